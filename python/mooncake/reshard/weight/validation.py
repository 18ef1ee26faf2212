"""Checks of bound memory against its resource and placement, under upstream's module name."""

from __future__ import annotations

from ..contracts import (
    RuntimeBindingFragment,
    RuntimeInstanceId,
    TensorId,
    validate_resource_binding_identity,
)
from ..geometry import boxes_exactly_cover, boxes_overlap
from ._axes import OwnershipAxis, ParallelRank, ReplicatedAxis, SplitAxis
from ._binding import validate_runtime_binding, validate_runtime_bindings
from ._tensor import PlacementFragment, TensorDescriptor
from ._topology import ParallelTopology

__all__ = [
    "OwnershipAxis",
    "ParallelRank",
    "ParallelTopology",
    "PlacementFragment",
    "ReplicatedAxis",
    "RuntimeBindingFragment",
    "RuntimeInstanceId",
    "SplitAxis",
    "TensorDescriptor",
    "TensorId",
    "boxes_exactly_cover",
    "boxes_overlap",
    "validate_resource_binding_identity",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]
