"""The source fragments that a target fragment is copied from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from ..contracts import TensorId
from ..geometry import Box, intersection
from ._axes import OwnershipAxis, ReplicatedAxis
from ._coverage import Coordinates, coordinates
from ._placement import WeightPlacementManifest
from ._stored import StoredFragment
from ._tensor import PlacementFragment, TensorDescriptor, TensorPart

__all__ = [
    "FragmentIndex",
    "PlacedSources",
    "StoredSources",
]

_Fragment = TypeVar("_Fragment", bound=TensorPart)


class FragmentIndex(Generic[_Fragment]):
    """The fragments that cover a tensor once, found by the box that they overlap."""

    def __init__(self, fragments: Sequence[_Fragment]) -> None:
        dims = range(len(fragments[0].global_offset))
        # The dimension in which most fragments begin at different indices tells them apart best.
        self._dim = max(dims, key=lambda dim: len({part.global_offset[dim] for part in fragments}))
        self._fragments = sorted(fragments, key=lambda part: part.global_offset)
        self._fragments.sort(key=lambda part: part.global_offset[self._dim])
        self._starts = [part.global_offset[self._dim] for part in self._fragments]
        self._extent_max = max(part.local_shape[self._dim] for part in self._fragments)

    def overlapping(self, target: PlacementFragment) -> Iterator[tuple[_Fragment, Box]]:
        """Yield the fragments that share elements with the target, and the boxes they share."""
        start = target.global_offset[self._dim]
        first = bisect_right(self._starts, start - self._extent_max)
        last = bisect_left(self._starts, start + target.local_shape[self._dim])
        found = sorted(self._fragments[first:last], key=lambda part: part.global_offset)
        for fragment in found:
            box = intersection(
                (fragment.global_offset, fragment.local_shape),
                (target.global_offset, target.local_shape),
            )
            if box is not None:
                yield fragment, box


class StoredSources:
    """The fragments of stored weights, which hold each element once."""

    def __init__(self, fragments: Sequence[StoredFragment]) -> None:
        held: dict[TensorId, list[StoredFragment]] = defaultdict(list)
        for fragment in fragments:
            held[fragment.tensor_id].append(fragment)
        self._indices = {tensor_id: FragmentIndex(group) for tensor_id, group in held.items()}

    def overlapping(self, target: PlacementFragment) -> Iterator[tuple[StoredFragment, Box]]:
        """Yield the fragments that the target is copied from, and the boxes they share."""
        return self._indices[target.tensor_id].overlapping(target)


class PlacedSources:
    """The fragments of a placement, of which each target uses one replica.

    A target with data-parallel rank `d` uses replica `d mod n` of the `n` data-parallel ranks of
    the source that hold every tensor, and along the other axes the lowest coordinates. Where no
    rank holds every tensor, the ranks are counted for each tensor by itself.
    """

    def __init__(self, placement: WeightPlacementManifest) -> None:
        held: dict[TensorId, list[PlacementFragment]] = defaultdict(list)
        for fragment in placement.fragments:
            held[fragment.tensor_id].append(fragment)
        self._replicas = {
            tensor.tensor_id: _replicas_by_dp(tensor, held[tensor.tensor_id])
            for tensor in placement.tensors
        }
        ranks = [
            self._replicas[tensor.tensor_id].keys()
            for tensor in placement.tensors
            if "dp" not in tensor.axis_kinds(OwnershipAxis)
        ]
        self._complete = set.intersection(*map(set, ranks)) if ranks else set()
        self._indices: dict[tuple[TensorId, int], FragmentIndex[PlacementFragment]] = {}

    def overlapping(self, target: PlacementFragment) -> Iterator[tuple[PlacementFragment, Box]]:
        """Yield the fragments that the target is copied from, and the boxes they share."""
        replicas = self._replicas[target.tensor_id]
        ranks = sorted(self._complete & replicas.keys() or replicas)
        dp = ranks[target.rank.dp % len(ranks)]
        index = self._indices.get((target.tensor_id, dp))
        if index is None:
            index = self._indices[target.tensor_id, dp] = FragmentIndex(replicas[dp])
        return index.overlapping(target)


def _replicas_by_dp(
    tensor: TensorDescriptor, fragments: Sequence[PlacementFragment]
) -> dict[int, list[PlacementFragment]]:
    """Return one complete replica of a tensor for each data-parallel rank that has one."""
    owner_kinds = tensor.axis_kinds(OwnershipAxis)
    owners = {coordinates(fragment.rank, owner_kinds) for fragment in fragments}
    if "dp" in owner_kinds and len(owners) > 1:
        raise ValueError(
            "the source of a tensor has ambiguous declared owners along dp: "
            f"tensor_id={tensor.tensor_id} axes={owner_kinds} owners={sorted(owners)}"
        )
    kinds = (*owner_kinds, *tensor.axis_kinds(ReplicatedAxis))
    replicas: dict[Coordinates, list[PlacementFragment]] = defaultdict(list)
    for fragment in fragments:
        replicas[coordinates(fragment.rank, kinds)].append(fragment)
    by_dp: dict[int, list[PlacementFragment]] = {}
    for _, group in sorted(replicas.items()):
        by_dp.setdefault(group[0].rank.dp, group)
    return by_dp
