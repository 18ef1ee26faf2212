"""Checks of bound memory against its resource and placement, under upstream's module name."""

from __future__ import annotations

from ..contracts import validate_resource_binding_identity
from ._binding import validate_runtime_binding, validate_runtime_bindings

__all__ = [
    "validate_resource_binding_identity",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]
