"""KV caches as regions of blocks, and the copies that move blocks from one cache to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Copies", "Region", "group_concurrent_contiguous", "plan_copies", "regions_of"]


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that holds the same part of each block of a KV cache, in the order of the blocks.

    Attributes:
        address: Address of block 0.
        block_bytes: Length of the part, and the distance from one block to the next.
        blocks: Number of blocks.
        layer: Name of the layer, the first one if several share the memory.
    """

    address: int
    block_bytes: int
    blocks: int
    layer: str = field(default="", compare=False)

    @property
    def length(self) -> int:
        """Length of the region in bytes."""
        return self.block_bytes * self.blocks


@dataclass(frozen=True, slots=True)
class Copies:
    """Columns of a batch of transfers: addresses here, addresses of the peer, lengths."""

    sources: list[int]
    targets: list[int]
    lengths: list[int]


def group_concurrent_contiguous(
    src_indices: Sequence[int], dst_indices: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Split two lists of the same length into runs in which both count up by one.

    Args:
        src_indices: Blocks here.
        dst_indices: Blocks of the peer, one for each block here.

    Returns:
        The runs of either list.

    Raises:
        ValueError: The lists differ in length.
    """
    sources: list[list[int]] = []
    targets: list[list[int]] = []
    for source, target in zip(src_indices, dst_indices, strict=True):
        if sources and source == sources[-1][-1] + 1 and target == targets[-1][-1] + 1:
            sources[-1].append(source)
            targets[-1].append(target)
        else:
            sources.append([source])
            targets.append([target])
    return sources, targets


def plan_copies(
    regions: Sequence[Region],
    remote_addresses: Sequence[int],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> Copies:
    """Plan the copies of blocks into the regions of a peer, one copy per run and region.

    Args:
        regions: Regions here.
        remote_addresses: Address of block 0 in each region of the peer.
        pairs: For each request the blocks here and the blocks of the peer. The peer may want fewer:
            it has the first blocks already, and gets the last ones.

    Raises:
        ValueError: The peer wants more blocks than there are, or names a block that cannot be.
    """
    copies = Copies([], [], [])
    for local_blocks, remote_blocks in pairs:
        wanted = len(remote_blocks)
        if wanted == 0:
            continue
        if wanted > len(local_blocks):
            raise ValueError(f"the peer wants {wanted} blocks, and there are {len(local_blocks)}")
        if min(remote_blocks) < 0:
            raise ValueError(f"the peer names block {min(remote_blocks)}")
        runs = group_concurrent_contiguous(local_blocks[-wanted:], remote_blocks)
        for region, remote_address in zip(regions, remote_addresses, strict=True):
            size = region.block_bytes
            for source, target in zip(*runs, strict=True):
                copies.sources.append(region.address + source[0] * size)
                copies.targets.append(remote_address + target[0] * size)
                copies.lengths.append(len(source) * size)
    return copies


def regions_of(
    kv_caches: Mapping[str, Any], blocks: int | None, block_tokens: int | None = None
) -> list[Region]:
    """Return the regions of the layers of a KV cache. Layers that share memory count once.

    A layer is a tensor whose first dimension counts blocks, or whose first dimension is 2 (keys,
    values) and whose second dimension counts blocks. The latter has two regions.

    Args:
        kv_caches: Tensor of each layer.
        blocks: Number of blocks, if known.
        block_tokens: Number of tokens of a block, which is compared if `blocks` is not known: the
            kernels of some models have smaller blocks than the scheduler.

    Raises:
        ValueError: A layer is not stored block by block.
        TypeError: A layer is not a tensor.
    """
    found: dict[int, Region] = {}
    for name, cache in kv_caches.items():
        if not hasattr(cache, "data_ptr"):
            raise TypeError(
                f"KV cache of layer {name} is a {type(cache).__name__}, not a tensor; "
                "layers with several tensors are not supported"
            )
        for part in _parts(name, cache, blocks, block_tokens):
            region = _region(name, part)
            known = found.setdefault(region.address, region)
            if known != region:
                raise ValueError(f"KV cache of layer {name} overlaps another of a different shape")
    if not found:
        raise ValueError("there are no KV caches to register")
    return list(found.values())


def _parts(name: str, cache: Any, blocks: int | None, block_tokens: int | None) -> list[Any]:
    """Return the tensors of a layer whose first dimension counts blocks."""
    shape = tuple(cache.shape)
    if len(shape) < 2:
        raise ValueError(f"KV cache of layer {name} has the shape {shape}: no blocks")
    if blocks is None:
        # Keys and values apart have five dimensions: 2, blocks, tokens, heads, head size.
        is_split = len(shape) == 5 and shape[0] == 2
        tokens = shape[2] if len(shape) == 5 else shape[1]
        if block_tokens is not None and tokens != block_tokens:
            raise ValueError(
                f"KV cache of layer {name} has the shape {shape} with blocks of {tokens} tokens, "
                f"the scheduler has blocks of {block_tokens}, and their number is not known; set "
                "it by --num-gpu-blocks-override, or choose a block size that the kernel has"
            )
    elif shape[0] == blocks:
        is_split = False
    elif shape[0] == 2 and shape[1] == blocks:
        is_split = True
    else:
        raise ValueError(
            f"KV cache of layer {name} has the shape {shape}, in which neither the first dimension "
            f"nor the second behind a 2 counts {blocks} blocks"
        )
    return [cache[0], cache[1]] if is_split else [cache]


def _region(name: str, part: Any) -> Region:
    blocks = int(part.shape[0])
    if blocks == 0:
        raise ValueError(f"KV cache of layer {name} has no blocks")
    elements = part.numel() // blocks
    # The dimensions within a block may be permuted, but a block must be one range of bytes.
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(part.shape[1:], part.stride()[1:], strict=True)
    )
    if extent != elements or (blocks > 1 and part.stride(0) != elements):
        raise ValueError(
            f"KV cache of layer {name} is not stored block by block: shape {tuple(part.shape)}, "
            f"strides {tuple(part.stride())}"
        )
    return Region(part.data_ptr(), elements * part.element_size(), blocks, name)
