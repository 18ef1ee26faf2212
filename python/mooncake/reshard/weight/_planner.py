"""Plans the transfer of weights from a placement, or from a store, to another placement."""

from __future__ import annotations

from collections.abc import Sequence

from ..contracts import ParticipantId
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._plan import (
    LogicalTransferOperation,
    LogicalTransferPlan,
    check_limit,
    executors_of,
    in_tensor_order,
)
from ._region import PlanningLimits, region_between
from ._sources import PlacedSources, StoredSources
from ._stored import WeightManifest
from ._tensor import TensorDescriptor

__all__ = [
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
]


def plan_placement_transfer(
    source_placement: WeightPlacementManifest,
    target_placement: WeightPlacementManifest,
    *,
    planning_limits: PlanningLimits | None = None,
) -> LogicalTransferPlan:
    """Plan how all participants of a target placement get their weights from a source placement.

    Targets are spread over the data-parallel replicas of the source by their own dp rank.

    Raises:
        ValueError: The placements are of different resources, revisions, generations or tensors,
            a tensor is owned by several dp ranks, or the plan exceeds the limits.
    """
    _require_placement(source_placement, "source_placement")
    _require_placement(target_placement, "target_placement")
    sources = PlacedSources(source_placement)
    return _plan(
        source_placement, sources, target_placement, target_placement.parts, planning_limits
    )


def plan_placement_transfer_to_local_target(
    source_placement: WeightPlacementManifest,
    target_placement: WeightPlacementManifest,
    target_participant_id: ParticipantId | None = None,
    *,
    planning_limits: PlanningLimits | None = None,
) -> LogicalTransferPlan:
    """Plan how one participant of a target placement gets its weights from a source placement.

    `target_participant_id` may be left out if the target has one participant.

    Raises:
        ValueError: As `plan_placement_transfer`, the participant is unknown, or it holds nothing.
    """
    _require_placement(source_placement, "source_placement")
    _require_placement(target_placement, "target_placement")
    part = _target_part(target_placement, target_participant_id)
    return _plan(
        source_placement,
        PlacedSources(source_placement),
        target_placement,
        [part],
        planning_limits,
    )


def plan_stored_transfer_to_target_placement(
    source_manifest: WeightManifest,
    target_placement: WeightPlacementManifest,
    *,
    planning_limits: PlanningLimits | None = None,
) -> LogicalTransferPlan:
    """Plan how all participants of a target placement get their weights from a store.

    Raises:
        ValueError: As `plan_placement_transfer`.
    """
    if not isinstance(source_manifest, WeightManifest):
        kind = type(source_manifest).__name__
        raise ValueError(f"source_manifest must be a WeightManifest, not {kind}")
    _require_placement(target_placement, "target_placement")
    sources = StoredSources(source_manifest.fragments)
    return _plan(
        source_manifest, sources, target_placement, target_placement.parts, planning_limits
    )


def _plan(
    source: WeightPlacementManifest | WeightManifest,
    sources: PlacedSources | StoredSources,
    target: WeightPlacementManifest,
    receivers: Sequence[WeightPlacementPart],
    planning_limits: PlanningLimits | None,
) -> LogicalTransferPlan:
    _validate_same_weights(source, target)
    tensors = _tensors_of(receivers)
    _validate_tensors(source.tensors, tensors, is_complete=len(receivers) == len(target.parts))
    limits = planning_limits or PlanningLimits()
    operations = _operations(receivers, sources, limits)
    placement = source if isinstance(source, WeightPlacementManifest) else None
    return LogicalTransferPlan(
        resource_id=source.resource_id,
        revision=source.revision,
        source_placement=placement,
        target_placement=target,
        source_tensors=in_tensor_order(source.tensors),
        target_tensors=tensors,
        operations=operations,
        source_manifest=source if isinstance(source, WeightManifest) else None,
        planning_limits=limits,
        source_executors=executors_of(placement, operations, "source") if placement else (),
        target_executors=executors_of(target, operations, "target"),
    )


def _operations(
    receivers: Sequence[WeightPlacementPart],
    sources: PlacedSources | StoredSources,
    limits: PlanningLimits,
) -> tuple[LogicalTransferOperation, ...]:
    operations: list[LogicalTransferOperation] = []
    total = 0
    targets = [fragment for part in receivers for fragment in part.fragments]
    targets.sort(key=lambda fragment: fragment.fragment_id)
    for target in targets:
        for source, box in sources.overlapping(target):
            check_limit(len(operations) + 1, "max_transfer_regions", limits)
            region: LogicalTransferOperation = region_between(source, target, box)
            check_limit(region.segment_count, "max_segments_per_region", limits)
            total += region.segment_count
            check_limit(total, "max_total_lowered_segments", limits)
            operations.append(region)
    return tuple(operations)


def _target_part(
    placement: WeightPlacementManifest, participant_id: ParticipantId | None
) -> WeightPlacementPart:
    if participant_id is None and len(placement.parts) > 1:
        raise ValueError(
            "target_participant_id must be given: the target placement has "
            f"{len(placement.parts)} participants"
        )
    for part in placement.parts:
        if participant_id is None or part.participant_id == participant_id:
            if not part.fragments:
                raise ValueError(f"the target participant has no fragments: {part.participant_id}")
            return part
    raise ValueError(f"unknown target participant: {participant_id!r}")


def _tensors_of(parts: Sequence[WeightPlacementPart]) -> tuple[TensorDescriptor, ...]:
    tensors = {tensor.tensor_id: tensor for part in parts for tensor in part.tensors}
    return tuple(tensors[tensor_id] for tensor_id in sorted(tensors))


def _validate_same_weights(
    source: WeightPlacementManifest | WeightManifest, target: WeightPlacementManifest
) -> None:
    for name in ("resource_id", "revision", "weight_generation"):
        given, wanted = getattr(source, name), getattr(target, name)
        if given != wanted:
            raise ValueError(f"source and target {name} differ: {given!r} and {wanted!r}")


def _validate_tensors(
    source: Sequence[TensorDescriptor], target: Sequence[TensorDescriptor], *, is_complete: bool
) -> None:
    """Refuse tensors that the source lacks or describes differently.

    The target of all participants must also have each tensor of the source.
    """
    available = {tensor.tensor_id: tensor for tensor in source}
    wanted = {tensor.tensor_id: tensor for tensor in target}
    if is_complete and (missing := sorted(available.keys() - wanted.keys())):
        raise ValueError(f"target manifests are missing tensors of the source: {missing[:4]}")
    if unknown := sorted(wanted.keys() - available.keys()):
        raise ValueError(f"the target has unknown tensors, which the source lacks: {unknown[:4]}")
    for tensor_id, tensor in wanted.items():
        for name in (
            "global_shape", "dtype", "itemsize", "layout_fingerprint", "layer_id", "expert_id",
        ):  # fmt: skip
            given, expected = getattr(available[tensor_id], name), getattr(tensor, name)
            if given != expected:
                what = "layout" if name == "layout_fingerprint" else "tensor descriptor"
                raise ValueError(
                    f"{what} mismatch between source and target: tensor_id={tensor_id} "
                    f"{name}={given!r} and {expected!r}"
                )


def _require_placement(value: object, name: str) -> None:
    if not isinstance(value, WeightPlacementManifest):
        kind = type(value).__name__
        side = name.removesuffix("_placement")
        raise ValueError(
            f"{side} placement manifests must be WeightPlacementManifest: {name} is {kind}"
        )
