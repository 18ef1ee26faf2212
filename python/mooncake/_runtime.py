"""Loads the native module and closes its stores and engines at interpreter exit."""

from __future__ import annotations

import atexit
import threading

from mooncake import _native, errors
from mooncake._native import VERSION, Buffer, PutOptions, last_error

__all__ = ["Buffer", "PutOptions", "__version__", "_native", "last_error"]

__version__ = VERSION

_native.use_exceptions(errors.CLASSES)


def _close_at_exit() -> None:
    """Close every store and engine, and let threads that get a `ClosedError` end silently.

    Only daemon threads are left at that point, and nothing has asked them to stop.
    """
    previous_hook = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not issubclass(failed.exc_type, errors.ClosedError):
            previous_hook(failed)

    threading.excepthook = hook
    _native.at_exit()


# Registered at import: exit hooks of the program are registered later, run earlier, and may still
# use a store.
atexit.register(_close_at_exit)
