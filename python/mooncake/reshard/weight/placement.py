"""Placements, under upstream's module name."""

from __future__ import annotations

from ._placement import WeightPlacementManifest

__all__ = ["WeightPlacementManifest"]
