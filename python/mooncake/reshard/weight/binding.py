"""Checks of bound memory against its placement, under upstream's module name."""

from __future__ import annotations

from ..contracts import RuntimeInstanceId, validate_resource_binding_identity
from ..contracts.fragments import canonical_strides_bytes
from ._binding import (
    WeightRuntimeBindingManifest,
    validate_runtime_binding,
    validate_runtime_bindings,
)
from ._placement import WeightPlacementManifest

__all__ = [
    "RuntimeInstanceId",
    "WeightPlacementManifest",
    "WeightRuntimeBindingManifest",
    "canonical_strides_bytes",
    "validate_resource_binding_identity",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]
