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

# The order is upstream's, whose tests compare lists.
__all__ = [  # noqa: RUF022
    "ParallelRank",
    "ParallelTopology",
    "PlacementFragment",
    "TopologyParticipant",
    "WeightPlacementManifest",
    "WeightPlacementPart",
    "RuntimeBindingFragment",
    "WeightRuntimeBindingManifest",
    "SplitAxis",
    "ReplicatedAxis",
    "OwnershipAxis",
    "TensorDescriptor",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]
