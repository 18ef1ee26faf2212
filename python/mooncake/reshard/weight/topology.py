"""The participants of a parallel job, under upstream's module name."""

from __future__ import annotations

from ..contracts import ParticipantId, TopologyId
from ._axes import ParallelRank
from ._topology import ParallelTopology, TopologyParticipant

__all__ = [
    "ParallelRank",
    "ParallelTopology",
    "ParticipantId",
    "TopologyId",
    "TopologyParticipant",
]
