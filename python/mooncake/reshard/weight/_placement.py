"""Placements: the fragments that each participant of a topology holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from .._checks import (
    canonical_json,
    content_id,
    require_distinct,
    require_items,
    require_text,
    require_u64,
    set_fields,
    sha256_hex,
)
from ..contracts import (
    ParticipantId,
    PlacementId,
    PlacementSetId,
    ResourceId,
    ResourceKind,
    RevisionId,
    TensorId,
    TopologyId,
)
from ._axes import ParallelRank
from ._coverage import validate_complete_placement, validate_fragments
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology
from ._wire import placement_content, placement_record

__all__ = [
    "WeightPlacementManifest",
    "WeightPlacementPart",
]


@dataclass(frozen=True)
class WeightPlacementPart:
    """The fragments that one participant holds, in the order of their ids.

    Raises:
        ValueError: A field is out of its limits, a fragment has another rank or an unknown tensor,
            a tensor has no fragment, or fragments overlap.
    """

    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    placement_set_id: PlacementSetId
    topology_id: TopologyId
    participant_id: ParticipantId
    rank: ParallelRank
    tensors: tuple[TensorDescriptor, ...]
    fragments: tuple[PlacementFragment, ...]

    def __post_init__(self) -> None:
        for name in (
            "resource_id", "revision", "placement_set_id", "topology_id", "participant_id",
        ):  # fmt: skip
            require_text(getattr(self, name), name)
        require_u64(self.weight_generation, "weight_generation")
        if not isinstance(self.rank, ParallelRank):
            kind = type(self.rank).__name__
            raise ValueError(f"placement part rank must be a ParallelRank, not {kind}")
        tensors = require_items(self.tensors, "WeightPlacementPart tensors", TensorDescriptor)
        fragments = require_items(
            self.fragments, "WeightPlacementPart fragments", PlacementFragment
        )
        require_distinct([tensor.tensor_id for tensor in tensors], "tensor_id")
        set_fields(
            self,
            tensors=tuple(sorted(tensors, key=lambda tensor: tensor.tensor_id)),
            fragments=tuple(sorted(fragments, key=lambda part: part.placement_fragment_id)),
        )
        for fragment in fragments:
            if fragment.rank != self.rank:
                raise ValueError(
                    f"placement part fragment rank differs from part rank: {fragment.rank}, "
                    f"not {self.rank}: fragment_id={fragment.fragment_id}"
                )
        validate_fragments({tensor.tensor_id: tensor for tensor in tensors}, fragments)


@dataclass(frozen=True, init=False)
class WeightPlacementManifest:
    """A complete placement: one part per participant, in the order of the participants' ids.

    `placement_id` and `digest` are computed from the content.

    Raises:
        ValueError: A participant has no part, parts contradict each other, a tensor is not fully
            covered, or `placement_id` is given and does not belong to the content.
    """

    resource_id: ResourceId
    placement_id: PlacementId
    revision: RevisionId
    weight_generation: int
    placement_set_id: PlacementSetId
    topology: ParallelTopology
    parts: tuple[WeightPlacementPart, ...]
    tensors: tuple[TensorDescriptor, ...]
    fragments: tuple[PlacementFragment, ...]
    _digest: str | None = field(default=None, repr=False, compare=False)

    def __init__(
        self,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        weight_generation: int,
        placement_set_id: PlacementSetId,
        topology: ParallelTopology,
        parts: tuple[WeightPlacementPart, ...],
        placement_id: PlacementId | None = None,
    ) -> None:
        for name, text in (
            ("resource_id", resource_id),
            ("revision", revision),
            ("placement_set_id", placement_set_id),
        ):
            require_text(text, name)
        require_u64(weight_generation, "weight_generation")
        if not isinstance(topology, ParallelTopology):
            raise ValueError(f"topology must be a ParallelTopology, not {type(topology).__name__}")
        checked = require_items(parts, "WeightPlacementManifest parts", WeightPlacementPart)
        set_fields(
            self,
            resource_id=resource_id,
            revision=revision,
            weight_generation=weight_generation,
            placement_set_id=placement_set_id,
            topology=topology,
            parts=tuple(sorted(checked, key=lambda part: part.participant_id)),
            _digest=None,
        )
        self._validate_parts()
        self._collect_parts()
        computed = content_id({"schema": "complete-weight-placement", **placement_content(self)})
        if placement_id is not None and placement_id != computed:
            raise ValueError(
                "placement_id does not match canonical logical content: "
                f"{placement_id!r}, not {computed}"
            )
        set_fields(self, placement_id=PlacementId(computed))

    @classmethod
    def from_fragments(
        cls,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        weight_generation: int,
        placement_set_id: PlacementSetId,
        topology: ParallelTopology,
        tensors: Sequence[TensorDescriptor],
        fragments: Sequence[PlacementFragment],
        placement_id: PlacementId | None = None,
    ) -> WeightPlacementManifest:
        """Return the placement of fragments, each given to the participant with its rank.

        Raises:
            ValueError: As the class, or no participant has the rank of a fragment.
        """
        if not isinstance(topology, ParallelTopology):
            raise ValueError(f"topology must be a ParallelTopology, not {type(topology).__name__}")
        catalog = _tensors_by_id(require_items(tensors, "tensors", TensorDescriptor))
        held: dict[ParallelRank, list[PlacementFragment]] = defaultdict(list)
        for fragment in require_items(fragments, "fragments", PlacementFragment):
            held[fragment.rank].append(fragment)
        parts = tuple(
            WeightPlacementPart(
                resource_id=resource_id,
                revision=revision,
                weight_generation=weight_generation,
                placement_set_id=placement_set_id,
                topology_id=topology.topology_id,
                participant_id=member.participant_id,
                rank=member.rank,
                tensors=_referenced(catalog, held.get(member.rank, [])),
                fragments=tuple(held.pop(member.rank, [])),
            )
            for member in topology.participants
        )
        for rank in held:
            raise ValueError(f"no participant of the topology has the rank of a fragment: {rank}")
        _require_references(
            catalog, {fragment.tensor_id for part in parts for fragment in part.fragments}
        )
        return cls(
            resource_id=resource_id,
            revision=revision,
            weight_generation=weight_generation,
            placement_set_id=placement_set_id,
            topology=topology,
            parts=parts,
            placement_id=placement_id,
        )

    @property
    def resource_kind(self) -> ResourceKind:
        """The kind of the resource: model weights."""
        return ResourceKind.MODEL_WEIGHT

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the placement's canonical JSON."""
        if self._digest is None:
            set_fields(self, _digest=sha256_hex(canonical_json(placement_record(self))))
        assert self._digest is not None
        return self._digest

    def _validate_parts(self) -> None:
        topology = self.topology
        require_distinct([part.participant_id for part in self.parts], "placement participant")
        given = {part.participant_id: part for part in self.parts}
        for participant_id in given.keys() - {
            item.participant_id for item in topology.participants
        }:
            raise ValueError(
                f"missing topology participant, which a part names: participant_id={participant_id}"
            )
        for member in topology.participants:
            part = given.pop(member.participant_id, None)
            if part is None:
                raise ValueError(
                    "missing topology participant, which has no part: "
                    f"participant_id={member.participant_id}"
                )
            for name, wanted in (
                ("resource_id", self.resource_id),
                ("revision", self.revision),
                ("weight_generation", self.weight_generation),
                ("placement_set_id", self.placement_set_id),
                ("topology_id", topology.topology_id),
                ("rank", member.rank),
            ):
                if getattr(part, name) != wanted:
                    of = "topology" if wanted in (member.rank, topology.topology_id) else "manifest"
                    raise ValueError(
                        f"placement part {name} differs from {of}: {getattr(part, name)!r}, not "
                        f"{wanted!r}: participant_id={member.participant_id}"
                    )

    def _collect_parts(self) -> None:
        catalog: dict[TensorId, TensorDescriptor] = {}
        for part in self.parts:
            for tensor in part.tensors:
                if catalog.setdefault(tensor.tensor_id, tensor) != tensor:
                    raise ValueError(
                        f"parts describe a tensor differently: tensor_id={tensor.tensor_id}"
                    )
        fragments = tuple(fragment for part in self.parts for fragment in part.fragments)
        require_distinct([fragment.fragment_id for fragment in fragments], "placement_fragment_id")
        validate_complete_placement(catalog, fragments, self.topology)
        set_fields(
            self,
            tensors=tuple(catalog[tensor_id] for tensor_id in sorted(catalog)),
            fragments=fragments,
        )


def _tensors_by_id(tensors: Sequence[TensorDescriptor]) -> dict[TensorId, TensorDescriptor]:
    require_distinct([tensor.tensor_id for tensor in tensors], "tensor_id")
    return {tensor.tensor_id: tensor for tensor in tensors}


def _require_references(catalog: dict[TensorId, TensorDescriptor], held: set[TensorId]) -> None:
    for tensor_id in sorted(catalog.keys() - held):
        raise ValueError(f"unreferenced tensor, which no fragment holds: tensor_id={tensor_id}")


def _referenced(
    catalog: dict[TensorId, TensorDescriptor], fragments: Sequence[PlacementFragment]
) -> tuple[TensorDescriptor, ...]:
    ids = {fragment.tensor_id for fragment in fragments}
    for tensor_id in sorted(ids - catalog.keys()):
        raise ValueError(f"a fragment names an unknown tensor: {tensor_id}")
    return tuple(catalog[tensor_id] for tensor_id in ids)
