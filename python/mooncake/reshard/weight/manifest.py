"""Placements and bindings with their parts, under upstream's module name."""

from __future__ import annotations

from ..contracts import RuntimeBindingFragment
from ._axes import OwnershipAxis, ParallelRank, ReplicatedAxis, SplitAxis
from ._binding import (
    WeightRuntimeBindingManifest,
    validate_runtime_binding,
    validate_runtime_bindings,
)
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology, TopologyParticipant

__all__ = [
    "OwnershipAxis",
    "ParallelRank",
    "ParallelTopology",
    "PlacementFragment",
    "ReplicatedAxis",
    "RuntimeBindingFragment",
    "SplitAxis",
    "TensorDescriptor",
    "TopologyParticipant",
    "WeightPlacementManifest",
    "WeightPlacementPart",
    "WeightRuntimeBindingManifest",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]
