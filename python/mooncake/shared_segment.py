"""Tensors in memory that all ranks of a group on one host share, with one layout."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mooncake import engine
from mooncake.tensor.dtypes import DType, load_torch

__all__ = [
    "SharedSegment",
    "SharedSegmentError",
    "create_shared_segment",
    "shared_segment_supported",
]

_ALIGNMENT: Final = 4096

# Prefix of an exchanged message that carries a rank's failure.
_FAILED: Final = "failed: "

_OTHER_NAMES: Final = {
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "cfloat": "complex64",
    "cdouble": "complex128",
}


class SharedSegmentError(RuntimeError):
    """A segment cannot be created in one of the ranks."""


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a layout: entries of one shape and dtype."""

    count: int
    shape: tuple[int, ...]
    dtype: DType
    # Offset of the first entry.
    offset: int

    @property
    def items(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Layout:
    blocks: dict[str, _Block]
    # Distance between successive entries of a block.
    stride: int
    total: int

    def tag(self) -> str:
        """Return a hash that identifies the layout."""
        blocks = {name: (b.count, b.shape, b.dtype.name) for name, b in self.blocks.items()}
        return hashlib.sha256(json.dumps(blocks).encode()).hexdigest()[:16]


class SharedSegment:
    """A segment with a layout. The memory lives until the segment and all its tensors are gone.

    Blocks are ordered by name; each entry begins at a multiple of 4096 bytes. The first entries of
    all blocks come first, then the second entries, and so on.
    """

    __slots__ = ("__weakref__", "_layout", "_segment")

    _layout: _Layout
    _segment: engine.SharedSegment

    def __init__(self) -> None:
        """Raise: `create_shared_segment` makes instances."""
        raise TypeError("SharedSegment has no constructor; use create_shared_segment")

    def base_addr(self) -> int:
        """Return the address of the first byte in this process."""
        return self._segment.base_addr()

    def total_size(self) -> int:
        """Return the length of the layout in bytes."""
        return self._layout.total

    def addresses(self, block: str) -> list[int]:
        """Return the addresses of the entries of a block in this process.

        Args:
            block: Name of the block.

        Raises:
            SharedSegmentError: There is no such block.
        """
        one = self._block(block)
        first = self.base_addr() + one.offset
        return [first + index * self._layout.stride for index in range(one.count)]

    def tensors(self, block: str) -> list[Any]:
        """Return the entries of a block as torch tensors that view the segment, without copies.

        Args:
            block: Name of the block.

        Raises:
            SharedSegmentError: There is no such block.
            ImportError: torch is not installed.
        """
        torch, one = load_torch(), self._block(block)
        dtype = one.dtype.torch()
        if one.items == 0:
            return [torch.empty(one.shape, dtype=dtype, device="cpu") for _ in range(one.count)]
        size = one.items * one.dtype.itemsize
        found = []
        for address in self.addresses(block):
            view = (ctypes.c_char * size).from_address(address)
            # A tensor references the view, and the view references the segment's memory.
            view.segment = self._segment  # type: ignore[attr-defined]
            found.append(torch.frombuffer(view, dtype=dtype).reshape(one.shape))
        return found

    def _block(self, name: str) -> _Block:
        try:
            return self._layout.blocks[name]
        except KeyError:
            known = ", ".join(self._layout.blocks)
            raise SharedSegmentError(f"no block {name!r}; there are {known}") from None


def shared_segment_supported(mmap: bool = True, host_register: bool = False) -> bool:
    """Return whether segments of a kind can be created.

    Args:
        mmap: The memory is mapped.
        host_register: The memory is registered with a device.

    Returns:
        True for memory that is mapped and not registered.
    """
    return engine.SharedSegment.supported(mmap, host_register)


def create_shared_segment(  # noqa: PLR0913 (upstream's signature)
    name: str,
    blocks: Mapping[str, Mapping[str, Any]],
    world_size: int,
    rank_id: int,
    owner_rank: int = 0,
    device_id: int | None = None,
    comm_group: object = None,
    mmap: bool = True,
    host_register: bool = False,
    *,
    tp_group: object = None,
) -> SharedSegment:
    """Create a segment together with the other ranks of a group; each rank calls this function.

    The call returns when every rank has mapped the memory. If one rank fails, all of them fail.

    Args:
        name: Name of the segment, the same in all ranks.
        blocks: For each block ``{"count": n, "shape": (…), "dtype": d}``: number, shape and dtype
            of its entries; the same in all ranks. A dtype is one of torch or numpy, or its name.
        world_size: Number of ranks.
        rank_id: Number of this rank in the order of the group, from 0.
        owner_rank: Rank that owns the memory.
        device_id: Accepted; device memory is not supported.
        comm_group: Communication between the ranks: a group of ``torch.distributed`` (of processes
            of this host), or an object with ``all_gather_object(value)`` that returns the values of
            all ranks in their order. May be None for one rank.
        mmap: Must be true: the memory is mapped.
        host_register: Must be false: the memory is not registered with a device.
        tp_group: Another name for `comm_group`.

    Raises:
        SharedSegmentError: The layout is invalid, the ranks disagree, or one of them cannot map the
            memory.
        TypeError: Both names of the group were given.
    """
    if comm_group is not None and tp_group is not None:
        raise TypeError("create_shared_segment() got comm_group and tp_group, which are the same")
    group = tp_group if comm_group is None else comm_group
    if world_size != 1 and group is None:
        raise SharedSegmentError(f"comm_group must be given for world_size={world_size}")
    made = object.__new__(SharedSegment)
    try:
        layout = made._layout = _plan(blocks)
        made._segment, blob = engine.SharedSegment.create(
            f"{name}-{layout.tag()}",
            layout.total,
            world_size,
            rank_id,
            owner_rank,
            0 if device_id is None else device_id,
            mmap,
            host_register,
        )
        message = blob.decode()
    except RuntimeError as error:
        # The other ranks wait for this one, so the failure is sent to them.
        message = f"{_FAILED}{error}"
    messages = _exchange(message, world_size, group)
    # A barrier: the owner may exit once its call returns, so all ranks must have mapped the memory.
    message = ""
    try:
        made._segment.complete(messages)
    except RuntimeError as error:
        message = f"{_FAILED}{error}"
    _exchange(message, world_size, group)
    return made


def _exchange(message: str, world_size: int, group: object) -> list[str]:
    """Return the messages of all ranks, in their order; raise the failure of any rank."""
    messages = [message] if world_size == 1 else _all_gather(message, world_size, group)
    failures = [
        (rank, text.removeprefix(_FAILED))
        for rank, text in enumerate(messages)
        if isinstance(text, str) and text.startswith(_FAILED)
    ]
    if failures:
        why = failures[0][1] if world_size == 1 else f"rank {failures[0][0]}: {failures[0][1]}"
        raise SharedSegmentError(why)
    return messages


def _all_gather(message: str, world_size: int, group: object) -> list[str]:
    gather = getattr(group, "all_gather_object", None)
    if gather is not None:
        return list(gather(message))
    distributed = importlib.import_module("torch.distributed")
    messages: list[Any] = [None] * world_size
    # Group wrappers of other packages have a separate group for messages between hosts' CPUs.
    distributed.all_gather_object(messages, message, group=getattr(group, "cpu_group", group))
    return messages


def _plan(blocks: Mapping[str, Mapping[str, Any]]) -> _Layout:
    placed: dict[str, _Block] = {}
    offset = 0
    for name in sorted(blocks):
        block = _read_block(name, blocks[name], offset)
        placed[name] = block
        offset += _aligned(block.items * block.dtype.itemsize)
    total = offset * max((block.count for block in placed.values()), default=0)
    if total == 0:
        raise SharedSegmentError("the blocks have no bytes")
    return _Layout(placed, offset, total)


def _read_block(name: str, block: Mapping[str, Any], offset: int) -> _Block:
    if set(block) != {"count", "shape", "dtype"}:
        raise SharedSegmentError(
            f"block {name!r} must have count, shape and dtype, not {sorted(map(str, block))}"
        )
    shape = block["shape"]
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    for size in (block["count"], *sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise SharedSegmentError(f"block {name!r}: {size!r} is not a non-negative integer")
    dtype = _read_dtype(name, block["dtype"])
    return _Block(block["count"], tuple(map(int, sizes)), dtype, offset)


def _read_dtype(block: str, dtype: object) -> DType:
    text = dtype if isinstance(dtype, str) else None
    text = text or getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    text = str(text).removeprefix("torch.")
    try:
        return DType.of_name(_OTHER_NAMES.get(text, text))
    except TypeError as error:
        raise SharedSegmentError(f"block {block!r} has an unknown dtype: {dtype!r}") from error


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
