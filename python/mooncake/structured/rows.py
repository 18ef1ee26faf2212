"""Rows of a member or of a batch: the selections that callers make, and the ranges to read."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mooncake.structured.payloads import Array

__all__ = [
    "RowSpan",
    "StructuredMemberSlice",
    "covering_span",
    "row_spans",
    "rows_of",
    "sliced_rows",
]

# More runs of rows than this are read together with what lies between them, unless they are long.
_RUNS_MAX: Final = 256
_RUN_BYTES_MIN: Final = 64 << 10


@dataclass(frozen=True)
class StructuredMemberSlice:
    """A slice of a member along an axis, with the meaning of Python's slices.

    Attributes:
        axis: Always 0.
        start: First row.
        end: End of the rows.
        step: Distance of the rows.
    """

    axis: int
    start: int
    end: int
    step: int = 1


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows that are read together.

    Attributes:
        first: Number of the first row.
        count: Number of rows.
        at: Position of the first row in the result.
    """

    first: int
    count: int
    at: int


def sliced_rows(member_slice: StructuredMemberSlice, total: int, what: str) -> Array:
    """Return the numbers of the rows that a slice selects.

    Args:
        member_slice: The slice.
        total: Number of rows.
        what: What is sliced, for errors.

    Raises:
        ValueError: The axis is not 0, or the step is not positive.
    """
    if member_slice.axis != 0:
        raise ValueError(f"{what} slicing currently supports axis=0 only")
    if member_slice.step <= 0:
        raise ValueError(f"{what} slicing step must be positive")
    bounds = slice(member_slice.start, member_slice.end, member_slice.step).indices(total)
    return np.arange(*bounds, dtype=np.int64)


def rows_of(rows: Any, total: int) -> Array | None:
    """Return the numbers of the rows that a caller selects; None for all rows.

    Args:
        rows: A slice, a `StructuredMemberSlice`, or row numbers, of which negative ones count from
            the end.
        total: Number of rows.

    Raises:
        IndexError: There is no such row.
        TypeError: The selection is none of these, or a mask of booleans.
        ValueError: The step of a slice is not positive, or the axis is not 0.
    """
    if rows is None:
        return None
    if isinstance(rows, slice):
        if rows.step is not None and rows.step <= 0:
            raise ValueError("DataProto row slicing step must be positive")
        return np.arange(*rows.indices(total), dtype=np.int64)
    if isinstance(rows, StructuredMemberSlice):
        return sliced_rows(rows, total, "DataProto row")
    is_array = isinstance(rows, np.ndarray) and rows.ndim == 1 and rows.dtype.kind in "iu"
    if not is_array and (not isinstance(rows, Sequence) or isinstance(rows, str | bytes)):
        raise TypeError(
            "DataProto rows must be a slice, StructuredMemberSlice, or row index sequence"
        )
    # Upstream takes single booleans for numbers; as many as there are rows are meant as a mask.
    if not is_array and len(rows) == total > 0 and all(type(row) is bool for row in rows):
        raise TypeError(
            "DataProto row indices must be integers, not bool: select with numpy.flatnonzero(mask)"
        )
    numbers: list[int] = []
    for row in rows:
        if isinstance(row, np.bool_) or not hasattr(row, "__index__"):
            raise TypeError(f"DataProto row indices must be integers, not {type(row).__name__}")
        number = operator.index(row)
        if not -total <= number < total:
            raise IndexError(f"DataProto row index {number} out of range for {total} rows")
        numbers.append(number % total)
    return np.array(numbers, dtype=np.int64)


def row_spans(rows: Array, row_bytes: int) -> list[RowSpan] | None:
    """Return the runs of consecutive rows; None if it is faster to read all rows between.

    Args:
        rows: Numbers of the rows, in the order of the result.
        row_bytes: Length of a row.
    """
    if len(rows) == 0:
        return []
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    if len(breaks) >= _RUNS_MAX and len(rows) * row_bytes < _RUN_BYTES_MIN * len(breaks):
        return None
    bounds = [0, *breaks.tolist(), len(rows)]
    return [
        RowSpan(int(rows[first]), last - first, first) for first, last in itertools.pairwise(bounds)
    ]


def covering_span(rows: Array) -> RowSpan:
    """Return the rows from the first to the last of some rows."""
    first = int(rows.min())
    return RowSpan(first, int(rows.max()) + 1 - first, 0)
