"""Weights in objects of a store, under upstream's module name."""

from __future__ import annotations

from ..contracts import ResourceId, ResourceKind, RevisionId, StoredFragmentId, TensorId
from ._axes import ParallelAxis
from ._stored import StoredFragment, StoredManifestIdentity, WeightManifest
from ._tensor import TensorDescriptor

__all__ = [
    "ParallelAxis",
    "ResourceId",
    "ResourceKind",
    "RevisionId",
    "StoredFragment",
    "StoredFragmentId",
    "StoredManifestIdentity",
    "TensorDescriptor",
    "TensorId",
    "WeightManifest",
]
