"""The memory of running participants that holds the fragments of a placement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .._checks import (
    require_distinct,
    require_items,
    require_sha256,
    require_text,
    require_u64,
    set_fields,
)
from ..contracts import (
    LeaseId,
    ParticipantId,
    PlacementFragmentId,
    PlacementId,
    ResourceId,
    ResourceKind,
    RevisionId,
    RuntimeBindingFragment,
    RuntimeInstanceId,
    TensorId,
    validate_resource_binding_identity,
)
from ..contracts.fragments import canonical_strides_bytes
from ._placement import WeightPlacementManifest, WeightPlacementPart
from ._tensor import PlacementFragment, TensorDescriptor

__all__ = [
    "WeightRuntimeBindingManifest",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]


@dataclass(frozen=True)
class WeightRuntimeBindingManifest:
    """The memory of one participant, a fragment per fragment of its part of the placement.

    Raises:
        ValueError: A field is out of its limits, or a fragment is bound twice.
    """

    resource_id: ResourceId
    placement_id: PlacementId
    placement_digest: str
    instance_id: RuntimeInstanceId
    generation: int
    lease_id: LeaseId
    revision: RevisionId
    participant_id: ParticipantId
    fragments: tuple[RuntimeBindingFragment, ...]

    def __post_init__(self) -> None:
        for name in (
            "resource_id", "placement_id", "instance_id", "lease_id", "revision", "participant_id",
        ):  # fmt: skip
            require_text(getattr(self, name), name)
        require_sha256(self.placement_digest, "placement_digest")
        require_u64(self.generation, "generation")
        fragments = require_items(
            self.fragments, "WeightRuntimeBindingManifest fragments", RuntimeBindingFragment
        )
        require_distinct([part.placement_fragment_id for part in fragments], "placement fragment")
        require_distinct([part.fragment_id for part in fragments], "runtime fragment_id")
        set_fields(self, fragments=fragments)

    @property
    def resource_kind(self) -> ResourceKind:
        """The kind of the resource: model weights."""
        return ResourceKind.MODEL_WEIGHT


def validate_runtime_binding(
    placement: WeightPlacementManifest, binding: WeightRuntimeBindingManifest
) -> None:
    """Refuse a binding that does not fit its participant's part of a placement.

    Raises:
        ValueError: The binding is for another placement, lacks a fragment or has one that the
            part has not, a fragment is not a dense array of the placed size, or memory is shared
            by fragments that are not declared as aliases.
    """
    _require_placement(placement)
    if not isinstance(binding, WeightRuntimeBindingManifest):
        kind = type(binding).__name__
        raise ValueError(f"binding must be a WeightRuntimeBindingManifest, not {kind}")
    _validate_bindings(placement, [binding])


def validate_runtime_bindings(placement: WeightPlacementManifest, bindings: object) -> None:
    """Refuse bindings that do not bind each participant with fragments once.

    Raises:
        ValueError: As `validate_runtime_binding`, a participant with fragments is missing or
            bound twice, or one without fragments is bound.
    """
    _require_placement(placement)
    checked = require_items(bindings, "runtime bindings", WeightRuntimeBindingManifest)
    ids = [binding.participant_id for binding in checked]
    require_distinct(ids, "runtime binding participant")
    _validate_bindings(placement, checked)
    wanted = {part.participant_id for part in placement.parts if part.fragments}
    for name, left in (("missing", wanted.difference(ids)), ("unknown", set(ids) - wanted)):
        if left:
            raise ValueError(f"{name} runtime binding participant: participant_id={min(left)}")


def _validate_bindings(
    placement: WeightPlacementManifest, bindings: Sequence[WeightRuntimeBindingManifest]
) -> None:
    tensors = {tensor.tensor_id: tensor for tensor in placement.tensors}
    parts = {part.participant_id: part for part in placement.parts}
    # Addresses are comparable within one address space: an instance, its worker and a device.
    spaces: dict[tuple[str, str, str], list[_BoundFragment]] = defaultdict(list)
    for binding in bindings:
        validate_resource_binding_identity(placement, binding)
        if binding.revision != placement.revision:
            raise ValueError(
                "the binding has another revision than the placement: "
                f"{binding.revision!r} and {placement.revision!r}"
            )
        part = parts.get(binding.participant_id)
        if part is None:
            raise ValueError(
                "unknown runtime binding participant, which the placement has not: "
                f"participant_id={binding.participant_id}"
            )
        for bound in _bound_fragments(part, binding, tensors):
            memory = bound.memory
            spaces[binding.instance_id, memory.worker_id, memory.device].append(bound)
    for group in spaces.values():
        _validate_memory_is_disjoint(group, tensors)
        _validate_storages([bound.memory for bound in group])


def _require_placement(placement: object) -> None:
    if not isinstance(placement, WeightPlacementManifest):
        kind = type(placement).__name__
        raise ValueError(f"placement must be a WeightPlacementManifest, not {kind}")


def _validate_storages(group: list[RuntimeBindingFragment]) -> None:
    """Refuse storages that overlap: views name the same storage, or disjoint ones."""
    storages = sorted({(memory.storage_address, memory.storage_nbytes) for memory in group})
    for (start, size), (after, other) in pairwise(storages):
        if start + size > after:
            raise ValueError(
                "storage allocation ranges overlap: "
                f"address={start} nbytes={size} and address={after} nbytes={other}"
            )


@dataclass(frozen=True)
class _BoundFragment:
    placed: PlacementFragment
    memory: RuntimeBindingFragment


def _bound_fragments(
    part: WeightPlacementPart,
    binding: WeightRuntimeBindingManifest,
    tensors: dict[TensorId, TensorDescriptor],
) -> list[_BoundFragment]:
    placed: dict[PlacementFragmentId, PlacementFragment] = {
        fragment.placement_fragment_id: fragment for fragment in part.fragments
    }
    bound = []
    for memory in binding.fragments:
        fragment = placed.pop(memory.placement_fragment_id, None)
        if fragment is None:
            raise ValueError(
                "unknown placement fragment, which the participant's part has not: "
                f"placement_fragment_id={memory.placement_fragment_id} "
                f"participant_id={part.participant_id}"
            )
        _validate_memory_fits(fragment, memory, tensors[fragment.tensor_id].itemsize)
        bound.append(_BoundFragment(fragment, memory))
    for missing in placed:
        raise ValueError(
            f"missing placement fragment, which is not bound: placement_fragment_id={missing} "
            f"participant_id={part.participant_id}"
        )
    return bound


def _validate_memory_fits(
    fragment: PlacementFragment, memory: RuntimeBindingFragment, itemsize: int
) -> None:
    for name, bound, placed in (
        ("local_shape", memory.local_shape, fragment.local_shape),
        ("itemsize", memory.itemsize, itemsize),
        ("nbytes", memory.nbytes, fragment.nbytes),
        (
            "strides_bytes",
            memory.strides_bytes,
            canonical_strides_bytes(fragment.local_shape, itemsize),
        ),
    ):
        if bound != placed:
            label = "byte size" if name == "nbytes" else name
            raise ValueError(
                f"{label} of the bound memory differs from the placed fragment's: {bound}, not "
                f"{placed}: placement_fragment_id={fragment.placement_fragment_id}"
            )


def _validate_memory_is_disjoint(
    group: list[_BoundFragment], tensors: dict[TensorId, TensorDescriptor]
) -> None:
    """Refuse shared memory, except of aliases that are equal in all but the tensor's id."""
    group.sort(key=lambda bound: bound.memory.address)
    end, last = 0, None
    for bound in group:
        if bound.memory.address < end and last is not None and not _aliased(last, bound, tensors):
            raise ValueError(
                "address ranges overlap, of fragments that are no declared aliases: "
                f"fragment_id={last.memory.fragment_id} and {bound.memory.fragment_id} "
                f"address={bound.memory.address}"
            )
        if bound.memory.address + bound.memory.nbytes > end:
            end, last = bound.memory.address + bound.memory.nbytes, bound


def _aliased(
    first: _BoundFragment, second: _BoundFragment, tensors: dict[TensorId, TensorDescriptor]
) -> bool:
    one, other = tensors[first.placed.tensor_id], tensors[second.placed.tensor_id]
    return (
        other.tensor_id in first.placed.aliases
        and replace(other, tensor_id=one.tensor_id) == one
        and first.placed.global_offset == second.placed.global_offset
        and first.placed.local_shape == second.placed.local_shape
        and first.memory.address == second.memory.address
    )
