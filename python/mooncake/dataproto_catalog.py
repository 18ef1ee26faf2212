"""A catalog of the rows of stored DataProto batches, and a client that keeps it informed."""

import logging

from ._dataproto.catalog import DataProtoCatalog
from ._dataproto.transfer import DataProtoCatalogTransfer

__all__ = ["DataProtoCatalog", "DataProtoCatalogTransfer", "logger"]

logger = logging.getLogger("mooncake.dataproto_catalog")
