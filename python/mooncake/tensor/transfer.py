"""Reads tensors into memory: lowers plans to ranged reads of all objects in one call."""

from __future__ import annotations

import functools
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
    plan_of,
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

_KEPT_RANGES_MAX = 512
"""Number of ranges up to which the table of a read is kept; building a larger one is little of the
read."""

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

    planned = [(job, _ranges_of(job, is_registered=is_registered)) for job in jobs]
    valid = [(job, each) for job, each in planned if isinstance(each, _Direct | _Staged)]
    parts = [part for job, _ in valid for part in job.found.parts]
    names = [decoded(part.key) for part in parts]
    heads = np.zeros((len(parts), METADATA_BYTES), dtype=np.uint8)
    columns = _columns([each for _, each in valid], heads)
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
        outcomes = yield ReadRanges(names, columns, owners)
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
class _Table:
    """Ranges to read, grouped by object; the last range of an object may be its metadata.

    The metadata is read in the same call, since an object may be replaced between two calls but not
    within one.

    Attributes:
        starts: First range of each object, and the number of all ranges at the end.
        destinations: Offset of each range in the memory to fill.
        offsets: Offset of each range in its object.
        lengths: Length of each range in bytes.
        heads: The ranges that are metadata, if it is read.
    """

    starts: Any
    destinations: Any
    offsets: Any
    lengths: Any
    heads: Any

    @staticmethod
    def of(plan: Plan, *, has_heads: bool) -> _Table:
        """Return the ranges of a plan."""
        import numpy as np

        if not has_heads:
            none = np.zeros(0, dtype=np.int64)
            return _Table(plan.starts, plan.destinations, plan.offsets, plan.lengths, none)
        count = len(plan.starts) - 1
        starts = plan.starts + np.arange(count + 1)
        heads = starts[1:] - 1
        columns = np.zeros((3, len(plan) + count), dtype=np.int64)
        is_data = np.ones(len(plan) + count, dtype=bool)
        is_data[heads] = False
        columns[:, is_data] = plan.destinations, plan.offsets, plan.lengths
        columns[2, heads] = METADATA_BYTES
        return _Table(starts, columns[0], columns[1], columns[2], heads)


# A read of the same part again, as of another layer with the same shape, costs no table.
@functools.lru_cache(maxsize=256)
def _kept_table(parts: tuple[Grid, ...], has_heads: bool) -> _Table:
    return _Table.of(plan_of(parts), has_heads=has_heads)


def _table(parts: tuple[Grid, ...], *, has_heads: bool) -> _Table:
    if sum(part.count for part in parts) <= _KEPT_RANGES_MAX:
        return _kept_table(parts, has_heads)
    return _Table.of(plan_of(parts), has_heads=has_heads)


@dataclass(frozen=True, slots=True)
class _Direct:
    """A read that goes to the memory of the job.

    Attributes:
        table: The ranges.
        address: Address of the memory.
    """

    table: _Table
    address: int


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

    @property
    def address(self) -> int:
        """Address of the memory."""
        address: int = self.memory.ctypes.data
        return address

    @property
    def table(self) -> _Table:
        """The range of each object, and its metadata."""
        import numpy as np

        bounds = np.array(self.bounds, dtype=np.int64)
        starts = np.arange(len(bounds), dtype=np.int64)
        offsets = np.array([grid.source[0] for grid in self.grids], dtype=np.int64)
        return _Table.of(Plan(starts, offsets, bounds[:-1], np.diff(bounds)), has_heads=True)

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


def _ranges_of(job: Job, *, is_registered: bool) -> _Direct | _Staged | MooncakeError:
    """Return how to read a job; no ranges for a tensor without elements."""
    found = job.found
    sources = [Source(part.box, part.metadata.data_offset) for part in found.parts]
    try:
        parts = grids(sources, found.wanted, found.metadata.dtype.itemsize)
        staged = None if is_registered else _stage(job, parts)
        return staged or _Direct(_table(parts, has_heads=not is_registered), job.address)
    except (IncompleteError, TooManyRangesError) as error:
        return invalid(found.key, str(error))


def _stage(job: Job, parts: tuple[Grid, ...]) -> _Staged | None:
    """Return how to read a job of tiny pieces; None if its ranges are read one by one."""
    import numpy as np

    if getattr(job.owner, "is_cuda", False):
        return None
    wanted, ranges = sum(part.nbytes for part in parts), sum(part.count for part in parts)
    if ranges < _STAGED_RANGES_MIN or wanted >= ranges * _STAGED_BYTES_MAX:
        return None
    bounds = [0, *accumulate(part.span if part.count else 0 for part in parts)]
    if bounds[-1] > _STAGED_EXCESS_MAX * wanted:
        return None
    return _Staged(parts, np.empty(bounds[-1], dtype=np.uint8), bounds)


def _columns(jobs: Sequence[_Direct | _Staged], heads: Any) -> Columns:
    """Return the ranges of all jobs as the columns of one call.

    Args:
        jobs: The ranges of each job.
        heads: Memory for the metadata of each object, if the tables have it.
    """
    import numpy as np

    tables = [job.table for job in jobs]
    of_heads = heads.ctypes.data + np.arange(len(heads), dtype=np.int64) * METADATA_BYTES
    columns = []
    for job, table in zip(jobs, tables, strict=True):
        addresses = table.destinations + job.address
        addresses[table.heads] = of_heads[: len(table.heads)]
        of_heads = of_heads[len(table.heads) :]
        columns.append((addresses, table.offsets, table.lengths))
    if len(tables) == 1:
        return tables[0].starts, *columns[0]
    none = np.zeros(0, dtype=np.int64)
    counts = np.concatenate([none, *(np.diff(table.starts) for table in tables)])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    addresses, offsets, lengths = (
        np.concatenate([none, *(own[at] for own in columns)]) for at in range(3)
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
