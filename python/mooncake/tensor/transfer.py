"""Reads tensors into memory: lowers plans to ranged reads of all objects in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake._runtime import _native
from mooncake._values import decoded
from mooncake.errors import MooncakeError
from mooncake.tensor.calls import Operation, ReadRanges
from mooncake.tensor.format import METADATA_BYTES
from mooncake.tensor.planner import IncompleteError, Plan, Source, TooManyRangesError, plan
from mooncake.tensor.search import Found, invalid

if TYPE_CHECKING:
    from mooncake.tensor.search import Part

__all__ = ["Job", "fill"]

_LEASE_EXPIRED = -707

Columns: TypeAlias = tuple[Any, Any, Any, Any]
"""The first range of each object; the address, offset and length of each range."""


@dataclass(frozen=True, slots=True)
class Job:
    """A part of a tensor to read, and the memory to fill.

    Attributes:
        found: The objects to read it from.
        address: Address of the memory.
        owner: Object that keeps the memory.
    """

    found: Found
    address: int
    owner: object


def fill(
    jobs: Sequence[Job], *, is_registered: bool = False
) -> Operation[list[MooncakeError | None]]:
    """Fill the memory of each job.

    Args:
        jobs: What to read.
        is_registered: Refuse memory that is not registered.

    Returns:
        For each job None or its failure, after which the content of the memory is undefined.
    """
    import numpy as np

    planned: list[tuple[Job, Plan | MooncakeError]] = [(job, _plan(job.found)) for job in jobs]
    valid = [(job, ranges) for job, ranges in planned if isinstance(ranges, Plan)]
    parts = [part for job, _ in valid for part in job.found.parts]
    names = [decoded(part.key) for part in parts]
    heads = np.zeros((len(parts), METADATA_BYTES), dtype=np.uint8)
    columns = _columns(valid)
    owners = [heads, *(job.owner for job, _ in valid)]
    if is_registered:
        # The heads are read into memory of this call, which is not registered.
        outcomes = yield ReadRanges(names, columns, owners, is_registered=True)
        checks = yield ReadRanges(names, _columns_of_heads(heads), owners)
        outcomes = [
            outcome if isinstance(outcome, MooncakeError) else check
            for outcome, check in zip(outcomes, checks, strict=True)
        ]
    else:
        outcomes = yield ReadRanges(names, _with_heads(columns, heads), owners)
    results: list[MooncakeError | None] = []
    rows = iter(zip(parts, heads, outcomes, strict=True))
    for job, ranges in planned:
        if isinstance(ranges, Plan):
            results.append(_result([next(rows) for _ in job.found.parts]))
        else:
            results.append(ranges)
    return results


def _plan(found: Found) -> Plan | MooncakeError:
    """Plan a job; the plan has no ranges for a tensor without elements."""
    sources = [Source(part.box, part.metadata.data_offset) for part in found.parts]
    try:
        return plan(sources, found.wanted, found.metadata.dtype.itemsize)
    except (IncompleteError, TooManyRangesError) as error:
        return invalid(found.key, str(error))


def _columns(jobs: Sequence[tuple[Job, Plan]]) -> Columns:
    """Return the ranges of all jobs as the columns of one call."""
    import numpy as np

    none = np.zeros(0, dtype=np.int64)
    counts = [np.diff(ranges.starts) for _, ranges in jobs]
    starts = np.concatenate([[0], np.cumsum(np.concatenate([none, *counts]))]).astype(np.int64)
    return (
        starts,
        np.concatenate([none, *(ranges.destinations + job.address for job, ranges in jobs)]),
        np.concatenate([none, *(ranges.offsets for _, ranges in jobs)]),
        np.concatenate([none, *(ranges.lengths for _, ranges in jobs)]),
    )


def _columns_of_heads(heads: Any) -> Columns:
    """Return the columns that read the metadata of each object."""
    import numpy as np

    count = len(heads)
    return (
        np.arange(count + 1, dtype=np.int64),
        heads.ctypes.data + np.arange(count, dtype=np.int64) * METADATA_BYTES,
        np.zeros(count, dtype=np.int64),
        np.full(count, METADATA_BYTES, dtype=np.int64),
    )


def _with_heads(columns: Columns, heads: Any) -> Columns:
    """Return columns with one more range for each object, its metadata.

    It is read in the same call, since an object may be replaced between two calls but not within
    one.
    """
    import numpy as np

    starts, *values = columns
    ends = starts[1:]
    of_heads = _columns_of_heads(heads)
    added = [np.insert(own, ends, head) for own, head in zip(values, of_heads[1:], strict=True)]
    return (starts + of_heads[0], added[0], added[1], added[2])


def _result(rows: Sequence[tuple[Part, Any, int | MooncakeError]]) -> MooncakeError | None:
    """Return the failure of one job from the outcomes of its objects."""
    for part, head, outcome in rows:
        if isinstance(outcome, MooncakeError):
            return outcome
        if head.tobytes() != part.head:
            return _native.failure(
                _LEASE_EXPIRED, "the object was replaced during the read", key=decoded(part.key)
            )
    return None
