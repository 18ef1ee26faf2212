"""Files that a request may mount: under certain directories, and reached without links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from typing import Final

__all__ = ["MountRefusedError", "open_mountable", "roots"]

_SHARED_MEMORY: Final = "/dev/shm"
_MOUNTS: Final = "/proc/self/mounts"
_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# A device or a pipe must not block, and is refused after it was opened.
_FILE: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class MountRefusedError(Exception):
    """A path may not be mounted; the text is the reason."""


def roots(extra: str | None) -> list[str]:
    """Return the directories whose files may be mounted.

    Args:
        extra: A further directory; None for none.
    """
    found = [_SHARED_MEMORY]
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            found += [fields[1] for fields in map(str.split, mounts) if fields[2] == "hugetlbfs"]
    except OSError:
        pass  # without /proc there is only the shared memory
    return found + ([os.path.realpath(extra)] if extra else [])


def open_mountable(path: str, allowed: Sequence[str]) -> int:
    """Open a file for reading and writing; the caller closes the descriptor.

    Args:
        path: Absolute path below one of the allowed directories. No component below it may be a
            link or ``..``.
        allowed: Directories, of `roots`.

    Raises:
        MountRefusedError: The path is not below an allowed directory, contains a link, or is not a
            regular file.
        OSError: There is no such file, or it may not be opened.
    """
    root = next((each for each in allowed if path.startswith(each.rstrip("/") + "/")), None)
    if root is None or "\0" in path:
        raise MountRefusedError(
            f"only files below {', '.join(allowed)} may be mounted; --mount_root=DIRECTORY allows "
            "another directory"
        )
    names = [name for name in path[len(root) :].split("/") if name not in ("", ".")]
    if not names or ".." in names:
        raise MountRefusedError("the path must name a file and have no '..'")
    try:
        file = _open_below(root, names)
    except OSError as error:
        # A link is no directory to `O_DIRECTORY | O_NOFOLLOW`.
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            raise MountRefusedError("the path has a link, or does not name a file") from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise MountRefusedError("the path does not name a regular file")
    return file


def _open_below(root: str, names: Sequence[str]) -> int:
    """Open a file by its names from a directory down, without following links."""
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            below = os.open(name, _DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = below
        return os.open(names[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)
