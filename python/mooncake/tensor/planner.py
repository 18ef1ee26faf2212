"""Plans of reads: from stored boxes of a tensor to a wanted box, as columns of byte ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mooncake.tensor.layout import Box

    Column: TypeAlias = NDArray[np.int64]

__all__ = [
    "RANGES_MAX",
    "Grid",
    "IncompleteError",
    "Plan",
    "Source",
    "TooManyRangesError",
    "grids",
    "plan",
    "plan_of",
]

RANGES_MAX = 1 << 24
"""Maximum number of ranges of a plan, which take 400 MB; a plan with more is refused."""


class IncompleteError(ValueError):
    """The sources do not cover the wanted box exactly once."""


class TooManyRangesError(ValueError):
    """The plan would have more than `RANGES_MAX` ranges."""


@dataclass(frozen=True, slots=True)
class Source:
    """A stored object that holds a box of the tensor, row by row.

    Attributes:
        box: The part of the tensor.
        data_offset: Offset of its first element in the object.
    """

    box: Box
    data_offset: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Byte ranges to read, grouped by source.

    The ranges of source ``i`` are those from ``starts[i]`` to ``starts[i + 1]``. Adjacent ranges
    are merged: no shorter plan has the same effect.

    Attributes:
        starts: First range of each source, and the number of all ranges at the end.
        offsets: Offset of each range in the object of its source.
        destinations: Offset of each range in the memory of the wanted box.
        lengths: Length of each range in bytes.
    """

    starts: Column
    offsets: Column
    destinations: Column
    lengths: Column

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def nbytes(self) -> int:
        """Number of bytes that are read."""
        return int(self.lengths.sum())


def plan(sources: Sequence[Source], wanted: Box, itemsize: int) -> Plan:
    """Plan the reads that fill the memory of a box, row by row, from stored boxes.

    Args:
        sources: The stored boxes; they must not overlap within the wanted box.
        wanted: The box to read.
        itemsize: Length of an element in bytes.

    Raises:
        IncompleteError: The sources do not cover the box exactly once.
        TooManyRangesError: The pieces are too small; read whole sources instead.
    """
    return plan_of(grids(sources, wanted, itemsize))


def plan_of(parts: Sequence[Grid]) -> Plan:
    """Plan the reads of grids.

    Raises:
        TooManyRangesError: The pieces are too small; read whole sources instead.
    """
    import numpy as np

    counts = [part.count for part in parts]
    if sum(counts) > RANGES_MAX:
        raise TooManyRangesError(
            f"the read has too many ranges ranges={sum(counts)} limit={RANGES_MAX}"
        )
    starts = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    columns = np.empty((3, int(starts[-1])), dtype=np.int64)
    for part, first, end in zip(parts, starts[:-1], starts[1:], strict=True):
        if end - first == 1:
            columns[:, first] = part.source[0], part.wanted[0], part.length
        elif end > first:
            columns[0, first:end] = part.offsets()
            columns[1, first:end] = part.destinations()
            columns[2, first:end] = part.length
    return Plan(starts, columns[0], columns[1], columns[2])


def grids(sources: Sequence[Source], wanted: Box, itemsize: int) -> tuple[Grid, ...]:
    """Return the ranges to read of each source, as a grid.

    Raises:
        IncompleteError: The sources do not cover the box exactly once.
    """
    return _grids(tuple(sources), wanted, itemsize)


# A read of the same part again, as of the same layer's weights, costs no plan.
@functools.lru_cache(maxsize=256)
def _grids(sources: tuple[Source, ...], wanted: Box, itemsize: int) -> tuple[Grid, ...]:
    parts = tuple(_grid_of(source, wanted, itemsize) for source in sources)
    found, expected = sum(part.nbytes for part in parts), math.prod(wanted.shape) * itemsize
    if found != expected:
        raise IncompleteError(
            f"the stored parts do not cover the wanted part once wanted_bytes={expected} "
            f"stored_bytes={found}"
        )
    return parts


@dataclass(frozen=True, slots=True)
class Grid:
    """The ranges of one source: equally long, at the points of a regular grid.

    Attributes:
        extents: Number of points along each dimension of the grid, outermost first.
        source: Offset of the first point in the object, and the distance of points along each
            dimension.
        wanted: The same in the memory of the wanted box.
        length: Length of each range in bytes.
    """

    extents: tuple[int, ...]
    source: tuple[int, tuple[int, ...]]
    wanted: tuple[int, tuple[int, ...]]
    length: int

    @property
    def count(self) -> int:
        """Number of ranges."""
        return math.prod(self.extents) if self.length else 0

    @property
    def nbytes(self) -> int:
        """Length of all ranges together."""
        return self.count * self.length

    @property
    def span(self) -> int:
        """Distance from the first byte in the object to the end of the last range."""
        steps = zip(self.extents, self.source[1], strict=True)
        return sum((extent - 1) * step for extent, step in steps) + self.length

    def offsets(self) -> Column:
        """Return the offset of each range in the object."""
        return _points(self.extents, *self.source)

    def destinations(self) -> Column:
        """Return the offset of each range in the memory of the wanted box."""
        return _points(self.extents, *self.wanted)


def _points(extents: tuple[int, ...], first: int, distances: tuple[int, ...]) -> Column:
    import numpy as np

    points = np.full(1, first, dtype=np.int64)
    for extent, distance in zip(extents, distances, strict=True):
        along = np.arange(extent, dtype=np.int64) * distance
        points = (points[:, None] + along[None, :]).reshape(-1)
    return points


def _grid_of(source: Source, wanted: Box, itemsize: int) -> Grid:
    box = source.box
    start = tuple(map(max, box.start, wanted.start))
    stop = tuple(map(min, box.stop, wanted.stop))
    common = tuple(high - low for low, high in zip(start, stop, strict=True))
    if any(extent <= 0 for extent in common):
        return Grid((), (0, ()), (0, ()), 0)
    of_source, of_wanted = _strides(box.shape, itemsize), _strides(wanted.shape, itemsize)
    # The dimensions from `outer` on are contiguous on both sides: inside of the first of them only
    # whole rows of either box are taken.
    outer = len(common)
    length = itemsize
    while outer > 0:
        outer -= 1
        length *= common[outer]
        if not common[outer] == box.shape[outer] == wanted.shape[outer]:
            break
    first = source.data_offset + _offset(start, box.start, of_source)
    return Grid(
        common[:outer],
        (first, of_source[:outer]),
        (_offset(start, wanted.start, of_wanted), of_wanted[:outer]),
        length,
    )


def _strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _offset(point: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((at - base) * step for at, base, step in zip(point, origin, strides, strict=True))
