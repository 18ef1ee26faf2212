"""Objects of many named members, and batches of columns, over the bytes of a store.

In reading order: `payloads` (memory that a put reads), `bundle_store` and `writes` (reads, removals
and puts of many objects), `manifest` and `bundle` (payloads under one manifest), `members` and
`reading` (typed members), `columns` (columns of Python objects), `references` and `dataproto`
(batches of columns), and `transfer` (the class that users call).
`mooncake.structured_object_store` is the import name.
"""

from __future__ import annotations

try:
    import numpy as _numpy  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "mooncake.structured_object_store needs numpy: install mooncake-transfer-engine[structured]"
    ) from error

__all__: list[str] = []
