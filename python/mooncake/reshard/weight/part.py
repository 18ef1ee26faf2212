"""The fragments of one participant, under upstream's module name."""

from __future__ import annotations

from ._placement import WeightPlacementPart

__all__ = ["WeightPlacementPart"]
