"""Memory of callers: which objects have bytes that can be put, and how a store sees these bytes."""

from __future__ import annotations

import ctypes
import re
from typing import Any, Protocol, TypeAlias

from mooncake._hints import Readable as Buffer

__all__ = [
    "SupportsArrayInterface",
    "SupportsDLPack",
    "Writable",
    "check_value",
    "readable",
    "writable",
]

_PLAIN = (bytes, bytearray, memoryview)
_LISTS = (list, tuple)
# In the format of a buffer.
_FIELD_NAMES = re.compile(":[^:]*:")
# Kinds of devices of DLPack whose memory the CPU addresses: CPU, pinned by CUDA, pinned by ROCm.
_HOST_DEVICES = (1, 3, 11)


class SupportsArrayInterface(Protocol):
    """An array of numpy, or an object that describes its memory as numpy does."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Address, shape and type of the elements."""


class SupportsDLPack(Protocol):
    """An array that other libraries can use without a copy."""

    def __dlpack_device__(self) -> tuple[Any, Any]:
        """Return the kind and the number of the device that has the memory."""

    def __dlpack__(self) -> Any:
        """Return the array in a capsule."""


Readable: TypeAlias = Buffer | SupportsArrayInterface | SupportsDLPack
"""Contiguous bytes: the buffer protocol, an array of numpy, or DLPack in host memory."""


Writable: TypeAlias = Buffer | SupportsArrayInterface | SupportsDLPack
"""Contiguous memory that can be written, of the same kinds; not ``bytes``."""

_ADVICE: dict[type, str] = {
    type(None): "to remove an object, call delete",
    str: "encode it: text.encode()",
    dict: "encode it, for instance json.dumps(value).encode() or pickle.dumps(value)",
}


def check_value(value: object) -> None:
    """Refuse a list of values for a single value, and a tensor for its bytes."""
    if isinstance(value, _LISTS):
        # The native put would concatenate the items.
        raise TypeError(f"a value is a bytes-like object, not {type(value).__name__}")
    if hasattr(value, "data_ptr"):
        raise TypeError("a value is a bytes-like object, not a tensor; use put_tensor")


def readable(value: object, key: str | bytes | None = None) -> Buffer:
    """Return a value to put as an object with the buffer protocol, over the same memory.

    Args:
        value: The value.
        key: Key of the object, for the text of an error.

    Raises:
        TypeError: The value has no bytes that can be read in place.
        BufferError: The memory is not contiguous.
    """
    if isinstance(value, _PLAIN):
        return value
    check_value(value)
    exported = _exported(value)
    if not _has_buffer(exported):
        of = "" if key is None else f" of {key!r}"
        kind = type(value)
        advice = _ADVICE.get(kind, "encode it, for instance with pickle.dumps(value)")
        raise TypeError(f"the value{of} is a bytes-like object, not {kind.__name__}; {advice}")
    return exported


def writable(target: object) -> Buffer:
    """Return the destination of a get as an object with the buffer protocol, over the same memory.

    Raises:
        TypeError: The destination has no memory that can be written in place.
        BufferError: The memory is not contiguous.
    """
    if isinstance(target, bytes):
        raise BufferError("the memory of bytes is read-only; use a bytearray")
    if isinstance(target, _PLAIN):
        return target
    if hasattr(target, "data_ptr"):
        raise TypeError("a destination is a writable buffer, not a tensor; use get_tensor with out")
    return _exported(target)


def _has_buffer(value: Any) -> bool:
    """Return whether a value has the buffer protocol, with whatever memory."""
    try:
        memoryview(value).release()
    except TypeError:
        return False
    except (BufferError, ValueError):
        return True
    return True


def _exported(value: Any) -> Buffer:
    try:
        view = memoryview(value)
    except (TypeError, ValueError):
        is_array = hasattr(value, "__array_interface__")
        if is_array or hasattr(value, "__dlpack_device__"):
            return _array_bytes(value, is_array=is_array)
    else:
        # Memory without dimensions has no shape, and that of ctypes no strides, as natives need.
        if view.ndim == 0:
            if "O" in _FIELD_NAMES.sub("", view.format):
                raise TypeError("the item is a Python object; its bytes are an address")
            return view.cast("B")
        if isinstance(value, ctypes.Array):
            return view
        view.release()
    # The native call explains what else is wrong with the value.
    exported: Buffer = value
    return exported


def _array_bytes(value: Any, *, is_array: bool) -> Buffer:
    """Return the bytes of an array that has no buffer protocol, for instance of dates."""
    if not is_array and (device := int(value.__dlpack_device__()[0])) not in _HOST_DEVICES:
        text = f"the memory of the array is on a device (type {device} of DLPack)"
        raise TypeError(f"{text}; copy it to the host, or use put_tensor and get_tensor")
    try:
        import numpy as np
    except ImportError:
        text = (
            f"bytes of {type(value).__name__} need numpy; install it, or pass a bytes-like object"
        )
        raise TypeError(text) from None
    array = np.asarray(value) if is_array else np.from_dlpack(value)
    if array.dtype.hasobject:
        raise TypeError("the items of the array are Python objects; their bytes are addresses")
    if not array.flags.c_contiguous:
        raise BufferError("the memory of the array is not contiguous; use numpy.ascontiguousarray")
    as_bytes: Any = array.reshape(-1).view(np.uint8)
    exported: Buffer = as_bytes
    return exported
