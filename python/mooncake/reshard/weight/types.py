"""Axes, ranks, tensors and their fragments, under upstream's module name."""

from __future__ import annotations

from typing import TypeVar

from .._checks import require_items, require_sha256
from ..contracts import PlacementFragmentId, TensorId
from ..contracts.fragments import RuntimeBindingFragment, canonical_strides_bytes
from ._axes import (
    OwnershipAxis,
    ParallelAxis,
    ParallelAxisKind,
    ParallelRank,
    ReplicatedAxis,
    SplitAxis,
    SplitAxisKind,
)
from ._tensor import PlacementFragment, TensorDescriptor, check_geometry

__all__ = [
    "OwnershipAxis",
    "ParallelAxis",
    "ParallelAxisKind",
    "ParallelRank",
    "PlacementFragment",
    "PlacementFragmentId",
    "ReplicatedAxis",
    "RuntimeBindingFragment",
    "SplitAxis",
    "SplitAxisKind",
    "TensorDescriptor",
    "TensorId",
    "canonical_strides_bytes",
    "require_manifest_items",
    "require_sha256_digest",
    "validate_fragment_geometry",
]

_Item = TypeVar("_Item")


def require_manifest_items(value: object, name: str, item_type: type[_Item]) -> tuple[_Item, ...]:
    """Return the items of a sequence.

    Raises:
        ValueError: It is no sequence, or an item is of another type.
    """
    return require_items(value, name, item_type)


def require_sha256_digest(value: object, name: str) -> None:
    """Refuse text that is not a SHA-256 digest in lower case.

    Raises:
        ValueError: It is not.
    """
    require_sha256(value, name)


def validate_fragment_geometry(
    tensor: TensorDescriptor,
    *,
    fragment_id: str,
    global_offset: tuple[int, ...],
    local_shape: tuple[int, ...],
    nbytes: int,
) -> None:
    """Refuse a fragment that is not a box of the tensor, or has another size than its box.

    Raises:
        ValueError: It is not.
    """
    check_geometry(tensor, fragment_id, global_offset, local_shape, nbytes)
