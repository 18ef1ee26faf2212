"""Sets of shards: the objects of one tensor that is split along one dimension."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

from mooncake.tensor.format import AxisRecord, Manifest, TensorMetadata, shard_key
from mooncake.tensor.layout import Box, Shard, split_bounds
from mooncake.tensor.search import (
    Found,
    Heads,
    Part,
    Search,
    Unsettled,
    as_text,
    decoded_head,
    invalid,
    missing,
    mixed,
)

if TYPE_CHECKING:
    from mooncake.errors import MooncakeError
    from mooncake.tensor.layout import Split

__all__ = ["Member", "Query", "at_rank", "find_members", "members_of", "wanted_box"]


@dataclass(frozen=True, slots=True)
class Query:
    """The arguments of a search."""

    key: bytes
    target: Shard | None
    predicts: bool


@dataclass(frozen=True, slots=True)
class Member:
    """A shard in a set: its key and its rank on the axis that is split."""

    key: bytes
    rank: int


_Stored: TypeAlias = tuple[Member, bytes, TensorMetadata]
"""A stored shard: its place in a set, its head, and that decoded."""


def find_members(
    query: Query,
    members: Sequence[Member],
    of_first: bytes | None = None,
    manifest: Manifest | None = None,
) -> Search:
    """Return the members of a set that overlap the wanted part.

    Args:
        query: The arguments of the search.
        members: The objects of the set, in order of their ranks.
        of_first: Head of the first member, if it is known.
        manifest: Manifest of the set, if it has one.
    """
    if query.predicts and of_first is not None:
        found = _found_by_prediction(query, tuple(members), of_first, manifest)
        if found is not None:
            return found
    heads = yield Heads([member.key for member in members])
    assert heads is not None
    return _found(query, members, heads, manifest)


# A read of the same part again, as of the same layer's weights, costs no search of its members.
@functools.lru_cache(maxsize=256)
def _found_by_prediction(
    query: Query, members: tuple[Member, ...], of_first: bytes, manifest: Manifest | None
) -> Found | None:
    """Return the members that overlap the wanted part, if the first one tells of the others."""
    heads = _predicted(members, of_first)
    return None if heads is None else _found(query, members, heads, manifest)


def _found(
    query: Query,
    members: Sequence[Member],
    heads: Sequence[bytes | None],
    manifest: Manifest | None,
) -> Found:
    """Return the members that overlap the wanted part, from the heads of all members."""
    key, target = query.key, query.target
    stored = {
        member.rank: (member, head, decoded_head(member.key, head))
        for member, head in zip(members, heads, strict=True)
        if head is not None
    }
    if not stored:
        raise missing(key, [member.key for member in members])
    present = _of_one_set(len(members), stored)
    if not present:
        raise Unsettled(_contradiction(key, *[*stored.values()][:2]), is_mixed=True)
    first = next(iter(present.values()))
    metadata = first[2]
    shape, dim = metadata.global_shape, _split_dim(metadata, manifest)
    extents = {rank: own.local_shape[dim] for rank, (_, _, own) in present.items()}
    rules = _bounds(shape[dim], len(members), extents)
    if not rules:
        text = f"the shards do not add up to the tensor dim={dim} extent={shape[dim]} "
        text += f"shards={[extents.get(rank) for rank in range(len(members))]}"
        raise Unsettled(invalid(key, text), is_mixed=True)
    whole, wanted, bounds = Box.whole(shape), wanted_box(key, target, metadata), rules[0]
    needed = [
        member
        for member in members
        if _overlap(whole.narrow(dim, *bounds[member.rank : member.rank + 2]), wanted)
    ]
    # Without all shards, the place of one may be uncertain.
    required = needed if len(rules) == 1 else members
    absent = [member for member in required if member.rank not in present]
    others = [stored[member.rank] for member in absent if member.rank in stored]
    if others:
        raise Unsettled(_contradiction(key, first, others[0]), is_mixed=True)
    if absent:
        raise missing(key, [member.key for member in absent])
    chosen = [present[member.rank] for member in needed] or [first]
    parts = (
        Part(member.key, head, own, whole.narrow(dim, *bounds[member.rank : member.rank + 2]))
        for member, head, own in chosen
    )
    return Found(key, wanted, tuple(parts))


def _of_one_set(size: int, stored: dict[int, _Stored]) -> dict[int, _Stored]:
    """Return the shards that are of one set with the first one that is a member of such a set.

    Shards of other sets have the same names if they are of another layout that was not removed, or
    that is being written.
    """
    members = {}
    for rank, each in stored.items():
        axis = next((axis for axis in each[2].axes if axis.kind == "tp"), None)
        if axis is None or (axis.rank, axis.size) == (rank, size):
            members[rank] = each
    of_set = _set_of(next(iter(members.values()))[2]) if members else None
    return {rank: each for rank, each in members.items() if _set_of(each[2]) == of_set}


def _set_of(metadata: TensorMetadata) -> tuple[object, ...]:
    """Return what all shards of a set have in common."""
    axes = tuple((axis.kind, axis.size, axis.split_dim, axis.id) for axis in metadata.axes)
    return metadata.dtype, metadata.global_shape, axes


def _contradiction(key: bytes, first: _Stored, *others: _Stored) -> MooncakeError:
    """Return the error for shards that are not of one set."""
    metadata, member, other = first[2], (others or (first,))[0][0], (others or (first,))[0][2]
    if (other.dtype, other.global_shape) != (metadata.dtype, metadata.global_shape):
        return invalid(
            key,
            f"the shards are of different tensors: {as_text(member.key)} has "
            f"dtype={other.dtype.name} shape={other.global_shape}, others have "
            f"dtype={metadata.dtype.name} shape={metadata.global_shape}",
        )
    places = [f"{as_text(each[0].key)} {_axes_text(each[2])}" for each in (first, *others)]
    return mixed(key, places)


def _axes_text(metadata: TensorMetadata) -> str:
    texts = [f"{axis.kind}={axis.rank}/{axis.size} dim={axis.split_dim}" for axis in metadata.axes]
    return " ".join(texts)


def _predicted(members: Sequence[Member], of_first: bytes) -> list[bytes | None] | None:
    """Return the heads of all members of a set, computed from that of the first one.

    None if the first one does not tell where the others begin: a head has the extent of its shard,
    but not the place.
    """
    first = decoded_head(members[0].key, of_first)
    dim = _split_dim(first, None)
    extent = first.global_shape[dim]
    rules = _bounds(extent, len(members), {0: first.local_shape[dim]})
    if len(rules) != 1:
        return None
    (bounds,) = rules
    heads: list[bytes | None] = []
    for member in members:
        own = bounds[member.rank + 1] - bounds[member.rank]
        shape = Box.whole(first.global_shape).narrow(dim, 0, own).shape
        axes = tuple(
            replace(axis, rank=member.rank, extent=own) if axis.split_dim == dim else axis
            for axis in first.axes
        )
        heads.append(replace(first, local_shape=shape, axes=axes).encode())
    return heads


def _split_dim(metadata: TensorMetadata, manifest: Manifest | None) -> int:
    for axis in metadata.axes:
        if axis.split_dim is not None:
            return axis.split_dim
    return manifest.split_dim if manifest is not None else 0


def _bounds(extent: int, size: int, extents: dict[int, int]) -> list[list[int]]:
    """Return where the shards begin, for each rule that gives the known shards their extents."""
    if len(extents) == size:
        bounds = list(accumulate((extents[rank] for rank in range(size)), initial=0))
        return [bounds] if bounds[-1] == extent else []
    rules: tuple[Split, ...] = ("chunk", "tensor_split")
    found: list[list[int]] = []
    for bounds in (split_bounds(extent, size, rule) for rule in rules):
        is_valid = all(bounds[rank + 1] - bounds[rank] == own for rank, own in extents.items())
        if is_valid and bounds not in found:
            found.append(bounds)
    return found


def _overlap(one: Box, other: Box) -> bool:
    starts = map(max, one.start, other.start)
    stops = map(min, one.stop, other.stop)
    return all(start < stop for start, stop in zip(starts, stops, strict=True))


def at_rank(axes: Sequence[AxisRecord], rank: int) -> tuple[AxisRecord, ...]:
    """Return the axes of the shard of another ``tp`` rank in the same set."""
    return tuple(
        AxisRecord(axis.kind, rank, axis.size, axis.split_dim) if axis.kind == "tp" else axis
        for axis in axes
    )


@functools.lru_cache(maxsize=256)
def members_of(key: bytes, axes: tuple[AxisRecord, ...]) -> tuple[Member, ...]:
    """Return the shards that differ from a shard in the rank of ``tp`` only."""
    size = next((axis.size for axis in axes if axis.kind == "tp"), 1)
    return tuple(Member(shard_key(key, at_rank(axes, rank)), rank) for rank in range(size))


def wanted_box(key: bytes, target: Shard | None, metadata: TensorMetadata) -> Box:
    """Return the part of a tensor that a target wants."""
    if target is None:
        return Box.whole(metadata.global_shape)
    try:
        return target.box(metadata.global_shape)
    except ValueError as error:
        raise invalid(key, str(error)) from None
