"""Parallel axes: the rank of a participant, and how a tensor behaves along each axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from .._checks import require_integer, require_text

__all__ = [
    "AXIS_KINDS",
    "SPLIT_AXIS_KINDS",
    "OwnershipAxis",
    "ParallelAxis",
    "ParallelAxisKind",
    "ParallelRank",
    "ReplicatedAxis",
    "SplitAxis",
    "SplitAxisKind",
    "require_axis_kind",
]

ParallelAxisKind = Literal["dp", "pp", "ep", "tp"]
SplitAxisKind = Literal["ep", "tp"]

# The order in which a descriptor lists its axes.
AXIS_KINDS: tuple[ParallelAxisKind, ...] = ("dp", "pp", "ep", "tp")
SPLIT_AXIS_KINDS: tuple[SplitAxisKind, ...] = ("ep", "tp")


@dataclass(frozen=True)
class ParallelRank:
    """The coordinates of a participant on the four parallel axes."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0

    def __post_init__(self) -> None:
        for kind in AXIS_KINDS:
            require_integer(self.on(kind), f"parallel rank {kind}")

    def on(self, kind: ParallelAxisKind) -> int:
        """Return the coordinate on one axis."""
        return cast("int", getattr(self, kind))


@dataclass(frozen=True)
class SplitAxis:
    """Along this axis each rank holds another part of dimension `dim`."""

    kind: SplitAxisKind
    dim: int

    def __post_init__(self) -> None:
        if require_axis_kind(self.kind) not in SPLIT_AXIS_KINDS:
            raise ValueError(f"only ep and tp have split semantics: kind={self.kind}")
        require_integer(self.dim, "split axis dim")
        if self.kind == "ep" and self.dim != 0:
            raise ValueError(f"EP must split the leading dimension, of experts: dim={self.dim}")


@dataclass(frozen=True)
class ReplicatedAxis:
    """Along this axis each rank holds the same part of the tensor."""

    kind: ParallelAxisKind

    def __post_init__(self) -> None:
        require_axis_kind(self.kind)


@dataclass(frozen=True)
class OwnershipAxis:
    """Along this axis only some ranks hold the tensor, each of them whole."""

    kind: ParallelAxisKind

    def __post_init__(self) -> None:
        require_axis_kind(self.kind)


ParallelAxis: TypeAlias = SplitAxis | ReplicatedAxis | OwnershipAxis


def require_axis_kind(kind: object) -> ParallelAxisKind:
    """Return `kind` if it names a parallel axis."""
    text = require_text(kind, "parallel axis kind")
    if text not in AXIS_KINDS:
        raise ValueError(
            f"unsupported parallel axis kind: {text}: there are {', '.join(AXIS_KINDS)}"
        )
    return text
