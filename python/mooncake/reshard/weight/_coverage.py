"""Proof that the fragments of a placement hold every tensor completely."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TypeAlias

from .._checks import require_distinct
from ..contracts import TensorId
from ..geometry import boxes_exactly_cover, boxes_overlap
from ._axes import (
    AXIS_KINDS,
    SPLIT_AXIS_KINDS,
    OwnershipAxis,
    ParallelAxisKind,
    ParallelRank,
    ReplicatedAxis,
)
from ._tensor import PlacementFragment, TensorDescriptor, validate_fragment_geometry
from ._topology import ParallelTopology

__all__ = [
    "Coordinates",
    "Fragments",
    "coordinates",
    "validate_complete_placement",
    "validate_fragments",
]

_NOT_COVERED = "global placement tensor is not fully covered"

Coordinates: TypeAlias = tuple[int, ...]
Fragments: TypeAlias = Sequence[PlacementFragment]


def validate_fragments(tensors: Mapping[TensorId, TensorDescriptor], fragments: Fragments) -> None:
    """Refuse fragments of unknown tensors, of a wrong size, or that overlap on one rank."""
    held = defaultdict(list)
    for fragment in fragments:
        tensor = tensors.get(fragment.tensor_id)
        if tensor is None:
            raise ValueError(f"a fragment names an unknown tensor: {fragment.tensor_id}")
        validate_fragment_geometry(tensor, fragment)
        held[fragment.tensor_id, fragment.rank].append(fragment)
    require_distinct([fragment.fragment_id for fragment in fragments], "placement_fragment_id")
    for tensor_id in sorted(tensors.keys() - {fragment.tensor_id for fragment in fragments}):
        raise ValueError(f"unreferenced tensor, which no fragment holds: tensor_id={tensor_id}")
    for (tensor_id, rank), group in held.items():
        boxes = [(part.global_offset, part.local_shape) for part in group]
        if len(set(boxes)) < len(boxes):
            raise ValueError(
                "duplicate logical fragment for tensor and parallel rank: "
                f"logical fragment boxes overlap on one rank: tensor_id={tensor_id} rank={rank}"
            )
        if boxes_overlap(boxes):
            raise ValueError(
                f"logical fragment boxes overlap on one rank: tensor_id={tensor_id} rank={rank}"
            )


def validate_complete_placement(
    tensors: Mapping[TensorId, TensorDescriptor], fragments: Fragments, topology: ParallelTopology
) -> None:
    """Refuse a placement in which a tensor lacks a part, a replica or a declared axis."""
    if not tensors:
        raise ValueError("a placement must contain tensors")
    held: dict[TensorId, list[PlacementFragment]] = defaultdict(list)
    for fragment in fragments:
        held[fragment.tensor_id].append(fragment)
    _validate_alias_groups(tensors, held)
    for tensor_id, group in held.items():
        tensor = tensors[tensor_id]
        _validate_undeclared_axes(tensor, group, topology)
        _validate_replicas(tensor, group, topology)


def coordinates(rank: ParallelRank, kinds: Sequence[ParallelAxisKind]) -> Coordinates:
    """Return the coordinates of a rank on some axes."""
    return tuple(rank.on(kind) for kind in kinds)


def _validate_alias_groups(
    tensors: Mapping[TensorId, TensorDescriptor], held: Mapping[TensorId, Fragments]
) -> None:
    for tensor_id, group in held.items():
        aliases = group[0].aliases
        for alias in aliases:
            if alias not in tensors:
                raise ValueError(
                    f"an alias group references unknown tensor: tensor_id={tensor_id} alias={alias}"
                )
        members = aliases or (tensor_id,)
        if any(part.aliases != aliases for member in members for part in held[member]):
            raise ValueError(
                "an alias group is not declared consistently by all fragments of its tensors: "
                f"tensor_id={tensor_id} aliases={aliases}"
            )


def _validate_undeclared_axes(
    tensor: TensorDescriptor, fragments: Fragments, topology: ParallelTopology
) -> None:
    """Refuse a tensor that says nothing about an axis with more than one rank.

    Expert and tensor parallelism may overlay each other: one of them may stay undeclared where
    the coordinates on the declared axes determine the coordinate on it.
    """
    declared = [axis.kind for axis in tensor.parallel_axes]
    for kind in AXIS_KINDS:
        if kind in declared or topology.size(kind) == 1:
            continue
        values: dict[Coordinates, set[int]] = defaultdict(set)
        for fragment in fragments:
            values[coordinates(fragment.rank, declared)].add(fragment.rank.on(kind))
        is_overlay = (
            kind in SPLIT_AXIS_KINDS
            and len(set().union(*values.values())) > 1
            and all(len(group) == 1 for group in values.values())
        )
        if not is_overlay:
            is_independent = kind in SPLIT_AXIS_KINDS and any(
                len(group) > 1 for group in values.values()
            )
            what = (
                f"global placement tensor varies across undeclared {kind} axis, independently"
                if is_independent
                else f"a tensor has an active undeclared {kind} axis"
            )
            raise ValueError(
                f"{what}: add it to parallel_axes: tensor_id={tensor.tensor_id} "
                f"size={topology.size(kind)}"
            )


def _validate_replicas(
    tensor: TensorDescriptor, fragments: Fragments, topology: ParallelTopology
) -> None:
    """Refuse an owner without all of its replicas, and a replica without all of its parts."""
    owner_kinds = tensor.axis_kinds(OwnershipAxis)
    replica_kinds = tensor.axis_kinds(ReplicatedAxis)
    owners: dict[Coordinates, dict[Coordinates, list[PlacementFragment]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for fragment in fragments:
        owner = coordinates(fragment.rank, owner_kinds)
        owners[owner][coordinates(fragment.rank, replica_kinds)].append(fragment)
    for owner, replicas in owners.items():
        expected = {
            coordinates(member.rank, replica_kinds)
            for member in topology.participants
            if coordinates(member.rank, owner_kinds) == owner
        }
        if replicas.keys() != expected:
            raise ValueError(
                f"{_NOT_COVERED}: {tensor.tensor_id}: a replicated-axis participant has no part: "
                f"axes={replica_kinds} "
                f"missing={sorted(expected - replicas.keys())}"
            )
        for group in replicas.values():
            _validate_replica(tensor, group, topology)


def _validate_replica(
    tensor: TensorDescriptor, fragments: Fragments, topology: ParallelTopology
) -> None:
    kinds = tuple(axis.kind for axis in tensor.split_axes)
    boxes = [(part.global_offset, part.local_shape) for part in fragments]
    whole = (0,) * len(tensor.global_shape)
    if not boxes_exactly_cover(whole, tensor.global_shape, boxes):
        raise ValueError(
            f"{_NOT_COVERED}: {tensor.tensor_id}: shape={tensor.global_shape} boxes={boxes[:4]}"
        )
    expected = set(product(*(range(topology.size(kind)) for kind in kinds)))
    missing = expected - {coordinates(part.rank, kinds) for part in fragments}
    if missing:
        has_each_rank = all(
            len({part.rank.on(kind) for part in fragments}) == topology.size(kind) for kind in kinds
        )
        raise ValueError(
            f"{_NOT_COVERED}: {tensor.tensor_id}: a split-axis participant has no part"
            f"{' (non-Cartesian split-axis ranks)' if has_each_rank else ''}: "
            f"axes={kinds} missing={sorted(missing)[:4]}"
        )
    for axis in tensor.split_axes:
        spans = sorted(
            (part.global_offset[axis.dim], part.local_shape[axis.dim], part.rank.on(axis.kind))
            for part in fragments
        )
        end, last = 0, None
        for start, extent, rank in spans:
            if start < end and rank != last:
                raise ValueError(
                    f"inconsistent split-axis rank geometry: ranks of {axis.kind} share indices: "
                    f"tensor_id={tensor.tensor_id} dim={axis.dim} index={start}"
                )
            end, last = max(end, start + extent), rank
