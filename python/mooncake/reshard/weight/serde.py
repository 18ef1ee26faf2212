"""Placements as JSON, under upstream's module name."""

from __future__ import annotations

from ._placement_json import weight_placement_from_json, weight_placement_to_json

__all__ = ["weight_placement_from_json", "weight_placement_to_json"]
