"""The memory of a running participant, under upstream's module name."""

from __future__ import annotations

from ..contracts import (
    LeaseId,
    ParticipantId,
    PlacementId,
    ResourceId,
    ResourceKind,
    RevisionId,
    RuntimeBindingFragment,
    RuntimeInstanceId,
)
from ._binding import WeightRuntimeBindingManifest

__all__ = [
    "LeaseId",
    "ParticipantId",
    "PlacementId",
    "ResourceId",
    "ResourceKind",
    "RevisionId",
    "RuntimeBindingFragment",
    "RuntimeInstanceId",
    "WeightRuntimeBindingManifest",
]
