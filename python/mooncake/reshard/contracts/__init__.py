"""Ids, kinds and protocols that every reshardable resource has in common."""

from __future__ import annotations

from .fragments import RuntimeBindingFragment
from .ids import (
    LeaseId,
    ParticipantId,
    PlacementFragmentId,
    PlacementId,
    PlacementSetId,
    ResourceId,
    RevisionId,
    RuntimeFragmentId,
    RuntimeInstanceId,
    StoredFragmentId,
    TensorId,
    TopologyId,
)
from .manifest import (
    PlacementManifest,
    ResourceKind,
    ResourceManifest,
    RuntimeBindingManifest,
    StoredResourceManifest,
    validate_resource_binding_identity,
)

__all__ = [
    "LeaseId",
    "ParticipantId",
    "PlacementFragmentId",
    "PlacementId",
    "PlacementManifest",
    "PlacementSetId",
    "ResourceId",
    "ResourceKind",
    "ResourceManifest",
    "RevisionId",
    "RuntimeBindingFragment",
    "RuntimeBindingManifest",
    "RuntimeFragmentId",
    "RuntimeInstanceId",
    "StoredFragmentId",
    "StoredResourceManifest",
    "TensorId",
    "TopologyId",
    "validate_resource_binding_identity",
]
