"""Boxes in the index space of a tensor: containment, overlap, exact cover."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import prod
from typing import Protocol, TypeAlias

__all__ = [
    "LogicalBox",
    "OverlapRegion",
    "box_contains",
    "boxes_exactly_cover",
    "boxes_overlap",
    "regions_exactly_cover",
]

# Comparisons of two boxes of three or more dimensions in one check, which take a few seconds.
COMPARISONS_MAX = 1_000_000

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offset and shape


class LogicalBox(Protocol):
    """A box of a tensor."""

    @property
    def global_offset(self) -> tuple[int, ...]:
        """The first index in each dimension of the tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The extent in each dimension."""


class OverlapRegion(Protocol):
    """The part of a tensor that a transfer moves."""

    @property
    def overlap_offset(self) -> tuple[int, ...]:
        """The first index in each dimension of the tensor."""

    @property
    def overlap_shape(self) -> tuple[int, ...]:
        """The extent in each dimension."""


def box_contains(
    outer_offset: tuple[int, ...],
    outer_shape: tuple[int, ...],
    inner_offset: tuple[int, ...],
    inner_shape: tuple[int, ...],
) -> bool:
    """Return whether the inner box lies in the outer one.

    Raises:
        ValueError: The boxes do not have the same number of dimensions.
    """
    lengths = {len(part) for part in (outer_offset, outer_shape, inner_offset, inner_shape)}
    if len(lengths) > 1:
        raise ValueError(f"boxes have different lengths: dimensions={sorted(lengths)}")
    return all(
        outer <= inner and inner + inner_extent <= outer + outer_extent
        for outer, outer_extent, inner, inner_extent in zip(
            outer_offset, outer_shape, inner_offset, inner_shape, strict=True
        )
    )


def intersection(first: Box, second: Box) -> Box | None:
    """Return the box that two boxes share, or None if they share no element."""
    starts = tuple(map(max, first[0], second[0]))
    ends = tuple(
        min(a + a_extent, b + b_extent)
        for a, a_extent, b, b_extent in zip(*first, *second, strict=True)
    )
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


def boxes_overlap(boxes: Sequence[Box]) -> bool:
    """Return whether any two of the boxes share an element.

    In one and two dimensions the work grows as that of sorting. In more, it is limited.

    Raises:
        ValueError: The boxes do not have the same number of dimensions, or more than
            `COMPARISONS_MAX` pairs of boxes of three or more dimensions had to be compared.
    """
    filled = [box for box in boxes if min(box[1], default=1) > 0]
    dims = {len(extents) for box in filled for extents in box}
    if len(dims) > 1:
        raise ValueError(f"boxes have different lengths: dimensions={sorted(dims)}")
    if len(filled) < 2:
        return False
    count = dims.pop()
    if count == 0:
        return True
    # Sweep along the dimension that tells most boxes apart: fewest are open at a time.
    intervals = [
        len({(offset[dim], shape[dim]) for offset, shape in filled}) for dim in range(count)
    ]
    swept = intervals.index(max(intervals))
    filled.sort(key=lambda box: box[0][swept])
    if count == 1:
        return any(first[0][0] + first[1][0] > second[0][0] for first, second in pairwise(filled))
    return _rectangles_overlap(filled, swept) if count == 2 else _solids_overlap(filled, swept)


def _rectangles_overlap(boxes: Sequence[Box], swept: int) -> bool:
    """Return whether rectangles, sorted by their start in the dimension `swept`, overlap.

    The intervals of the open rectangles in the other dimension are disjoint, or an overlap was
    found. They are kept in order, so that a rectangle is compared with its two neighbours only.
    """
    across = 1 - swept
    starts: list[int] = []  # of the open intervals, sorted
    ends: list[int] = []
    closing: list[tuple[int, int]] = []  # heap of: end in the dimension swept, start across
    for offset, shape in boxes:
        while closing and closing[0][0] <= offset[swept]:
            index = bisect_left(starts, heappop(closing)[1])
            del starts[index], ends[index]
        start, end = offset[across], offset[across] + shape[across]
        index = bisect_left(starts, start)
        if (index > 0 and ends[index - 1] > start) or (index < len(starts) and starts[index] < end):
            return True
        starts.insert(index, start)
        ends.insert(index, end)
        heappush(closing, (offset[swept] + shape[swept], start))
    return False


def _solids_overlap(boxes: Sequence[Box], swept: int) -> bool:
    """Return whether boxes, sorted by their start in the dimension `swept`, overlap."""
    opened: list[Box] = []
    compared = 0
    for box in boxes:
        start = box[0][swept]
        opened = [other for other in opened if other[0][swept] + other[1][swept] > start]
        for other in opened:
            compared += 1
            if compared > COMPARISONS_MAX:
                raise ValueError(
                    "boxes exceed the high-dimensional overlap budget: merge them, or describe "
                    f"them in two dimensions: boxes={len(boxes)} comparisons={COMPARISONS_MAX}"
                )
            if intersection(box, other) is not None:
                return True
        opened.append(box)
    return False


def boxes_exactly_cover(
    container_offset: tuple[int, ...], container_shape: tuple[int, ...], boxes: Sequence[Box]
) -> bool:
    """Return whether each element of the container is in one box, and no box goes beyond it.

    Raises:
        ValueError: The boxes do not have the same number of dimensions as the container.
    """
    if not boxes:
        return False
    inside = all(box_contains(container_offset, container_shape, *box) for box in boxes)
    volume = sum(prod(shape) for _, shape in boxes)
    return inside and volume == prod(container_shape) and not boxes_overlap(boxes)


def regions_exactly_cover(target: LogicalBox, regions: Iterable[OverlapRegion]) -> bool:
    """Return whether each element of the target is in one region, and no region goes beyond it."""
    boxes = [(region.overlap_offset, region.overlap_shape) for region in regions]
    return boxes_exactly_cover(target.global_offset, target.local_shape, boxes)
