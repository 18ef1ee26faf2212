"""Placements, under upstream's module name."""

from __future__ import annotations

from ..contracts import (
    ParticipantId,
    PlacementId,
    PlacementSetId,
    ResourceId,
    ResourceKind,
    RevisionId,
    TensorId,
)
from ._axes import OwnershipAxis, ReplicatedAxis, SplitAxis
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology

__all__ = [
    "OwnershipAxis",
    "ParallelTopology",
    "ParticipantId",
    "PlacementFragment",
    "PlacementId",
    "PlacementSetId",
    "ReplicatedAxis",
    "ResourceId",
    "ResourceKind",
    "RevisionId",
    "SplitAxis",
    "TensorDescriptor",
    "TensorId",
    "WeightPlacementManifest",
    "WeightPlacementPart",
]
