"""A pool of memory spread over processes and machines, for KV cache, weights and tensors.

`mooncake.Store` is our own API: typed, with exceptions. `mooncake.store` offers upstream's names
with upstream's return values.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake._api.async_store import AsyncStore
    from mooncake._api.asynchronous.jobs import AsyncDrain, AsyncTask
    from mooncake._api.asynchronous.leases import AsyncLease
    from mooncake._api.blocking.jobs import Drain, Task
    from mooncake._api.blocking.leases import Lease
    from mooncake._api.store import ObjectInfo, SegmentInfo, Store, StoreConfig
    from mooncake._api.tasks import CopyInfo, DrainInfo, TaskInfo
    from mooncake._api.types import Cleared, Deleted
    from mooncake._logs import log_to_python
    from mooncake._native import Buffer, PutOptions, last_error
    from mooncake.buffer_pool import BufferPool, RegisteredBufferPool
    from mooncake.errors import (
        AlreadyExistsError,
        BusyError,
        ClosedError,
        CorruptError,
        DeadlineError,
        DeniedError,
        InternalError,
        InvalidArgumentError,
        LeaseLostError,
        MooncakeError,
        NoSpaceError,
        NotFoundError,
        NotReadyError,
        NotSupportedError,
        QuotaExceededError,
        ShardedTensorError,
        StorageError,
        TransferFailedError,
        UnavailableError,
        VersionDiffersError,
    )

    __version__: str

# Other distributions may have modules below `mooncake` in folders of their own.
__path__ = extend_path(__path__, __name__)

__all__ = [
    "AlreadyExistsError",
    "AsyncDrain",
    "AsyncLease",
    "AsyncStore",
    "AsyncTask",
    "Buffer",
    "BufferPool",
    "BusyError",
    "Cleared",
    "ClosedError",
    "CopyInfo",
    "CorruptError",
    "DeadlineError",
    "Deleted",
    "DeniedError",
    "Drain",
    "DrainInfo",
    "InternalError",
    "InvalidArgumentError",
    "Lease",
    "LeaseLostError",
    "MooncakeError",
    "NoSpaceError",
    "NotFoundError",
    "NotReadyError",
    "NotSupportedError",
    "ObjectInfo",
    "PutOptions",
    "QuotaExceededError",
    "RegisteredBufferPool",
    "SegmentInfo",
    "ShardedTensorError",
    "StorageError",
    "Store",
    "StoreConfig",
    "Task",
    "TaskInfo",
    "TransferFailedError",
    "UnavailableError",
    "VersionDiffersError",
    "__version__",
    "last_error",
    "log_to_python",
]

_HOMES = {
    "AsyncDrain": "mooncake._api.asynchronous.jobs",
    "AsyncLease": "mooncake._api.asynchronous.leases",
    "AsyncStore": "mooncake._api.async_store",
    "AsyncTask": "mooncake._api.asynchronous.jobs",
    "Buffer": "mooncake._runtime",
    "BufferPool": "mooncake.buffer_pool",
    "Cleared": "mooncake._api.types",
    "Deleted": "mooncake._api.types",
    "CopyInfo": "mooncake._api.tasks",
    "Drain": "mooncake._api.blocking.jobs",
    "DrainInfo": "mooncake._api.tasks",
    "Lease": "mooncake._api.blocking.leases",
    "ObjectInfo": "mooncake._api.store",
    "PutOptions": "mooncake._runtime",
    "RegisteredBufferPool": "mooncake.buffer_pool",
    "SegmentInfo": "mooncake._api.store",
    "Store": "mooncake._api.store",
    "StoreConfig": "mooncake._api.store",
    "Task": "mooncake._api.blocking.jobs",
    "TaskInfo": "mooncake._api.tasks",
    "__version__": "mooncake._runtime",
    "last_error": "mooncake._runtime",
    "log_to_python": "mooncake._logs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``import mooncake`` alone costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_HOMES.get(name, "mooncake.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names and the modules that are loaded, without what is imported here."""
    import sys

    modules = {name for name in globals() if f"{__name__}.{name}" in sys.modules}
    return sorted({*__all__, *modules, *(name for name in globals() if name.startswith("__"))})
