"""Boxes in the index space of a tensor: containment, overlap, exact cover."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "LogicalBox",
    "OverlapRegion",
    "box_contains",
    "boxes_exactly_cover",
    "boxes_overlap",
    "regions_exactly_cover",
]

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
    """Returns whether the inner box lies in the outer one.

    Raises:
        ValueError: The boxes do not have the same number of dimensions.
    """
    return all(
        outer <= inner and inner + inner_extent <= outer + outer_extent
        for outer, outer_extent, inner, inner_extent in zip(
            outer_offset, outer_shape, inner_offset, inner_shape, strict=True
        )
    )


def intersection(first: Box, second: Box) -> Box | None:
    """Returns the box that two boxes share, or None if they share no element."""
    starts = tuple(map(max, first[0], second[0]))
    ends = tuple(
        min(a + a_extent, b + b_extent)
        for a, a_extent, b, b_extent in zip(*first, *second, strict=True)
    )
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return starts, tuple(end - start for start, end in zip(starts, ends, strict=True))


def boxes_overlap(boxes: Sequence[Box]) -> bool:
    """Returns whether any two of the boxes share an element.

    Raises:
        ValueError: The boxes do not have the same number of dimensions.
    """
    filled = [box for box in boxes if prod(box[1])]
    dims = {len(extents) for box in filled for extents in box}
    if len(dims) > 1:
        raise ValueError(f"boxes must have the same number of dimensions: {sorted(dims)}")
    if dims == {0}:
        return len(filled) > 1
    if not filled:
        return False
    # Sweep along the dimension that separates most boxes; compare those that are open at a time.
    dim = max(range(dims.pop()), key=lambda d: len({offset[d] for offset, _ in filled}))
    filled.sort(key=lambda box: box[0][dim])
    opened: list[Box] = []
    for box in filled:
        start = box[0][dim]
        opened = [other for other in opened if other[0][dim] + other[1][dim] > start]
        if any(intersection(box, other) for other in opened):
            return True
        opened.append(box)
    return False


def boxes_exactly_cover(
    container_offset: tuple[int, ...], container_shape: tuple[int, ...], boxes: Sequence[Box]
) -> bool:
    """Returns whether each element of the container is in one box, and no box goes beyond it.

    Raises:
        ValueError: The boxes do not have the same number of dimensions as the container.
    """
    if not boxes:
        return False
    inside = all(box_contains(container_offset, container_shape, *box) for box in boxes)
    volume = sum(prod(shape) for _, shape in boxes)
    return inside and volume == prod(container_shape) and not boxes_overlap(boxes)


def regions_exactly_cover(target: LogicalBox, regions: Iterable[OverlapRegion]) -> bool:
    """Returns whether each element of the target is in one region, and no region goes beyond it."""
    boxes = [(region.overlap_offset, region.overlap_shape) for region in regions]
    return boxes_exactly_cover(target.global_offset, target.local_shape, boxes)
