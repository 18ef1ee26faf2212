"""Reads tensors into memory: lowers plans to ranged reads of all objects in one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from mooncake._api.values import decoded
from mooncake._runtime import _native
from mooncake.errors import MooncakeError
from mooncake.tensor.calls import MemoryGrid, Operation, ReadGrids
from mooncake.tensor.format import GENERATION_TAG, METADATA_BYTES
from mooncake.tensor.memory import at_address
from mooncake.tensor.planner import Grid, IncompleteError, Source, plan
from mooncake.tensor.search import Evidence, Found, invalid, mixed

__all__ = ["RANGES_MAX", "Job", "fill", "replaced"]

_LEASE_EXPIRED = -707

_STAGED_BYTES_MAX = 256
"""Mean length of ranges below which a second copy costs less than reading them one by one."""

_STAGED_RANGES_MIN = 1024
"""Number of ranges from which they may be staged."""

_STAGED_EXCESS_MAX = 2
"""Maximum ratio of staged bytes to wanted bytes."""

RANGES_MAX = 1 << 24
"""Maximum number of ranges of a read, whose transfer takes 1 GB for them; more are refused."""


@dataclass(frozen=True, slots=True)
class Job:
    """A part of a tensor to read, and the memory to fill.

    Attributes:
        found: The objects to read it from.
        address: Address of the memory.
        owner: Object that keeps the memory.
        evidence: What must still be so, or the tensor would be found elsewhere.
    """

    found: Found
    address: int
    owner: object
    evidence: tuple[Evidence, ...] = ()


def fill(
    jobs: Sequence[Job], *, lease: bool, is_registered: bool = False
) -> Operation[list[MooncakeError | None]]:
    """Fill the memory of each job.

    Args:
        jobs: What to read.
        lease: Lease the objects.
        is_registered: Refuse memory that is not registered.

    Returns:
        For each job None or its failure, after which the content of the memory is undefined.
    """
    planned = [(job, _ranges_of(job, is_registered=is_registered)) for job in jobs]
    valid = [(job, each) for job, each in planned if isinstance(each, _Direct | _Staged)]
    rows = [row for job, each in valid for row in _rows_of(job, each)]
    names = [decoded(row.evidence.key) for row in rows]
    data = [row.grids for row in rows]
    starts = list(accumulate((row.evidence.length for row in rows), initial=0))
    heads = bytearray(starts[-1])
    base, _ = _native.writable_range(heads)
    # The heads are read in the same call, since an object may be replaced between two calls but not
    # within one.
    checks: list[list[MemoryGrid]] = [
        [(base + start, 0, row.evidence.length, ())]
        for row, start in zip(rows, starts, strict=False)
    ]
    # A staged read keeps its own memory, too.
    owners = [heads, valid]
    # Parts that were written by one call are of one version, parts of two calls are not.
    tag = GENERATION_TAG if any(len(job.found.parts) > 1 for job, _ in valid) else ""
    if is_registered:
        # The heads are read into memory of this call, which is not registered.
        outcomes = yield ReadGrids(names, data, owners, is_registered=True, lease=lease, tag=tag)
        checked = yield ReadGrids(names, checks, owners, lease=lease)
        outcomes = [
            check
            if isinstance(check, MooncakeError) and not isinstance(outcome, MooncakeError)
            else outcome
            for outcome, check in zip(outcomes, checked, strict=True)
        ]
    else:
        grids = [[*own, *check] for own, check in zip(data, checks, strict=True)]
        outcomes = yield ReadGrids(names, grids, owners, lease=lease, tag=tag)
    read = [
        row.failure(outcome, heads[start : start + row.evidence.length])
        for row, outcome, start in zip(rows, outcomes, starts, strict=False)
    ]
    first = 0
    results: list[MooncakeError | None] = []
    for job, each in planned:
        if isinstance(each, MooncakeError):
            results.append(each)
            continue
        parts = len(job.found.parts)
        after = first + parts + len(job.evidence)
        failed = next(filter(None, read[first:after]), None)
        if failed is None and parts > 1:
            written = {outcome[2] for outcome in outcomes[first : first + parts]}
            if len(written) > 1:
                failed = mixed(job.found.key, sorted(written))
        first = after
        results.append(failed)
        if isinstance(each, _Staged) and failed is None:
            each.scatter(job)
    return results


@dataclass(frozen=True, slots=True)
class _Row:
    """An object of a read.

    Attributes:
        evidence: What it must begin with.
        grids: The ranges to read of it.
        is_part: Whether it holds a part of the tensor; else it tells where the parts are.
    """

    evidence: Evidence
    grids: list[MemoryGrid]
    is_part: bool

    def failure(self, outcome: Any, head: bytearray) -> MooncakeError | None:
        """Return the failure of the read, if it has failed."""
        if self.is_part and isinstance(outcome, MooncakeError):
            return outcome
        return None if self.evidence.is_confirmed(outcome, head) else replaced(self.evidence.key)


def _rows_of(job: Job, planned: _Direct | _Staged) -> list[_Row]:
    """Return the parts of a job and its evidence."""
    parts = zip(job.found.parts, planned.memory_grids(), strict=True)
    rows = [
        _Row(Evidence(part.key, METADATA_BYTES, part.head), grids, is_part=True)
        for part, grids in parts
    ]
    return rows + [_Row(evidence, [], is_part=False) for evidence in job.evidence]


@dataclass(frozen=True, slots=True)
class _Direct:
    """A read that goes to the memory of the job.

    Attributes:
        grids: The ranges of each object.
        address: Address of the memory.
    """

    grids: tuple[Grid, ...]
    address: int

    def memory_grids(self) -> list[list[MemoryGrid]]:
        """Return the ranges of each object, with their memory."""
        return [
            [(self.address + grid.destination, grid.offset, grid.length, grid.dimensions)]
            if grid.length
            else []
            for grid in self.grids
        ]


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

    def memory_grids(self) -> list[list[MemoryGrid]]:
        """Return the range of each object, with its memory."""
        address: int = self.memory.ctypes.data
        return [
            [(address + start, grid.offset, grid.span, ())] if grid.length else []
            for grid, start in zip(self.grids, self.bounds, strict=False)
        ]

    def scatter(self, job: Job) -> None:
        """Copy the pieces to the memory of the job."""
        import numpy as np

        found = job.found
        nbytes = math.prod(found.wanted.shape) * found.metadata.dtype.itemsize
        into = at_address(job.address, nbytes)
        for grid, start in zip(self.grids, self.bounds, strict=False):
            if grid.length == 0:
                continue
            columns = [*zip(*grid.dimensions, strict=True)] or [(), (), ()]
            counts, of_source, of_wanted = columns
            shape = (*counts, grid.length)
            pieces = np.ndarray(shape, np.uint8, self.memory, start, (*of_source, 1))
            np.ndarray(shape, np.uint8, into, grid.destination, (*of_wanted, 1))[...] = pieces


def _ranges_of(job: Job, *, is_registered: bool) -> _Direct | _Staged | MooncakeError:
    """Return how to read a job; no ranges for a tensor without elements."""
    found = job.found
    sources = tuple(Source(part.box, part.metadata.data_offset) for part in found.parts)
    try:
        grids = plan(sources, found.wanted, found.metadata.dtype.itemsize)
    except IncompleteError as error:
        return invalid(found.key, str(error))
    staged = None if is_registered else _stage(job, grids)
    if staged is not None:
        return staged
    ranges = sum(grid.count for grid in grids)
    if ranges > RANGES_MAX:
        text = f"the read has too many ranges ranges={ranges} limit={RANGES_MAX}"
        return invalid(found.key, text)
    return _Direct(grids, job.address)


def _stage(job: Job, grids: tuple[Grid, ...]) -> _Staged | None:
    """Return how to read a job of tiny pieces; None if its ranges are read one by one."""
    if getattr(job.owner, "is_cuda", False):
        return None
    wanted, ranges = sum(grid.nbytes for grid in grids), sum(grid.count for grid in grids)
    if ranges < _STAGED_RANGES_MIN or wanted >= ranges * _STAGED_BYTES_MAX:
        return None
    bounds = [0, *accumulate(grid.span if grid.length else 0 for grid in grids)]
    if bounds[-1] > _STAGED_EXCESS_MAX * wanted:
        return None
    import numpy as np

    return _Staged(grids, np.empty(bounds[-1], dtype=np.uint8), bounds)


def replaced(key: str | bytes | None) -> MooncakeError:
    """Return the failure of a read whose object was replaced meanwhile."""
    text = "the object was replaced during the read"
    name = decoded(key) if isinstance(key, bytes) else key
    return _native.failure(_LEASE_EXPIRED, text, key=name)
