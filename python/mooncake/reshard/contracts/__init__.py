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

# The order is upstream's, whose tests compare lists.
__all__ = [  # noqa: RUF022
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
    "RuntimeBindingManifest",
    "RuntimeBindingFragment",
    "RuntimeFragmentId",
    "RuntimeInstanceId",
    "StoredFragmentId",
    "TensorId",
    "TopologyId",
    "StoredResourceManifest",
    "validate_resource_binding_identity",
]
