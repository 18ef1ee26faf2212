"""Files of the format safetensors: their headers, read with suspicion, and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from mooncake._runtime import Buffer
from mooncake.checkpoint.local import Block, LocalTensor
from mooncake.checkpoint.manifest import Tensor
from mooncake.checkpoint.names import CORRUPT, INVALID, error_of
from mooncake.checkpoint.transfer import Source
from mooncake.tensor.dtypes import DType

__all__ = [
    "DTYPES",
    "LAYOUT",
    "FileMemory",
    "FileTensors",
    "SafetensorsFile",
    "header_of",
    "index_of",
]

DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
"""Names of types in files, and in torch."""

LAYOUT: Final = "safetensors"
"""Name of the text beside a checkpoint that says which tensors were in which file."""

_HEADER_BYTES_MAX = 100_000_000
_METADATA = "__metadata__"
_ALIGNMENT = 64
_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _FileRange:
    """The bytes of a tensor in a file, which are read when they are put."""

    file: SafetensorsFile
    offset: int
    nbytes: int

    def read_into(self, memory: memoryview) -> None:
        """Read the bytes into memory of their length."""
        done = 0
        while done < self.nbytes:
            end = min(done + (1 << 30), self.nbytes)
            read = os.preadv(self.file.descriptor, [memory[done:end]], self.offset + done)
            if read == 0:
                raise self.file.changed()
            done += read


class FileMemory:
    """Memory that bytes of files are read into. Each use begins at its beginning.

    Memory that is used again has its pages: to touch new ones takes longer than to read a file.
    """

    def __init__(self) -> None:
        """Begin without memory."""
        self._buffer: Buffer | None = None

    def read(self, blocks: Sequence[Block]) -> list[Source]:
        """Read the bytes of blocks. What an earlier call read is gone.

        Raises:
            CorruptError: A file was shortened.
        """
        ranges: list[_FileRange] = [block.value for block in blocks]
        starts = [0, *accumulate(_rounded(each.nbytes) for each in ranges)]
        if self._buffer is None or len(self._buffer) < starts[-1]:
            self._buffer = Buffer.allocate(max(starts[-1], 1))
        first, view = self._buffer.ptr(), self._buffer.buffer
        sources = []
        for each, start in zip(ranges, starts, strict=False):
            each.read_into(view[start : start + each.nbytes])
            sources.append(Source(first + start, each.nbytes, self._buffer))
        return sources


def _rounded(nbytes: int) -> int:
    """Return a length after which other bytes may begin at an address of the same alignment."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class SafetensorsFile:
    """A file that is open for reading.

    Attributes:
        path: Path of the file.
        descriptor: Descriptor of the file.
        metadata: Text by name.
        tensors: The tensors, over ranges of the file.
    """

    def __init__(self, path: str) -> None:
        """Open a file and check its header.

        Raises:
            OSError: The file cannot be read.
            InvalidArgumentError: It is no file of that format, or damaged.
        """
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.metadata: dict[str, str] = {}
        self.tensors: list[LocalTensor] = []
        try:
            self._state = self._stat()
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def check_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened.

        Raises:
            CorruptError: It was.
        """
        if self._stat() != self._state:
            raise self.changed()

    def changed(self) -> Exception:
        """Return the error for a file that changes while it is read."""
        return error_of(CORRUPT, "the file changes while it is read: try again", file=self.path)

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns

    def _read_header(self) -> None:
        size = self._state[0]
        head = os.pread(self.descriptor, 8, 0)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _HEADER_BYTES_MAX):
            raise self._damaged(f"its header has an impossible length ({length} of {size} bytes)")
        try:
            header = json.loads(os.pread(self.descriptor, length, 8))
            metadata = header.pop(_METADATA, {})
            self.metadata = {str(name): str(text) for name, text in metadata.items()}
            start = 8 + length
            ends = [self._add(name, each, start) for name, each in header.items()]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise self._damaged(f"its header is wrong: {error!s:.200}") from error
        end = 0
        for first, last in sorted(ends):
            if first < end:
                raise self._damaged("two tensors overlap")
            end = max(last, end)

    def _add(self, name: str, each: dict[str, Any], start: int) -> tuple[int, int]:
        """Add a tensor; return where its bytes begin and end."""
        first, last = each["data_offsets"]
        shape = tuple(each["shape"])
        numbers = (first, last, *shape)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"a number of {name!r} is none")
        if each["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} has the unknown dtype {each['dtype']!r:.40}")
        dtype = DType.of_name(DTYPES[each["dtype"]])
        nbytes = math.prod(shape) * dtype.itemsize
        if last - first != nbytes or start + last > self._state[0]:
            raise ValueError(f"{name!r} has {nbytes} bytes, and not those from {first} to {last}")
        value = _FileRange(self, start + first, nbytes)
        block = Block((0,) * len(shape), shape, value)
        self.tensors.append(LocalTensor(name, dtype, shape, (block,) if nbytes else ()))
        return first, last

    def _damaged(self, why: str) -> Exception:
        return error_of(INVALID, f"the file is no safetensors file: {why}", file=self.path)


class FileTensors:
    """The tensors of files, in the place of those of a state dict.

    Attributes:
        tensors: The tensors.
        tree: The tree of a flat state dict.
    """

    def __init__(self, files: list[SafetensorsFile]) -> None:
        """Unite the tensors of files.

        Raises:
            InvalidArgumentError: Two files have a tensor of the same name.
        """
        self._files = files
        self.tensors = [tensor for file in files for tensor in file.tensors]
        owners: dict[str, str] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor.name in owners:
                    text = "two files have a tensor of the same name; save them one by one"
                    names = {"first": owners[tensor.name], "second": file.path}
                    raise error_of(INVALID, text, key=None, tensor=tensor.name, **names)
                owners[tensor.name] = file.path
        pairs = [[each.name, {"tensor": at}] for at, each in enumerate(self.tensors)]
        self.tree = {"dict": pairs}

    def check(self) -> None:
        """Refuse files that were written to meanwhile."""
        for file in self._files:
            file.check_unchanged()

    def document(self) -> dict[str, Any]:
        """Return what a layout needs to know."""
        return {"tree": self.tree, "tensors": [each.document() for each in self.tensors]}


def header_of(tensors: list[Tensor], metadata: dict[str, str]) -> bytes:
    """Return the beginning of a file: the length of the header and the header.

    Raises:
        InvalidArgumentError: The format has no such dtype; the message names the tensor.
    """
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    end = 0
    for tensor in tensors:
        code = _CODES.get(tensor.dtype.name)
        if code is None or tensor.name == _METADATA:
            text = "a safetensors file cannot hold a tensor of that dtype or name"
            raise error_of(INVALID, text, tensor=tensor.name, dtype=tensor.dtype.name)
        first, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": code, "shape": tensor.shape, "data_offsets": [first, end]}
    text_of_header = json.dumps(header, separators=(",", ":")).encode()
    # The elements begin at a multiple of 8.
    text_of_header += b" " * (-len(text_of_header) % 8)
    return len(text_of_header).to_bytes(8, "little") + text_of_header


def index_of(files: dict[str, list[str]], total: int) -> bytes:
    """Return the index of files that hold parts of a model."""
    places = {tensor: file for file, names in files.items() for tensor in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def code_of(dtype: DType) -> str:
    """Return the name of a type in files, or that of torch if there is none."""
    return _CODES.get(dtype.name, dtype.name)
