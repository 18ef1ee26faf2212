"""Which files and directories there are: directories are what keys have before a slash."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mooncake._api.empty import are_empty, is_empty_mark
from mooncake._api.native_calls import Native
from mooncake._api.outcomes import only
from mooncake._api.values import decoded, encoded
from mooncake.errors import NotFoundError

__all__ = ["Entry", "entries", "entry"]

# Keys of the first call that looks for anything in a directory.
_PROBED = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or a directory.

    Attributes:
        path: Path, which is the key of a file.
        size: Length of a file in bytes; None for a directory.
        version: Version of the object of a file, if it is known.
    """

    path: str
    size: int | None
    version: int | None = None

    @property
    def is_directory(self) -> bool:
        """True for a directory."""
        return self.size is None


def entry(native: Native, path: str) -> Entry | None:
    """Return the file or directory of a path; None if there is none. A file comes first."""
    if not path:
        return Entry("", None)
    described = native.describe([encoded(path)])[0]
    # An object that is being written for the first time has no version yet.
    if isinstance(described, NotFoundError) or only([described])["version"] is None:
        below = next(entries(native, path, depth=1, page=_PROBED), None)
        return None if below is None else Entry(path, None)
    found = only([described])
    size = 0 if is_empty_mark(found["size"], found["tags"]) else found["size"]
    return Entry(path, size, found["version"])


def entries(
    native: Native,
    directory: str,
    *,
    depth: int | None,
    stem: str = "",
    page: int = 0,
    unnamed: list[str] | None = None,
) -> Iterator[Entry]:
    """Iterate over files and directories below a directory, in the byte order of the keys.

    Objects that are not complete are left out, and so are those whose key has an empty component,
    which no path names.

    Args:
        native: The native store.
        directory: Path of the directory; "" is the root.
        depth: Number of levels; None is all.
        stem: Beginning of the names in the directory.
        page: Number of keys of each call; 0 is as many as a call returns.
        unnamed: Gets the keys that no path names.
    """
    base = encoded(f"{directory}/") if directory else b""
    after, last_directories = None, list[bytes]()
    while True:
        keys, is_last = native.list(prefix=base + encoded(stem), after=after, limit=page)
        files = list[tuple[bytes, int]]()
        found = list[Entry | int]()
        for key, size, is_complete, *_ in keys:
            parts = key[len(base) :].split(b"/")
            if is_complete and b"" in parts and unnamed is not None:
                unnamed.append(decoded(key))
            if not is_complete or b"" in parts:
                continue
            directories = parts[:-1] if depth is None else parts[:-1][:depth]
            found += _new_directories(base, directories, last_directories)
            last_directories = directories
            if depth is None or len(parts) <= depth:
                found.append(len(files))
                files.append((key, size))
        short = [key for key, size in files if size == 1]
        marks = zip(short, are_empty(native, short), strict=True)
        empty = {key for key, is_empty in marks if is_empty}
        for each in found:
            if isinstance(each, Entry):
                yield each
            else:
                key, size = files[each]
                yield Entry(decoded(key), 0 if key in empty else size)
        if is_last or not keys:
            return
        after = _next_after(base, keys[-1][0], depth)


def _new_directories(base: bytes, parts: list[bytes], last: list[bytes]) -> list[Entry]:
    """Return the directories of a key that the key before it is not in."""
    same = 0
    while same < min(len(parts), len(last)) and parts[same] == last[same]:
        same += 1
    return [
        Entry(decoded(base + b"/".join(parts[: at + 1])), None) for at in range(same, len(parts))
    ]


def _next_after(base: bytes, key: bytes, depth: int | None) -> bytes:
    """Return the key after which a listing goes on: keys below the wanted levels are skipped."""
    parts = key[len(base) :].split(b"/")
    if depth is None or len(parts) <= depth:
        return key
    # No text in UTF-8 has this byte; keys of other bytes are listed one after the other.
    return max(key, base + b"/".join(parts[:depth]) + b"/\xff")
