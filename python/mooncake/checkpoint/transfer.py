"""Puts and reads of parts: batches of limited length, with checksums of a second thread."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from mooncake._runtime import PutOptions, _native
from mooncake.checkpoint.local import Block, Box
from mooncake.checkpoint.manifest import Part, Tensor
from mooncake.checkpoint.names import CORRUPT, NOT_FOUND, Keys, error_of
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor import memory
from mooncake.tensor.calls import Dimension, MemoryGrid
from mooncake.tensor.format import DIMS_MAX

__all__ = [
    "Reader",
    "Request",
    "Source",
    "batched",
    "checksum_threads",
    "group_of",
    "put_options",
    "read_parts",
    "xxh3_of",
]

BATCH_BYTES: Final = 128 << 20
BATCH_ITEMS: Final = 256
_THREADS_MAX = 4
PINS: Final = ("soft", "hard", None)


def group_of(prefix: str, save: str) -> str:
    """Return the name of the group of what a save puts."""
    # The id alone is unique; names of groups are at most 1 KiB long.
    return f"{prefix[-200:]}@{save}"


def put_options(pin: str | None, replicas: int, group: str, count: int) -> PutOptions:
    """Return the options with which objects of a group are put.

    Raises:
        ValueError: The pin is none of those there are.
    """
    if pin not in PINS:
        raise ValueError(f'a pin is "soft", "hard" or None, not {pin!r}')
    return PutOptions(
        replicas=replicas,
        soft_pin="enable" if pin == "soft" else "disable",
        is_hard_pinned=pin == "hard",
        groups=[group] * count,
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Contiguous host memory of a part.

    Attributes:
        address: Address of the first byte.
        nbytes: Length in bytes.
        owner: Object that keeps the memory.
    """

    address: int
    nbytes: int
    owner: Any

    @classmethod
    def of(cls, block: Block) -> Source:
        """Return the memory of a block, or that of a copy on the host."""
        value = block.value
        if value.ndim > DIMS_MAX:
            value = value.reshape(-1)
        place = memory.of(value)
        if place.is_on_device:
            place = memory.of(value.cpu())
        return cls(place.address, place.nbytes, place.owner)

    def view(self) -> memoryview:
        """Return the memory as a buffer. The source keeps it alive."""
        return memory.at_address(self.address, self.nbytes)


def checksum_threads() -> ThreadPoolExecutor:
    """Return threads that compute checksums beside a transfer: a copy alone is faster."""
    count = min(len(os.sched_getaffinity(0)), _THREADS_MAX)
    return ThreadPoolExecutor(count, "mooncake-checkpoint")


def xxh3_of(address: int, nbytes: int) -> int:
    """Return the checksum of memory. Other threads run meanwhile."""
    return _native.xxh3(memory.at_address(address, nbytes)) if nbytes else 0


def batched(sizes: Sequence[int]) -> Iterator[slice]:
    """Split items of some lengths into batches."""
    start = 0
    while start < len(sizes):
        end, total = start, 0
        while (
            end < len(sizes)
            and end - start < BATCH_ITEMS
            and (end == start or total + sizes[end] <= BATCH_BYTES)
        ):
            total += sizes[end]
            end += 1
        yield slice(start, end)
        start = end


@dataclass(frozen=True, slots=True)
class Request:
    """A box of a tensor to read into contiguous host memory.

    Attributes:
        tensor: The tensor.
        box: The box.
        address: Address of the memory.
    """

    tensor: Tensor
    box: Box
    address: int


@dataclass(frozen=True, slots=True)
class _Read:
    """Ranges of one part to read.

    Attributes:
        name: Name of the tensor.
        part: The part.
        grid: The ranges.
        nbytes: Their length.
        address: Address of the memory if all of the part goes there in one piece; else 0.
    """

    name: str
    part: Part
    grid: MemoryGrid
    nbytes: int
    address: int

    @property
    def is_checked(self) -> bool:
        """True if a checksum tells whether the bytes are those of the part."""
        return self.address != 0 and self.part.xxh3 is not None


class Reader:
    """Reads boxes of tensors, whose parts have the versions that the manifest names."""

    def __init__(self, native: Any, keys: Keys) -> None:
        """Read from a store.

        Args:
            native: The native store.
            keys: Keys of the checkpoint.
        """
        self._native = native
        self._keys = keys

    def read(
        self,
        requests: Sequence[Request],
        progress: Callable[[int, int], object] | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        """Fill memory, and compare the checksums of the parts that are read whole.

        Args:
            requests: What to read.
            progress: Called with the bytes that are done, and all.
            resumes: Skip parts that the memory has already, by their checksum.

        Raises:
            NotFoundError: A part is missing; the message names the tensor.
            CorruptError: A part is not the one that was saved.
        """
        reads = [each for request in requests for each in _reads_of(request)]
        total, done = sum(each.nbytes for each in reads), 0
        if resumes:
            reads = [each for each in reads if not _is_there(each)]
            done = total - sum(each.nbytes for each in reads)
            if progress is not None and done:
                progress(done, total)
        checks: list[Future[None]] = []
        with checksum_threads() as pool:
            for piece in batched([each.nbytes for each in reads]):
                batch = reads[piece]
                self._read_batch(batch)
                for check in checks:
                    check.result()
                checks = [pool.submit(self._compare, each) for each in batch if each.is_checked]
                done += sum(each.nbytes for each in batch)
                if progress is not None and done < total:
                    progress(done, total)
            for check in checks:
                check.result()
        if progress is not None:
            progress(total, total)

    def _read_batch(self, batch: Sequence[_Read]) -> None:
        keys = [self._keys.of(each.part.name) for each in batch]
        outcomes = _native.read_grids(
            self._native, keys, [[each.grid] for each in batch], lease=False
        )
        for key, each, outcome in zip(keys, batch, outcomes, strict=True):
            if isinstance(outcome, MooncakeError):
                raise self._failure(key, each, outcome) from outcome
            if outcome[1] != each.part.version:
                raise self._replaced(key, each.name)

    def _failure(self, key: str, each: _Read, failure: MooncakeError) -> MooncakeError:
        if isinstance(failure, NotFoundError):
            text = "a part of the checkpoint is missing: it was removed, evicted or lost"
            return error_of(NOT_FOUND, text, key=key, tensor=each.name)
        (size,) = self._native.sizes([key], lease=False)
        if isinstance(size, int) and size != each.part.nbytes:
            return self._replaced(key, each.name)
        failure.add_note(f"tensor {each.name!r} of the checkpoint {self._keys.prefix!r}")
        return failure

    def _replaced(self, key: str, name: str) -> MooncakeError:
        text = "a part was replaced: it is not the object that the checkpoint was saved with"
        return error_of(CORRUPT, text, key=key, tensor=name)

    def _compare(self, read: _Read) -> None:
        if read.is_checked and xxh3_of(read.address, read.part.nbytes) != read.part.xxh3:
            text = "the bytes of a part do not match the checksum of the checkpoint"
            raise error_of(CORRUPT, text, key=self._keys.of(read.part.name), tensor=read.name)


def read_parts(native: Any, keys: Keys, parts: Sequence[tuple[str, Part]], buffer: Any) -> None:
    """Read whole parts, one after the other, into one buffer that is as long as the longest.

    Raises:
        NotFoundError: A part is missing; the message names the tensor.
        CorruptError: A part is not the one that was saved.
    """
    reader, (address, _) = Reader(native, keys), _native.writable_range(buffer)
    for name, part in parts:
        grid = (address, 0, part.nbytes, ())
        read = _Read(name, part, grid, part.nbytes, address)
        reader._read_batch([read])
        reader._compare(read)


def _is_there(each: _Read) -> bool:
    return each.is_checked and xxh3_of(each.address, each.part.nbytes) == each.part.xxh3


def _reads_of(request: Request) -> Iterator[_Read]:
    """Return the ranges of the parts that make up a box."""
    offset, shape = request.box
    size = request.tensor.dtype.itemsize
    for part in request.tensor.parts:
        first = [max(a, b) for a, b in zip(offset, part.offset, strict=True)]
        last = [
            min(a + n, b + m)
            for a, n, b, m in zip(offset, shape, part.offset, part.shape, strict=True)
        ]
        own = [end - start for start, end in zip(first, last, strict=True)]
        if any(length <= 0 for length in own):
            continue
        in_part = [a - b for a, b in zip(first, part.offset, strict=True)]
        in_box = [a - b for a, b in zip(first, offset, strict=True)]
        source, target = _Place(part.shape, in_part), _Place(shape, in_box)
        grid = _grid(request.address, size, own, source, target)
        nbytes = math.prod(own) * size
        is_whole = nbytes == part.nbytes and not grid[3]
        name = request.tensor.name
        yield _Read(name, part, grid, nbytes, grid[0] if is_whole else 0)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a box lies in a row-major memory.

    Attributes:
        shape: Shape of the memory.
        first: First index of the box.
    """

    shape: Sequence[int]
    first: Sequence[int]

    def strides(self, size: int) -> list[int]:
        """Return the distance in bytes of neighbours in each dimension."""
        strides, step = [], size
        for length in reversed(self.shape):
            strides.append(step)
            step *= length
        return strides[::-1]

    def start(self, strides: Sequence[int]) -> int:
        """Return the offset of the box in bytes."""
        return sum(map(math.prod, zip(self.first, strides, strict=True)))


def _grid(
    address: int, size: int, own: Sequence[int], source: _Place, target: _Place
) -> MemoryGrid:
    """Return the ranges of a box that lies in two row-major memories.

    Args:
        address: Address of the target.
        size: Length of an element.
        own: Shape of the box.
        source: Where the box lies in the part.
        target: Where it lies in the target.
    """
    in_source, in_target = source.strides(size), target.strides(size)
    dim, length = len(own), size
    # Inner dimensions that both memories have whole are one range with the dimension before them.
    while dim > 0:
        dim -= 1
        length *= own[dim]
        if own[dim] != source.shape[dim] or own[dim] != target.shape[dim]:
            break
    dims: list[Dimension] = [
        (own[at], in_source[at], in_target[at]) for at in range(dim) if own[at] > 1
    ]
    return address + target.start(in_target), source.start(in_source), length, dims
