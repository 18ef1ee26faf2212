"""Writes and removals of tensors and arrays: whole, one shard, or all shards of a layout."""

from __future__ import annotations

import functools
import os
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake._api.values import changed, decoded, options_for
from mooncake._runtime import PutOptions, _native
from mooncake.errors import AlreadyExistsError, MooncakeError, NotFoundError
from mooncake.tensor import described, memory
from mooncake.tensor.calls import Operation, Put, Remove
from mooncake.tensor.format import (
    GENERATION_TAG,
    AxisRecord,
    Manifest,
    TensorMetadata,
    guides,
    shard_key,
    writer_key,
)
from mooncake.tensor.forms import (
    OTHER_AXES,
    Form,
    forms_of,
    is_shard_of,
    marks_of,
    other_layout,
)
from mooncake.tensor.inventory import axes_of, records, stored_keys
from mooncake.tensor.layout import Box, Layout, Shard
from mooncake.tensor.search import invalid, list_names, listed, mixed, read_heads
from mooncake.tensor.shard_set import Member, at_rank, members_of

if TYPE_CHECKING:
    from mooncake.tensor.dtypes import DType
    from mooncake.tensor.memory import TensorMemory

__all__ = ["Item", "remove", "remove_objects", "write"]

_GENERATION_BYTES = 8
_CONDITIONS_MAX = 1024
"""Number of keys on which a put may depend; more are looked up."""
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
_Rows: TypeAlias = "list[tuple[int, _Object]]"


@dataclass(slots=True)
class _Batch:
    """Tensors that one call writes.

    Attributes:
        items: The tensors.
        options: Number of copies, pins, placement; groups and versions are one for each item.
        overwrite: Replace existing objects.
        is_exclusive: A tensor has one layout.
        generation: What the caller calls the version; "" for no name.
        shards: The objects to put, and the place of the item of each.
        manifests: The manifests to put after them.
        results: The outcome of each item; false before it is put.
    """

    items: Sequence[Item]
    options: PutOptions | None
    overwrite: bool
    is_exclusive: bool
    generation: str
    shards: _Rows = field(default_factory=list)
    manifests: _Rows = field(default_factory=list)
    results: list[Outcome] = field(default_factory=list)

    def prepare(self) -> set[int]:
        """Make the objects; return the items of which they could be made."""
        items = set()
        for at, item in enumerate(self.items):
            self.results.append(False)
            try:
                objects = _objects(item)
            except (MooncakeError, TypeError) as error:
                self.results[at] = error
            except ValueError as error:
                self.results[at] = invalid(item.key, str(error))
            else:
                items.add(at)
                for each in objects:
                    (self.manifests if each.is_manifest else self.shards).append((at, each))
        return items

    def of(self, items: Container[int], rows: _Rows) -> _Rows:
        """Return the shards or manifests of items that have not failed."""
        return [row for row in rows if row[0] in items and isinstance(self.results[row[0]], bool)]

    def put(self, objects: _Rows, generation: str, if_absent: Sequence[bytes] = ()) -> Put:
        """Return the call that puts objects."""
        options = options_for(_tagged(self.options, generation), [at for at, _ in objects])
        return Put(
            [decoded(each.key) for _, each in objects],
            [each.buffers for _, each in objects],
            options,
            self.overwrite,
            if_absent,
        )

    def add(self, objects: _Rows, outcomes: Sequence[Any]) -> None:
        """Add the outcomes of a call to the results."""
        for (at, each), outcome in zip(objects, outcomes, strict=True):
            result = self.results[at]
            if isinstance(result, bool):
                is_failure = isinstance(outcome, MooncakeError)
                self.results[at] = (
                    outcome if is_failure else result or (outcome and not each.is_manifest)
                )


def write(
    items: Sequence[Item],
    options: PutOptions | None,
    *,
    overwrite: bool,
    is_exclusive: bool = True,
    generation: str | None = None,
) -> Operation[list[Outcome]]:
    """Write tensors: shards first, then manifests.

    Args:
        items: The tensors.
        options: Number of copies, pins, placement; the groups and versions are one for each item.
        overwrite: Replace existing objects.
        is_exclusive: A tensor has one layout: another one is refused, or removed with `overwrite`.
        generation: Name of the version, the same at all ranks that write shards of it.

    Returns:
        For each item whether at least one of its objects was stored, or the first failure.
    """
    if generation == "":
        text = "a generation has a name: the step of a training, for instance"
        raise _native.failure(_INVALID_PARAMS, text)
    options = _checked_options(options, items)
    batch = _Batch(items, options, overwrite, is_exclusive, generation or "")
    left = batch.prepare()
    if is_exclusive:
        left = yield from _put_new(batch, left)
    if left:
        yield from _put_beside(batch, left)
    return batch.results


def _put_new(batch: _Batch, items: set[int]) -> Operation[set[int]]:
    """Put tensors that are stored in no other form, without a look-up: the puts have a condition.

    Returns:
        The items that are left: something is stored, or their shards depend on what is.
    """
    kinds = {type(batch.items[at].layout) for at in items}
    others = [name for at in items for name in _other_forms(batch.items[at])]
    is_split = Layout in kinds
    has_versions = batch.options is not None and batch.options.if_versions is not None
    if len(kinds) != 1 or Shard in kinds or has_versions or len(others) > _CONDITIONS_MAX:
        return items
    if is_split and batch.overwrite:
        return items
    generation = ""
    if is_split:
        generation = batch.generation or os.urandom(_GENERATION_BYTES).hex()
    objects = batch.of(items, batch.shards)
    outcomes = yield batch.put(objects, generation, others)
    left = {
        at
        for (at, _), outcome in zip(objects, outcomes, strict=True)
        if outcome is not True
        and (isinstance(outcome, AlreadyExistsError) or (is_split and outcome is False))
    }
    if not left:
        batch.add(objects, outcomes)
    else:
        rows = list(zip(objects, outcomes, strict=True))
        done = [row for row in rows if row[0][0] not in left]
        batch.add([each for each, _ in done], [outcome for _, outcome in done])
        # Shards that join those of another call have the tag of that one.
        wrong = [decoded(each.key) for (at, each), put in rows if at in left and put is True]
        if wrong:
            yield Remove(wrong, force=True)
    yield from _put_manifests(batch, items - left)
    return left


def _put_beside(batch: _Batch, items: set[int]) -> Operation[None]:
    """Look up in which forms tensors are stored, and put them accordingly."""
    plans = yield from _plans(batch, items)
    # A manifest that says what the stored one says need not be put after the shards.
    early = {at for at, each in batch.manifests if at in plans and plans[at].has_stored(each)}
    # Shards that one call writes together have the same tag, which readers compare.
    for generation in dict.fromkeys(plan.generation for plan in plans.values()):
        own = {at for at, plan in plans.items() if plan.generation == generation}
        if objects := [*batch.of(own, batch.shards), *batch.of(own & early, batch.manifests)]:
            batch.add(objects, (yield batch.put(objects, generation)))
    late = plans.keys() - early
    for marks in dict.fromkeys(plans[at].marks for at in late):
        yield from _put_manifests(batch, {at for at in late if plans[at].marks == marks}, marks)
    if batch.overwrite:
        yield from _remove_other_forms(batch, plans)


def _put_manifests(batch: _Batch, items: set[int], marks: str = "") -> Operation[None]:
    """Put manifests, which say that shards exist, after the shards."""
    if manifests := batch.of(items, batch.manifests):
        batch.add(manifests, (yield batch.put(manifests, marks)))


_MANIFEST, _WRITERS, _FIRST = guides(b"")


def _other_forms(item: Item) -> tuple[bytes, ...]:
    """Return the keys of which one exists if the tensor is stored in another form."""
    key = item.key
    if item.layout is None:
        return key + _FIRST, key + _MANIFEST, key + _WRITERS
    names = key, key + _MANIFEST, key + _WRITERS
    return (*names, key + _FIRST) if item.layout.axes else names


def remove(key: bytes, *, force: bool, spare_pinned: bool = False) -> Operation[None]:
    """Remove a tensor with all of its shards and manifests.

    Args:
        key: Key of the tensor.
        force: Remove leased objects, too.
        spare_pinned: Leave hard-pinned objects.

    Raises:
        NotFoundError: There is no object of the tensor.
        BusyError: An object is leased, hard-pinned or being copied. What tells of the tensor stays,
            so that the removal can be repeated.
    """
    (form,) = yield from forms_of([(key, ())])
    if isinstance(form, MooncakeError):
        raise form
    keys = yield from stored_keys(form, searches=True)
    if (yield from remove_objects(key, keys, force=force, spare_pinned=spare_pinned)) == 0:
        text = "neither the tensor nor shards of it are stored"
        raise _native.failure(_NOT_FOUND, text, key=decoded(key))


def remove_objects(
    key: bytes, keys: Sequence[bytes], *, force: bool, spare_pinned: bool = False
) -> Operation[int]:
    """Remove objects of a tensor: those that tell of it last; return how many there were.

    Args:
        key: Key of the tensor.
        keys: Keys of the objects.
        force: Remove leased objects, too.
        spare_pinned: Leave hard-pinned objects.

    Raises:
        BusyError: An object is leased, hard-pinned or being copied. What tells of the tensor stays,
            so that the removal can be repeated.
    """
    told = guides(key)
    removed = 0
    for part in (
        [each for each in keys if each not in told],
        [each for each in keys if each in told],
    ):
        if not part:
            continue
        outcomes = yield Remove([decoded(each) for each in part], force, spare_pinned)
        failures = [each for each in outcomes if isinstance(each, MooncakeError)]
        others = [each for each in failures if not isinstance(each, NotFoundError)]
        if others:
            raise others[0]
        removed += len(outcomes) - len(failures)
    return removed


@dataclass(frozen=True, slots=True)
class _Plan:
    """How an item is written.

    Attributes:
        generation: Value of the tag of its shards; "" for none.
        form: What was stored of it before, if that was looked up.
        marks: Value of the tag of its manifest; "" for none.
    """

    generation: str = ""
    form: Form | None = None
    marks: str = ""

    def has_stored(self, manifest: _Object) -> bool:
        """Return whether a manifest is stored already, and has the tag of the shards."""
        form = self.form
        if form is None or self.marks != self.generation:
            return False
        is_of_writers = manifest.key == form.key + _WRITERS
        stored = form.writers if is_of_writers else form.manifest
        is_marked = is_of_writers or form.marks == self.marks
        return stored is not None and is_marked and stored.encode() == manifest.buffers[0]


def _plans(batch: _Batch, items: set[int]) -> Operation[dict[int, _Plan]]:
    """Return how items are written; those that cannot be fail."""
    shards: dict[int, list[bytes]] = {at: [] for at in sorted(items)}
    for at, each in batch.of(items, batch.shards):
        shards[at].append(each.key)
    known: dict[int, Form | MooncakeError] = {}
    wanted: dict[int, tuple[bytes, Sequence[bytes]]] = {}
    for at, names in shards.items():
        item = batch.items[at]
        if batch.is_exclusive or (batch.overwrite and item.layout is not None):
            is_whole = item.layout is None
            is_new = is_whole or (batch.overwrite and isinstance(item.layout, Layout))
            wanted[at] = item.key, () if is_new else names
    if wanted:
        known = dict(zip(wanted, (yield from forms_of([*wanted.values()])), strict=True))
    for at, form in known.items():
        item = batch.items[at]
        if not batch.overwrite and isinstance(form, Form) and form.may_have_axes(item.layout):
            names = yield from list_names(item.key + b"__")
            stored = [each[len(item.key) :] for each in names if _is_in_another_layout(item, each)]
            if stored:
                known[at] = other_layout(form, item.layout, [listed(stored)])
    new, plans = batch.generation or os.urandom(_GENERATION_BYTES).hex(), {}
    for at, names in shards.items():
        seen = known.get(at)
        try:
            if isinstance(seen, MooncakeError):
                raise seen
            generation = _generation(batch, batch.items[at], seen, names, new)
            marks = "" if seen is None else marks_of(seen, batch.items[at].layout)
            plans[at] = _Plan(generation, seen, marks)
        except MooncakeError as error:
            batch.results[at] = error
    return plans


def _generation(
    batch: _Batch, item: Item, form: Form | None, names: Sequence[bytes], new: str
) -> str:
    """Return which call the shards of an item are said to be written by; "" for none.

    Raises:
        AlreadyExistsError: The tensor is stored in another layout, and is not overwritten.
        NotReadyError: The stored shards that the item completes are of different versions, or of
            another one than that which the caller names.
    """
    layout = item.layout
    if form is not None and not batch.overwrite and not form.agrees_with(layout):
        raise other_layout(form, layout, form.layouts)
    if layout is None:
        return ""
    if isinstance(layout, Layout):
        if batch.overwrite:
            return new
        # Objects that exist are kept, so those that are missing join them.
        stored = None if form is None else form.generation(names, layout)
        if stored is not None and batch.generation not in ("", stored):
            raise mixed(item.key, [stored or "without a generation", batch.generation])
        return new if stored is None and form is not None else stored or ""
    if batch.generation:
        return batch.generation
    # A shard that is written alone takes the place of one that was written with the others.
    return "" if form is None else form.generation_of_shard(names[0], layout)


def _remove_other_forms(batch: _Batch, plans: dict[int, _Plan]) -> Operation[None]:
    """Remove what is left of an earlier form of overwritten tensors.

    Where each rank writes its shard alone, the last one does.
    """
    written = {each.key for _, each in (*batch.shards, *batch.manifests)}
    stale: dict[bytes, int] = {}
    for at, plan in plans.items():
        layout, form = batch.items[at].layout, plan.form
        if batch.results[at] is not True or form is None:
            continue
        if layout is None and not form.is_split:
            continue
        if isinstance(layout, Shard) or not batch.is_exclusive:
            # No rank replaces these, and they would count in a later layout of their size.
            surplus = yield from _surplus(batch.items[at], plan)
            stale.update(dict.fromkeys(surplus, at))
        if not batch.is_exclusive:
            continue
        if isinstance(layout, Shard):
            if form.agrees_with(layout):
                continue
            members = members_of(form.key, tuple(records(layout)))
            if not (yield from _is_whole_set(members, layout, plan)):
                continue
            written.update(member.key for member in members)
        for name in (yield from stored_keys(form)):
            if name not in written and not _is_of_others(batch.items[at], name):
                stale[name] = at
    if not stale:
        return
    outcomes = yield Remove([decoded(name) for name in stale], force=True)
    for at, outcome in zip(stale.values(), outcomes, strict=True):
        if isinstance(outcome, MooncakeError) and not isinstance(outcome, NotFoundError):
            batch.results[at] = outcome


def _surplus(item: Item, plan: _Plan) -> Operation[list[bytes]]:
    """Return the shards of earlier layouts that no rank of the layout of an item replaces.

    They are of the same kind: parts of writers, shards of one axis, or shards with the same expert,
    stage and replica.
    """
    key, form, layout = item.key, plan.form, item.layout
    if form is None or layout is None:
        return []
    shard = layout.shard(0) if isinstance(layout, Layout) else layout
    axis = shard.axis("tp")
    if item.is_writer:
        known = form.writers
        if axis is None or known is None:
            return []
        size, dim = known.shard_count, known.split_dim
        is_same = (size, dim) == (axis.size, axis.dim)
        return [] if is_same else [writer_key(key, rank, size, dim) for rank in range(size)]
    if len(shard.axes) > 1 or axis is None:
        name = shard_key(key, records(shard))
        if name in form.shards or not plan.marks.startswith(OTHER_AXES):
            return []
        names = yield from list_names(key + b"__")
        return [each for each in names if _is_of_earlier_axes(item, shard, each)]
    stored = max(form.size, form.manifest.shard_count if form.manifest else 0)
    ranks = range(axis.size, stored)
    return [shard_key(key, [AxisRecord("tp", rank, stored)]) for rank in ranks]


def _is_of_earlier_axes(item: Item, shard: Shard, name: bytes) -> bool:
    """Return whether an object is one that a shard with further axes makes stale."""
    axes = axes_of(item.key, name)
    if not axes or _is_of_others(item, name):
        return False
    own = tuple(records(shard))
    return shard_key(b"", at_rank(axes, 0)) != shard_key(b"", at_rank(own, 0))


def _is_whole_set(members: Sequence[Member], layout: Shard, plan: _Plan) -> Operation[bool]:
    """Return whether all shards of a layout are stored, in the version of one of them."""
    heads = yield from read_heads([member.key for member in members], tag=GENERATION_TAG)
    return all(is_shard_of(head, layout) and head.generation == plan.generation for head in heads)


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


def _is_in_another_layout(item: Item, name: bytes) -> bool:
    """Return whether an object is a shard with further axes in another layout than the item.

    It is of the same expert, stage and replica.
    """
    axes, layout = axes_of(item.key, name), item.layout
    if not axes or layout is None or all(axis.kind == "tp" for axis in layout.axes):
        return bool(axes)
    shard = layout.shard(0) if isinstance(layout, Layout) else layout
    own, split = shard.axis("tp"), next((axis for axis in axes if axis.kind == "tp"), None)
    if own is None or split is None or _is_of_others(item, name):
        return False
    return (split.size, split.split_dim) != (own.size, own.dim)


def _tagged(options: PutOptions | None, generation: str) -> PutOptions | None:
    if not generation:
        return options
    tags = {} if options is None else options.tags
    return changed(options, tags={**tags, GENERATION_TAG: generation})


def _objects(item: Item) -> list[_Object]:
    """Return the objects of an item, with the manifest of its shards last."""
    if described.is_described(item.value):
        if item.layout is not None:
            raise invalid(item.key, "a structured array has no shards; put it whole")
        metadata, descr, payload = described.encode(item.value)
        return [_Object(item.key, [metadata.encode(), descr, *_buffers(payload)])]
    place = memory.of(item.value)
    if place.ragged_dim is not None:
        if item.layout is not None:
            raise invalid(item.key, "a jagged tensor has no shards; put it whole")
        return [_Object(item.key, [place.metadata().encode(), *_buffers(place)])]
    if item.layout is None:
        return [_Object(item.key, [_whole_head(place.dtype, place.shape), *_buffers(place)])]
    if isinstance(item.layout, Layout):
        shape, objects = place.shape, []
        for cut in _cuts(item.layout, place.dtype, shape):
            part = place if cut.index is None else memory.of(item.value[cut.index])
            objects.append(_Object(item.key + cut.suffix, [cut.head, *_buffers(part)]))
        dim, size = item.layout.dim, item.layout.size
    else:
        shape = _whole_shape(item, item.layout, place.shape)
        objects = [_shard(item, item.layout, place, shape)]
        axis = item.layout.axis("tp")
        dim, size = (axis.dim or 0, axis.size) if axis is not None else (0, 1)
    if shape and item.has_manifest:
        name = item.key + (_WRITERS if item.is_writer else _MANIFEST)
        manifest = _manifest(place.dtype, shape, dim, size)
        objects.append(_Object(name, [manifest], is_manifest=True))
    return objects


def _shard(item: Item, shard: Shard, place: TensorMemory, shape: tuple[int, ...]) -> _Object:
    """Return the object of one shard of a tensor of a shape."""
    axis = shard.axis("tp")
    extent = 0 if axis is None or axis.dim is None else place.shape[axis.dim]
    axes = tuple(records(shard, extent))
    head = TensorMetadata(place.dtype, shape, place.shape, axes)
    name = shard_key(item.key, axes)
    if item.is_writer and axis is not None:
        name = writer_key(item.key, axis.rank, axis.size, axis.dim or 0)
    return _Object(name, [head.encode(), *_buffers(place)])


@dataclass(frozen=True, slots=True)
class _Cut:
    """A shard of a layout.

    Attributes:
        suffix: End of its key.
        head: Its metadata.
        index: Which part of the tensor it is; None for all of it.
    """

    suffix: bytes
    head: bytes
    index: tuple[slice, ...] | None


# Tensors of one shape, as those of all layers, are cut once.
@functools.lru_cache(maxsize=256)
def _cuts(layout: Layout, dtype: DType, shape: tuple[int, ...]) -> tuple[_Cut, ...]:
    cuts = []
    for shard in layout.shards():
        box = shard.box(shape)
        axes = tuple(records(shard, box.shape[layout.dim]))
        head = TensorMetadata(dtype, shape, box.shape, axes).encode()
        index = tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))
        cuts.append(_Cut(shard_key(b"", axes), head, None if box.shape == shape else index))
    return tuple(cuts)


@functools.lru_cache(maxsize=256)
def _whole_head(dtype: DType, shape: tuple[int, ...]) -> bytes:
    return TensorMetadata(dtype, shape, shape).encode()


@functools.lru_cache(maxsize=256)
def _manifest(dtype: DType, shape: tuple[int, ...], dim: int, size: int) -> bytes:
    return Manifest(dtype, shape, dim, size).encode()


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
