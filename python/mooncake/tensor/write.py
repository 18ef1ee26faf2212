"""Writes and removals of tensors and arrays: whole, one shard, or all shards of a layout."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake._api.values import changed, decoded
from mooncake._runtime import PutOptions, _native
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor import described, memory
from mooncake.tensor.calls import Operation, Put, Remove
from mooncake.tensor.format import (
    GENERATION_TAG,
    Manifest,
    TensorMetadata,
    manifest_key,
    shard_key,
    writer_key,
    writer_manifest_key,
)
from mooncake.tensor.forms import Form, forms_of, other_layout
from mooncake.tensor.inventory import axes_of, records, stored_keys
from mooncake.tensor.layout import Box, Layout, Shard
from mooncake.tensor.search import invalid, list_names, listed

if TYPE_CHECKING:
    from mooncake.tensor.memory import TensorMemory

__all__ = ["Item", "remove", "write"]

_GENERATION_BYTES = 8
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


Outcome: TypeAlias = bool | MooncakeError | TypeError


def write(
    items: Sequence[Item],
    options: PutOptions | None,
    *,
    overwrite: bool,
    is_exclusive: bool = True,
) -> Operation[list[Outcome]]:
    """Write tensors: look up in which forms they are stored, put shards, then manifests.

    Args:
        items: The tensors.
        options: Number of copies, pins, placement; the groups and versions are one for each item.
        overwrite: Replace existing objects.
        is_exclusive: A tensor has one layout: another one is refused, or removed with `overwrite`.

    Returns:
        For each item whether at least one of its objects was stored, or the first failure.
    """
    objects: list[tuple[int, _Object]] = []
    results: list[Outcome] = [False] * len(items)
    options = _checked_options(options, items)
    for at, item in enumerate(items):
        try:
            objects += [(at, each) for each in _objects(item)]
        except (MooncakeError, TypeError) as error:
            results[at] = error
        except ValueError as error:
            results[at] = invalid(item.key, str(error))
    plans = yield from _plans(items, objects, results, overwrite, is_exclusive)
    # Shards that one call writes together have the same tag, which readers compare.
    for generation in dict.fromkeys(plan.generation for plan in plans.values()):
        own = {at for at, plan in plans.items() if plan.generation == generation}
        batch = [(at, each) for at, each in objects if at in own and not each.is_manifest]
        yield from _put(batch, _tagged(options, generation), overwrite, results)
    # A manifest says that shards exist, so it is written after them.
    manifests = [(at, each) for at, each in objects if each.is_manifest]
    yield from _put(manifests, options, overwrite, results)
    if overwrite and is_exclusive:
        yield from _remove_other_forms(items, plans, objects, results)
    return results


def remove(key: bytes, *, force: bool) -> Operation[None]:
    """Remove a tensor with all of its shards and manifests.

    Raises:
        NotFoundError: There is no object of the tensor.
        BusyError: An object is leased by a recent read.
    """
    (form,) = yield from forms_of([(key, ())])
    if isinstance(form, MooncakeError):
        raise form
    keys = yield from stored_keys(form, searches=True)
    outcomes = (yield Remove([decoded(each) for each in keys], force)) if keys else []
    failures = [each for each in outcomes if isinstance(each, MooncakeError)]
    others = [each for each in failures if not isinstance(each, NotFoundError)]
    if others:
        raise others[0]
    if len(failures) == len(outcomes):
        text = "neither the tensor nor shards of it are stored"
        raise _native.failure(_NOT_FOUND, text, key=decoded(key))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an item is written.

    Attributes:
        generation: Value of the tag of its shards; "" for none.
        form: What was stored of it before, if that was looked up.
    """

    generation: str = ""
    form: Form | None = None


def _plans(
    items: Sequence[Item],
    objects: Sequence[tuple[int, _Object]],
    results: list[Outcome],
    overwrite: bool,
    is_exclusive: bool,
) -> Operation[dict[int, _Plan]]:
    """Return how the valid items are written; the others fail."""
    shards: dict[int, list[bytes]] = {at: [] for at, each in enumerate(results) if each is False}
    for at, each in objects:
        if not each.is_manifest:
            shards[at].append(each.key)
    known: dict[int, Form | MooncakeError] = {}
    wanted: dict[int, tuple[bytes, Sequence[bytes]]] = {}
    for at, names in shards.items():
        layout = items[at].layout
        if is_exclusive or (overwrite and isinstance(layout, Shard)):
            is_new = layout is None or (overwrite and isinstance(layout, Layout))
            wanted[at] = items[at].key, () if is_new else names
    if wanted:
        known = dict(zip(wanted, (yield from forms_of([*wanted.values()])), strict=True))
    for at, form in known.items():
        if not overwrite and isinstance(form, Form) and form.may_have_axes(items[at].layout):
            names = yield from list_names(items[at].key + b"__")
            stored = [each[len(items[at].key) :] for each in names if axes_of(items[at].key, each)]
            if stored:
                known[at] = other_layout(form, items[at].layout, [listed(stored)])
    generation, plans = secrets.token_hex(_GENERATION_BYTES), {}
    for at, names in shards.items():
        seen = known.get(at)
        try:
            if isinstance(seen, MooncakeError):
                raise seen
            own = _generation(items[at], seen, names, generation, overwrite)
            plans[at] = _Plan(own, seen)
        except MooncakeError as error:
            results[at] = error
    return plans


def _generation(
    item: Item, form: Form | None, names: Sequence[bytes], new: str, overwrite: bool
) -> str:
    """Return which call the shards of an item are said to be written by; "" for none.

    Raises:
        AlreadyExistsError: The tensor is stored in another layout, and is not overwritten.
        NotReadyError: The stored shards that the item completes are of different versions.
    """
    layout = item.layout
    if form is not None and not overwrite and not form.agrees_with(layout):
        raise other_layout(form, layout, form.layouts)
    if layout is None:
        return ""
    if isinstance(layout, Layout):
        if overwrite:
            return new
        # Objects that exist are kept, so those that are missing join them.
        stored = None if form is None else form.generation(names, layout)
        return new if stored is None and form is not None else stored or ""
    # A shard that is written alone takes the place of one that was written with the others.
    return "" if form is None else form.generation_of_shard(names[0], layout)


def _put(
    batch: Sequence[tuple[int, _Object]],
    options: PutOptions | None,
    overwrite: bool,
    results: list[Outcome],
) -> Operation[None]:
    """Put objects of items that have not failed."""
    batch = [(at, each) for at, each in batch if isinstance(results[at], bool)]
    if not batch:
        return
    outcomes = yield Put(
        [decoded(each.key) for _, each in batch],
        [each.buffers for _, each in batch],
        _for_objects(options, [at for at, _ in batch]),
        overwrite,
    )
    for (at, each), outcome in zip(batch, outcomes, strict=True):
        result = results[at]
        if isinstance(result, bool):
            is_failure = isinstance(outcome, MooncakeError)
            results[at] = outcome if is_failure else result or (outcome and not each.is_manifest)


def _remove_other_forms(
    items: Sequence[Item],
    plans: dict[int, _Plan],
    objects: Sequence[tuple[int, _Object]],
    results: list[Outcome],
) -> Operation[None]:
    """Remove what is left of an earlier form of overwritten tensors.

    A shard that is written alone replaces only itself: other ranks write the others.
    """
    written = {each.key for _, each in objects}
    stale: dict[bytes, int] = {}
    for at, plan in plans.items():
        layout, form = items[at].layout, plan.form
        if isinstance(layout, Shard) or results[at] is not True or form is None:
            continue
        if layout is None and not form.is_split:
            continue
        for name in (yield from stored_keys(form)):
            if name not in written and not _is_of_others(items[at], name):
                stale[name] = at
    if not stale:
        return
    outcomes = yield Remove([decoded(name) for name in stale], force=True)
    for at, outcome in zip(stale.values(), outcomes, strict=True):
        if isinstance(outcome, MooncakeError) and not isinstance(outcome, NotFoundError):
            results[at] = outcome


def _is_of_others(item: Item, name: bytes) -> bool:
    """Return whether an object is of an expert, stage or replica other than those of the item."""
    own = {axis.kind: axis for axis in item.layout.axes} if item.layout is not None else {}
    for axis in axes_of(item.key, name):
        mine = own.get(axis.kind)
        if mine is None or axis.kind == "tp":
            continue
        if axis.rank != mine.rank if axis.kind == "dp" else axis.id != (mine.id or 0):
            return True
    return False


def _tagged(options: PutOptions | None, generation: str) -> PutOptions | None:
    if not generation:
        return options
    tags = {} if options is None else options.tags
    return changed(options, tags={**tags, GENERATION_TAG: generation})


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
