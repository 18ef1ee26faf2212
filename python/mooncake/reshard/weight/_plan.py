"""Plans of transfers: the regions to copy, and which participants take part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

from .._checks import (
    require_distinct,
    require_integers,
    require_items,
    require_sequence,
    require_text,
    set_fields,
    sha256_hex,
)
from ..contracts import ParticipantId, PlacementFragmentId, PlacementId, ResourceId, RevisionId
from ..geometry import regions_exactly_cover
from ._axes import AXIS_KINDS, ParallelRank
from ._coverage import coordinates
from ._placement import WeightPlacementManifest
from ._region import PlanningLimits, TransferRegion
from ._stored import StoredFragment, StoredManifestIdentity, WeightManifest
from ._tensor import PlacementFragment, TensorDescriptor

__all__ = [
    "LogicalTransferOperation",
    "LogicalTransferPlan",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "Side",
    "check_limit",
    "executors_of",
    "in_tensor_order",
    "validate_limits",
]

LogicalTransferOperation: TypeAlias = TransferRegion[
    PlacementFragment | StoredFragment, PlacementFragment
]
Side: TypeAlias = Literal["source", "target"]


@dataclass(frozen=True)
class PlacementExecutorPlan:
    """A participant that takes part in a plan, and the fragments that it sends or receives."""

    placement_id: PlacementId
    participant_id: ParticipantId
    rank: ParallelRank
    placement_fragment_ids: tuple[PlacementFragmentId, ...]

    def __post_init__(self) -> None:
        label = "placement executor identifiers must not be empty:"
        require_text(self.placement_id, f"{label} placement_id")
        require_text(self.participant_id, f"{label} participant_id")
        ids = require_items(self.placement_fragment_ids, "placement_fragment_ids", str)
        if not ids:
            raise ValueError(f"an executor must have a fragment: {self.participant_id}")
        require_distinct(ids, "placement_fragment_id")
        set_fields(self, placement_fragment_ids=ids)


@dataclass(frozen=True)
class PipelineRouteGroup:
    """The operations between one pipeline stage of the source and one of the target."""

    source_pp: int | None
    source_pipeline_stage_id: int | None
    target_pp: int
    target_pipeline_stage_id: int | None
    operation_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("source_pp", "source_pipeline_stage_id", "target_pp"):
            is_optional = name != "target_pp"
            _require_stage(getattr(self, name), name, is_optional=is_optional)
        _require_stage(self.target_pipeline_stage_id, "target_pipeline_stage_id", is_optional=True)
        label = "pipeline route indices must be non-negative integers: operation_indices"
        indices = require_integers(self.operation_indices, label)
        if len(set(indices)) < len(indices):
            raise ValueError(f"pipeline route has duplicate operation indices: {indices}")
        set_fields(self, operation_indices=indices)


@dataclass(frozen=True)
class LogicalTransferPlan:
    """The copies that fill the fragments of target participants, without addresses.

    The source is a placement or stored weights. The executors name the participants on both
    sides; a stored source has none.

    Raises:
        ValueError: The plan has no or two sources, is beyond its limits, contradicts its source
            or target, or does not fill each element of the target's fragments exactly once.
    """

    resource_id: ResourceId
    revision: RevisionId
    source_placement: WeightPlacementManifest | None
    target_placement: WeightPlacementManifest
    source_tensors: tuple[TensorDescriptor, ...]
    target_tensors: tuple[TensorDescriptor, ...]
    operations: tuple[LogicalTransferOperation, ...]
    source_manifest: WeightManifest | None = None
    planning_limits: PlanningLimits = field(default_factory=PlanningLimits)
    source_executors: tuple[PlacementExecutorPlan, ...] = ()
    target_executors: tuple[PlacementExecutorPlan, ...] = ()
    source_manifest_identity: StoredManifestIdentity | None = field(init=False)

    def __post_init__(self) -> None:
        for name in (
            "source_tensors", "target_tensors", "operations", "source_executors",
            "target_executors",
        ):  # fmt: skip
            set_fields(self, **{name: tuple(require_sequence(getattr(self, name), name))})
        self._validate_parts()
        manifest = self.source_manifest
        set_fields(self, source_manifest_identity=manifest.manifest_identity if manifest else None)
        self._validate_identity()
        validate_limits(self.operations, self.planning_limits)
        self._validate_source()
        self._validate_target()

    @property
    def total_bytes(self) -> int:
        """The bytes that the plan copies."""
        return sum(operation.total_bytes for operation in self.operations)

    @property
    def source_placement_id(self) -> PlacementId | None:
        """The id of the source placement, None if the source is stored."""
        return self.source_placement.placement_id if self.source_placement else None

    @property
    def target_placement_id(self) -> PlacementId:
        """The id of the target placement."""
        return self.target_placement.placement_id

    @property
    def pipeline_routes(self) -> tuple[PipelineRouteGroup, ...]:
        """The operations grouped by the pipeline stages of both sides."""
        routes: dict[tuple[int | None, int | None, int, int | None], list[int]] = defaultdict(list)
        for index, operation in enumerate(self.operations):
            source, target = operation.source, operation.target
            sender: tuple[int | None, int | None] = (None, None)
            if isinstance(source, PlacementFragment):
                sender = (source.rank.pp, source.pipeline_stage_id)
            routes[*sender, target.rank.pp, target.pipeline_stage_id].append(index)
        return tuple(
            PipelineRouteGroup(*route, operation_indices=tuple(indices))
            for route, indices in sorted(routes.items(), key=_route_order)
        )

    def operation_indices_for_executor(
        self, executor: PlacementExecutorPlan, side: str
    ) -> tuple[int, ...]:
        """Return the operations in which an executor sends (`source`) or receives (`target`).

        Raises:
            ValueError: `side` is neither.
        """
        if side not in ("source", "target"):
            raise ValueError(f"side must be source or target: side={side!r}")
        ids = set(executor.placement_fragment_ids)
        return tuple(
            index
            for index, operation in enumerate(self.operations)
            if _fragment_id(operation, cast("Side", side)) in ids
        )

    def validate_source_manifest_snapshot(self) -> None:
        """Refuse a plan whose stored source is no longer what the plan was made from.

        Raises:
            ValueError: The content of the manifest has changed.
        """
        manifest = self.source_manifest
        if manifest is None:
            return
        changed = sha256_hex(manifest.to_json()) != manifest.manifest_digest
        if changed or manifest.manifest_identity != self.source_manifest_identity:
            raise ValueError(
                f"the manifest has changed since the plan was made: {manifest.manifest_key}"
            )

    def validate_source_placement_snapshot(self) -> None:
        """Refuse a plan with an operation whose source is not in the source placement.

        Raises:
            ValueError: There is one.
        """
        if self.source_placement is None:
            return
        placed = {part.fragment_id: part for part in self.source_placement.fragments}
        for operation in self.operations:
            fragment_id = _fragment_id(operation, "source")
            if not isinstance(operation.source, PlacementFragment):
                raise ValueError(
                    "logical transfer plan source must be a placement, but an operation has a "
                    f"stored source: fragment_id={fragment_id}"
                )
            if placed.get(fragment_id) != operation.source:
                raise ValueError(
                    "logical plan and source placement fragment snapshots differ: "
                    f"fragment_id={fragment_id}"
                )

    def _validate_parts(self) -> None:
        """Refuse parts of other classes, and a plan without one source."""
        label = "logical transfer plan identifiers must not be empty:"
        require_text(self.resource_id, f"{label} resource_id")
        require_text(self.revision, f"{label} revision")
        _require_class(self.target_placement, WeightPlacementManifest, "target placement")
        _require_class(self.planning_limits, PlanningLimits, "planning_limits")
        if (self.source_placement is None) == (self.source_manifest is None):
            raise ValueError(
                "logical transfer plan requires exactly one source provenance: a placement or a "
                "stored manifest"
            )
        if self.source_placement is not None:
            _require_class(self.source_placement, WeightPlacementManifest, "source placement")
        if self.source_manifest is not None:
            _require_class(self.source_manifest, WeightManifest, "source manifest")
        label = "logical transfer plan requires a canonical transfer operation: operations"
        require_items(self.operations, label, TransferRegion)
        label = "logical transfer plan has invalid canonical executor metadata"
        for name in ("source_executors", "target_executors"):
            require_items(getattr(self, name), f"{label}: {name}", PlacementExecutorPlan)

    def _validate_identity(self) -> None:
        source = self.source_placement or self.source_manifest
        generations = (
            getattr(source, "weight_generation", None),
            self.target_placement.weight_generation,
        )
        if generations[0] != generations[1]:
            raise ValueError(
                f"logical transfer plan source and target weight_generation differs: {generations}"
            )
        sides = [("source placement", self.source_placement)]
        sides += [("target placement", self.target_placement)]
        for name, side in (*sides, ("source manifest", self.source_manifest)):
            for item in ("resource_id", "revision"):
                if side is not None and getattr(side, item) != getattr(self, item):
                    raise ValueError(
                        f"logical transfer plan {name} identity differs: {item}="
                        f"{getattr(side, item)!r}, not {getattr(self, item)!r}"
                    )

    def _validate_source(self) -> None:
        source = self.source_placement or self.source_manifest
        if source is not None and self.source_tensors != in_tensor_order(source.tensors):
            of = " from placement" if self.source_placement is not None else ""
            raise ValueError(
                f"logical plan source tensor catalog differs{of}: source_tensors must be the "
                "tensors of the source"
            )
        if self.source_placement is None:
            if self.source_executors:
                raise ValueError(
                    "logical plan has no source executor metadata if its source is stored"
                )
            assert self.source_manifest is not None
            stored = {str(part.fragment_id): part for part in self.source_manifest.fragments}
            for operation in self.operations:
                if not isinstance(operation.source, StoredFragment):
                    raise ValueError(
                        "logical transfer plan source has no placement, but an operation has a "
                        f"placed source: fragment_id={operation.source.fragment_id}"
                    )
                if stored.get(operation.source.fragment_id) != operation.source:
                    raise ValueError(
                        "logical plan and source manifest fragment snapshots differ: "
                        f"fragment_id={operation.source.fragment_id}"
                    )
            return
        self.validate_source_placement_snapshot()
        self._validate_executors("source", self.source_placement, self.source_executors)

    def _validate_target(self) -> None:
        self._validate_executors("target", self.target_placement, self.target_executors)
        receivers = {executor.participant_id for executor in self.target_executors}
        parts = [part for part in self.target_placement.parts if part.participant_id in receivers]
        tensors = {tensor for part in parts for tensor in part.tensors}
        if self.target_tensors != in_tensor_order(tensors):
            raise ValueError(
                "logical target tensor catalog differs from placement: target_tensors must be "
                "those of the receivers"
            )
        regions: dict[str, list[LogicalTransferOperation]] = defaultdict(list)
        for operation in self.operations:
            regions[operation.target.fragment_id].append(operation)
        for fragment in (fragment for part in parts for fragment in part.fragments):
            group = regions.pop(fragment.fragment_id, [])
            if any(operation.target != fragment for operation in group):
                raise ValueError(
                    "logical plan and target placement fragment snapshots differ: "
                    f"fragment_id={fragment.fragment_id}"
                )
            if not regions_exactly_cover(fragment, group):
                raise ValueError(
                    "logical target executor operations differ from target placement, whose "
                    "fragments must be filled exactly once: "
                    f"fragment_id={fragment.fragment_id}"
                )
        for fragment_id in regions:
            raise ValueError(
                "logical plan and target placement fragment snapshots differ: no receiver has "
                f"the fragment: {fragment_id}"
            )

    def _validate_executors(
        self,
        side: Side,
        placement: WeightPlacementManifest,
        executors: Sequence[PlacementExecutorPlan],
    ) -> None:
        if not executors:
            raise ValueError(f"logical plan has no {side} executor metadata")
        if any(executor.placement_id != placement.placement_id for executor in executors):
            raise ValueError(f"logical {side} executor placement differs from {side}")
        expected = executors_of(placement, self.operations, side)
        # Their order has no meaning.
        if len(executors) != len(expected) or set(executors) != set(expected):
            raise ValueError(
                f"logical {side} executors differ from planned operations: they must be the "
                "participants of the operations with their fragments"
            )


def in_tensor_order(tensors: Iterable[TensorDescriptor]) -> tuple[TensorDescriptor, ...]:
    """Return tensors in the order that plans list them: by their ids."""
    return tuple(sorted(tensors, key=lambda tensor: tensor.tensor_id))


def executors_of(
    placement: WeightPlacementManifest,
    operations: Iterable[LogicalTransferOperation],
    side: Side,
) -> tuple[PlacementExecutorPlan, ...]:
    """Return the participants of one side of the operations, in the order of their ranks."""
    used = {_fragment_id(operation, side) for operation in operations}
    executors = []
    for part in sorted(placement.parts, key=lambda part: coordinates(part.rank, AXIS_KINDS)):
        ids = tuple(fragment.placement_fragment_id for fragment in part.fragments)
        if used.intersection(ids):
            executors.append(
                PlacementExecutorPlan(placement.placement_id, part.participant_id, part.rank, ids)
            )
    return tuple(executors)


def validate_limits(operations: Sequence[LogicalTransferOperation], limits: PlanningLimits) -> None:
    """Refuse operations beyond the limits of a plan."""
    check_limit(len(operations), "max_transfer_regions", limits)
    total = 0
    for operation in operations:
        check_limit(operation.segment_count, "max_segments_per_region", limits)
        total += operation.segment_count
        check_limit(total, "max_total_lowered_segments", limits)


def check_limit(count: int, name: str, limits: PlanningLimits) -> None:
    """Refuse a count above one of the limits."""
    limit = getattr(limits, name)
    if count > limit:
        raise ValueError(f"the plan exceeds the planning limit {name}: {count} > {limit}")


def _require_class(value: object, wanted: type, name: str) -> None:
    if not isinstance(value, wanted):
        kind = type(value).__name__
        raise ValueError(f"logical transfer plan {name} is invalid: {kind} is no {wanted.__name__}")


def _require_stage(value: object, name: str, *, is_optional: bool) -> None:
    """Refuse a coordinate or a stage that is no integer from 0 on."""
    if value is None and is_optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"pipeline route {name} must be non-negative, at least 0: {value!r}")


def _route_order(item: tuple[tuple[int | None, ...], list[int]]) -> tuple[int, ...]:
    return tuple(-1 if coordinate is None else coordinate for coordinate in item[0])


def _fragment_id(operation: LogicalTransferOperation, side: Side) -> PlacementFragmentId:
    fragment = operation.source if side == "source" else operation.target
    return cast("PlacementFragmentId", fragment.fragment_id)
