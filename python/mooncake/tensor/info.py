"""Descriptions of what is stored under a key: bytes, or a tensor and its layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake._api.values import decoded
from mooncake.errors import InvalidArgumentError, MooncakeError, NotFoundError
from mooncake.tensor.calls import Describe, Operation
from mooncake.tensor.format import GENERATION_TAG, manifest_key, writer_manifest_key
from mooncake.tensor.inventory import find, find_stored
from mooncake.tensor.layout import Axis
from mooncake.tensor.search import Found, Unsettled, find_all

if TYPE_CHECKING:
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
        size: Length of the object, or of all shards and manifests of a tensor, in bytes.
        tensor: The tensor; None if the object is not one.
        version: Number that every put changes; None for a tensor that is stored in shards, and
            while the first put is unfinished.
        replicas: Number of copies; of a tensor in shards, of the one that has the fewest.
        expires_in_s: Time until the object, or the first one of a tensor, is removed; None: it does
            not expire.
        tags: Text stored beside the object.
        is_hard_pinned: True if the object, or every one of a tensor, is never evicted.
        soft_pin_ttl_s: Time that the soft pin lasts after each access; None: no pin.
        group: Group with which the object is kept or evicted; "" for none.
        data_type: Kind of data, as a number that only callers interpret.
    """

    key: Key
    size: int
    tensor: TensorInfo | None
    version: int | None = None
    replicas: int = 1
    expires_in_s: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    is_hard_pinned: bool = False
    soft_pin_ttl_s: float | None = None
    group: str = ""
    data_type: int = 0


def describe(keys: Sequence[bytes]) -> Operation[list[Info | MooncakeError]]:
    """Describe the objects of keys, or the tensors whose shards have keys made of them. Lease none.

    Args:
        keys: The keys.
    """
    details = yield Describe([decoded(key) for key in keys])
    readable = [isinstance(each, dict) and each["version"] is not None for each in details]
    found = yield from find_all(
        [
            find_stored(key) if is_object else find(key, None)
            for key, is_object in zip(keys, readable, strict=True)
        ],
        lease=False,
    )
    settled = [each.error if isinstance(each, Unsettled) else each for each in found]
    infos = [_info(*each) for each in zip(keys, details, settled, strict=True)]
    split = [
        (at, each)
        for at, each in enumerate(settled)
        if isinstance(each, Found) and isinstance(details[at], NotFoundError)
    ]
    rows = [(at, name) for at, each in split for name in _names_of(keys[at], each)]
    if rows:
        objects = yield Describe([decoded(name) for _, name in rows])
        own: dict[int, list[Mapping[str, Any]]] = {}
        for (at, _), each in zip(rows, objects, strict=True):
            if isinstance(each, dict):
                own.setdefault(at, []).append(each)
        for at, found_objects in own.items():
            info = infos[at]
            if isinstance(info, Info):
                infos[at] = replace(info, **_united(found_objects))
    return infos


def _names_of(key: bytes, found: Found) -> list[bytes]:
    """Return the keys of the shards of a tensor, and of the manifests that it may have."""
    return [*(part.key for part in found.parts), manifest_key(key), writer_manifest_key(key)]


def _united(objects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is true of a tensor, of whose objects this is known."""
    ends = [each["expires_in_s"] for each in objects if each["expires_in_s"] is not None]
    pins = [each["soft_pin_ttl_s"] for each in objects]
    groups = {each["group"] for each in objects}
    return {
        "size": sum(each["size"] for each in objects),
        "replicas": min(each["replicas"] for each in objects),
        "expires_in_s": min(ends, default=None),
        "is_hard_pinned": all(each["is_hard_pinned"] for each in objects),
        "soft_pin_ttl_s": None if None in pins else min(pins),
        "group": groups.pop() if len(groups) == 1 else "",
    }


def _info(
    key: bytes, details: dict[str, Any] | MooncakeError, found: Found | MooncakeError
) -> Info | MooncakeError:
    if isinstance(details, NotFoundError):
        if isinstance(found, NotFoundError) and not found.context.keys() - {"key"}:
            # Neither the object nor a shard is there.
            return details
        if isinstance(found, MooncakeError):
            return found
        return Info(decoded(key), _total_bytes(found), _tensor_info(found))
    if isinstance(details, MooncakeError):
        return details
    tags = {name: value for name, value in details["tags"].items() if name != GENERATION_TAG}
    info = Info(decoded(key), tensor=None, **{**details, "tags": tags})
    if isinstance(found, Found):
        return replace(info, size=_total_bytes(found), tensor=_tensor_info(found))
    is_no_tensor = isinstance(found, InvalidArgumentError) or info.version is None
    return info if is_no_tensor else found


def _total_bytes(found: Found) -> int:
    return sum(part.metadata.total_bytes for part in found.parts)


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
