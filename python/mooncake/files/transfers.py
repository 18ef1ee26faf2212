"""Files between the pool and local disks, and within the pool, some megabytes at a time."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import IO, TypeAlias

from mooncake._api.files import FileReader, FileWriter, Target, opened_reader
from mooncake._api.pieces import CHUNK_BYTES
from mooncake._api.store import Store
from mooncake._api.types import Key
from mooncake._runtime import PutOptions
from mooncake.files.local import replace_file

__all__ = ["Moved", "copy", "download", "upload"]

Moved: TypeAlias = Callable[[int], object]
"""Called with the number of bytes that were moved since the last call."""

# Files up to this length are put whole, which stores their checksum.
_WHOLE_BYTES = 64 << 20


def _ignored(_count: int) -> None:
    """Report nothing."""


def upload(
    store: Store,
    local: str,
    key: Key,
    *,
    options: PutOptions | None = None,
    overwrite: bool = True,
    moved: Moved = _ignored,
) -> int:
    """Put a local file; return its length.

    Args:
        store: The store.
        local: Name of the local file.
        key: Key of the object.
        options: Number of copies, pins, placement.
        overwrite: Replace a file with that key; otherwise it is a failure.
        moved: Called for each part.

    Raises:
        AlreadyExistsError: There is a file that is not to be replaced.
        OSError: The local file cannot be read, or its length changed meanwhile.
    """
    target = Target(store._native, key, options, overwrite=overwrite)
    with open(local, "rb", buffering=0) as source:
        state = os.fstat(source.fileno())
        size = state.st_size if stat.S_ISREG(state.st_mode) else None
        is_whole = size is None or size <= _WHOLE_BYTES
        with FileWriter(target, None if is_whole else size) as file:
            for piece in _pieces(source, moved):
                if size is not None and file.tell() + len(piece) > size:
                    raise _changed(local)
                file.write(piece)
            total = file.tell()
            if size not in (None, total):
                raise _changed(local)
    return total


def download(store: Store, key: Key, local: str, *, moved: Moved = _ignored) -> int:
    """Write a file of the pool to a local one, which is replaced when it is whole.

    Args:
        store: The store.
        key: Key of the object.
        local: Name of the local file.
        moved: Called for each part.

    Returns:
        The length of the file.

    Raises:
        NotFoundError: There is no such object.
        OSError: The local file cannot be written.
    """
    with opened_reader(store, key, CHUNK_BYTES) as file:
        replace_file(local, file.size, _pieces(file, moved))
        return file.size


def copy(store: Store, source: Key, target: Key, *, options: PutOptions | None = None) -> int:
    """Copy a file within the pool, with its bytes through this process.

    Args:
        store: The store.
        source: Key of the object.
        target: Key of the copy, which is replaced.
        options: Number of copies, pins, placement.

    Returns:
        The length of the file.

    Raises:
        NotFoundError: There is no such object.
    """
    with opened_reader(store, source, CHUNK_BYTES) as file:
        is_whole = file.size <= _WHOLE_BYTES
        to = Target(store._native, target, options)
        with FileWriter(to, None if is_whole else file.size) as written:
            if is_whole:
                written.write(file.read())
            else:
                for piece in _pieces(file, _ignored):
                    written.write(piece)
        return file.size


def _pieces(file: FileReader | IO[bytes], moved: Moved) -> Iterator[memoryview]:
    """Read a file to its end; each piece is valid until the next one."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while length := file.readinto(buffer):  # type: ignore[union-attr]
        yield buffer[:length]
        moved(length)


def _changed(local: str) -> OSError:
    return OSError(f"{local} changed while it was read; nothing was stored")
