"""Ranges of objects: parts, chunks, and readers like files."""

# Generated from asynchronous/ranges.py by scripts/generate_blocking_api.py; do not edit.

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

from mooncake._api.blocking.sharded import explained
from mooncake._api.buffers import Writable, writable
from mooncake._api.limits import limited
from mooncake._api.native_calls import Located, Native
from mooncake._api.outcomes import only
from mooncake._api.types import Key

__all__ = ["ObjectReader", "RangeCalls"]

_CHUNK_BYTES = 8 << 20


class ObjectReader:
    """Reads one version of an object in pieces, like a file that is open for reading.

    All pieces come from the version that was found when the reader was made. Once the object was
    replaced, removed or evicted, and its memory reused, reads fail; they never mix two versions.
    `lease` keeps an object from that.
    """

    __slots__ = ("_located", "_native", "_position")

    def __init__(self, native: Native, located: Located) -> None:
        """Prepare the value that `Store.reader` returns."""
        self._native = native
        self._located = located
        self._position = 0

    @property
    def size(self) -> int:
        """Length of the object in bytes."""
        return self._located.size

    @property
    def version(self) -> int:
        """Number of the version; it changes when the object is replaced."""
        return self._located.version

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position of the next read and return it.

        Args:
            offset: Distance in bytes.
            whence: From where: the beginning (0), the position (1) or the end (2).
        """
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence is 0, 1 or 2, not {whence}")
        base = (0, self._position, self.size)[whence]
        if base + offset < 0:
            raise ValueError(f"the position would be negative: {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read at most `size` bytes, or all that are left; empty at the end.

        Raises:
            NotFoundError: The object was removed.
            DeadlineError: The object was replaced meanwhile, or its holder does not answer.
        """
        left = max(self.size - self._position, 0)
        length = left if size < 0 else min(size, left)
        if length == 0:
            return b""
        read = self._native.read_located(self._located, self._position, length)
        self._position += length
        return read

    def readinto(self, buffer: Writable) -> int:
        """Fill writable, contiguous memory as far as there are bytes; return their number."""
        whole = memoryview(writable(buffer)).cast("B")
        length = min(max(self.size - self._position, 0), len(whole))
        part = whole[:length]
        del whole
        try:
            if length > 0:
                self._native.read_located_into(self._located, self._position, part)
        finally:
            # Not released: a call whose wait was cancelled holds the memory until it has ended.
            del part
        self._position += length
        return length


class RangeCalls:
    """The methods of `Store` for ranges of objects."""

    __slots__ = ()

    _native: Native

    def _within(self, timeout_s: float | None) -> Native:
        return self._native if timeout_s is None else self._native.within(timeout_s)

    def reader(self, key: Key, *, timeout_s: float | None = None) -> ObjectReader:
        """Return a reader of the object as it is now, with the methods of a file.

        Args:
            key: Key of the object.
            timeout_s: Longest duration of this call, and of each read.

        Raises:
            NotFoundError: The object does not exist.
        """
        step = limited(self._native, timeout_s)
        return ObjectReader(self._within(timeout_s), _located(step, key))

    def get_range(
        self,
        key: Key,
        offset: int,
        length: int | None = None,
        *,
        timeout_s: float | None = None,
    ) -> bytes:
        """Get a part of an object as bytes; checksums are not verified.

        Args:
            key: Key of the object.
            offset: First byte.
            length: Number of bytes; None is all up to the end. A range that reaches beyond the end
                is cut there, as slices are.
            timeout_s: Longest duration of the call.

        Raises:
            NotFoundError: The object does not exist.
        """
        if offset < 0 or (length is not None and length < 0):
            raise ValueError(f"a range is not negative: offset={offset} length={length}")
        native = limited(self._native, timeout_s)
        located = _located(native, key)
        left = max(located.size - offset, 0)
        wanted = left if length is None else min(length, left)
        return native().read_located(located, offset, wanted) if wanted else b""

    def get_range_into(
        self, key: Key, offset: int, buffer: Writable, *, timeout_s: float | None = None
    ) -> int:
        """Fill writable, contiguous memory with a part of an object.

        Args:
            key: Key of the object.
            offset: First byte.
            buffer: Memory to fill, as far as the object has bytes.
            timeout_s: Longest duration of the call.

        Returns:
            Number of bytes.

        Raises:
            NotFoundError: The object does not exist.
        """
        native = limited(self._native, timeout_s)
        located = _located(native, key)
        reader = ObjectReader(native(), located)
        reader.seek(offset)
        return reader.readinto(buffer)

    def chunks(
        self, key: Key, chunk_bytes: int = _CHUNK_BYTES, *, timeout_s: float | None = None
    ) -> Iterator[bytes]:
        """Iterate over the bytes of an object in chunks, all from the same version of it.

        Args:
            key: Key of the object.
            chunk_bytes: Length of each chunk but the last one.
            timeout_s: Longest duration of the read of each chunk.

        Raises:
            NotFoundError: The object does not exist, or was removed meanwhile.
        """
        if chunk_bytes < 1:
            raise ValueError(f"a chunk has at least one byte, not {chunk_bytes}")
        reader = self.reader(key, timeout_s=timeout_s)
        while chunk := reader.read(chunk_bytes):
            yield chunk


def _located(native: Callable[[], Native], key: Key) -> Located:
    """Locate an object, without a lease."""
    located = native().locate([key], lease=False)
    return only(explained(native, [key], located))
