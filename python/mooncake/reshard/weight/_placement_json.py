"""Placements as JSON text."""

from __future__ import annotations

from .._checks import (
    canonical_json,
    parse_json_object,
    require_distinct,
    require_fields,
    require_sequence,
    require_text,
)
from ..contracts import PlacementId, ResourceKind
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._wire import (
    fragment_from_record,
    placement_record,
    rank_from_record,
    tensor_from_record,
    topology_from_record,
)

__all__ = [
    "weight_placement_from_json",
    "weight_placement_to_json",
]

_PLACEMENT_FIELDS = frozenset(
    {
        "parts",
        "placement_id",
        "placement_set_id",
        "resource_id",
        "resource_kind",
        "revision",
        "tensors",
        "topology",
        "weight_generation",
    }
)
_PART_FIELDS = frozenset({"fragments", "participant_id", "rank"})


def weight_placement_to_json(placement: WeightPlacementManifest) -> str:
    """Return the canonical JSON text of a placement; its digest is that of this text."""
    if not isinstance(placement, WeightPlacementManifest):
        kind = type(placement).__name__
        raise ValueError(f"placement must be a WeightPlacementManifest, not {kind}")
    return canonical_json(placement_record(placement))


def weight_placement_from_json(value: str) -> WeightPlacementManifest:
    """Return the placement of a JSON text, whose fields may stand in any order.

    Raises:
        ValueError: The text is no JSON, has other fields, or describes no complete placement; or
            an id does not belong to the content.
    """
    name = "placement manifest"
    record = require_fields(parse_json_object(value, name), name, _PLACEMENT_FIELDS)
    kind = require_text(record["resource_kind"], "resource_kind")
    for field in ("placement_id", "placement_set_id", "resource_id", "revision"):
        require_text(record[field], field)
    if kind != ResourceKind.MODEL_WEIGHT.value:
        raise ValueError(f"resource_kind must be {ResourceKind.MODEL_WEIGHT.value}: {kind!r}")
    topology = topology_from_record(record["topology"])
    tensors = [
        tensor_from_record(item, f"tensor {index}")
        for index, item in enumerate(require_sequence(record["tensors"], "tensors"))
    ]
    require_distinct([tensor.tensor_id for tensor in tensors], "tensor_id")
    unreferenced = {tensor.tensor_id for tensor in tensors}
    parts = []
    for index, item in enumerate(require_sequence(record["parts"], "parts")):
        fields = require_fields(item, f"part {index}", _PART_FIELDS)
        fragments = [
            fragment_from_record(fragment, f"part {index} fragment {number}")
            for number, fragment in enumerate(require_sequence(fields["fragments"], "fragments"))
        ]
        held = {fragment.tensor_id for fragment in fragments}
        unreferenced -= held
        parts.append(
            WeightPlacementPart(
                resource_id=record["resource_id"],
                revision=record["revision"],
                weight_generation=record["weight_generation"],
                placement_set_id=record["placement_set_id"],
                topology_id=topology.topology_id,
                participant_id=fields["participant_id"],
                rank=rank_from_record(fields["rank"], f"part {index} rank"),
                tensors=tuple(tensor for tensor in tensors if tensor.tensor_id in held),
                fragments=tuple(fragments),
            )
        )
    for tensor_id in sorted(unreferenced):
        raise ValueError(f"unreferenced tensor, which no fragment holds: tensor_id={tensor_id}")
    return WeightPlacementManifest(
        resource_id=record["resource_id"],
        revision=record["revision"],
        weight_generation=record["weight_generation"],
        placement_set_id=record["placement_set_id"],
        topology=topology,
        parts=tuple(parts),
        placement_id=PlacementId(record["placement_id"]),
    )
