"""Pieces of an object whose length is known at its end: kept in order, until they are put."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import AsyncIterable, Iterable
from typing import TypeAlias

from mooncake._api.buffers import Readable as Value
from mooncake._hints import Readable
from mooncake._runtime import _native

__all__ = [
    "CHUNK_BYTES",
    "AsyncSource",
    "Pieces",
    "Source",
    "bytes_of",
    "check_size",
    "check_source",
]

Source: TypeAlias = Iterable[Value]
"""Pieces of an object in their order."""

AsyncSource: TypeAlias = AsyncIterable[Value] | Iterable[Value]
"""Pieces of an object in their order, from an iterator of either kind."""

CHUNK_BYTES = 8 << 20
"""Length of the memory that pieces are copied to, and of the parts that are moved at a time."""

# From this length on immutable memory is kept as it is: to describe it costs less than to copy it.
_INVALID_PARAMS = -600
_KEPT_BYTES = 64 << 10


class Pieces:
    """Bytes in the order in which they were appended, as the parts that a put gathers.

    ``bytes``, and views of ``bytes``, cannot change and are kept as they are if they are long.
    Other memory may change as soon as the call that brought it has ended, and is copied.
    """

    __slots__ = ("_begin", "_chunk", "_parts", "_used", "total")

    def __init__(self) -> None:
        """Begin without a byte."""
        self.total = 0
        self._parts: list[memoryview] = []
        # Of the chunk, bytes from `_begin` to `_used` are in no part yet.
        self._chunk = memoryview(b"")
        self._begin = self._used = 0

    def append(self, value: Readable) -> int:
        """Append contiguous memory; return its length in bytes.

        Raises:
            TypeError: The value has no buffer protocol.
            BufferError: The memory is not contiguous.
        """
        piece = bytes_of(value)
        length = piece.nbytes
        self.total += length
        if length >= _KEPT_BYTES and type(piece.obj) is bytes:
            self._end_part()
            self._parts.append(piece)
            return length
        done = 0
        while done < length:
            if self._used == len(self._chunk):
                self._end_part()
                is_large = self.total > _KEPT_BYTES
                self._chunk, self._begin, self._used = _new_chunk(is_large=is_large), 0, 0
            count = min(length - done, len(self._chunk) - self._used)
            self._chunk[self._used : self._used + count] = piece[done : done + count]
            self._used += count
            done += count
        return length

    def parts(self) -> list[memoryview]:
        """Return the parts, none of them empty."""
        self._end_part()
        return self._parts

    def clear(self) -> None:
        """Give the memory back."""
        self.total, self._parts = 0, []
        self._chunk, self._begin, self._used = memoryview(b""), 0, 0

    def _end_part(self) -> None:
        if self._begin < self._used:
            self._parts.append(self._chunk[self._begin : self._used])
            self._begin = self._used


def check_source(pieces: object) -> None:
    """Refuse a single value, whose items would be taken for pieces."""
    is_iterable = isinstance(pieces, Iterable | AsyncIterable)
    if isinstance(pieces, str | bytes | bytearray | memoryview) or not is_iterable:
        kind = type(pieces).__name__
        text = f"the pieces are an iterable of bytes-like objects, not {kind}"
        raise TypeError(f"{text}; put stores a single value")


def check_size(size: int) -> None:
    """Refuse a number of bytes that no object has."""
    if size < 1:
        text = "the size is a number of bytes; an object has at least one"
        raise _native.failure(_INVALID_PARAMS, text, context={"size": size})


def bytes_of(value: Readable) -> memoryview:
    """Return contiguous memory as a view of bytes.

    Raises:
        TypeError: The value has no buffer protocol.
        BufferError: The memory is not contiguous.
    """
    view = memoryview(value)
    if not view.c_contiguous:
        raise BufferError("the memory is not contiguous; copy it first, for instance with bytes()")
    if view.format == "B" and view.ndim == 1:
        return view
    # A view of no elements cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _new_chunk(*, is_large: bool) -> memoryview:
    """Return memory to copy pieces to.

    A large chunk has huge pages where the kernel has them: faults of small pages cost several times
    what the copy costs.
    """
    if not is_large:
        return memoryview(bytearray(_KEPT_BYTES))
    chunk = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The kernel may be built without them.
    with contextlib.suppress(OSError):
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(chunk)
