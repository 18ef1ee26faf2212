"""Plans of reads: from stored boxes of a tensor to a wanted box, as grids of byte ranges."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.tensor.calls import Dimension
from mooncake.tensor.layout import Box

__all__ = ["Grid", "IncompleteError", "Source", "plan"]


class IncompleteError(ValueError):
    """The sources do not cover the wanted box exactly once."""


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
class Grid:
    """The ranges to read of one source: of one length, at regular distances.

    Adjacent ranges are merged: no shorter list has the same effect.

    Attributes:
        offset: Offset of the first range in the object.
        destination: Offset of the first range in the memory of the wanted box.
        length: Length of each range in bytes; 0 if nothing is read of the source.
        dimensions: Number of ranges along each dimension, and their distances in the object and in
            the memory of the wanted box, outermost first. Without dimensions it is one range.
        count: Number of ranges.
        nbytes: Length of all ranges together.
    """

    offset: int
    destination: int
    length: int
    dimensions: tuple[Dimension, ...] = ()
    count: int = field(init=False, compare=False)
    nbytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Count the ranges, once for all reads of a plan."""
        count = math.prod(count for count, _, _ in self.dimensions) if self.length else 0
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "nbytes", count * self.length)

    @property
    def span(self) -> int:
        """Distance from the first byte in the object to the end of the last range."""
        return sum((count - 1) * step for count, step, _ in self.dimensions) + self.length


# A read of the same part again, as of the same layer's weights, costs no plan.
@functools.lru_cache(maxsize=256)
def plan(sources: tuple[Source, ...], wanted: Box, itemsize: int) -> tuple[Grid, ...]:
    """Plan the reads that fill the memory of a box, row by row, from stored boxes.

    Args:
        sources: The stored boxes; they must not overlap within the wanted box.
        wanted: The box to read.
        itemsize: Length of an element in bytes.

    Returns:
        The ranges to read of each source.

    Raises:
        IncompleteError: The sources do not cover the box exactly once.
    """
    parts = tuple(_grid_of(source, wanted, itemsize) for source in sources)
    found, expected = sum(part.nbytes for part in parts), math.prod(wanted.shape) * itemsize
    if found != expected:
        raise IncompleteError(
            f"the stored parts do not cover the wanted part once wanted_bytes={expected} "
            f"stored_bytes={found}"
        )
    return parts


def _grid_of(source: Source, wanted: Box, itemsize: int) -> Grid:
    box = source.box
    start = tuple(map(max, box.start, wanted.start))
    stop = tuple(map(min, box.stop, wanted.stop))
    common = tuple(high - low for low, high in zip(start, stop, strict=True))
    if any(extent <= 0 for extent in common):
        return Grid(0, 0, 0)
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
    return Grid(
        source.data_offset + _offset(start, box.start, of_source),
        _offset(start, wanted.start, of_wanted),
        length,
        tuple(zip(common[:outer], of_source, of_wanted, strict=False)),
    )


def _strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides, step = [], itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _offset(point: Sequence[int], origin: Sequence[int], strides: Sequence[int]) -> int:
    return sum((at - base) * step for at, base, step in zip(point, origin, strides, strict=True))
