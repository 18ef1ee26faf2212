"""Reads tensors into memory: lowers plans to ranged reads of all objects in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake._runtime import _native
from mooncake._values import decoded
from mooncake.errors import MooncakeError
from mooncake.tensor.calls import Operation, ReadRanges
from mooncake.tensor.format import METADATA_BYTES
from mooncake.tensor.inventory import Found, invalid
from mooncake.tensor.planner import IncompleteError, Plan, Source, TooManyRangesError, plan

if TYPE_CHECKING:
    from mooncake.tensor.inventory import Part

__all__ = ["Job", "fill"]

_LEASE_EXPIRED = -707


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
    heads = np.zeros((len(parts), METADATA_BYTES), dtype=np.uint8)
    columns = _columns(valid, heads)
    names = [decoded(part.key) for part in parts]
    owners = [heads, *(job.owner for job, _ in valid)]
    outcomes = yield ReadRanges(names, columns, owners, is_registered)
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


def _columns(jobs: Sequence[tuple[Job, Plan]], heads: Any) -> tuple[Any, Any, Any, Any]:
    """Return the columns of one call: of each object its ranges, then its metadata.

    The metadata is read in the same call, since an object may be replaced between two calls but not
    within one.
    """
    import numpy as np

    counts = [np.diff(ranges.starts) + 1 for _, ranges in jobs]
    starts = np.zeros(len(heads) + 1, dtype=np.int64)
    if counts:
        np.cumsum(np.concatenate(counts), out=starts[1:])
    columns = [np.empty(int(starts[-1]), dtype=np.int64) for _ in range(3)]
    at_heads = starts[1:] - 1
    is_range = np.ones(len(columns[0]), dtype=bool)
    is_range[at_heads] = False
    addresses, offsets, lengths = columns
    addresses[at_heads] = heads.ctypes.data + np.arange(len(heads), dtype=np.int64) * METADATA_BYTES
    offsets[at_heads] = 0
    lengths[at_heads] = METADATA_BYTES
    if jobs:
        addresses[is_range] = np.concatenate(
            [ranges.destinations + job.address for job, ranges in jobs]
        )
        offsets[is_range] = np.concatenate([ranges.offsets for _, ranges in jobs])
        lengths[is_range] = np.concatenate([ranges.lengths for _, ranges in jobs])
    return starts, addresses, offsets, lengths


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
