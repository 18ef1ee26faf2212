"""Names that annotations use and that need not exist otherwise, for `typing.get_type_hints`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio as asyncio

    import numpy as np
    import numpy.typing as npt
    import torch as torch
    from typing_extensions import Buffer as Readable

    from mooncake._native import Begun as Begun
else:

    class _LazyModule:
        """A module that is imported when an attribute of it is read: it is slow or optional."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module(self._name), name)

    _T = TypeVar("_T")

    class Begun(int, Generic[_T]):
        """The number of a call that was begun, which native code gives as an integer."""

    asyncio = _LazyModule("asyncio")
    np = _LazyModule("numpy")
    npt = _LazyModule("numpy.typing")
    torch = _LazyModule("torch")
    try:
        from collections.abc import Buffer as Readable
    except ImportError:  # before Python 3.12
        Readable = bytes | bytearray | memoryview

__all__ = ["Begun", "Readable", "asyncio", "np", "npt", "torch"]
