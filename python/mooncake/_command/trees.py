"""`mooncake put -r` and `get -r`: folders as the files below a prefix, and back."""

from __future__ import annotations

import argparse
import glob
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from mooncake._api.store import Store
from mooncake._api.values import encoded, with_terms
from mooncake._command.output import CommandError, UsageError, print_json, quoted
from mooncake._command.progress import Progress
from mooncake._runtime import PutOptions
from mooncake._units import format_bytes
from mooncake.errors import AlreadyExistsError
from mooncake.files.listing import entries, entry
from mooncake.files.patterns import fixed_part, has_magic, matcher
from mooncake.files.transfers import download, upload

__all__ = ["get_tree", "put_tree"]

_NAMED_MAX = 10
_ONE_BY_ONE = "`mooncake get KEY FILE` writes one object to a file of any name."


@dataclass(frozen=True, slots=True)
class _Move:
    """A file to move.

    Attributes:
        path: Path of the file in the pool.
        local: Name of the local file.
        size: Length in bytes, as it was when the files were listed.
    """

    path: str
    local: str
    size: int


def put_tree(store: Store, options: argparse.Namespace) -> int:
    """Store local files under a prefix.

    Returns:
        0; 1 if existing files were kept.
    """
    sources = [os.fsdecode(options.key), *options.files[:-1]]
    prefix = options.files[-1].strip("/")
    moves = list(_local_files(sources, prefix))
    terms = with_terms(None, ttl_s=options.ttl, tags=dict(options.tags) if options.tags else None)
    kept: list[str] = []
    total = sum(move.size for move in moves)
    with _Counted("put", prefix, total, options, len(moves)) as counted:
        for move in moves:
            if _is_stored(store, move, terms, options, counted):
                counted.files += 1
            else:
                kept.append(move.path)
                counted.skip(move.size)
    if options.is_json:
        print_json({"prefix": prefix, "files": counted.files, "bytes": counted.bytes, "kept": kept})
    else:
        print(f"stored {_files(counted.files)} ({format_bytes(counted.bytes)})")
    for path in kept[:_NAMED_MAX]:
        print(f"mooncake: {quoted(path)} exists and was kept", file=sys.stderr)
    if len(kept) > _NAMED_MAX:
        print(f"mooncake: and {len(kept) - _NAMED_MAX} more exist and were kept", file=sys.stderr)
    if kept:
        print("  hint: Add --overwrite to replace them.", file=sys.stderr)
    return 1 if kept else 0


def _is_stored(
    store: Store,
    move: _Move,
    terms: PutOptions | None,
    options: argparse.Namespace,
    counted: _Counted,
) -> bool:
    key = encoded(move.path)
    if not options.overwrite and store.exists(key):
        return False
    try:
        upload(
            store,
            move.local,
            key,
            options=terms,
            overwrite=options.overwrite,
            moved=counted.add,
        )
    except AlreadyExistsError:
        return False
    return True


def get_tree(store: Store, options: argparse.Namespace) -> int:
    """Write the files below a prefix, or those that match a pattern, to a folder.

    Returns:
        0.
    """
    (folder,) = options.files
    pattern = os.fsdecode(options.key).strip("/")
    moves, unnamed = _stored_files(store, pattern, folder)
    if unnamed:
        shown = ", ".join(map(quoted, unnamed[:_NAMED_MAX]))
        shown += ", …" if len(unnamed) > _NAMED_MAX else ""
        text = f"{len(unnamed)} left out, since a part of the key has no name: {shown}"
        print(f"mooncake: {text}\n  hint: {_ONE_BY_ONE}", file=sys.stderr)
    if not moves:
        what = "matches" if has_magic(pattern) else "is below"
        text = f"no file {what} {quoted(pattern)}"
        raise CommandError(text, "`mooncake ls` lists the keys; a pattern is quoted: 'run/*.pt'.")
    with _Counted("get", pattern, sum(move.size for move in moves), options, len(moves)) as counted:
        for move in moves:
            os.makedirs(os.path.dirname(move.local) or ".", exist_ok=True)
            download(store, encoded(move.path), move.local, moved=counted.add)
            counted.files += 1
    if options.is_json:
        print_json({"folder": folder, "files": counted.files, "bytes": counted.bytes})
    else:
        print(f"wrote {_files(counted.files)} ({format_bytes(counted.bytes)})")
    return 0


def _local_files(sources: list[str], prefix: str) -> Iterator[_Move]:
    """Yield the files of folders and patterns, with the paths that they get.

    The files of a single folder come directly below the prefix. Otherwise files and folders keep
    their names.
    """
    is_folder = len(sources) == 1 and os.path.isdir(sources[0])
    found = 0
    for source in sources:
        names = [source]
        if not os.path.lexists(source) and glob.has_magic(source):
            names = sorted(glob.glob(source, recursive=True))
        for name in names:
            below = "" if is_folder else os.path.basename(os.path.normpath(name))
            for local in _regular_files(name):
                rest = os.path.relpath(local, name)
                parts = [prefix, below, "" if rest == os.curdir else rest]
                found += 1
                yield _Move("/".join(filter(None, parts)), local, os.stat(local).st_size)
    if not found:
        raise CommandError(f"no file in {' '.join(map(quoted, sources))}")


def _regular_files(name: str) -> Iterator[str]:
    """Yield the files of a folder in order, or a file itself; refuse what is neither."""
    if not os.path.isdir(name):
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise CommandError(f"{quoted(name)} is neither a file nor a folder")
        yield name
        return
    with os.scandir(name) as listed:
        for each in sorted(listed, key=lambda each: each.name):
            if each.is_symlink() and os.path.isdir(each.path):
                text = f"{quoted(each.path)} is a link to a folder"
                raise CommandError(text, "Put that folder by its own name, or remove the link.")
            yield from _regular_files(each.path)


def _stored_files(store: Store, pattern: str, folder: str) -> tuple[list[_Move], list[str]]:
    """Return the files of a prefix or a pattern, with the local names that they get.

    Also returns the keys with an empty part, which no file can have.

    Raises:
        CommandError: A key has a name that leads out of the folder, or is both a file and a folder.
    """
    native, base = store._native, fixed_part(pattern) if has_magic(pattern) else pattern
    is_match = matcher(pattern) if has_magic(pattern) else None
    found: dict[str, int] = {}
    unnamed: list[str] = []
    for each in entries(native, base, depth=None, unnamed=unnamed):
        if each.size is not None and (is_match is None or is_match(each.path)):
            found[each.path] = each.size
    if not found and is_match is None:
        itself = entry(native, base)
        if itself is not None and itself.size is not None:
            base, found = base.rpartition("/")[0], {base: itself.size}
    moves = []
    for path, size in found.items():
        name = path[len(base) :].lstrip("/") if base else path
        parts = name.split("/")
        if {os.curdir, os.pardir} & set(parts) or "\0" in name:
            text = f"{quoted(path)} has a name that leads out of the folder"
            raise CommandError(f"{text}; nothing was written", _ONE_BY_ONE)
        for at in range(1, len(parts)):
            above = "/".join([*([base] if base else []), *parts[:at]])
            if above in found:
                text = f"{quoted(above)} is a file, and {quoted(path)} needs a folder of that name"
                raise CommandError(f"{text}; nothing was written", _ONE_BY_ONE)
        moves.append(_Move(path, os.path.join(folder, *parts), size))
    if is_match is not None:
        unnamed = list(filter(is_match, unnamed))
    return moves, unnamed


class _Counted:
    """The progress of many files, and what an interruption leaves."""

    def __init__(
        self, verb: str, name: str, total: int, options: argparse.Namespace, count: int
    ) -> None:
        self.files = self.bytes = 0
        self._done, self._count, self._verb = 0, count, verb
        self._progress = Progress(verb, quoted(name), total, options.progress)

    def add(self, count: int) -> None:
        """Count bytes that were moved."""
        self.bytes += count
        self.skip(count)

    def skip(self, count: int) -> None:
        """Count bytes that need not be moved."""
        self._done += count
        self._progress.advance(self._done)

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._progress.close(self.bytes)
            return
        self._progress.end()
        word = "stored" if self._verb == "put" else "written"
        why = "interrupted" if issubclass(kind, KeyboardInterrupt) else "stopped"
        text = f"{why}: {self.files} of {_files(self._count)} {word}, each whole"
        print(f"mooncake: {text}", file=sys.stderr)


def check_options(options: argparse.Namespace, verb: str) -> None:
    """Refuse arguments that do not fit together.

    Raises:
        UsageError: A name is missing, or there are too many.
    """
    if not options.recursive:
        if len(options.files) > 1:
            raise UsageError(f"{verb} takes a key and a file", "For more files add -r.")
        return
    if verb == "get" and len(options.files) != 1:
        raise UsageError("get -r takes a prefix or a pattern, and a folder", "Quote a pattern.")
    if verb == "put":
        if not options.files:
            raise UsageError("put -r takes folders or files, and a prefix last")
        prefix = options.files[-1].strip("/")
        if prefix and {"", os.curdir, os.pardir} & set(prefix.split("/")):
            raise UsageError(f"{quoted(prefix)} is no prefix of files: a part of it has no name")


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number} files"
