"""Local files that are written: each takes its name when it is complete."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from typing import IO

__all__ = ["about", "replace_file", "write_all"]


def replace_file(name: str, size: int, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a local file beside its name, which it takes when it is complete.

    Args:
        name: Name of the file.
        size: Length of the pieces together.
        pieces: Content.

    Raises:
        OSError: The file cannot be written; the text names it.
    """
    path = os.path.realpath(name)
    try:
        before = os.stat(path)
    except FileNotFoundError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        # A device or a pipe cannot be replaced; a directory fails here.
        with open(path, "wb") as file:
            write_all(file, pieces)
        return
    directory, base = os.path.split(path)
    partial = os.path.join(directory, f".{base[:200]}.{os.urandom(4).hex()}.part")
    with about(directory):
        descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            # A full disk is noticed before bytes are moved.
            if size:
                with about(path):
                    os.posix_fallocate(file.fileno(), 0, size)
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            write_all(file, pieces)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


@contextlib.contextmanager
def about(path: str) -> Iterator[None]:
    """Name a path in the failures of system calls."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def write_all(file: IO[bytes], pieces: Iterable[bytes | memoryview]) -> None:
    """Write pieces to a file."""
    for piece in pieces:
        file.write(piece)
