"""Objects as binary files of Python that are open for reading."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from mooncake._api.blocking.ranges import ObjectReader

__all__ = ["ObjectFile"]


class ObjectFile(io.RawIOBase):
    """An unbuffered binary file over a reader of an object."""

    def __init__(self, reader: ObjectReader) -> None:
        """Make a file at the reader's position."""
        super().__init__()
        self._reader = reader

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer as far as there are bytes."""
        self._checkClosed()
        return self._reader.readinto(buffer)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Set the position and return it."""
        self._checkClosed()
        return self._reader.seek(offset, whence)

    def tell(self) -> int:
        """Return the position."""
        self._checkClosed()
        return self._reader.tell()
