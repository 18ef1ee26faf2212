"""`ParallelAxis`, `TensorParallelism` and `ReadTarget`: upstream's words for shards, and ours.

Any object with the same attributes is accepted in the place of these classes.
"""

from __future__ import annotations

import operator
from typing import Any

from mooncake.tensor.format import AXES_MAX, AXIS_KINDS, AxisKind
from mooncake.tensor.layout import Axis, Shard

__all__ = ["ParallelAxis", "ReadTarget", "TensorParallelism", "shard_of", "target_of", "writer_of"]

_MODES = ("as_stored", "shard", "full")
_KINDS: dict[str, AxisKind] = {kind: kind for kind in AXIS_KINDS}


class ParallelAxis:
    """A rank on one axis of parallelism.

    Attributes:
        kind: ``"tp"``, ``"dp"``, ``"ep"`` or ``"pp"``, in upper or lower case.
        rank: Rank on the axis, from 0.
        size: Number of ranks.
        split_dim: Dimension that a ``tp`` axis splits; None for the other kinds.
        expert_id: Expert of an ``ep`` axis.
        stage_id: Stage of a ``pp`` axis.
    """

    __slots__ = ("expert_id", "kind", "rank", "size", "split_dim", "stage_id")

    def __init__(self) -> None:
        """Make an axis without a kind; assign the attributes."""
        self.kind = ""
        self.rank = 0
        self.size = 1
        self.split_dim: int | None = None
        self.expert_id: int | None = None
        self.stage_id: int | None = None

    def __repr__(self) -> str:
        return f"<ParallelAxis {self.kind}={self.rank}/{self.size}>"


class TensorParallelism:
    """The axes of a shard."""

    __slots__ = ("_axes",)

    def __init__(self) -> None:
        """Make a shard without axes; assign `axes`."""
        self._axes: list[Any] = []

    @property
    def axes(self) -> list[Any]:
        """The axes, as a new list: assign the list to change it."""
        return list(self._axes)

    @axes.setter
    def axes(self, axes: list[Any]) -> None:
        self._axes = list(axes)

    def __repr__(self) -> str:
        return f"<TensorParallelism axes={self._axes!r}>"


class ReadTarget:
    """What a read returns.

    Attributes:
        parallelism: The shard that is wanted, for the mode ``"shard"``. For the mode ``"full"`` its
            expert and stage.
    """

    __slots__ = ("_mode", "parallelism")

    def __init__(self) -> None:
        """Make a target that is the object as stored."""
        self._mode = "as_stored"
        self.parallelism: Any = None

    @property
    def mode(self) -> str:
        """``"as_stored"``, ``"shard"`` or ``"full"``; assignment ignores the case.

        Raises:
            RuntimeError: On assignment, there is no such mode.
        """
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if not isinstance(mode, str):
            raise TypeError(f"mode must be a str, not {type(mode).__name__}")
        if mode.lower() not in _MODES:
            raise RuntimeError(f"Unsupported ReadTarget mode: {mode}")
        self._mode = mode.lower()

    def __repr__(self) -> str:
        return f"<ReadTarget {self._mode} parallelism={self.parallelism!r}>"


def shard_of(parallelism: Any) -> Shard:
    """Return the shard that a `TensorParallelism` names.

    Raises:
        ValueError: The axes are not those of a shard; the message says why.
    """
    axes = getattr(parallelism, "axes", None)
    if not isinstance(axes, list | tuple) or not 1 <= len(axes) <= AXES_MAX:
        raise ValueError(f"a parallelism has a list of 1 to {AXES_MAX} axes")
    return Shard(tuple(_axis_of(axis) for axis in axes))


def target_of(target: Any) -> tuple[str, Shard | None]:
    """Return the mode of a `ReadTarget`, and the shard that it names.

    Raises:
        ValueError: It is not a target, or names a shard that cannot be; the message says why.
    """
    if target is None:
        return "as_stored", None
    mode, parallelism = getattr(target, "mode", None), getattr(target, "parallelism", None)
    if not isinstance(mode, str) or mode.lower() not in _MODES:
        raise ValueError(f"unknown mode of a target mode={mode!r} known={', '.join(_MODES)}")
    shard = None if parallelism is None else shard_of(parallelism)
    if mode.lower() == "shard" and shard is None:
        raise ValueError("a target with the mode shard needs a parallelism")
    return mode.lower(), shard


def writer_of(partition: Any) -> Shard:
    """Return the shard that a writer's partition is: an object with rank, size and split_dim.

    Raises:
        ValueError: An attribute is missing or out of range.
    """
    rank, size, dim = (_integer(partition, name) for name in ("rank", "size", "split_dim"))
    if rank is None or size is None or dim is None:
        raise ValueError(
            "a writer partition is an object with the attributes rank, size, split_dim"
        )
    return Shard.tp(rank, size, dim)


def _axis_of(axis: Any) -> Axis:
    name = getattr(axis, "kind", None)
    kind = _KINDS.get(name.lower()) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown kind of axis kind={name!r} known={', '.join(AXIS_KINDS)}")
    rank, size, dim = (_integer(axis, name) for name in ("rank", "size", "split_dim"))
    id_ = _integer(axis, {"ep": "expert_id", "pp": "stage_id"}.get(kind, ""))
    if rank is None or size is None:
        raise ValueError(f"an axis has a rank and a size axis={kind}")
    return Axis(kind, rank, size, dim, id_)


def _integer(value: Any, name: str) -> int | None:
    number = getattr(value, name, None) if name else None
    if number is None or isinstance(number, bool):
        return None
    try:
        return operator.index(number)
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {type(number).__name__}") from None
