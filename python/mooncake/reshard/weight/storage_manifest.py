"""Weights in objects of a store, under upstream's module name."""

from __future__ import annotations

from ._stored import StoredFragment, StoredManifestIdentity, WeightManifest

__all__ = ["StoredFragment", "StoredManifestIdentity", "WeightManifest"]
