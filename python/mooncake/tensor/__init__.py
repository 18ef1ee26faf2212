"""Tensors in a store: how they are split over ranks, and how they are put and got."""

from __future__ import annotations

from mooncake.tensor.layout import Axis, AxisKind, Layout, Shard, Split

__all__ = ["Axis", "AxisKind", "Layout", "Shard", "Split"]
