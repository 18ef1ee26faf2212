"""`mooncake put`, `get` and `cp`: objects from and to files."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from mooncake._api.empty import EMPTY_VALUE, are_empty, with_empty_mark
from mooncake._api.reserved import Reservation
from mooncake._api.store import Store, StoreConfig
from mooncake._command import admin, masters, trees
from mooncake._command.output import CommandError, UsageError, quoted
from mooncake._command.parser import add_json, add_metadata, duration
from mooncake._command.progress import Progress, add_progress
from mooncake._runtime import _native
from mooncake._units import format_bytes
from mooncake.errors import (
    AlreadyExistsError,
    MooncakeError,
    NoSpaceError,
    NotFoundError,
    TransferFailedError,
    UnavailableError,
)
from mooncake.files.local import about, replace_file, write_all

if TYPE_CHECKING:
    from mooncake._api.buffers import Readable

__all__ = [
    "add_cp_options",
    "add_get_options",
    "add_put_options",
    "cp",
    "get",
    "hinting",
    "joined",
    "joined_for_bytes",
    "lending_line",
    "put",
]

_CHUNK_BYTES = 8 << 20
# Objects up to this size are moved whole, which verifies their checksum.
_WHOLE_BYTES = 64 << 20
_TEXT_BYTES = 8192
_TICK_S = 0.2
# Time to find out what is stored after an interruption.
_CHECK_S = 1.0
_NO_METADATA = "P2PHANDSHAKE"


def joined(options: argparse.Namespace) -> Store:
    """Join the pool that the options name."""
    return _opened(options.master, StoreConfig(tenant=options.tenant))


@contextlib.contextmanager
def joined_for_bytes(options: argparse.Namespace) -> Iterator[Store]:
    """Join the pool to read or write the bytes of objects, which needs their metadata server."""
    config = StoreConfig(tenant=options.tenant, metadata=options.metadata)
    with _opened(options.master, config) as store, hinting(store, options.metadata):
        yield store


def _opened(master: str, config: StoreConfig) -> Store:
    try:
        return Store(master, config)
    except UnavailableError as error:
        error.remedy = masters.remedy_of(error, master)
        raise


@contextlib.contextmanager
def hinting(store: Store, metadata: str) -> Iterator[None]:
    """Let failures say what helps in this pool.

    A process that cannot be reached may use another metadata server; a pool without memory needs a
    process that lends some.
    """
    try:
        yield
    except NoSpaceError as error:
        with contextlib.suppress(MooncakeError):
            if not store.segments():
                error.remedy = (
                    f"No process lends memory to the pool; start `{lending_line(store)}`, or "
                    'open a store that lends some: StoreConfig(segment_bytes="1GB").'
                )
        raise
    except (NotFoundError, TransferFailedError) as error:
        if "peer" in error.context:
            error.remedy = _remedy_of_peer(store, metadata)
        raise


def lending_line(store: Store) -> str:
    """Return a command line that lends memory to the pool."""
    options = f"--master_server_address={store.master_address} --metadata_server=P2PHANDSHAKE"
    return f"mooncake_client {options} --global_segment_size=1GB"


def _remedy_of_peer(store: Store, metadata: str) -> str:
    """Return what to do if the process that holds an object cannot be reached."""
    if metadata != _NO_METADATA:
        text = f"Its holder may be gone, or does not use the metadata server {metadata}"
        return f"{text}: --metadata {_NO_METADATA} if it uses none."
    address = ""
    with contextlib.suppress(MooncakeError):
        address = store.stats()["pool"]["metadata_address"]
    url = f"http://{admin.reachable(address, store.master_address)}/metadata" if address else "URL"
    text = "Its holder may be gone, or uses a metadata server"
    return f"{text}: --metadata {url}, in Python StoreConfig(metadata=…)."


def add_put_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `put`."""
    parser.add_argument(
        "key", type=os.fsencode, help="key of the object; with -r the first folder or file"
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="file",
        help="file to store, which must not shrink meanwhile; - or none is standard input; with -r "
        "more folders, files or quoted patterns, and last the prefix of their keys",
    )
    parser.add_argument(
        "-r",
        "--recursive",
        action="store_true",
        help="store folders: each file below the prefix, an object each",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing object")
    parser.add_argument(
        "--ttl",
        type=duration,
        metavar="TIME",
        help="remove the object after that time: 30s, 2h, 1d",
    )
    parser.add_argument(
        "--tag",
        type=_tag,
        action="append",
        dest="tags",
        metavar="NAME=VALUE",
        help="store text beside the object; may be repeated",
    )
    add_progress(parser)
    add_metadata(parser)
    add_json(parser)


def put(options: argparse.Namespace) -> int:
    """Store a file under a key, or the files of folders under a prefix.

    Returns:
        0; 1 if an existing object was kept.
    """
    trees.check_options(options, "put")
    if options.recursive:
        with joined_for_bytes(options) as store:
            return trees.put_tree(store, options)
    with (
        _telling_of_interruption(),
        _hinting_at_arguments(options),
        _content(_file_of(options), options.progress) as value,
        joined_for_bytes(options) as store,
    ):
        tags = dict(options.tags) if options.tags else None
        return _stored(store, options, options.key, value, ttl_s=options.ttl, tags=tags)


@contextlib.contextmanager
def _hinting_at_arguments(options: argparse.Namespace) -> Iterator[None]:
    """Let the failure to open a file say how folders are stored, and what comes first."""
    try:
        yield
    except (IsADirectoryError, FileNotFoundError) as error:
        remedy = ""
        if isinstance(error, IsADirectoryError) or os.path.isdir(options.key):
            remedy = "Give -r for a folder: `mooncake put -r DIR PREFIX`."
        elif os.path.exists(options.key):
            remedy = "The key comes first: `mooncake put KEY FILE`."
        error.remedy = remedy  # type: ignore[union-attr]
        raise


def add_get_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `get`."""
    parser.add_argument(
        "key", type=os.fsencode, help="key of the object; with -r a prefix or a quoted pattern"
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="file",
        help="file to write, replaced when the object is complete; - or none is standard output; "
        "with -r the folder for the files",
    )
    parser.add_argument(
        "-r",
        "--recursive",
        action="store_true",
        help="write the objects below a prefix, or those that match a pattern, to a folder",
    )
    parser.add_argument("--force", action="store_true", help="write binary data to a terminal, too")
    add_progress(parser)
    add_metadata(parser)
    add_json(parser)


def get(options: argparse.Namespace) -> int:
    """Write an object to a file, or those of a prefix to a folder.

    Returns:
        0.
    """
    trees.check_options(options, "get")
    if options.recursive:
        with joined_for_bytes(options) as store:
            return trees.get_tree(store, options)
    file = _file_of(options)
    if options.is_json and file == "-":
        raise UsageError("--json needs a file for the object", "Name it after the key.")
    with (
        joined_for_bytes(options) as store,
        _pieces(store, options.key, "get", options.progress) as (size, pieces, progress),
    ):
        if file != "-":
            replace_file(file, size, pieces)
            progress.close(size)
            if options.is_json:
                key = os.fsdecode(options.key)
                print(json.dumps({"key": key, "bytes": size, "file": file}))
            return 0
        is_guarded = sys.stdout.isatty() and not options.force
        for at, piece in enumerate(pieces):
            if is_guarded and at == 0 and not _is_text(piece[:_TEXT_BYTES]):
                text = f"{quoted(options.key)} is binary ({format_bytes(size)})"
                remedy = "Name a file to write it to, or add --force to write it to the terminal."
                raise CommandError(text, remedy)
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        # Beside a text on the same terminal the line would only disturb.
        if options.progress or not sys.stdout.isatty():
            progress.close(size)
    return 0


def _file_of(options: argparse.Namespace) -> str:
    """Return the name of the one local file; - is a standard stream."""
    return options.files[0] if options.files else "-"


def add_cp_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `cp`."""
    parser.add_argument("source", type=os.fsencode, help="key of the object to copy")
    parser.add_argument("target", type=os.fsencode, help="key of the copy")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing object")
    add_progress(parser)
    add_metadata(parser)
    add_json(parser)


def cp(options: argparse.Namespace) -> int:
    """Copy an object to another key.

    Returns:
        0; 1 if an existing object was kept.
    """
    target: bytes = options.target
    with (
        _telling_of_interruption(),
        joined_for_bytes(options) as store,
        _pieces(store, options.source, "cp", options.progress) as (size, pieces, progress),
    ):
        with _checking_after_interruption(store, target, options.overwrite):
            if size == 0:
                mark = with_empty_mark(None)
                is_stored = store.put(
                    target, EMPTY_VALUE, overwrite=options.overwrite, options=mark
                )
            elif size <= _WHOLE_BYTES:
                is_stored = store.put(target, next(pieces), overwrite=options.overwrite)
            else:
                is_stored = _put_pieces(store, target, size, pieces, overwrite=options.overwrite)
        if is_stored:
            progress.close(size)
        return _print_stored(options, target, size, is_stored)


class _InterruptedPut(KeyboardInterrupt):
    """A put that was interrupted; the text says what is stored."""


@contextlib.contextmanager
def _telling_of_interruption() -> Iterator[None]:
    """Print what is stored if the command is interrupted."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        print(
            f"mooncake: interrupted: {str(interruption) or 'nothing was stored'}", file=sys.stderr
        )
        raise


@contextlib.contextmanager
def _checking_after_interruption(store: Store, key: bytes, is_overwritten: bool) -> Iterator[None]:
    """Find out what is stored if a put is interrupted, which may have been over just then."""
    try:
        yield
    except KeyboardInterrupt as interruption:
        name = quoted(key)
        try:
            is_there = store.exists(key, timeout_s=_CHECK_S)
        except MooncakeError:
            text = f"`mooncake stat {name}` shows whether it is stored"
        else:
            values = "its old value, or the new one whole" if is_overwritten else "a whole value"
            text = f"{name} has {values}" if is_there else "nothing was stored"
        raise _InterruptedPut(text) from interruption


def _put_pieces(
    store: Store, key: bytes, size: int, pieces: Iterator[memoryview], *, overwrite: bool
) -> bool:
    """Put an object in pieces; return whether it was stored."""
    at = 0
    try:
        space = Reservation(store._native, key, size, overwrite=overwrite)
    except AlreadyExistsError:
        return False
    try:
        for piece in pieces:
            address, length = _native.writable_range(piece)
            space.write(address, length, at)
            at += length
    except BaseException:
        space.revoke()
        raise
    space.publish()
    return True


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"a tag is NAME=VALUE: {text!r}")
    return name, value


def _stored(
    store: Store,
    options: argparse.Namespace,
    key: bytes,
    value: Readable,
    *,
    ttl_s: float | None = None,
    tags: dict[str, str] | None = None,
) -> int:
    size = memoryview(value).nbytes  # type: ignore[arg-type]
    is_overwritten: bool = options.overwrite
    progress = Progress("put", quoted(key), size, options.progress)
    with _checking_after_interruption(store, key, is_overwritten), _ticking(progress, size, store):
        is_stored = store.put(key, value, overwrite=is_overwritten, ttl_s=ttl_s, tags=tags)
    if is_stored:
        progress.close(size)
    return _print_stored(options, key, size, is_stored)


def _print_stored(options: argparse.Namespace, key: bytes, size: int, is_stored: bool) -> int:
    if options.is_json:
        text = os.fsdecode(key)
        print(json.dumps({"key": text, "bytes": size, "is_stored": is_stored}))
    if not is_stored:
        text = f"{quoted(key)} exists and was kept"
        print(f"mooncake: {text}\n  hint: Add --overwrite to replace it.", file=sys.stderr)
    return 0 if is_stored else 1


@contextlib.contextmanager
def _content(name: str, is_shown: bool | None) -> Iterator[Readable]:
    """Open a file, or standard input, as memory."""
    if name == "-":
        if sys.stdin.isatty():
            print("mooncake: reading standard input; Ctrl-D ends it", file=sys.stderr)
        with _memory_of(sys.stdin.buffer, is_shown) as value:
            yield value
        return
    with open(name, "rb") as file, _memory_of(file, is_shown) as value:
        yield value


@contextlib.contextmanager
def _memory_of(file: IO[bytes], is_shown: bool | None) -> Iterator[Readable]:
    """Map a regular file; read others, of which a long one is mapped from a temporary file."""
    state = os.fstat(file.fileno())
    if stat.S_ISREG(state.st_mode) and state.st_size > 0 and file.tell() == 0:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped
        return
    pieces = _read(file, is_shown)
    head = bytearray()
    for piece in pieces:
        head += piece
        if len(head) >= _WHOLE_BYTES:
            break
    else:
        yield head
        return
    with tempfile.TemporaryFile() as copy:
        with about(tempfile.gettempdir()):
            copy.write(head)
            del head
            write_all(copy, pieces)
            copy.flush()
        with mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield mapped


def _read(file: IO[bytes], is_shown: bool | None) -> Iterator[bytes]:
    """Read a file to its end, in pieces as they arrive, and show how many bytes there are."""
    name = "standard input" if file is sys.stdin.buffer else quoted(str(file.name))
    progress, done = Progress("read", name, None, is_shown), 0
    # Of a pipe, a piece is what is there; `read` would wait for the whole length.
    read = getattr(file, "read1", file.read)
    try:
        while piece := read(_CHUNK_BYTES):
            yield piece
            done += len(piece)
            # What somebody types shows itself.
            if not file.isatty():
                progress.advance(done)
    finally:
        progress.end()


@contextlib.contextmanager
def _pieces(
    store: Store, key: bytes, verb: str, is_shown: bool | None
) -> Iterator[tuple[int, Iterator[memoryview], Progress]]:
    """Yield the size of an object, its bytes in pieces, all from one version, and the progress.

    Args:
        store: The store.
        key: Key of the object.
        verb: What is done with the object, for the progress.
        is_shown: Whether to show the progress; None: if there is a terminal.
    """
    progress = Progress(verb, quoted(key), None, is_shown)
    try:
        size = store.size(key)
    except NotFoundError:
        # A read tells an object whose copies cannot be read from a missing one.
        size = memoryview(store.get_buffer(key)).nbytes
    if size == len(EMPTY_VALUE) and are_empty(store._native, [key])[0]:
        yield 0, iter(()), progress
        return
    if size <= _WHOLE_BYTES:
        value = memoryview(store.get_buffer(key))
        yield value.nbytes, iter([value]), progress
        return
    reader = store.reader(key)
    progress = Progress(verb, quoted(key), reader.size, is_shown)

    def pieces() -> Iterator[memoryview]:
        buffer, done = bytearray(_CHUNK_BYTES), 0
        try:
            while length := reader.readinto(buffer):
                yield memoryview(buffer)[:length]
                done += length
                progress.advance(done)
        finally:
            progress.end()

    yield reader.size, pieces(), progress


def _is_text(piece: memoryview) -> bool:
    """Return whether bytes act on a terminal as text alone."""
    try:
        text = bytes(piece).decode()
    except UnicodeDecodeError as error:
        # The piece may end within a character.
        if error.start < len(piece) - 3 or error.reason != "unexpected end of data":
            return False
        text = bytes(piece[: error.start]).decode()
    return all(character.isprintable() or character in "\n\r\t" for character in text)


@contextlib.contextmanager
def _ticking(progress: Progress, size: int, store: Store) -> Iterator[None]:
    """Show the progress of one call that moves many bytes, from the counters of the store."""
    if not progress.is_shown:
        yield
        return
    is_over = threading.Event()

    def tick() -> None:
        while not is_over.wait(_TICK_S):
            counts = store._native.metrics()["by_transport"].values()
            progress.advance(min(sum(count["written_bytes"] for count in counts), size))

    thread = threading.Thread(target=tick, name="mooncake-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        progress.end()
