"""The fragments of one participant, under upstream's module name."""

from __future__ import annotations

from ..contracts import ParticipantId, PlacementSetId, ResourceId, RevisionId, TopologyId
from ._axes import ParallelRank
from ._placement import WeightPlacementPart
from ._tensor import PlacementFragment, TensorDescriptor

__all__ = [
    "ParallelRank",
    "ParticipantId",
    "PlacementFragment",
    "PlacementSetId",
    "ResourceId",
    "RevisionId",
    "TensorDescriptor",
    "TopologyId",
    "WeightPlacementPart",
]
