"""Ids of resources, placements, their fragments and the processes that hold them."""

from __future__ import annotations

from typing import NewType

__all__ = [
    "LeaseId",
    "ParticipantId",
    "PlacementFragmentId",
    "PlacementId",
    "PlacementSetId",
    "ResourceId",
    "RevisionId",
    "RuntimeFragmentId",
    "RuntimeInstanceId",
    "StoredFragmentId",
    "TensorId",
    "TopologyId",
]

LeaseId = NewType("LeaseId", str)
ParticipantId = NewType("ParticipantId", str)
PlacementFragmentId = NewType("PlacementFragmentId", str)
PlacementId = NewType("PlacementId", str)
PlacementSetId = NewType("PlacementSetId", str)
ResourceId = NewType("ResourceId", str)
RevisionId = NewType("RevisionId", str)
RuntimeFragmentId = NewType("RuntimeFragmentId", str)
RuntimeInstanceId = NewType("RuntimeInstanceId", str)
StoredFragmentId = NewType("StoredFragmentId", str)
TensorId = NewType("TensorId", str)
TopologyId = NewType("TopologyId", str)
