"""Kinds of resources, and the protocols of their manifests."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from .ids import LeaseId, PlacementId, ResourceId, RuntimeInstanceId

__all__ = [
    "PlacementManifest",
    "ResourceKind",
    "ResourceManifest",
    "RuntimeBindingManifest",
    "StoredResourceManifest",
    "validate_resource_binding_identity",
]


class ResourceKind(str, Enum):  # noqa: UP042 - str() gives the name of the member
    """The kind of a resource that is spread over parallel ranks."""

    MODEL_WEIGHT = "model_weight"
    KV_CACHE = "kv_cache"


class ResourceManifest(Protocol):
    """A description of one resource."""

    @property
    def resource_id(self) -> ResourceId:
        """The id of the resource."""

    @property
    def resource_kind(self) -> ResourceKind:
        """The kind of the resource."""


class StoredResourceManifest(ResourceManifest, Protocol):
    """A description of a resource that lies in a store."""


class PlacementManifest(ResourceManifest, Protocol):
    """A description of the fragments that each participant holds, without addresses."""

    @property
    def placement_id(self) -> PlacementId:
        """The id of the placement."""

    @property
    def digest(self) -> str:
        """The SHA-256 digest of the placement's canonical JSON."""


class RuntimeBindingManifest(ResourceManifest, Protocol):
    """The memory of one running participant that holds its fragments of a placement."""

    @property
    def placement_id(self) -> PlacementId:
        """The id of the placement that is bound."""

    @property
    def placement_digest(self) -> str:
        """The digest of the placement that is bound."""

    @property
    def instance_id(self) -> RuntimeInstanceId:
        """The id of the running instance."""

    @property
    def generation(self) -> int:
        """The number of times that the instance has bound its memory anew."""

    @property
    def lease_id(self) -> LeaseId:
        """The lease that keeps the memory in place."""


def validate_resource_binding_identity(
    placement: PlacementManifest, binding: RuntimeBindingManifest
) -> None:
    """Refuse a binding that was made for another resource or placement.

    Raises:
        ValueError: The kind, the resource, the placement's id or its digest differ.
    """
    for name, placed, bound in (
        ("resource_kind", placement.resource_kind, binding.resource_kind),
        ("resource_id", placement.resource_id, binding.resource_id),
        ("placement_id", placement.placement_id, binding.placement_id),
        ("placement digest", placement.digest, binding.placement_digest),
    ):
        if placed != bound:
            raise ValueError(
                f"the binding has another {name} than the placement: {bound!r} and {placed!r}"
            )
