"""Checks of bound memory against its placement, under upstream's module name."""

from __future__ import annotations

from ._binding import validate_runtime_binding, validate_runtime_bindings

__all__ = ["validate_runtime_binding", "validate_runtime_bindings"]
