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
from array import array
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake._runtime import _native
from mooncake._values import decoded
from mooncake.errors import InvalidArgumentError, MooncakeError, NotFoundError
from mooncake.tensor.calls import List, Operation, ReadRanges
from mooncake.tensor.format import (
    AXIS_KINDS,
    MANIFEST_BYTES,
    METADATA_BYTES,
    AxisRecord,
    FormatError,
    Manifest,
    TensorMetadata,
    manifest_key,
    shard_key,
    writer_key,
    writer_manifest_key,
)
from mooncake.tensor.layout import Axis, AxisKind, Box, Shard, split_bounds

if TYPE_CHECKING:
    from mooncake.tensor.layout import Split

__all__ = [
    "Found",
    "Part",
    "Search",
    "find",
    "find_all",
    "find_stored",
    "invalid",
    "records",
    "stored_keys",
]

_NOT_FOUND = -704
_INVALID_PARAMS = -600
_LISTED_MAX = 8
"""Maximum number of keys in the text of an error."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stored object that holds a part of a tensor.

    Attributes:
        key: Key of the object.
        head: The first bytes of the object, as they were when it was found.
        metadata: The decoded head.
        box: The part of the tensor.
    """

    key: bytes
    head: bytes
    metadata: TensorMetadata
    box: Box


@dataclass(frozen=True, slots=True)
class Found:
    """The objects from which a wanted part of a tensor can be read.

    Attributes:
        key: Key of the tensor.
        wanted: The wanted part.
        parts: The objects that hold it.
    """

    key: bytes
    wanted: Box
    parts: tuple[Part, ...]

    @property
    def metadata(self) -> TensorMetadata:
        """Metadata of one of the parts; all have the same dtype and global shape."""
        return self.parts[0].metadata


@dataclass(frozen=True, slots=True)
class _Heads:
    """A request for the first bytes of objects: None for an object that does not exist."""

    keys: list[bytes]
    length: int = METADATA_BYTES


@dataclass(frozen=True, slots=True)
class _Names:
    """A request for the keys that have a prefix."""

    prefix: bytes


Search: TypeAlias = Generator[_Heads | _Names, Any, Found]
"""A search for the objects of one tensor: yields requests, receives their answers."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A shard in a set: its key and its rank on the axis that is split."""

    key: bytes
    rank: int


def find(key: bytes, target: Shard | None) -> Search:
    """Find the objects from which a tensor, or one shard of it, can be read.

    Raises:
        NotFoundError: The tensor or a part of it is not stored; the message names the objects.
        InvalidArgumentError: The objects are not tensors, contradict each other, or do not say
            which of them is wanted.
    """
    exact = shard_key(key, records(target)) if target else key
    is_selective = target is not None and any(target.axis(kind) for kind in _SELECTIVE)
    first = [exact] if is_selective or target is None else [exact, key]
    heads = yield _Heads(first)
    if target is not None and heads[0] is not None:
        part = _exact(exact, heads[0], target)
        if part is not None:
            return Found(key, part.box, (part,))
    if not is_selective and heads[-1] is not None:
        return _whole(key, heads[-1], target)
    found = None if is_selective else (yield from _find_split(key, target))
    if found is None and target is not None and any(axis.kind != "tp" for axis in target.axes):
        found = yield from _find_named(key, target)
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
    (head,) = yield _Heads([key])
    if head is None:
        raise _missing(key, [_Member(key, 0)])
    metadata = _decoded_head(key, head)
    box = Box.whole(metadata.local_shape)
    return Found(key, box, (Part(key, head, metadata, box),))


def find_all(searches: Sequence[Search]) -> Operation[list[Found | MooncakeError]]:
    """Carry out searches; the requests of all of them go out together, round by round."""
    results: list[Found | MooncakeError | None] = [None] * len(searches)
    running = dict(enumerate(searches))
    answers: dict[int, Any] = dict.fromkeys(running)
    while running:
        wanted: dict[int, _Heads | _Names] = {}
        for at, search in list(running.items()):
            try:
                wanted[at] = search.send(answers[at])
            except StopIteration as end:
                results[at] = end.value
            except MooncakeError as error:
                results[at] = error
            if at not in wanted:
                del running[at]
        answers = yield from _answer(wanted)
        for at, answer in answers.items():
            if isinstance(answer, MooncakeError):
                results[at] = answer
                del running[at]
    return [result for result in results if result is not None]


def stored_keys(key: bytes) -> Operation[list[bytes]]:
    """Return the keys of all objects of a tensor, in whichever form it is stored."""
    heads = yield from _read_heads([key, shard_key(key, [AxisRecord("tp", 0, 1)])], METADATA_BYTES)
    manifests = [manifest_key(key), writer_manifest_key(key)]
    for outcome in heads:
        if isinstance(outcome, MooncakeError):
            raise outcome
    of_set, of_writers = yield from _read_heads(manifests, MANIFEST_BYTES)
    keys = [key] if heads[0] is not None else []
    shards = max(_size_of(heads[1]), _count_of(of_set))
    keys += [shard_key(key, [AxisRecord("tp", rank, shards)]) for rank in range(shards)]
    keys += [name for name, head in zip(manifests, (of_set, of_writers), strict=True) if head]
    if of_writers is not None or of_set is not None or not keys:
        names = yield from _list_names(key + b"__")
        keys += [name for name in names if _axes_of(key, name) or _writer_of(key, name)]
    return keys


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


def invalid(key: bytes, text: str) -> MooncakeError:
    """Return the error for a tensor that cannot be read or written as asked."""
    return _native.failure(_INVALID_PARAMS, text, key=decoded(key))


# Whole tensors and exact shards


def _whole(key: bytes, head: bytes, target: Shard | None) -> Found:
    metadata = _decoded_head(key, head)
    box = Box.whole(metadata.global_shape)
    if metadata.local_shape != metadata.global_shape:
        raise invalid(key, f"the object is a shard of a tensor shape={metadata.local_shape}")
    if target is not None and metadata.ragged_dim is not None:
        raise invalid(key, "a jagged tensor has no shards: get it whole")
    return Found(key, _wanted(key, target, metadata), (Part(key, head, metadata, box),))


def _exact(key: bytes, head: bytes, target: Shard) -> Part | None:
    """Return the shard if it is the wanted one; its name does not say all that its axes say."""
    metadata = _decoded_head(key, head)
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
    box = _wanted(key, target, metadata)
    return Part(key, head, metadata, box) if box.shape == metadata.local_shape else None


def _wanted(key: bytes, target: Shard | None, metadata: TensorMetadata) -> Box:
    if target is None:
        return Box.whole(metadata.global_shape)
    try:
        return target.box(metadata.global_shape)
    except ValueError as error:
        raise invalid(key, str(error)) from None


# Sets of shards that are split along one dimension


def _find_split(key: bytes, target: Shard | None) -> Generator[Any, Any, Found | None]:
    """Look for shards of one ``tp`` axis, and for parts of writers."""
    first = shard_key(key, [AxisRecord("tp", 0, 1)])
    (head,) = yield _Heads([first])
    shards, writers = yield _Heads([manifest_key(key), writer_manifest_key(key)], MANIFEST_BYTES)
    if head is not None:
        size = _size_of(head)
        if size == 0:
            raise invalid(first, "the object is not a shard of a tensor")
        return (yield from _read_set(key, target, _members(key, (AxisRecord("tp", 0, size),))))
    if writers is not None:
        manifest = _decoded_manifest(writer_manifest_key(key), writers)
        size, dim = manifest.shard_count, manifest.split_dim
        members = [_Member(writer_key(key, rank, size, dim), rank) for rank in range(size)]
        return (yield from _read_set(key, target, members, manifest))
    if shards is not None:
        manifest = _decoded_manifest(manifest_key(key), shards)
        named = yield from _find_named(key, target, manifest)
        if named is not None:
            return named
        members = _members(key, (AxisRecord("tp", 0, manifest.shard_count),))
        return (yield from _read_set(key, target, members, manifest))
    return None


def _read_set(
    key: bytes, target: Shard | None, members: list[_Member], manifest: Manifest | None = None
) -> Search:
    """Return the members of a set that overlap the wanted part."""
    heads = yield _Heads([member.key for member in members])
    present = {
        member.rank: (member, head, _decoded_head(member.key, head))
        for member, head in zip(members, heads, strict=True)
        if head is not None
    }
    if not present:
        raise _missing(key, members)
    _, _, metadata = next(iter(present.values()))
    shape, dim = metadata.global_shape, _split_dim(metadata, manifest)
    for member, _, other in present.values():
        if (other.dtype, other.global_shape) != (metadata.dtype, shape):
            raise invalid(
                key,
                f"the shards are of different tensors: {_text(member.key)} has "
                f"dtype={other.dtype.name} shape={other.global_shape}, others have "
                f"dtype={metadata.dtype.name} shape={shape}",
            )
    extents = {rank: other.local_shape[dim] for rank, (_, _, other) in present.items()}
    bounds = _bounds(shape[dim], len(members), extents)
    if bounds is None:
        raise invalid(
            key,
            f"the shards do not add up to the tensor dim={dim} extent={shape[dim]} "
            f"shards={[extents.get(rank) for rank in range(len(members))]}",
        )
    whole, wanted = Box.whole(shape), _wanted(key, target, metadata)
    needed = [
        member
        for member in members
        if _overlap(whole.narrow(dim, *bounds[member.rank : member.rank + 2]), wanted)
    ]
    missing = [member for member in needed if member.rank not in present]
    if missing:
        raise _missing(key, missing)
    chosen = [present[member.rank] for member in needed] or [next(iter(present.values()))]
    parts = (
        Part(member.key, head, own, whole.narrow(dim, *bounds[member.rank : member.rank + 2]))
        for member, head, own in chosen
    )
    return Found(key, wanted, tuple(parts))


def _split_dim(metadata: TensorMetadata, manifest: Manifest | None) -> int:
    for axis in metadata.axes:
        if axis.split_dim is not None:
            return axis.split_dim
    return manifest.split_dim if manifest is not None else 0


def _bounds(extent: int, size: int, extents: dict[int, int]) -> list[int] | None:
    """Return where the shards begin; None if their extents fit no rule."""
    if len(extents) == size:
        bounds = [0]
        for rank in range(size):
            bounds.append(bounds[-1] + extents[rank])
        return bounds if bounds[-1] == extent else None
    rules: tuple[Split, ...] = ("chunk", "tensor_split")
    for rule in rules:
        bounds = split_bounds(extent, size, rule)
        if all(bounds[rank + 1] - bounds[rank] == own for rank, own in extents.items()):
            return bounds
    return None


def _overlap(one: Box, other: Box) -> bool:
    starts = map(max, one.start, other.start)
    stops = map(min, one.stop, other.stop)
    return all(start < stop for start, stop in zip(starts, stops, strict=True))


# Shards with other axes


def _find_named(
    key: bytes, target: Shard | None, manifest: Manifest | None = None
) -> Generator[Any, Any, Found | None]:
    """Look for shards with ``dp``, ``ep`` or ``pp`` axes.

    They are found by name if the target names all of these axes, else in a list of the stored keys,
    for which the master visits all of its objects.
    """
    if manifest is None:
        (head,) = yield _Heads([manifest_key(key)], MANIFEST_BYTES)
        manifest = None if head is None else _decoded_manifest(manifest_key(key), head)
    others = tuple(axis for axis in records(target) if axis.kind != "tp") if target else ()
    if others and manifest is not None:
        split = AxisRecord("tp", 0, manifest.shard_count, manifest.split_dim)
        members = _members(key, (*others, split))
        (head,) = yield _Heads([members[0].key])
        if head is not None:
            return (yield from _read_set(key, target, members, manifest))
    names = yield _Names(key + b"__")
    stored = {name: axes for name in names if (axes := _axes_of(key, name))}
    if not stored:
        return None
    chosen = _select(key, target, list(stored.values()))
    if chosen is None:
        suffixes = _listed([name[len(key) :] for name in stored])
        text = f"no stored shard fits the target target={target} stored={suffixes}"
        raise _native.failure(_NOT_FOUND, text, key=decoded(key))
    return (yield from _read_set(key, target, _members(key, chosen)))


def _members(key: bytes, axes: tuple[AxisRecord, ...]) -> list[_Member]:
    """Return the shards that differ from a shard in the rank of ``tp`` only."""
    size = next((axis.size for axis in axes if axis.kind == "tp"), 1)
    return [_Member(shard_key(key, _at_rank(axes, rank)), rank) for rank in range(size)]


def _select(
    key: bytes, target: Shard | None, stored: Sequence[tuple[AxisRecord, ...]]
) -> tuple[AxisRecord, ...] | None:
    """Choose the set of shards to read: its axes, with rank 0 of ``tp``."""
    counts = Counter(_at_rank(axes, 0) for axes in stored)
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

    def preference(axes: tuple[AxisRecord, ...]) -> tuple[bool, int, str]:
        is_incomplete = counts[axes] < len(_members(b"", axes))
        unlike = len(kinds ^ {axis.kind for axis in axes})
        return is_incomplete, unlike, "".join(axis.key_part for axis in axes)

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


def _at_rank(axes: Sequence[AxisRecord], rank: int) -> tuple[AxisRecord, ...]:
    """Return the axes of the shard of another ``tp`` rank in the same set."""
    return tuple(
        AxisRecord(axis.kind, rank, axis.size, axis.split_dim) if axis.kind == "tp" else axis
        for axis in axes
    )


_SELECTIVE: tuple[AxisKind, ...] = ("ep", "pp")
_KINDS: dict[bytes, AxisKind] = {kind.encode(): kind for kind in AXIS_KINDS}
_SUFFIXES = {"dp": None, "tp": b"sd", "ep": b"eid", "pp": b"sid"}
_AXIS = re.compile(rb"__(dp|tp|ep|pp)_(\d{1,9})of(\d{1,9})(?:_(sd|eid|sid)(\d{1,9}))?")
_WRITER = re.compile(rb"__writer_\d{1,9}of\d{1,9}_sd\d{1,9}")


def _axes_of(key: bytes, name: bytes) -> tuple[AxisRecord, ...]:
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


def _decoded_head(key: bytes, head: bytes) -> TensorMetadata:
    try:
        return TensorMetadata.decode(head)
    except FormatError as error:
        raise invalid(key, str(error)) from None


def _decoded_manifest(key: bytes, head: bytes) -> Manifest:
    try:
        return Manifest.decode(head)
    except FormatError as error:
        raise invalid(key, str(error)) from None


def _size_of(head: bytes | MooncakeError | None) -> int:
    """Return the number of shards of which an object is one; 0 if it is none."""
    if not isinstance(head, bytes):
        return 0
    try:
        axes = TensorMetadata.decode(head).axes
    except FormatError:
        return 0
    return next((axis.size for axis in axes if axis.kind == "tp"), 0)


def _count_of(head: bytes | MooncakeError | None) -> int:
    if not isinstance(head, bytes):
        return 0
    try:
        return Manifest.decode(head).shard_count
    except FormatError:
        return 0


def _missing(key: bytes, members: Sequence[_Member]) -> MooncakeError:
    names = _listed([member.key for member in members])
    text = f"shards of the tensor are missing: {names}"
    return _native.failure(_NOT_FOUND, text, key=decoded(key))


def _listed(keys: Sequence[bytes]) -> str:
    text = ", ".join(map(_text, keys[:_LISTED_MAX]))
    return text if len(keys) <= _LISTED_MAX else f"{text} and {len(keys) - _LISTED_MAX} more"


def _text(key: bytes) -> str:
    return key.decode(errors="replace")


# Calls


def _answer(wanted: dict[int, _Heads | _Names]) -> Operation[dict[int, Any]]:
    """Answer the requests of one round."""
    answers: dict[int, Any] = {}
    for length in {request.length for request in wanted.values() if isinstance(request, _Heads)}:
        requests = {
            at: request.keys
            for at, request in wanted.items()
            if isinstance(request, _Heads) and request.length == length
        }
        keys = [key for keys in requests.values() for key in keys]
        heads = iter((yield from _read_heads(keys, length)))
        for at, own in requests.items():
            outcomes = [next(heads) for _ in own]
            failed = (each for each in outcomes if isinstance(each, MooncakeError))
            answers[at] = next(failed, outcomes)
    for at, request in wanted.items():
        if isinstance(request, _Names):
            answers[at] = yield from _list_names(request.prefix)
    return answers


def _read_heads(keys: list[bytes], length: int) -> Operation[list[bytes | MooncakeError | None]]:
    """Return the first bytes of objects: None without an object, ``b""`` for a shorter one."""
    count = len(keys)
    memory = bytearray(count * length)
    base, _ = _native.writable_range(memory)
    columns = (
        array("q", range(count + 1)),
        array("q", range(base, base + count * length, length)),
        array("q", [0]) * count,
        array("q", [length]) * count,
    )
    outcomes = yield ReadRanges([decoded(key) for key in keys], columns, memory)
    heads: list[bytes | MooncakeError | None] = []
    for at, outcome in enumerate(outcomes):
        if isinstance(outcome, NotFoundError):
            heads.append(None)
        elif isinstance(outcome, InvalidArgumentError):
            heads.append(b"")
        else:
            head = bytes(memory[at * length : (at + 1) * length])
            heads.append(outcome if isinstance(outcome, MooncakeError) else head)
    return heads


def _list_names(prefix: bytes) -> Operation[list[bytes]]:
    names: list[bytes] = []
    after: bytes | None = None
    while True:
        page, is_last = yield List(prefix, after)
        names += [name for name, _, is_complete, _ in page if is_complete]
        if is_last or not page:
            return names
        after = page[-1][0]
