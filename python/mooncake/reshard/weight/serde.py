"""Placements as JSON, under upstream's module name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..contracts import (
    ParticipantId,
    PlacementFragmentId,
    PlacementId,
    PlacementSetId,
    ResourceId,
    ResourceKind,
    RevisionId,
    TensorId,
    TopologyId,
)
from ._axes import (
    OwnershipAxis,
    ParallelAxis,
    ParallelAxisKind,
    ParallelRank,
    ReplicatedAxis,
    SplitAxis,
    SplitAxisKind,
)
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._placement_json import weight_placement_from_json, weight_placement_to_json
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology, TopologyParticipant

__all__ = [
    "JsonObject",
    "JsonScalar",
    "JsonValue",
    "OwnershipAxis",
    "ParallelAxis",
    "ParallelAxisKind",
    "ParallelRank",
    "ParallelTopology",
    "ParticipantId",
    "PlacementFragment",
    "PlacementFragmentId",
    "PlacementId",
    "PlacementSetId",
    "ReplicatedAxis",
    "ResourceId",
    "ResourceKind",
    "RevisionId",
    "SplitAxis",
    "SplitAxisKind",
    "TensorDescriptor",
    "TensorId",
    "TopologyId",
    "TopologyParticipant",
    "WeightPlacementManifest",
    "WeightPlacementPart",
    "weight_placement_from_json",
    "weight_placement_to_json",
]

JsonScalar: TypeAlias = bool | int | float | str | None
JsonValue: TypeAlias = "JsonScalar | list[JsonValue] | dict[str, JsonValue]"
JsonObject: TypeAlias = Mapping[str, JsonValue]
