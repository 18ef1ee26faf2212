"""Writes and removals of tensors and arrays: whole, one shard, or all shards of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake._api.values import changed, decoded
from mooncake._runtime import PutOptions, _native
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor import described, memory
from mooncake.tensor.calls import Operation, Put, Remove
from mooncake.tensor.format import (
    Manifest,
    TensorMetadata,
    manifest_key,
    shard_key,
    writer_key,
    writer_manifest_key,
)
from mooncake.tensor.inventory import records, stored_keys
from mooncake.tensor.layout import Box, Layout, Shard
from mooncake.tensor.search import invalid

if TYPE_CHECKING:
    from mooncake.tensor.memory import TensorMemory

__all__ = ["Item", "remove", "write"]

_NOT_FOUND = -704
_INVALID_PARAMS = -600


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to write.

    Attributes:
        key: Key of the tensor.
        value: Tensor or array: the whole of it, or with a `Shard` only that shard.
        layout: None to store it whole, the shard that the value is, or the layout of all shards.
        shape: Shape of the whole tensor, of which the value is a shard; None to compute it from the
            number of shards.
        is_writer: The shard is the part of a writer, with the names of those.
        has_manifest: Store a manifest beside shards.
    """

    key: bytes
    value: Any
    layout: Layout | Shard | None = None
    shape: tuple[int, ...] | None = None
    is_writer: bool = False
    has_manifest: bool = True


@dataclass(frozen=True, slots=True)
class _Object:
    """An object to put: its key, and the buffers that make it up."""

    key: bytes
    buffers: list[Any]
    is_manifest: bool = False


def write(
    items: Sequence[Item],
    options: PutOptions | None,
    *,
    overwrite: bool,
    removes_other_forms: bool = True,
) -> Operation[list[bool | MooncakeError | TypeError]]:
    """Write tensors in one batch, the manifests in a second one.

    Args:
        items: The tensors.
        options: Number of copies, pins, placement; the groups and versions are one for each item.
        overwrite: Replace existing objects.
        removes_other_forms: With `overwrite`, remove what is stored in another layout.

    Returns:
        For each item whether at least one of its objects was stored, or the first failure.
    """
    objects: list[tuple[int, _Object]] = []
    results: list[bool | MooncakeError | TypeError] = [False] * len(items)
    options = _checked_options(options, items)
    for at, item in enumerate(items):
        try:
            objects += [(at, each) for each in _objects(item)]
        except (MooncakeError, TypeError) as error:
            results[at] = error
        except ValueError as error:
            results[at] = invalid(item.key, str(error))
    # A manifest says that shards exist, so it is written after them.
    for is_manifest in (False, True):
        batch = [
            (at, each)
            for at, each in objects
            if each.is_manifest == is_manifest and isinstance(results[at], bool)
        ]
        outcomes = yield Put(
            [decoded(each.key) for _, each in batch],
            [each.buffers for _, each in batch],
            _for_objects(options, [at for at, _ in batch]),
            overwrite,
        )
        for (at, _), outcome in zip(batch, outcomes, strict=True):
            result = results[at]
            if isinstance(result, bool):
                is_failure = isinstance(outcome, MooncakeError)
                results[at] = outcome if is_failure else result or (outcome and not is_manifest)
    if overwrite and removes_other_forms:
        yield from _remove_other_forms(items, {each.key for _, each in objects}, results)
    return results


def remove(key: bytes, *, force: bool) -> Operation[None]:
    """Remove a tensor with all of its shards and manifests.

    Raises:
        NotFoundError: There is no object of the tensor.
        BusyError: An object is leased by a recent read.
    """
    keys = yield from stored_keys(key)
    outcomes = yield Remove([decoded(each) for each in keys], force)
    failures = [each for each in outcomes if isinstance(each, MooncakeError)]
    others = [each for each in failures if not isinstance(each, NotFoundError)]
    if others:
        raise others[0]
    if len(failures) == len(outcomes):
        text = "neither the tensor nor shards of it are stored"
        raise _native.failure(_NOT_FOUND, text, key=decoded(key))


def _remove_other_forms(
    items: Sequence[Item],
    written: set[bytes],
    results: Sequence[bool | MooncakeError | TypeError],
) -> Operation[None]:
    """Remove what is left of an earlier form of overwritten tensors.

    A shard that is written alone replaces only itself: other ranks write the others.
    """
    stale: list[bytes] = []
    for item, result in zip(items, results, strict=True):
        if isinstance(item.layout, Shard) or result is not True:
            continue
        stale += [key for key in (yield from stored_keys(item.key)) if key not in written]
    if stale:
        yield Remove([decoded(key) for key in stale], force=True)


def _objects(item: Item) -> Iterator[_Object]:
    """Return the objects of an item, with the manifest of its shards last."""
    if described.is_described(item.value):
        if item.layout is not None:
            raise invalid(item.key, "a structured array has no shards; put it whole")
        head, descr, payload = described.encode(item.value)
        yield _Object(item.key, [head.encode(), descr, *_buffers(payload)])
        return
    place = memory.of(item.value)
    if item.layout is None:
        yield _Object(item.key, [place.metadata().encode(), *_buffers(place)])
        return
    if place.ragged_dim is not None:
        raise invalid(item.key, "a jagged tensor has no shards; put it whole")
    if isinstance(item.layout, Shard):
        shards, shape = [item.layout], _whole_shape(item, item.layout, place.shape)
        boxes = [Box.whole(place.shape)]
    else:
        shards, shape = list(item.layout.shards()), place.shape
        boxes = [shard.box(shape) for shard in shards]
    for shard, box in zip(shards, boxes, strict=True):
        part = place if box.shape == place.shape else memory.of(_cut(item.value, box))
        axis = shard.axis("tp")
        extent = 0 if axis is None or axis.dim is None else part.shape[axis.dim]
        axes = tuple(records(shard, extent))
        head = TensorMetadata(part.dtype, shape, part.shape, axes)
        name = shard_key(item.key, axes)
        if item.is_writer and axis is not None:
            name = writer_key(item.key, axis.rank, axis.size, axis.dim or 0)
        yield _Object(name, [head.encode(), *_buffers(part)])
    if shape and item.has_manifest:
        axis = shards[0].axis("tp")
        dim, size = (axis.dim, axis.size) if axis is not None else (0, 1)
        manifest = Manifest(place.dtype, shape, dim or 0, size)
        name = writer_manifest_key(item.key) if item.is_writer else manifest_key(item.key)
        yield _Object(name, [manifest.encode()], is_manifest=True)


def _whole_shape(item: Item, shard: Shard, own: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the tensor of which a value is a shard."""
    axis = shard.axis("tp")
    if item.shape is None:
        if axis is None:
            return own
        whole = Box.whole(own)
        if axis.dim is None or axis.dim >= len(own):
            raise ValueError(
                f"the shard does not have the dimension that is split dim={axis.dim} shape={own}"
            )
        return whole.narrow(axis.dim, 0, own[axis.dim] * axis.size).shape
    expected = shard.box(item.shape).shape
    if expected != own:
        raise ValueError(
            f"the value is not that shard of the tensor shard={shard} shape={item.shape} "
            f"expected={expected} given={own}"
        )
    return tuple(item.shape)


def _cut(value: Any, box: Box) -> Any:
    return value[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]


def _buffers(place: TensorMemory) -> list[Any]:
    """Return the pieces of a tensor as parts of a value that keep its memory."""
    if place.is_on_device:
        return [_native.AddressRange(*piece, place) for piece in place.ranges()]
    return [_Held(address, length, place).as_buffer() for address, length in place.ranges()]


class _Held:
    """Memory at an address and the object that keeps it, as numpy's interface of arrays."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, address: int, length: int, owner: object) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (length,),
            "typestr": "|u1",
            "version": 3,
        }
        self._owner = owner

    def as_buffer(self) -> Any:
        import numpy as np

        return np.asarray(self)


def _checked_options(options: PutOptions | None, items: Sequence[Item]) -> PutOptions | None:
    if options is None:
        return None
    for name, values in (("groups", options.groups), ("if_versions", options.if_versions)):
        if values is not None and len(values) != len(items):
            text = "there is not one value for each tensor"
            counts = {name: len(values), "tensors": len(items)}
            raise _native.failure(_INVALID_PARAMS, text, context=counts)
    if options.if_versions is not None and any(item.layout is not None for item in items):
        text = "if_version is for tensors that are stored whole: shards have versions of their own"
        raise _native.failure(_INVALID_PARAMS, text)
    return options


def _for_objects(options: PutOptions | None, rows: Sequence[int]) -> PutOptions | None:
    """Return options whose groups and versions are those of the items that the objects are of."""
    if options is None:
        return None
    each = {"groups": options.groups, "if_versions": options.if_versions}
    changes = {name: [values[at] for at in rows] for name, values in each.items() if values}
    return changed(options, **changes) if changes else options
