"""Weights in objects of a store, under upstream's module name."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeAlias

from ..contracts import ResourceId, ResourceKind, RevisionId, StoredFragmentId, TensorId
from ._axes import ParallelAxis
from ._stored import StoredFragment, StoredManifestIdentity, WeightManifest
from ._tensor import TensorDescriptor

__all__ = [
    "ParallelAxis",
    "ResourceId",
    "ResourceKind",
    "RevisionId",
    "StoredAliasDescriptorKey",
    "StoredAliasGeometryKey",
    "StoredFragment",
    "StoredFragmentId",
    "StoredGeometryKey",
    "StoredManifestIdentity",
    "TensorDescriptor",
    "TensorId",
    "WeightManifest",
    "validate_weight_manifest_snapshot",
]

_Numbers: TypeAlias = tuple[int, ...]
StoredGeometryKey: TypeAlias = tuple[TensorId, _Numbers, _Numbers]
StoredAliasDescriptorKey: TypeAlias = tuple[
    _Numbers, str, int, _Numbers, tuple[ParallelAxis, ...], int | None, int | None, str
]
StoredAliasGeometryKey: TypeAlias = tuple[tuple[TensorId, ...], _Numbers, _Numbers, int]


def validate_weight_manifest_snapshot(manifest: WeightManifest) -> WeightManifest:
    """Return a manifest that is made of the same fields, and so checked again.

    Raises:
        ValueError: A field is wrong, or it is no manifest.
    """
    if not isinstance(manifest, WeightManifest):
        raise ValueError(f"weight manifest snapshot is invalid: {type(manifest).__name__}")
    try:
        given = {each.name: getattr(manifest, each.name) for each in fields(manifest) if each.init}
        return WeightManifest(**given)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"weight manifest snapshot is invalid: {error}") from error
