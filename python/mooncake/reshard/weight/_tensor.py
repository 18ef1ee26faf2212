"""Tensors of a model, and the fragments of them that participants hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

from .._checks import (
    content_id,
    optional_integer,
    require_distinct,
    require_integer,
    require_integers,
    require_sequence,
    require_text,
    require_u64,
    set_fields,
)
from ..contracts import PlacementFragmentId, TensorId
from ._axes import (
    AXIS_KINDS,
    OwnershipAxis,
    ParallelAxis,
    ParallelAxisKind,
    ParallelRank,
    ReplicatedAxis,
    SplitAxis,
)

__all__ = [
    "PlacementFragment",
    "TensorDescriptor",
    "TensorPart",
    "check_geometry",
    "checked_aliases",
    "validate_fragment_geometry",
]


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor of a model, and how it is spread along the parallel axes.

    `shard_dims` are the dimensions that are split, in ascending order; `parallel_axes` says by
    which axis. `layout_fingerprint` names the order of the elements in memory: only tensors with
    the same fingerprint are copied to each other.

    Raises:
        ValueError: A field is out of its limits, or the fields contradict each other.
    """

    tensor_id: TensorId
    global_shape: tuple[int, ...]
    dtype: str
    itemsize: int
    shard_dims: tuple[int, ...]
    layout_fingerprint: str
    parallel_axes: tuple[ParallelAxis, ...]
    layer_id: int | None = None
    expert_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("tensor_id", "dtype", "layout_fingerprint"):
            require_text(getattr(self, name), name)
        shape = _checked_shape(self.global_shape)
        if not shape:
            raise ValueError("global_shape must have at least one dimension")
        require_integer(self.itemsize, "itemsize", minimum=1)
        set_fields(
            self,
            global_shape=shape,
            shard_dims=_checked_shard_dims(self.shard_dims, len(shape)),
            parallel_axes=_in_axis_order(self.parallel_axes),
        )
        optional_integer(self.layer_id, "layer_id")
        optional_integer(self.expert_id, "expert_id")
        self._validate_split_axes()

    def _validate_split_axes(self) -> None:
        splits = [axis for axis in self.parallel_axes if isinstance(axis, SplitAxis)]
        if len({axis.dim for axis in splits}) < len(splits):
            raise ValueError(f"split axes share a dimension: tensor_id={self.tensor_id}")
        dims = len(self.global_shape)
        for axis in splits:
            if axis.dim >= dims:
                raise ValueError(
                    f"split axis dimension is out of range: tensor_id={self.tensor_id} "
                    f"dim={axis.dim} dimensions={dims}"
                )
        if tuple(sorted(axis.dim for axis in splits)) != self.shard_dims:
            raise ValueError(
                "parallel axis split dimensions conflict with shard_dims: "
                f"tensor_id={self.tensor_id} shard_dims={self.shard_dims}"
            )
        for axis in splits:
            if axis.kind != "ep":
                continue
            if self.expert_id is not None:
                raise ValueError(
                    "ep cannot split an individually allocated expert; use an OwnershipAxis: "
                    f"tensor_id={self.tensor_id} expert_id={self.expert_id}"
                )

    @property
    def split_axes(self) -> tuple[SplitAxis, ...]:
        """The axes that split the tensor."""
        return tuple(axis for axis in self.parallel_axes if isinstance(axis, SplitAxis))

    def axis_kinds(
        self, semantics: type[SplitAxis | ReplicatedAxis | OwnershipAxis]
    ) -> tuple[ParallelAxisKind, ...]:
        """Return the kinds of the axes along which the tensor behaves in one way."""
        return tuple(axis.kind for axis in self.parallel_axes if isinstance(axis, semantics))


class TensorPart(Protocol):
    """A box of a tensor in a dense buffer of its own."""

    @property
    def tensor_id(self) -> TensorId:
        """The tensor."""

    @property
    def fragment_id(self) -> str:
        """The id of the fragment."""

    @property
    def global_offset(self) -> tuple[int, ...]:
        """The first index in each dimension of the tensor."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The extent in each dimension."""

    @property
    def nbytes(self) -> int:
        """The size of the buffer."""


@dataclass(frozen=True, init=False)
class PlacementFragment:
    """The box of a tensor that one rank holds, as a dense array.

    `aliases` are the tensors that share this memory, the tensor itself among them. The id is
    computed from the content unless it is given.

    Raises:
        ValueError: A field is out of its limits.
    """

    tensor_id: TensorId
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    nbytes: int
    rank: ParallelRank
    pipeline_stage_id: int | None
    aliases: tuple[TensorId, ...]
    placement_fragment_id: PlacementFragmentId

    def __init__(
        self,
        tensor_id: TensorId,
        global_offset: tuple[int, ...],
        local_shape: tuple[int, ...],
        nbytes: int,
        rank: ParallelRank,
        pipeline_stage_id: int | None = None,
        aliases: tuple[TensorId, ...] = (),
        placement_fragment_id: PlacementFragmentId | None = None,
    ) -> None:
        require_text(tensor_id, "tensor_id")
        if not isinstance(rank, ParallelRank):
            raise ValueError(f"rank must be a ParallelRank, not {type(rank).__name__}")
        set_fields(
            self,
            tensor_id=tensor_id,
            global_offset=require_integers(global_offset, "global_offset"),
            local_shape=require_integers(local_shape, "local_shape", minimum=1),
            nbytes=require_u64(nbytes, "nbytes", minimum=1),
            rank=rank,
            pipeline_stage_id=optional_integer(pipeline_stage_id, "pipeline_stage_id"),
            aliases=checked_aliases(aliases, tensor_id),
        )
        if placement_fragment_id is None:
            content = {"schema": "weight-placement-fragment", **self.content()}
            placement_fragment_id = PlacementFragmentId(content_id(content))
        require_text(placement_fragment_id, "placement_fragment_id")
        set_fields(self, placement_fragment_id=placement_fragment_id)

    @property
    def fragment_id(self) -> PlacementFragmentId:
        """The id of the fragment."""
        return self.placement_fragment_id

    def content(self) -> dict[str, object]:
        """Return the fields, without the id, as they are written to JSON."""
        rank = {kind: self.rank.on(kind) for kind in AXIS_KINDS}
        stage = self.pipeline_stage_id
        return {
            "aliases": list(self.aliases),
            "global_offset": list(self.global_offset),
            "local_shape": list(self.local_shape),
            "nbytes": self.nbytes,
            "rank": rank,
            "tensor_id": self.tensor_id,
            **({} if stage is None else {"pipeline_stage_id": stage}),
        }


def checked_aliases(aliases: object, tensor_id: TensorId) -> tuple[TensorId, ...]:
    """Return the tensors that share a fragment's memory, in order; none if it is not shared."""
    ids = [
        TensorId(require_text(alias, "aliases must contain non-empty strings: alias"))
        for alias in require_sequence(aliases, "aliases")
    ]
    require_distinct(ids, "entry of aliases")
    if ids and (tensor_id not in ids or len(ids) < 2):
        raise ValueError(
            f"aliases must name the tensor itself and at least one other: "
            f"tensor_id={tensor_id} aliases={ids}"
        )
    return tuple(sorted(ids))


def validate_fragment_geometry(tensor: TensorDescriptor, fragment: TensorPart) -> None:
    """Refuse a fragment that is not a box of the tensor, or has another size than its box."""
    check_geometry(
        tensor,
        fragment.fragment_id,
        fragment.global_offset,
        fragment.local_shape,
        fragment.nbytes,
    )


def check_geometry(
    tensor: TensorDescriptor,
    fragment_id: str,
    global_offset: tuple[int, ...],
    local_shape: tuple[int, ...],
    nbytes: int,
) -> None:
    """Refuse a box that is not in the tensor, or has another size than `nbytes`."""
    named = f"tensor_id={tensor.tensor_id} fragment_id={fragment_id}"
    dims = len(tensor.global_shape)
    if len(global_offset) != dims or len(local_shape) != dims:
        raise ValueError(
            f"fragment rank mismatch: {fragment_id}: it must have the tensor's {dims} "
            f"dimensions: {named}"
        )
    for dim, extent in enumerate(tensor.global_shape):
        end = global_offset[dim] + local_shape[dim]
        if end > extent:
            raise ValueError(
                f"a fragment is out of bounds: dim={dim} end={end} extent={extent} {named}"
            )
    expected = prod(local_shape) * tensor.itemsize
    if nbytes != expected:
        raise ValueError(
            f"byte size mismatch of a fragment and its box: nbytes={nbytes} "
            f"expected={expected} {named}"
        )


def _checked_shape(shape: object) -> tuple[int, ...]:
    return require_integers(shape, "global_shape", minimum=1)


def _checked_shard_dims(shard_dims: object, dims: int) -> tuple[int, ...]:
    checked = require_integers(shard_dims, "shard_dims")
    if len(set(checked)) < len(checked):
        raise ValueError(f"shard_dims contains duplicates: shard_dims={checked}")
    if list(checked) != sorted(checked):
        raise ValueError(f"shard_dims must be sorted in ascending order: shard_dims={checked}")
    if checked and checked[-1] >= dims:
        raise ValueError(
            f"shard_dims contains an out-of-range dimension: dims={dims} shard_dims={checked}"
        )
    return checked


def _in_axis_order(axes: object) -> tuple[ParallelAxis, ...]:
    checked: list[ParallelAxis] = []
    for axis in require_sequence(axes, "TensorDescriptor parallel_axes"):
        if not isinstance(axis, SplitAxis | ReplicatedAxis | OwnershipAxis):
            raise ValueError(
                "TensorDescriptor parallel_axes must contain explicit axis values, as SplitAxis, "
                f"not {type(axis).__name__}"
            )
        checked.append(axis)
    require_distinct([axis.kind for axis in checked], "parallel axis kind")
    return tuple(sorted(checked, key=lambda axis: AXIS_KINDS.index(axis.kind)))
