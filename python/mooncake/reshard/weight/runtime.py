"""The memory of a running participant, under upstream's module name."""

from __future__ import annotations

from ._binding import WeightRuntimeBindingManifest

__all__ = ["WeightRuntimeBindingManifest"]
