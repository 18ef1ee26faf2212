"""Loads the native module once and ties it to the life of the interpreter."""

from __future__ import annotations

import atexit
import threading

from mooncake import _native, errors
from mooncake._native import VERSION, Buffer, PutOptions, last_error

__all__ = ["Buffer", "PutOptions", "__version__", "_native", "last_error"]

__version__ = VERSION

_native.use_exceptions(errors.CLASSES)


def _close_at_exit() -> None:
    """Close every store and engine, and let threads that hear of it end without a word.

    Only daemon threads are left, which nobody asked to stop.
    """
    previous_hook = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        if not issubclass(failed.exc_type, errors.ClosedError):
            previous_hook(failed)

    threading.excepthook = hook
    _native.at_exit()


# Registered at import, so that hooks of the program, which come later, run before it and may still
# use a store.
atexit.register(_close_at_exit)
