"""Descriptions of what is stored under a key: bytes, or a tensor and its layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mooncake._api.values import decoded
from mooncake.errors import InvalidArgumentError, MooncakeError, NotFoundError
from mooncake.tensor.calls import Sizes
from mooncake.tensor.inventory import find, find_stored
from mooncake.tensor.layout import Axis
from mooncake.tensor.search import Found, find_all

if TYPE_CHECKING:
    from mooncake.tensor.calls import Operation
    from mooncake.tensor.search import Part

__all__ = ["Info", "PartInfo", "TensorInfo", "describe"]

Key: TypeAlias = str | bytes


@dataclass(frozen=True, slots=True)
class PartInfo:
    """An object that holds a tensor or a part of it.

    Attributes:
        key: Key of the object.
        shape: Shape of the part.
        axes: Rank of the part on each axis of parallelism; none for a whole tensor.
    """

    key: Key
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor.

    Attributes:
        dtype: Name of the type of the elements.
        shape: Shape of the whole tensor.
        parts: The objects that hold it.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[PartInfo, ...]

    @property
    def layout(self) -> str:
        """The layout in words, for instance ``"8 shards along dimension 0"``."""
        axes = self.parts[0].axes
        split = next((axis for axis in axes if axis.kind == "tp"), None)
        if not axes:
            return "whole"
        if len(self.parts) > 1 and split is not None:
            others = [str(axis) for axis in axes if axis is not split]
            return " ".join([f"{len(self.parts)} shards along dimension {split.dim}", *others])
        return "shard " + " ".join(map(str, axes))


@dataclass(frozen=True, slots=True)
class Info:
    """What is stored under a key.

    Attributes:
        key: The key.
        size: Length of the object, or of all objects of a tensor, in bytes.
        tensor: The tensor; None if the object is not one.
    """

    key: Key
    size: int
    tensor: TensorInfo | None


def describe(key: bytes) -> Operation[Info]:
    """Describe the object of a key, or the tensor whose shards have keys made of it.

    Raises:
        NotFoundError: There is neither.
        InvalidArgumentError: Shards are stored that do not make up one tensor.
    """
    (size,) = yield Sizes([decoded(key)])
    is_object = not isinstance(size, NotFoundError)
    if is_object and isinstance(size, MooncakeError):
        raise size
    (found,) = yield from find_all([find_stored(key) if is_object else find(key, None)])
    if is_object and isinstance(found, InvalidArgumentError):
        return Info(decoded(key), size, None)
    if isinstance(found, MooncakeError):
        raise found
    total = sum(part.metadata.total_bytes for part in found.parts)
    return Info(decoded(key), total, _tensor_info(found))


def _tensor_info(found: Found) -> TensorInfo:
    metadata = found.metadata
    return TensorInfo(
        metadata.dtype.name, metadata.global_shape, tuple(_part_info(part) for part in found.parts)
    )


def _part_info(part: Part) -> PartInfo:
    axes = (
        Axis(
            axis.kind,
            axis.rank,
            axis.size,
            axis.split_dim if axis.kind == "tp" else None,
            axis.id if axis.kind in ("ep", "pp") else None,
        )
        for axis in part.metadata.axes
    )
    return PartInfo(decoded(part.key), part.metadata.local_shape, tuple(axes))
