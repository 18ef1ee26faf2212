"""The participants of a parallel job, under upstream's module name."""

from __future__ import annotations

from ._topology import ParallelTopology, TopologyParticipant

__all__ = ["ParallelTopology", "TopologyParticipant"]
