"""A catalog of the rows of stored DataProto batches, and a client that keeps it informed."""

from ._dataproto.catalog import DataProtoCatalog
from ._dataproto.transfer import DataProtoCatalogTransfer

__all__ = ["DataProtoCatalog", "DataProtoCatalogTransfer"]
