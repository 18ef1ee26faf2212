"""Reads of tensors and arrays, however they are stored, into memory of torch or numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mooncake.errors import DeadlineError, MooncakeError
from mooncake.tensor import described, memory
from mooncake.tensor.calls import Operation
from mooncake.tensor.dtypes import DType, load_numpy, load_torch
from mooncake.tensor.format import METADATA_BYTES, TensorMetadata
from mooncake.tensor.inventory import find
from mooncake.tensor.layout import Box, Shard
from mooncake.tensor.recall import forget, recall, remember
from mooncake.tensor.retries import Failure, Retries
from mooncake.tensor.search import Evidence, Found, Part, State, Unsettled, find_all, invalid
from mooncake.tensor.transfer import Job, fill, replaced

__all__ = ["Arrays", "Library", "Request", "Tensors", "read", "without_metadata"]


@dataclass(frozen=True, slots=True)
class Request:
    """A tensor to read.

    Attributes:
        key: Key of the tensor.
        target: The shard to read; None reads the whole tensor.
        out: Tensor or array to fill; None makes one.
        rows: The part of the first dimension to read; None reads all of it.
    """

    key: bytes
    target: Shard | None = None
    out: Any = None
    rows: slice | None = None


_HUGE_BYTES = 4 << 20
"""Length from which numpy asks for huge pages."""


class Library(Protocol):
    """A library of tensors or arrays."""

    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Return a new value with undefined content."""

    def restore(self, stored: Any, metadata: TensorMetadata) -> Any:
        """Return the value of an object that has more than metadata and elements."""


class Tensors:
    """Tensors of torch."""

    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Return a new tensor with undefined content.

        numpy lets the kernel back large arrays by huge pages, torch does not; the page faults of
        small ones cost more than the transfer.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _HUGE_BYTES:
            return load_torch().empty(shape, dtype=dtype.torch(), device="cpu")
        return memory.as_torch(load_numpy().empty(nbytes, dtype="uint8"), dtype, shape)

    def restore(self, stored: Any, metadata: TensorMetadata) -> Any:
        """Return a jagged tensor that shares the memory of its object."""
        if metadata.ragged_dim is None:
            raise TypeError("the object is an array of a dtype that torch lacks; use get_array")
        return memory.restore(stored, metadata)


class Arrays:
    """Arrays of numpy."""

    def empty(self, dtype: DType, shape: tuple[int, ...]) -> Any:
        """Return a new array with undefined content."""
        return load_numpy().empty(shape, dtype=dtype.numpy())

    def restore(self, stored: Any, metadata: TensorMetadata) -> Any:
        """Return an array with a dtype of its own that shares the memory of its object."""
        if metadata.ragged_dim is not None:
            raise TypeError("the object is a jagged tensor; use get_tensor")
        return described.restore(stored, metadata)


def read(
    requests: Sequence[Request], library: Library, *, lease: bool = False
) -> Operation[list[Any]]:
    """Read tensors: one call to find all of them, and one to read them.

    Shards that are stored unevenly, or replaced during the read, cost further calls. Tensors that
    were read before cost one call. While a tensor is being replaced, the read waits.

    Args:
        requests: The tensors.
        library: Library of the values.
        lease: Lease the objects.

    Returns:
        For each request the filled value or its failure.
    """
    results: list[Any] = [None] * len(requests)
    pending = list(range(len(requests)))
    retries, is_first = Retries(), True
    while pending:
        try:
            attempt = _attempt(requests, library, pending, results, is_first, lease)
            failed = yield from attempt
        except DeadlineError:
            if is_first:
                raise
            break
        for at in failed:
            forget(requests[at].key, requests[at].target)
        pending, is_first = (yield from retries.choose(failed)), False
    return [retries.explained(at, result) for at, result in enumerate(results)]


def _attempt(
    requests: Sequence[Request],
    library: Library,
    pending: Sequence[int],
    results: list[Any],
    is_first: bool,
    lease: bool,
) -> Operation[dict[int, Failure]]:
    """Read those of the tensors that are pending; return what those failed with that may succeed.

    Args:
        requests: The tensors.
        library: Library of the values.
        pending: Places of those that are read.
        results: Receives the filled values, and the failures.
        is_first: It is the first attempt.
        lease: Lease the objects.
    """
    wanted = [requests[at] for at in pending]
    places = yield from _find(wanted, is_first=is_first, lease=lease)
    readings: dict[int, tuple[_Reading, State]] = {}
    failed: dict[int, Failure] = {}
    for at, (each, is_recalled) in zip(pending, places, strict=True):
        try:
            if isinstance(each, Unsettled):
                results[at], failed[at] = each.error, Failure.of_search(each)
                continue
            if isinstance(each, MooncakeError):
                raise each
            evidence = (each.evidence or ()) if is_recalled else ()
            state = () if is_recalled else each.state
            readings[at] = _begin(each, requests[at], library, evidence), state
        except (MooncakeError, TypeError, ImportError) as error:
            results[at] = error
            if is_recalled:
                # The tensor may have become another one since.
                failed[at] = Failure.of_read(replaced(requests[at].key))
    failures = yield from fill([reading.job for reading, _ in readings.values()], lease=lease)
    for (at, (reading, state)), failure in zip(readings.items(), failures, strict=True):
        results[at] = _end(reading, requests[at], library) if failure is None else failure
        if failure is not None:
            failed[at] = Failure.of_read(failure, state)
    return failed


def _find(
    requests: Sequence[Request], *, is_first: bool, lease: bool
) -> Operation[list[tuple[Found | MooncakeError | Unsettled, bool]]]:
    """Find tensors; the first attempt recalls where they were.

    Returns:
        For each request where the tensor is, and whether that was recalled without a search.
    """
    recalled = [recall(each.key, each.target) if is_first else None for each in requests]
    # The first attempt also predicts the metadata of shards, which saves a call.
    searches = [
        find(request.key, request.target, predicts=is_first)
        for request, known in zip(requests, recalled, strict=True)
        if known is None
    ]
    found = iter((yield from find_all(searches, lease=lease)))
    places: list[tuple[Found | MooncakeError | Unsettled, bool]] = []
    for request, known in zip(requests, recalled, strict=True):
        if known is not None:
            places.append((known, True))
            continue
        each = next(found)
        places.append((each, False))
        if isinstance(each, Found):
            remember(request.key, request.target, each)
    return places


@dataclass(frozen=True, slots=True)
class _Reading:
    """A read in progress: the job, the value that it fills, and whether that is a whole object."""

    job: Job
    value: Any
    restores: TensorMetadata | None = None


def _begin(
    found: Found, request: Request, library: Library, evidence: tuple[Evidence, ...]
) -> _Reading:
    metadata = found.metadata
    if metadata.data_offset > METADATA_BYTES:
        if request.target is not None or request.rows is not None:
            text = "a jagged tensor or a structured array is read whole: it has no shards or rows"
            raise invalid(request.key, text)
        return _begin_object(found, evidence)
    if request.rows is not None:
        found = _with_rows(found, request.rows)
    value = request.out
    if value is None:
        value = library.empty(metadata.dtype, found.wanted.shape)
    place = memory.of(value)
    _check_destination(found, place, value)
    return _Reading(Job(found, place.address, value, evidence), value)


def _with_rows(found: Found, rows: slice) -> Found:
    """Narrow what is wanted to a part of its first dimension."""
    if not isinstance(rows, slice):
        text = "rows is a slice, as in rows=slice(10, 20) or rows=slice(5, 6) for one row"
        raise TypeError(f"{text}, not {type(rows).__name__}: {rows!r:.60}")
    wanted = found.wanted
    if not wanted.shape:
        raise invalid(found.key, "a tensor without dimensions has no rows")
    start, stop, step = rows.indices(wanted.shape[0])
    if step != 1:
        raise invalid(found.key, f"rows are read one after the other, without a step rows={rows}")
    first = wanted.start[0]
    narrowed = wanted.narrow(0, first + start, first + max(start, stop))
    parts = tuple(part for part in found.parts if part.box.overlaps(narrowed))
    return replace(found, wanted=narrowed, parts=parts or found.parts[:1])


def _begin_object(found: Found, evidence: tuple[Evidence, ...]) -> _Reading:
    """Begin to read an object as it is, behind its metadata."""
    (part,) = found.parts
    stored = load_numpy().empty(part.metadata.total_bytes, dtype="uint8")
    stored[:METADATA_BYTES] = memoryview(part.head)
    job = Job(without_metadata(found), stored.ctypes.data + METADATA_BYTES, stored, evidence)
    return _Reading(job, stored, part.metadata)


def without_metadata(found: Found) -> Found:
    """Return the bytes of one object that follow its metadata, as a tensor."""
    (part,) = found.parts
    shape = (part.metadata.total_bytes - METADATA_BYTES,)
    metadata, box = TensorMetadata(DType.of_name("uint8"), shape, shape), Box.whole(shape)
    return Found(found.key, box, (Part(part.key, part.head, metadata, box),))


def _end(reading: _Reading, request: Request, library: Library) -> Any:
    if reading.restores is None:
        return reading.value
    try:
        value = library.restore(reading.value, reading.restores)
        if request.out is None:
            return value
        request.out[...] = value
    except (TypeError, ValueError) as error:
        return invalid(request.key, str(error))
    return request.out


def _check_destination(found: Found, place: memory.TensorMemory, value: Any) -> None:
    """Refuse memory that is not the value's own, or does not fit."""
    if (place.dtype, place.shape) != (found.metadata.dtype, found.wanted.shape):
        raise invalid(
            found.key,
            f"the destination does not fit stored={found.metadata.dtype.name}"
            f"{found.wanted.shape} destination={place.dtype.name}{place.shape}",
        )
    own = value.data_ptr() if hasattr(value, "data_ptr") else value.ctypes.data
    if place.nbytes > 0 and own != place.address:
        raise invalid(found.key, "the destination is not contiguous, or in foreign byte order")
    flags = getattr(value, "flags", None)
    if flags is not None and not flags["W"]:
        raise invalid(found.key, "the destination is read-only")
