"""Plans of transfers between two placements of a model's weights over parallel ranks."""

from .contracts import PlacementManifest, ResourceKind, ResourceManifest, RuntimeBindingManifest

# The order is upstream's, whose tests compare lists.
__all__ = [  # noqa: RUF022
    "ResourceKind",
    "ResourceManifest",
    "PlacementManifest",
    "RuntimeBindingManifest",
]
