"""The JSON records of tensors, fragments, topologies and placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._checks import require_fields, require_object, require_sequence, require_text
from ..contracts import TensorId
from ._axes import AXIS_KINDS, OwnershipAxis, ParallelAxis, ParallelRank, ReplicatedAxis, SplitAxis
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology, TopologyParticipant

if TYPE_CHECKING:
    from ._placement import WeightPlacementManifest

__all__ = [
    "fragment_from_record",
    "placement_content",
    "placement_record",
    "rank_from_record",
    "tensor_from_record",
    "tensor_record",
    "topology_from_record",
]

_SEMANTICS: dict[str, type[SplitAxis | ReplicatedAxis | OwnershipAxis]] = {
    "split": SplitAxis,
    "replicated": ReplicatedAxis,
    "ownership": OwnershipAxis,
}
_TENSOR_FIELDS = frozenset(TensorDescriptor.__dataclass_fields__)
_FRAGMENT_FIELDS = frozenset(PlacementFragment.__dataclass_fields__) - {"pipeline_stage_id"}
_TOPOLOGY_FIELDS = frozenset(ParallelTopology.__dataclass_fields__)


def placement_content(placement: WeightPlacementManifest) -> dict[str, object]:
    """Return what the id of a placement is computed from."""
    topology = placement.topology
    return {
        "parts": [
            {
                "fragments": [_fragment_record(fragment) for fragment in part.fragments],
                "participant_id": part.participant_id,
                "rank": {kind: part.rank.on(kind) for kind in AXIS_KINDS},
            }
            for part in placement.parts
        ],
        "placement_set_id": placement.placement_set_id,
        "resource_id": placement.resource_id,
        "revision": placement.revision,
        "tensors": [tensor_record(tensor) for tensor in placement.tensors],
        "topology": {"topology_id": topology.topology_id, **topology.content()},
        "weight_generation": placement.weight_generation,
    }


def placement_record(placement: WeightPlacementManifest) -> dict[str, object]:
    """Return the JSON record of a placement, which its digest is computed from."""
    return {
        "placement_id": placement.placement_id,
        "resource_kind": placement.resource_kind.value,
        **placement_content(placement),
    }


def tensor_record(tensor: TensorDescriptor) -> dict[str, object]:
    """Return the JSON record of a tensor."""
    return {
        "dtype": tensor.dtype,
        "expert_id": tensor.expert_id,
        "global_shape": list(tensor.global_shape),
        "itemsize": tensor.itemsize,
        "layer_id": tensor.layer_id,
        "layout_fingerprint": tensor.layout_fingerprint,
        "parallel_axes": [_axis_record(axis) for axis in tensor.parallel_axes],
        "shard_dims": list(tensor.shard_dims),
        "tensor_id": tensor.tensor_id,
    }


def tensor_from_record(value: object, name: str) -> TensorDescriptor:
    """Return the tensor of a JSON record."""
    record = dict(require_fields(value, name, _TENSOR_FIELDS))
    axes = require_sequence(record.pop("parallel_axes"), f"{name} parallel_axes")
    parsed = (_axis_from_record(axis, f"{name} axis {index}") for index, axis in enumerate(axes))
    return TensorDescriptor(**record, parallel_axes=tuple(parsed))


def fragment_from_record(value: object, name: str) -> PlacementFragment:
    """Return the placement fragment of a JSON record."""
    record = dict(require_fields(value, name, _FRAGMENT_FIELDS, frozenset({"pipeline_stage_id"})))
    require_text(record["placement_fragment_id"], f"{name} placement_fragment_id")
    rank = rank_from_record(record.pop("rank"), f"{name} rank")
    aliases = tuple(
        TensorId(str(alias)) for alias in require_sequence(record.pop("aliases"), f"{name} aliases")
    )
    return PlacementFragment(**record, rank=rank, aliases=aliases)


def rank_from_record(value: object, name: str) -> ParallelRank:
    """Return the rank of a JSON record."""
    return ParallelRank(**require_fields(value, name, frozenset(AXIS_KINDS)))


def topology_from_record(value: object) -> ParallelTopology:
    """Return the topology of a JSON record."""
    record = dict(require_fields(value, "topology", _TOPOLOGY_FIELDS))
    require_text(record["topology_id"], "topology_id")
    members = []
    for index, item in enumerate(require_sequence(record.pop("participants"), "participants")):
        name = f"participant {index}"
        fields: Any = require_fields(item, name, frozenset({"participant_id", "rank"}))
        rank = rank_from_record(fields["rank"], f"{name} rank")
        members.append(TopologyParticipant(fields["participant_id"], rank))
    return ParallelTopology(**record, participants=tuple(members))


def _fragment_record(fragment: PlacementFragment) -> dict[str, object]:
    return {"placement_fragment_id": fragment.placement_fragment_id, **fragment.content()}


def _axis_record(axis: ParallelAxis) -> dict[str, object]:
    semantics = next(name for name, kind in _SEMANTICS.items() if isinstance(axis, kind))
    dim = {"dim": axis.dim} if isinstance(axis, SplitAxis) else {}
    return {"kind": axis.kind, "semantics": semantics, **dim}


def _axis_from_record(value: object, name: str) -> ParallelAxis:
    given = require_text(require_object(value, name).get("semantics"), f"{name} axis semantics")
    semantics = _SEMANTICS.get(given)
    if semantics is None:
        raise ValueError(
            f"unsupported parallel axis semantics: {given}: {name} takes {', '.join(_SEMANTICS)}"
        )
    wanted = frozenset({"kind", "semantics"} | ({"dim"} if semantics is SplitAxis else set()))
    fields = dict(require_fields(value, name, wanted))
    del fields["semantics"]
    return semantics(**fields)
