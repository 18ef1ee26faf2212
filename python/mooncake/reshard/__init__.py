"""Plans of transfers between two placements of a model's weights over parallel ranks."""

from .contracts import PlacementManifest, ResourceKind, ResourceManifest, RuntimeBindingManifest

__all__ = ["PlacementManifest", "ResourceKind", "ResourceManifest", "RuntimeBindingManifest"]
