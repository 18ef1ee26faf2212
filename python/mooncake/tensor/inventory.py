"""Finds out in which objects a tensor is stored: whole, in shards, or in parts of writers.

| Form | Objects |
|---|---|
| whole | ``KEY`` |
| shards of one ``tp`` axis | ``KEY_tp_RANK``, and a manifest |
| shards with other axes | ``KEY__dp_…__tp_…__ep_…__pp_…``, and a manifest if the tensor is split |
| parts of writers | ``KEY__writer_RANKofSIZE_sdDIM``, and a manifest |

The metadata of every object that is read says which part of the tensor it holds; names and
manifests only say where to look.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.tensor.calls import Operation
from mooncake.tensor.format import (
    AXIS_KINDS,
    AxisKind,
    AxisRecord,
    FormatError,
    Manifest,
    TensorMetadata,
    manifest_key,
    shard_key,
    writer_key,
    writer_manifest_key,
)
from mooncake.tensor.forms import Form
from mooncake.tensor.layout import Axis, Box, Shard
from mooncake.tensor.search import (
    Found,
    Heads,
    Names,
    Part,
    Search,
    Unsettled,
    decoded_head,
    decoded_manifest,
    invalid,
    list_names,
    listed,
    missing,
)
from mooncake.tensor.shard_set import (
    Member,
    Query,
    at_rank,
    find_members,
    members_of,
    wanted_box,
)

if TYPE_CHECKING:
    from mooncake.errors import MooncakeError

__all__ = ["axes_of", "find", "find_stored", "records", "stored_keys"]

_NOT_FOUND = -704


def find(key: bytes, target: Shard | None, *, predicts: bool = False) -> Search:
    """Find the objects from which a tensor, or one shard of it, can be read.

    Args:
        key: Key of the tensor.
        target: The wanted shard; None finds the whole tensor.
        predicts: Compute the metadata of shards from that of the first one, without reading it. A
            read fails if the prediction is wrong.

    Raises:
        NotFoundError: The tensor or a part of it is not stored; the message names the objects.
        InvalidArgumentError: The objects are not tensors, contradict each other, or do not say
            which of them is wanted.
    """
    exact = shard_key(key, records(target)) if target else key
    first = shard_key(key, [AxisRecord("tp", 0, 1)])
    manifests = _manifest_keys(key)
    exact_head, head, of_first, of_set, of_writers = yield Heads([exact, key, first], manifests)
    manifest = None if of_set is None else decoded_manifest(manifests[0], of_set)
    if target is not None and exact_head is not None:
        part = _exact(exact, exact_head, target)
        if part is not None and _is_of_layout(target, manifest, of_first):
            return Found(key, part.box, (part,))
    query = Query(key, target, predicts)
    is_selective = target is not None and any(target.axis(kind) for kind in _SELECTIVE)
    if head is not None and not is_selective:
        return _whole(key, head, target)
    found: Found | None = None
    if not is_selective:
        found = yield from _find_split(query, of_first, of_writers)
    has_others = target is not None and any(axis.kind != "tp" for axis in target.axes)
    if found is None and (has_others or manifest is not None):
        found = yield from _find_named(query, manifest)
    if found is None and manifest is not None and not is_selective:
        axes = (AxisRecord("tp", 0, manifest.shard_count),)
        found = yield from find_members(query, members_of(key, axes), manifest=manifest)
    if found is None:
        text = "neither the tensor nor shards of it are stored"
        text += "" if target is None else f" target={target}"
        raise _native.failure(_NOT_FOUND, text, key=decoded(key))
    return found


def find_stored(key: bytes) -> Search:
    """Find one object, whatever part of a tensor it is.

    Raises:
        NotFoundError: The object does not exist.
        InvalidArgumentError: The object is not a tensor.
    """
    (head,) = yield Heads([key])
    if head is None:
        raise missing(key, [key]).error
    metadata = decoded_head(key, head)
    box = Box.whole(metadata.local_shape)
    return Found(key, box, (Part(key, head, metadata, box),))


def stored_keys(form: Form, *, searches: bool = False) -> Operation[list[bytes]]:
    """Return the keys of all objects of a tensor, in whichever forms it is stored; lease none.

    Args:
        form: What is known of it.
        searches: List also the shards of a layout that nothing else tells of.
    """
    key = form.key
    keys = [key] if form.is_whole else []
    shards = max(form.size, form.manifest.shard_count if form.manifest else 0)
    keys += [shard_key(key, [AxisRecord("tp", rank, shards)]) for rank in range(shards)]
    manifests = zip(_manifest_keys(key), (form.manifest, form.writers), strict=True)
    keys += [name for name, found in manifests if found is not None]
    if searches or form.manifest is not None or form.writers is not None:
        names = yield from list_names(key + b"__")
        keys += [name for name in names if axes_of(key, name) or _writer_of(key, name)]
    if searches:
        names = yield from list_names(key + b"_tp_")
        keys += [name for name in names if _SHARD.fullmatch(name, len(key))]
    return list(dict.fromkeys(keys))


def records(shard: Shard, extent: int = 0) -> list[AxisRecord]:
    """Return the axes of a shard as they are stored; `extent` is its length along the split."""
    return [
        AxisRecord(
            axis.kind,
            axis.rank,
            axis.size,
            axis.dim,
            axis.id or 0,
            extent if axis.dim is not None else 0,
        )
        for axis in shard.axes
    ]


# Whole tensors and exact shards


def _whole(key: bytes, head: bytes, target: Shard | None) -> Found:
    metadata = decoded_head(key, head)
    box = Box.whole(metadata.global_shape)
    if metadata.local_shape != metadata.global_shape:
        raise invalid(key, f"the object is a shard of a tensor shape={metadata.local_shape}")
    if target is not None and metadata.ragged_dim is not None:
        raise invalid(key, "a jagged tensor has no shards: get it whole")
    return Found(key, wanted_box(key, target, metadata), (Part(key, head, metadata, box),))


def _exact(key: bytes, head: bytes, target: Shard) -> Part | None:
    """Return the shard if it is the wanted one; its name does not say all that its axes say."""
    metadata = decoded_head(key, head)
    stored = {axis.kind: axis for axis in metadata.axes}
    if stored.keys() != {axis.kind for axis in target.axes}:
        return None
    for axis in target.axes:
        own = stored[axis.kind]
        if (own.rank, own.size, own.split_dim, own.id) != (
            axis.rank,
            axis.size,
            axis.dim,
            axis.id or 0,
        ):
            return None
    box = wanted_box(key, target, metadata)
    return Part(key, head, metadata, box) if box.shape == metadata.local_shape else None


def _is_of_layout(target: Shard, manifest: Manifest | None, of_first: bytes | None) -> bool:
    """Return whether a shard is of the layout in which the tensor is stored now.

    Another layout may have left a shard that the present one does not replace.
    """
    axis = target.axis("tp")
    if axis is None:
        return True
    if manifest is not None:
        return (manifest.shard_count, manifest.split_dim) == (axis.size, axis.dim)
    if of_first is None or len(target.axes) > 1:
        return True
    axes = decoded_head(b"", of_first).axes if of_first else ()
    return any((each.size, each.split_dim) == (axis.size, axis.dim) for each in axes)


# Sets of shards


def _find_split(
    query: Query, of_first: bytes | None, of_writers: bytes | None
) -> Generator[Any, Any, Found | None]:
    """Look for shards of one ``tp`` axis, and for parts of writers."""
    key = query.key
    if of_first is not None:
        first = shard_key(key, [AxisRecord("tp", 0, 1)])
        size = _size_of(of_first)
        if size == 0:
            raise invalid(first, "the object is not a shard of a tensor")
        members = members_of(key, (AxisRecord("tp", 0, size),))
        return (yield from find_members(query, members, of_first))
    if of_writers is not None:
        manifest = decoded_manifest(writer_manifest_key(key), of_writers)
        size, dim = manifest.shard_count, manifest.split_dim
        members = tuple(Member(writer_key(key, rank, size, dim), rank) for rank in range(size))
        return (yield from find_members(query, members, manifest=manifest))
    return None


# Shards with other axes


def _find_named(query: Query, manifest: Manifest | None) -> Generator[Any, Any, Found | None]:
    """Look for shards with ``dp``, ``ep`` or ``pp`` axes.

    They are found by name if the target names all of these axes, else in a list of the stored keys,
    for which the master visits all of its objects.
    """
    key, target = query.key, query.target
    others = tuple(axis for axis in records(target) if axis.kind != "tp") if target else ()
    if others and manifest is not None:
        split = AxisRecord("tp", 0, manifest.shard_count, manifest.split_dim)
        members = members_of(key, (*others, split))
        (head,) = yield Heads([members[0].key])
        if head is not None:
            return (yield from find_members(query, members, head, manifest))
    names = yield Names(key + b"__")
    stored = {name: axes for name in names if (axes := axes_of(key, name))}
    if not stored:
        return None
    chosen = _select(key, target, list(stored.values()), manifest)
    if chosen is None:
        suffixes = listed([name[len(key) :] for name in stored])
        failure = _native.failure(
            _NOT_FOUND,
            "no stored shard fits the target",
            key=decoded(key),
            context={"target": target, "stored": suffixes},
            remedy="Ask for a shard of what is stored; `info` of the key shows the layout.",
        )
        raise Unsettled(failure, is_mixed=False)
    return (yield from find_members(query, members_of(key, chosen)))


def _select(
    key: bytes,
    target: Shard | None,
    stored: Sequence[tuple[AxisRecord, ...]],
    manifest: Manifest | None,
) -> tuple[AxisRecord, ...] | None:
    """Choose the set of shards to read: its axes, with rank 0 of ``tp``.

    Of two whole sets, that of the manifest was written last.
    """
    present = None if manifest is None else (manifest.shard_count, manifest.split_dim)
    counts = Counter(at_rank(axes, 0) for axes in stored)
    candidates = list(counts)
    for kind in _SELECTIVE:
        own = target.axis(kind) if target is not None else None
        ids = {axis.id for axes in candidates for axis in axes if axis.kind == kind}
        if own is None and len(ids) > 1:
            raise invalid(
                key,
                f"the target must name one of the {kind} axes that are stored ids={sorted(ids)}",
            )
        if own is not None:
            candidates = [
                axes
                for axes in candidates
                if any(axis.kind == kind and axis.id == own.id for axis in axes)
            ]
    wanted = target.axis("dp") if target is not None else None
    if wanted is not None:
        candidates = _of_replica(candidates, wanted)
    kinds = {axis.kind for axis in target.axes} if target is not None else set()

    def preference(axes: tuple[AxisRecord, ...]) -> tuple[bool, bool, int, str]:
        is_incomplete = counts[axes] < len(members_of(b"", axes))
        splits = [(axis.size, axis.split_dim) for axis in axes if axis.kind == "tp"]
        unlike = len(kinds ^ {axis.kind for axis in axes})
        is_old = present not in (None, *splits)
        return is_incomplete, is_old, unlike, "".join(axis.key_part for axis in axes)

    return min(candidates, key=preference, default=None)


def _of_replica(
    candidates: list[tuple[AxisRecord, ...]], wanted: Axis
) -> list[tuple[AxisRecord, ...]]:
    """Return the candidates of the wanted replica, or those that are not replicated.

    Of another number of replicas than wanted, rank ``r`` reads replica ``r`` modulo that number.
    """

    def fits(axes: tuple[AxisRecord, ...]) -> bool:
        return all(axis.rank == wanted.rank % axis.size for axis in axes if axis.kind == "dp")

    return [axes for axes in candidates if fits(axes)]


_SELECTIVE: tuple[AxisKind, ...] = ("ep", "pp")
_KINDS: dict[bytes, AxisKind] = {kind.encode(): kind for kind in AXIS_KINDS}
_SUFFIXES = {"dp": None, "tp": b"sd", "ep": b"eid", "pp": b"sid"}
_AXIS = re.compile(rb"__(dp|tp|ep|pp)_(\d{1,9})of(\d{1,9})(?:_(sd|eid|sid)(\d{1,9}))?")
_SHARD = re.compile(rb"_tp_(?:0|[1-9]\d{0,8})")
_WRITER = re.compile(rb"__writer_\d{1,9}of\d{1,9}_sd\d{1,9}")


def axes_of(key: bytes, name: bytes) -> tuple[AxisRecord, ...]:
    """Return the axes that the key of a shard names; none if it is not the key of a shard."""
    axes, at = [], len(key)
    while at < len(name):
        match = _AXIS.match(name, at)
        if match is None or _SUFFIXES[kind := _KINDS[match[1]]] != match[4]:
            return ()
        number, is_split = int(match[5] or 0), kind == "tp"
        rank, size = int(match[2]), int(match[3])
        dim, id_ = (number, 0) if is_split else (None, number)
        axes.append(AxisRecord(kind, rank, size, dim, id_))
        at = match.end()
    return tuple(axes)


def _writer_of(key: bytes, name: bytes) -> bool:
    return _WRITER.fullmatch(name, len(key)) is not None


# Metadata


def _manifest_keys(key: bytes) -> tuple[bytes, bytes]:
    return manifest_key(key), writer_manifest_key(key)


def _size_of(head: bytes | MooncakeError | None) -> int:
    """Return the number of shards of which an object is one; 0 if it is none."""
    if not isinstance(head, bytes):
        return 0
    try:
        axes = TensorMetadata.decode(head).axes
    except FormatError:
        return 0
    return next((axis.size for axis in axes if axis.kind == "tp"), 0)
