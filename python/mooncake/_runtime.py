"""Loads the native module once and ties it to the life of the interpreter."""

from __future__ import annotations

import atexit

from mooncake import _native, errors
from mooncake._native import VERSION, Buffer, PutOptions, last_error

__all__ = ["Buffer", "PutOptions", "__version__", "_native", "last_error"]

__version__ = VERSION

_native.use_exceptions(errors.CLASSES)

# Registered at import, so that hooks of the program, which come later, run before it and may still
# use a store.
atexit.register(_native.at_exit)
