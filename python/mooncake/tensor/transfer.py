"""Reads tensors into memory: lowers plans to ranged reads of all objects in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.errors import MooncakeError
from mooncake.tensor.calls import Operation, ReadRanges
from mooncake.tensor.format import METADATA_BYTES
from mooncake.tensor.memory import at_address
from mooncake.tensor.planner import (
    Grid,
    IncompleteError,
    Plan,
    Source,
    TooManyRangesError,
    grids,
    plan,
)
from mooncake.tensor.search import Found, invalid

if TYPE_CHECKING:
    from mooncake.tensor.search import Part

__all__ = ["Job", "fill", "replaced"]

_LEASE_EXPIRED = -707

_STAGED_BYTES_MAX = 256
"""Mean length of ranges below which a second copy costs less than reading them one by one."""

_STAGED_RANGES_MIN = 1024
"""Number of ranges from which they may be staged."""

_STAGED_EXCESS_MAX = 2
"""Maximum ratio of staged bytes to wanted bytes."""

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

    planned: list[tuple[Job, Plan | _Staged | MooncakeError]] = []
    for job in jobs:
        staged = None if is_registered else _stage(job)
        planned.append((job, staged or _plan(job.found)))
    valid = [(job, each) for job, each in planned if isinstance(each, Plan | _Staged)]
    parts = [part for job, _ in valid for part in job.found.parts]
    names = [decoded(part.key) for part in parts]
    heads = np.zeros((len(parts), METADATA_BYTES), dtype=np.uint8)
    columns = _columns(valid)
    # A staged read keeps its own memory, too.
    owners = [heads, valid]
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
    for job, each in planned:
        if isinstance(each, MooncakeError):
            results.append(each)
            continue
        results.append(_result([next(rows) for _ in job.found.parts]))
        if isinstance(each, _Staged) and results[-1] is None:
            each.scatter(job)
    return results


@dataclass(frozen=True, slots=True)
class _Staged:
    """A read of tiny pieces: the objects go to memory of this call, the pieces from there.

    Attributes:
        grids: The pieces of each object.
        memory: The objects, one after the other, each from its first piece to its last one.
        bounds: Where the objects begin in that memory, and where the last one ends.
    """

    grids: tuple[Grid, ...]
    memory: Any
    bounds: list[int]

    def columns(self) -> Columns:
        """Return the range of each object."""
        import numpy as np

        firsts = np.array(self.bounds[:-1], dtype=np.int64)
        return (
            np.arange(len(self.bounds), dtype=np.int64),
            self.memory.ctypes.data + firsts,
            np.array([grid.source[0] for grid in self.grids], dtype=np.int64),
            np.diff(np.array(self.bounds, dtype=np.int64)),
        )

    def scatter(self, job: Job) -> None:
        """Copy the pieces to the memory of the job."""
        import numpy as np

        found = job.found
        nbytes = math.prod(found.wanted.shape) * found.metadata.dtype.itemsize
        into = at_address(job.address, nbytes)
        for grid, start in zip(self.grids, self.bounds, strict=False):
            if grid.count == 0:
                continue
            shape = (*grid.extents, grid.length)
            (first, of_wanted), (_, of_source) = grid.wanted, grid.source
            pieces = np.ndarray(shape, np.uint8, self.memory, start, (*of_source, 1))
            np.ndarray(shape, np.uint8, into, first, (*of_wanted, 1))[...] = pieces


def _stage(job: Job) -> _Staged | None:
    """Return how to read a job of tiny pieces; None if its ranges are read one by one."""
    import numpy as np

    found, itemsize = job.found, job.found.metadata.dtype.itemsize
    if getattr(job.owner, "is_cuda", False):
        return None
    try:
        parts = grids(_sources(found), found.wanted, itemsize)
    except IncompleteError:
        return None
    wanted, ranges = sum(part.nbytes for part in parts), sum(part.count for part in parts)
    if ranges < _STAGED_RANGES_MIN or wanted >= ranges * _STAGED_BYTES_MAX:
        return None
    bounds = [0, *accumulate(part.span if part.count else 0 for part in parts)]
    if bounds[-1] > _STAGED_EXCESS_MAX * wanted:
        return None
    return _Staged(parts, np.empty(bounds[-1], dtype=np.uint8), bounds)


def _plan(found: Found) -> Plan | MooncakeError:
    """Plan a job; the plan has no ranges for a tensor without elements."""
    try:
        return plan(_sources(found), found.wanted, found.metadata.dtype.itemsize)
    except (IncompleteError, TooManyRangesError) as error:
        return invalid(found.key, str(error))


def _sources(found: Found) -> list[Source]:
    return [Source(part.box, part.metadata.data_offset) for part in found.parts]


def _columns_of(job: Job, ranges: Plan | _Staged) -> Columns:
    if isinstance(ranges, _Staged):
        return ranges.columns()
    return ranges.starts, ranges.destinations + job.address, ranges.offsets, ranges.lengths


def _columns(jobs: Sequence[tuple[Job, Plan | _Staged]]) -> Columns:
    """Return the ranges of all jobs as the columns of one call."""
    import numpy as np

    none = np.zeros(0, dtype=np.int64)
    tables = [_columns_of(job, ranges) for job, ranges in jobs]
    if len(tables) == 1:
        return tables[0]
    counts = np.concatenate([none, *(np.diff(table[0]) for table in tables)])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    addresses, offsets, lengths = (
        np.concatenate([none, *(table[column] for table in tables)]) for column in (1, 2, 3)
    )
    return starts, addresses, offsets, lengths


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
            return replaced(part.key)
    return None


def replaced(key: bytes) -> MooncakeError:
    """Return the failure of a read whose object was replaced meanwhile."""
    text = "the object was replaced during the read"
    return _native.failure(_LEASE_EXPIRED, text, key=decoded(key))
