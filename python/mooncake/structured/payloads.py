"""Memory of the caller that a put reads in place: a payload is a list of pieces of memory."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "MASKED_REFUSED",
    "Array",
    "Payload",
    "bytes_payload",
    "concatenated",
    "is_masked",
    "payload_of_array",
]

Array = npt.NDArray[Any]

MASKED_REFUSED: Final = "masked array, whose mask would be lost: store array.filled(value)"

# Pieces shorter than this on average are copied together first: a piece costs about 1 us, which is
# more than the copy of so few bytes.
_PIECE_BYTES_MIN: Final = 1 << 10


class Payload(NamedTuple):
    """The bytes of one object, as pieces of memory that are stored one after the other.

    Attributes:
        addresses: Address of each piece.
        sizes: Length of each piece in bytes; none is empty.
        owner: Keeps the memory alive.
    """

    addresses: Sequence[int]
    sizes: Sequence[int]
    owner: object

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return sum(self.sizes)

    def chunks(self, chunk_bytes: int) -> list[Payload]:
        """Cut the payload into chunks of a length; the last one may be shorter."""
        total = self.nbytes
        if total <= chunk_bytes:
            return [self] if total else []
        ends = list(accumulate(self.sizes))
        starts = range(0, total, chunk_bytes)
        return [self._part(ends, start, min(start + chunk_bytes, total)) for start in starts]

    def tobytes(self) -> bytes:
        """Return a copy of the bytes."""
        return b"".join(map(ctypes.string_at, self.addresses, self.sizes))

    def _part(self, ends: Sequence[int], start: int, end: int) -> Payload:
        addresses: list[int] = []
        sizes: list[int] = []
        at = bisect_right(ends, start)
        while start < end:
            begin = ends[at] - self.sizes[at]
            size = min(ends[at], end) - start
            addresses.append(self.addresses[at] + start - begin)
            sizes.append(size)
            start += size
            at += 1
        return Payload(addresses, sizes, self.owner)


def is_masked(value: object) -> bool:
    """Return whether a value is an array of `numpy.ma`, or the masked item of such an array."""
    return isinstance(value, np.ma.MaskedArray)


def payload_of_array(array: Array) -> Payload:
    """Return the items of an array in C order; an array in another order is copied.

    Raises:
        TypeError: The items are Python objects, or some may be masked.
    """
    if is_masked(array):
        raise TypeError(f"a {MASKED_REFUSED}")
    if array.dtype.hasobject:
        raise TypeError(
            f"an array of dtype {array.dtype} holds Python objects, whose bytes are addresses of "
            "this process"
        )
    kept = np.ascontiguousarray(array)
    address: int = kept.__array_interface__["data"][0]
    return Payload([address], [kept.nbytes], kept) if kept.nbytes else Payload([], [], kept)


def bytes_payload(value: Any, name: str) -> Payload:
    """Return the bytes of an object with the buffer protocol.

    Args:
        value: The object; it is copied if it is not contiguous.
        name: Name of the value in the error.

    Raises:
        TypeError: The object has no buffer protocol, or its items are Python objects.
    """
    if type(value) is bytes and value:
        data = np.frombuffer(value, dtype=np.uint8)
        return Payload([data.__array_interface__["data"][0]], [len(value)], data)
    if isinstance(value, np.ndarray):
        return payload_of_array(value)
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{name} must be bytes-like, got {type(value).__name__}") from None
    if "O" in view.format:
        raise TypeError(f"{name} holds Python objects, whose bytes are addresses of this process")
    flat = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    if not flat.nbytes:
        return Payload([], [], value)
    return payload_of_array(np.frombuffer(flat, dtype=np.uint8))


def concatenated(arrays: Sequence[Array]) -> Payload:
    """Return the items of many C-contiguous arrays of one dtype, one array after the other.

    Arrays of a few bytes are copied into one; others are read where they are.
    """
    # Many callers pass columns whose rows are empty or missing.
    filled = [array for array in arrays if array.nbytes]
    sizes = [array.nbytes for array in filled]
    if sum(sizes) < _PIECE_BYTES_MIN * len(filled):
        return payload_of_array(np.concatenate([array.reshape(-1) for array in filled]))
    return Payload([array.__array_interface__["data"][0] for array in filled], sizes, filled)
