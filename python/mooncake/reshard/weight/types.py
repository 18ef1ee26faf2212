"""Axes, ranks, tensors and their fragments, under upstream's module name."""

from __future__ import annotations

from ..contracts import PlacementFragmentId, TensorId
from ..contracts.fragments import RuntimeBindingFragment, canonical_strides_bytes
from ._axes import (
    OwnershipAxis,
    ParallelAxis,
    ParallelAxisKind,
    ParallelRank,
    ReplicatedAxis,
    SplitAxis,
    SplitAxisKind,
)
from ._tensor import PlacementFragment, TensorDescriptor

__all__ = [
    "OwnershipAxis",
    "ParallelAxis",
    "ParallelAxisKind",
    "ParallelRank",
    "PlacementFragment",
    "PlacementFragmentId",
    "ReplicatedAxis",
    "RuntimeBindingFragment",
    "SplitAxis",
    "SplitAxisKind",
    "TensorDescriptor",
    "TensorId",
    "canonical_strides_bytes",
]
