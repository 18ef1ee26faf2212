"""Tensors in a store: how they are split over ranks, and how they are put and got."""

from __future__ import annotations

from mooncake.tensor.format import AxisKind
from mooncake.tensor.info import Info, PartInfo, TensorInfo
from mooncake.tensor.layout import Axis, Layout, Shard, Split

__all__ = [
    "Axis",
    "AxisKind",
    "Info",
    "Layout",
    "PartInfo",
    "Shard",
    "Split",
    "TensorInfo",
]
