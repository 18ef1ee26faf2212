"""Regions of a transfer: strided copies between the dense buffers of two fragments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Generic, TypeVar

from .._checks import require_integer, require_integers, require_text, set_fields
from ..contracts import TensorId
from ..contracts.fragments import canonical_strides_bytes
from ..geometry import Box, box_contains
from ._tensor import TensorPart

__all__ = [
    "PlanningLimits",
    "RegionLoops",
    "TransferRegion",
    "derive_loops",
    "region_between",
]

_Source = TypeVar("_Source", bound=TensorPart)
_Target = TypeVar("_Target", bound=TensorPart)


@dataclass(frozen=True)
class PlanningLimits:
    """Limits of a plan, so that a hostile placement cannot exhaust the memory."""

    max_transfer_regions: int = 1_000_000
    max_segments_per_region: int = 1_000_000
    max_total_lowered_segments: int = 10_000_000

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _require_positive(getattr(self, name), name)


@dataclass(frozen=True)
class RegionLoops:
    """The copies of a region: `inner_bytes` for each step of nested loops, outermost first."""

    source_base_offset: int
    target_base_offset: int
    inner_bytes: int
    outer_loop_counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


@dataclass(frozen=True)
class TransferRegion(Generic[_Source, _Target]):
    """The box that a source and a target fragment share, as nested strided copies.

    Offsets and strides are in bytes from the beginning of each fragment's dense buffer.

    Raises:
        ValueError: The box is not inside both fragments, or the loops do not copy that box.
    """

    tensor_id: TensorId
    source: _Source
    target: _Target
    overlap_offset: tuple[int, ...]
    overlap_shape: tuple[int, ...]
    source_base_offset: int
    target_base_offset: int
    inner_bytes: int
    outer_loop_counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        require_text(self.tensor_id, "transfer region tensor_id must not be empty: tensor_id")
        for name, minimum in (
            ("overlap_offset", 0),
            ("overlap_shape", 1),
            ("outer_loop_counts", 1),
            ("source_strides", 1),
            ("target_strides", 1),
        ):
            label = f"transfer region {name}"
            integers = require_integers(getattr(self, name), label, minimum=minimum)
            set_fields(self, **{name: integers})
        for name, minimum in (
            ("source_base_offset", 0), ("target_base_offset", 0), ("inner_bytes", 1),
        ):  # fmt: skip
            require_integer(getattr(self, name), f"transfer region {name}", minimum=minimum)
        self.validate_bounds()

    @property
    def segment_count(self) -> int:
        """The number of contiguous copies."""
        return prod(self.outer_loop_counts)

    @property
    def total_bytes(self) -> int:
        """The bytes of all copies."""
        return self.inner_bytes * self.segment_count

    @property
    def source_offset(self) -> int:
        """The offset of the first copy in the source fragment."""
        return self.source_base_offset

    @property
    def target_offset(self) -> int:
        """The offset of the first copy in the target fragment."""
        return self.target_base_offset

    @property
    def nbytes(self) -> int:
        """The bytes of one copy."""
        return self.inner_bytes

    @property
    def repeat(self) -> int:
        """The number of contiguous copies."""
        return self.segment_count

    @property
    def source_stride(self) -> int:
        """The distance of copies in the source fragment, 0 if there is one copy.

        Raises:
            ValueError: The region has more than one loop.
        """
        return _only_stride(self.source_strides)

    @property
    def target_stride(self) -> int:
        """The distance of copies in the target fragment, 0 if there is one copy.

        Raises:
            ValueError: The region has more than one loop.
        """
        return _only_stride(self.target_strides)

    def validate_bounds(self) -> None:
        """Refuse a region that leaves its fragments, or whose loops do not copy its box.

        Raises:
            ValueError: It does.
        """
        for side, fragment in (("source", self.source), ("target", self.target)):
            if fragment.tensor_id != self.tensor_id:
                raise ValueError(
                    f"transfer region tensor mismatch: the {side} fragment is of another tensor: "
                    f"{fragment.tensor_id}, not {self.tensor_id}"
                )
            box = (fragment.global_offset, fragment.local_shape)
            if not box_contains(*box, self.overlap_offset, self.overlap_shape):
                raise ValueError(
                    f"transfer region exceeds {side} logical fragment: "
                    f"offset={self.overlap_offset} shape={self.overlap_shape} "
                    f"fragment_id={fragment.fragment_id}"
                )
        loops = derive_loops(self.source, self.target, (self.overlap_offset, self.overlap_shape))
        for name in RegionLoops.__dataclass_fields__:
            given, derived = getattr(self, name), getattr(loops, name)
            if given != derived:
                raise ValueError(
                    "transfer region loop geometry does not match overlap: the loops are not the "
                    "canonical ones of its box: "
                    f"{name}={given}, not {derived}"
                )

    def iter_segments(self, *, max_segments: int) -> Iterator[tuple[int, int, int]]:
        """Yield source offset, target offset and length of each contiguous copy, in order.

        Raises:
            ValueError: There are more than `max_segments`; before the first is yielded.
        """
        require_integer(max_segments, "max_segments", minimum=1)
        if self.segment_count > max_segments:
            raise ValueError(
                f"the region exceeds max_segments: {self.segment_count} > {max_segments}"
            )
        return self._segments()

    def _segments(self) -> Iterator[tuple[int, int, int]]:
        for steps in product(*(range(count) for count in self.outer_loop_counts)):
            yield (
                self.source_base_offset + _dot(steps, self.source_strides),
                self.target_base_offset + _dot(steps, self.target_strides),
                self.inner_bytes,
            )


def _require_positive(value: object, name: str) -> None:
    """Refuse a limit that allows nothing."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"planning limit {name} must be a positive integer, at least 1: {name}={value!r}"
        )


def region_between(source: _Source, target: _Target, box: Box) -> TransferRegion[_Source, _Target]:
    """Return the region that copies a box from one fragment to another."""
    loops = derive_loops(source, target, box)
    return TransferRegion(source.tensor_id, source, target, *box, **vars(loops))


def derive_loops(source: TensorPart, target: TensorPart, box: Box) -> RegionLoops:
    """Return the loops that copy a box between two dense buffers.

    The trailing dimensions that the box fills in both fragments are contiguous, together with
    the part of the dimension before them. All dimensions before that one are loops, also those
    with one step.
    """
    shape = box[1]
    inner = len(shape) - 1
    while inner > 0 and shape[inner] == source.local_shape[inner] == target.local_shape[inner]:
        inner -= 1
    inner = max(inner, 0)
    itemsize = source.nbytes // prod(source.local_shape)
    source_strides = canonical_strides_bytes(source.local_shape, itemsize)
    target_strides = canonical_strides_bytes(target.local_shape, itemsize)
    return RegionLoops(
        source_base_offset=_dot(_relative(box[0], source.global_offset), source_strides),
        target_base_offset=_dot(_relative(box[0], target.global_offset), target_strides),
        inner_bytes=prod(shape[inner:]) * itemsize,
        outer_loop_counts=shape[:inner],
        source_strides=source_strides[:inner],
        target_strides=target_strides[:inner],
    )


def _relative(offset: tuple[int, ...], origin: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(index - start for index, start in zip(offset, origin, strict=True))


def _dot(steps: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(step * stride for step, stride in zip(steps, strides, strict=True))


def _only_stride(strides: tuple[int, ...]) -> int:
    if len(strides) > 1:
        raise ValueError(f"the region has {len(strides)} nested loops, each with its own stride")
    return strides[0] if strides else 0
