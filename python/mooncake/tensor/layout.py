"""Layouts: how a tensor is split over ranks, and which box of the tensor a shard holds.

An axis is one dimension of parallelism, with the rank of a process on it:

| Kind | Meaning | Its shards |
|---|---|---|
| ``tp`` | tensor parallelism | split the tensor along one dimension |
| ``dp`` | data parallelism | are replicas, one for each rank |
| ``ep`` | expert parallelism | are the tensors of different experts |
| ``pp`` | pipeline parallelism | are the tensors of different stages |

Only a ``tp`` axis splits a tensor. The ids of ``ep`` and ``pp`` axes select one of several tensors
under the same key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from mooncake.tensor.format import AXIS_KINDS, AxisKind

__all__ = [
    "RANKS_MAX",
    "Axis",
    "AxisKind",
    "Box",
    "Layout",
    "Shard",
    "Split",
    "split_bounds",
]

Split: TypeAlias = Literal["chunk", "tensor_split"]
"""Rule for a dimension whose extent is not a multiple of the number of ranks.

``"chunk"`` gives every rank but the last ones ``ceil(extent / size)``, as `torch.chunk`; the last
ranks may get nothing. ``"tensor_split"`` gives the first ranks one more than the others, as
`torch.tensor_split` and `numpy.array_split`.
"""

RANKS_MAX = 65_536
"""Maximum number of ranks on an axis."""

_SPLITS: tuple[Split, ...] = get_args(Split)
_ID_NAMES = {"ep": "expert", "pp": "stage"}


@dataclass(frozen=True, slots=True)
class Axis:
    """A rank on one axis of parallelism.

    Attributes:
        kind: ``"tp"``, ``"dp"``, ``"ep"`` or ``"pp"``.
        rank: Rank on the axis, from 0.
        size: Number of ranks.
        dim: Dimension that a ``tp`` axis splits; None for the other kinds.
        id: Expert of an ``ep`` axis, or stage of a ``pp`` axis; None for the other kinds.
    """

    kind: AxisKind
    rank: int
    size: int
    dim: int | None = None
    id: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that no axis can have.

        Raises:
            ValueError: The kind is unknown, the rank is out of range, or `dim` or `id` is missing
                or does not belong to this kind.
        """
        if self.kind not in AXIS_KINDS:
            raise ValueError(
                f"unknown kind of axis kind={self.kind!r} known={', '.join(AXIS_KINDS)}"
            )
        if not 1 <= self.size <= RANKS_MAX:
            raise ValueError(
                f"an axis has 1 to {RANKS_MAX} ranks axis={self.kind} size={self.size}"
            )
        if not 0 <= self.rank < self.size:
            raise ValueError(
                f"the rank is outside of its axis axis={self.kind} rank={self.rank} "
                f"size={self.size}"
            )
        self._check_member("dim", self.dim, self.kind == "tp")
        self._check_member("id", self.id, self.kind in _ID_NAMES)

    def _check_member(self, name: str, value: int | None, is_required: bool) -> None:
        if is_required and value is None:
            meaning = _ID_NAMES.get(self.kind, "dimension that is split")
            raise ValueError(f"an axis of this kind needs {name} ({meaning}) axis={self.kind}")
        if not is_required and value is not None:
            raise ValueError(f"an axis of this kind has no {name} axis={self.kind} {name}={value}")
        if value is not None and value < 0:
            raise ValueError(f"{name} is negative axis={self.kind} {name}={value}")

    def __str__(self) -> str:
        text = f"{self.kind}={self.rank}/{self.size}"
        if self.dim is not None:
            text += f" dim={self.dim}"
        if self.id is not None:
            text += f" {_ID_NAMES[self.kind]}={self.id}"
        return text

    @classmethod
    def tp(cls, rank: int, size: int, dim: int = 0) -> Axis:
        """Return a rank of a tensor that is split over `size` ranks along `dim`."""
        return cls("tp", rank, size, dim=dim)

    @classmethod
    def dp(cls, rank: int, size: int) -> Axis:
        """Return a rank that holds one of `size` replicas."""
        return cls("dp", rank, size)

    @classmethod
    def ep(cls, rank: int, size: int, expert: int) -> Axis:
        """Return a rank that holds an expert."""
        return cls("ep", rank, size, id=expert)

    @classmethod
    def pp(cls, rank: int, size: int, stage: int) -> Axis:
        """Return a rank that holds a pipeline stage."""
        return cls("pp", rank, size, id=stage)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor: for each dimension a half-open range of indices."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    def narrow(self, dim: int, start: int, stop: int) -> Box:
        """Return the part of the box with another range of one dimension."""
        starts, stops = list(self.start), list(self.stop)
        starts[dim], stops[dim] = start, stop
        return Box(tuple(starts), tuple(stops))

    def overlaps(self, other: Box) -> bool:
        """Return whether the boxes have an element in common."""
        starts, stops = map(max, self.start, other.start), map(min, self.stop, other.stop)
        return all(start < stop for start, stop in zip(starts, stops, strict=True))


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of a tensor: its rank on each axis of parallelism.

    Attributes:
        axes: The axes, at most one of each kind; kept in the order dp, tp, ep, pp.
        split: Rule for a dimension whose extent is not a multiple of the number of ``tp`` ranks.

    Example:
        >>> Shard.tp(1, 4, dim=0).box((10, 3))
        Box(start=(3, 0), stop=(6, 3))
    """

    axes: tuple[Axis, ...]
    split: Split = "chunk"

    def __post_init__(self) -> None:
        """Refuse axes that cannot be combined.

        Raises:
            ValueError: There is no axis, two axes are of the same kind, or the rule is unknown.
        """
        kinds = [axis.kind for axis in self.axes]
        if not kinds:
            raise ValueError("a shard has at least one axis")
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"a shard has at most one axis of each kind axes={', '.join(kinds)}")
        if self.split not in _SPLITS:
            known = ", ".join(_SPLITS)
            raise ValueError(f"unknown rule split={self.split!r} known={known}")
        ordered = sorted(self.axes, key=lambda axis: AXIS_KINDS.index(axis.kind))
        object.__setattr__(self, "axes", tuple(ordered))

    @classmethod
    def tp(cls, rank: int, size: int, dim: int = 0, *, split: Split = "chunk") -> Shard:
        """Return one of `size` shards of a tensor that is split along `dim` only."""
        return cls((Axis.tp(rank, size, dim),), split)

    def axis(self, kind: AxisKind) -> Axis | None:
        """Return the axis of a kind, or None."""
        return next((axis for axis in self.axes if axis.kind == kind), None)

    def box(self, shape: Sequence[int]) -> Box:
        """Return the part of a tensor of that shape that the shard holds.

        Raises:
            ValueError: The tensor does not have the dimension that is split.
        """
        whole = Box.whole(shape)
        axis = self.axis("tp")
        if axis is None:
            return whole
        dim = check_dim(axis.dim, shape)
        bounds = split_bounds(shape[dim], axis.size, self.split)
        return whole.narrow(dim, bounds[axis.rank], bounds[axis.rank + 1])

    def __str__(self) -> str:
        return " ".join(map(str, self.axes))


@dataclass(frozen=True, slots=True)
class Layout:
    """All shards of a tensor that is split over ranks along one dimension.

    Attributes:
        size: Number of shards.
        dim: Dimension that is split.
        split: Rule for an extent that is not a multiple of `size`.
        axes: Axes that all shards share, for instance the expert to which the tensor belongs.

    Example:
        >>> [shard.box((10,)).shape for shard in Layout(4).shards()]
        [(3,), (3,), (3,), (1,)]
    """

    size: int
    dim: int = 0
    split: Split = "chunk"
    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no shard can have.

        Raises:
            ValueError: As for `Axis` and `Shard`.
        """
        self.shard(0)

    def shard(self, rank: int) -> Shard:
        """Return the shard of a rank."""
        return Shard((*self.axes, Axis.tp(rank, self.size, self.dim)), self.split)

    def shards(self) -> Iterator[Shard]:
        """Return all shards, in order of their ranks."""
        return (self.shard(rank) for rank in range(self.size))


def split_bounds(extent: int, size: int, split: Split = "chunk") -> list[int]:
    """Return where the shards of a dimension begin, and where the last one ends.

    Args:
        extent: Extent of the dimension.
        size: Number of shards.
        split: Rule for an extent that is not a multiple of `size`.

    Returns:
        ``size + 1`` indices: shard ``i`` is the range from number ``i`` to number ``i + 1``.
    """
    if split == "chunk":
        step = -(-extent // size)
        return [min(rank * step, extent) for rank in range(size + 1)]
    base, longer = divmod(extent, size)
    return [rank * base + min(rank, longer) for rank in range(size + 1)]


def check_dim(dim: int | None, shape: Sequence[int]) -> int:
    """Return the dimension that is split, if a tensor of that shape has it.

    Raises:
        ValueError: The tensor has fewer dimensions.
    """
    if dim is None or not 0 <= dim < len(shape):
        raise ValueError(
            f"the tensor does not have the dimension that is split dim={dim} "
            f"dimensions={len(shape)} shape={tuple(shape)}"
        )
    return dim
