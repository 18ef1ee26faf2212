"""`mooncake checkpoint`: safetensors files as checkpoints, and back; lists, checks, removals."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mooncake._api.store import Store
from mooncake._command.files import joined, joined_for_bytes
from mooncake._command.output import CommandError, UsageError, print_table, quoted
from mooncake._command.parser import Parser, add_json, add_master, add_metadata
from mooncake._command.progress import Progress, add_progress
from mooncake._runtime import Buffer, _native
from mooncake._units import format_bytes
from mooncake.errors import CorruptError

__all__ = ["add_options"]

_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
_FILE_NAME = re.compile(r"[^/\0]{1,200}")
_DEFAULT_FILE = "model.safetensors"
_FAILED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the commands of `mooncake checkpoint`."""
    commands = parser.add_subparsers(
        required=True, metavar="ACTION", parser_class=Parser, help="what to do with a checkpoint"
    )

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, exit_code_of_failure=_FAILED)
        add_master(command)
        add_json(command)
        return command

    file_help = "safetensors file, or folder with such files"
    save = add("save", _save, "store a safetensors file or folder as a checkpoint")
    save.add_argument("file", help=file_help)
    save.add_argument("prefix", help="name of the checkpoint; one of that name is replaced")
    save.add_argument(
        "--pin",
        choices=("soft", "hard", "none"),
        default="soft",
        help="protection from eviction: while anything else can be evicted, always, or none",
    )
    save.add_argument("--replicas", type=int, default=1, help="number of copies")
    load = add("load", _load, "write a checkpoint to a safetensors file or folder")
    load.add_argument("prefix", help="name of the checkpoint")
    load.add_argument(
        "file", help=f"{file_help}: a name that ends in {_SUFFIX} is a file, another one a folder"
    )
    for command in (save, load):
        add_metadata(command)
    listing = add("ls", _ls, "list checkpoints")
    listing.add_argument("prefix", nargs="?", default="", help="only this name and those below it")
    verify = add("verify", _verify, "read a checkpoint and compare its checksums")
    verify.add_argument("prefix", help="name of the checkpoint")
    add_metadata(verify)
    for command in (save, load, verify):
        add_progress(command)
    remove = add("rm", _remove, "remove a checkpoint, and what interrupted saves of it have left")
    remove.add_argument("prefix", help="name of the checkpoint")
    remove.add_argument(
        "--force", action="store_true", help="remove it even if a save of it runs, or it is leased"
    )


def _save(options: argparse.Namespace) -> int:
    from mooncake.checkpoint.safetensors import LAYOUT, FileTensors
    from mooncake.checkpoint.saving import Terms, save_local

    with contextlib.ExitStack() as stack:
        folder = _Folder.opened(options.file, stack)
        tensors = FileTensors(folder.files)
        metadata = dict(folder.files[0].metadata) if folder.is_file else {}
        metadata[LAYOUT] = json.dumps(folder.layout())
        pin = None if options.pin == "none" else options.pin
        terms = Terms(pin, replicas=options.replicas, metadata=metadata)
        size = sum(block.value.nbytes for each in tensors.tensors for block in each.blocks)
        with joined_for_bytes(options) as store, _progress("save", options, size) as progress:
            saved = save_local(lambda: tensors, store, options.prefix, terms, progress)
    _print_result(options, {"prefix": saved.prefix, "bytes": saved.nbytes, "save": saved.save})
    return 0


def _load(options: argparse.Namespace) -> int:
    from mooncake.checkpoint.loading import again_if_replaced

    with joined_for_bytes(options) as store:
        write = _Target(store, options).write
        size = again_if_replaced(store._native, options.prefix, write)
    _print_result(options, {"prefix": options.prefix, "bytes": size, "file": options.file})
    return 0


def _ls(options: argparse.Namespace) -> int:
    from mooncake import checkpoint

    with joined(options) as store:
        found = checkpoint.list(store, options.prefix)
    if options.is_json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    elif found:
        rows = [
            [
                quoted(each.prefix),
                format_bytes(each.nbytes) if each.is_readable else "damaged",
                str(each.tensors),
            ]
            for each in found
        ]
        print_table(["CHECKPOINT", "SIZE", "TENSORS"], rows, right=(1, 2))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from mooncake import checkpoint
    from mooncake.checkpoint.manifest import read_manifest
    from mooncake.checkpoint.names import Keys

    with joined_for_bytes(options) as store:
        size = read_manifest(store._native, Keys(options.prefix)).nbytes
        with _progress("verify", options, size) as progress:
            found = checkpoint.verify(store, options.prefix, progress=progress)
    _print_result(options, {"prefix": found.prefix, "bytes": found.nbytes, "is_whole": True})
    return 0


def _remove(options: argparse.Namespace) -> int:
    from mooncake import checkpoint

    with joined(options) as store:
        checkpoint.delete(store, options.prefix, force=options.force)
    _print_result(options, {"prefix": options.prefix, "is_removed": True})
    return 0


def _print_result(options: argparse.Namespace, result: dict[str, Any]) -> None:
    if options.is_json:
        print(json.dumps(result))


@contextlib.contextmanager
def _progress(
    verb: str, options: argparse.Namespace, size: int
) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a block, and print its closing line if it succeeds."""
    shown = Progress(verb, quoted(options.prefix), size, options.progress)
    last = [0]

    def advance(done: int, total: int) -> None:
        last[0] = min(done, total)
        shown.advance(done)

    try:
        yield advance
    except BaseException:
        shown.end()
        raise
    shown.close(last[0])


@dataclass(slots=True)
class _Folder:
    """Files that make up a checkpoint.

    Attributes:
        files: The files.
        is_file: True for a single file that was named itself.
        index: Name of the index; "" without one.
    """

    files: list[Any] = field(default_factory=list)
    is_file: bool = False
    index: str = ""

    @classmethod
    def opened(cls, path: str, stack: contextlib.ExitStack) -> _Folder:
        """Open a file, or the files of a folder that the index names, or else all.

        Raises:
            UsageError: There is no such file in the folder.
            CommandError: The index is damaged, or does not fit the files.
        """
        from mooncake.checkpoint.safetensors import SafetensorsFile

        folder = cls(is_file=not os.path.isdir(path))
        names = [""] if folder.is_file else sorted(os.listdir(path))
        indices = [name for name in names if name.endswith(_INDEX)]
        if len(indices) > 1:
            text = f"{quoted(path)} has {len(indices)} indices"
            raise UsageError(text, "Keep one, or save the files one by one.")
        places: dict[str, str] = {}
        if indices:
            folder.index = indices[0]
            places = _places(os.path.join(path, folder.index))
            names = sorted({*places.values()})
        elif not folder.is_file:
            names = [name for name in names if name.endswith(_SUFFIX)]
        if not names:
            raise UsageError(f"{quoted(path)} has no {_SUFFIX} files", "Name another folder.")
        for name in names:
            file = SafetensorsFile(os.path.join(path, name) if name else path)
            stack.callback(file.close)
            folder.files.append(file)
        if indices:
            folder.check_index(places)
        return folder

    def check_index(self, places: dict[str, str]) -> None:
        """Refuse an index that differs from the files."""
        found = {
            tensor.name: os.path.basename(file.path)
            for file in self.files
            for tensor in file.tensors
        }
        wrong = sorted(name for name in {*places, *found} if places.get(name) != found.get(name))
        if wrong:
            text = f"{quoted(self.index)} and the files disagree about the tensor {wrong[0]!r}"
            raise CommandError(text, "Write the files again.")

    def layout(self) -> dict[str, Any]:
        """Return which tensors are in which file."""
        files = {
            os.path.basename(file.path): {
                "metadata": file.metadata,
                "tensors": [tensor.name for tensor in file.tensors],
            }
            for file in self.files
        }
        return {"files": files, "index": self.index}


def _places(path: str) -> dict[str, str]:
    """Return the file of each tensor that an index names."""
    try:
        with open(path, "rb") as file:
            places = json.load(file)["weight_map"]
        found = {str(tensor): str(name) for tensor, name in places.items()}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CommandError(f"{quoted(path)} is no index: {error!s:.100}") from error
    for name in found.values():
        if not _is_file_name(name):
            raise CommandError(f"{quoted(path)} names a file outside of its folder: {name!r:.100}")
    return found


def _is_file_name(name: str) -> bool:
    return name not in (".", "..") and _FILE_NAME.fullmatch(name) is not None


class _Target:
    """The file or the folder that a checkpoint is written to."""

    def __init__(self, store: Store, options: argparse.Namespace) -> None:
        self._store, self._options = store, options
        self._path: str = options.file
        self._is_file = self._path.endswith(_SUFFIX) and not os.path.isdir(self._path)

    def write(self, manifest: Any, keys: Any) -> int:
        """Write the tensors; return their length in bytes."""
        from mooncake.checkpoint.safetensors import header_of, index_of
        from mooncake.checkpoint.transfer import Reader

        files, index = self._files(manifest)
        tensors = {each.name: each for each in manifest.tensors}
        heads = {
            name: header_of([tensors[each] for each in own], metadata)
            for name, (metadata, own) in files.items()
        }
        total: int = sum(each.nbytes for each in manifest.tensors)
        reader, done = Reader(self._store._native, keys), 0
        if not self._is_file:
            os.makedirs(self._path, exist_ok=True)
        with _progress("load", self._options, total) as progress, contextlib.ExitStack() as stack:
            parts: list[tuple[Any, str]] = []
            for name, (_, own) in files.items():
                path = self._path if self._is_file else os.path.join(self._path, name)
                part = stack.enter_context(_replacing(path))
                parts.append(part)
                size = len(heads[name]) + sum(tensors[each].nbytes for each in own)
                os.posix_fallocate(part[0].fileno(), 0, size)
                part[0].write(heads[name])
                for data in _read(reader, [tensors[each] for each in own]):
                    part[0].write(data)
                    done += len(data)
                    progress(done, total)
            if index:
                part = stack.enter_context(_replacing(os.path.join(self._path, index)))
                part[0].write(index_of({name: own for name, (_, own) in files.items()}, total))
                parts.append(part)
            # Nothing is replaced until everything is there.
            for file, path in parts:
                file.flush()
                os.replace(file.name, path)
        return total

    def _files(self, manifest: Any) -> tuple[dict[str, tuple[dict[str, str], list[str]]], str]:
        """Return metadata and tensors of each file, and the name of the index."""
        from mooncake.checkpoint.safetensors import LAYOUT

        names = [each.name for each in manifest.tensors]
        texts = {name: text for name, text in manifest.metadata.items() if name != LAYOUT}
        single = {_DEFAULT_FILE: (texts, names)}
        layout = manifest.metadata.get(LAYOUT)
        if self._is_file or layout is None:
            return single, ""
        try:
            document = json.loads(layout)
            files = {
                str(name): (
                    {str(key): str(text) for key, text in each["metadata"].items()},
                    [str(tensor) for tensor in each["tensors"]],
                )
                for name, each in document["files"].items()
            }
            index = str(document["index"])
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise CorruptError(f"the list of files is damaged: {error!s:.100}") from error
        placed = sorted(tensor for _, own in files.values() for tensor in own)
        if placed != sorted(names) or not all(map(_is_file_name, [*files, index or "none"])):
            raise CorruptError("the list of files does not fit the tensors, or leaves its folder")
        return files, index


def _read(reader: Any, tensors: Sequence[Any]) -> Iterator[memoryview]:
    """Yield the bytes of tensors in batches, after their checksums were compared."""
    from mooncake.checkpoint.transfer import Request, batched

    buffer = Buffer.allocate(1)
    for piece in batched([each.nbytes for each in tensors]):
        batch = tensors[piece]
        length = sum(each.nbytes for each in batch)
        if length == 0:
            continue
        if length > len(buffer):
            buffer = Buffer.allocate(length)
        address, requests = _native.writable_range(buffer)[0], []
        for each in batch:
            box = (0,) * len(each.shape), each.shape
            if each.nbytes:
                requests.append(Request(each, box, address))
            address += each.nbytes
        reader.read(requests)
        yield memoryview(buffer).cast("B")[:length]


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[tuple[Any, str]]:
    """Yield a file beside a path, which is removed at the end unless it was renamed."""
    folder, base = os.path.split(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(".part", f".{base[:200]}.", folder)
    mask = os.umask(0)
    os.umask(mask)
    os.fchmod(descriptor, 0o666 & ~mask)
    os.close(descriptor)
    try:
        with open(name, "r+b") as file:
            yield file, os.path.join(folder, base)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
