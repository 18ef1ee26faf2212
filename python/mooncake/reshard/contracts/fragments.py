"""The memory that holds one fragment of a resource."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._checks import (
    U64_MAX,
    require_integer,
    require_integers,
    require_text,
    require_u64,
    set_fields,
)
from .ids import PlacementFragmentId, RuntimeFragmentId

__all__ = ["RuntimeBindingFragment", "canonical_strides_bytes"]


@dataclass(frozen=True)
class RuntimeBindingFragment:
    """The memory that holds one fragment: a view of a storage allocation.

    `owner` keeps the memory alive and takes no part in comparisons.

    Raises:
        ValueError: A field is out of its limits, the view is not inside the allocation, or the
            address is not `storage_address + storage_offset_bytes`.
    """

    placement_fragment_id: PlacementFragmentId
    fragment_id: RuntimeFragmentId
    address: int
    nbytes: int
    worker_id: str
    endpoint: str
    device: str
    itemsize: int
    local_shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    storage_address: int
    storage_nbytes: int
    storage_offset_bytes: int
    owner: object | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("placement_fragment_id", "fragment_id", "worker_id", "endpoint", "device"):
            require_text(getattr(self, name), name)
        require_integer(self.itemsize, "runtime itemsize", minimum=1)
        shape = _require_extents(self.local_shape, "runtime local_shape", minimum=1)
        strides = _require_extents(self.strides_bytes, "runtime strides_bytes")
        if len(shape) != len(strides):
            raise ValueError(
                "runtime stride rank differs from local_shape: strides_bytes and local_shape have "
                f"{len(strides)} and {len(shape)}"
            )
        set_fields(
            self,
            local_shape=shape,
            strides_bytes=_with_canonical_singletons(shape, strides, self.itemsize),
        )
        self._validate_addresses()

    def _validate_addresses(self) -> None:
        for start, length in (("address", "nbytes"), ("storage_address", "storage_nbytes")):
            first = require_u64(getattr(self, start), start, minimum=1)
            size = require_u64(getattr(self, length), length, minimum=1)
            if first + size > U64_MAX:
                raise ValueError(f"{start} + {length} must be a 64-bit integer: {start}={first}")
        offset = require_u64(self.storage_offset_bytes, "storage_offset_bytes")
        if self.address != self.storage_address + offset:
            raise ValueError(
                "address must be storage_address plus storage_offset_bytes: "
                f"address={self.address} storage_address={self.storage_address} offset={offset}"
            )
        if offset + self.nbytes > self.storage_nbytes:
            raise ValueError(
                "the view must end inside its storage allocation: "
                f"end={offset + self.nbytes} storage_nbytes={self.storage_nbytes}"
            )


def canonical_strides_bytes(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides of a contiguous array, in bytes, the last dimension densest."""
    strides = []
    stride = itemsize
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


def _require_extents(values: object, name: str, *, minimum: int = 0) -> tuple[int, ...]:
    """Return integers, which a tuple or a list must hold."""
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name} must be a tuple or list, not {type(values).__name__}")
    return require_integers(values, name, minimum=minimum)


def _with_canonical_singletons(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[int, ...]:
    """Replace strides that are never taken, so that equal memory compares equal."""
    canonical = canonical_strides_bytes(shape, itemsize)
    result = []
    for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        if extent > 1 and stride == 0:
            raise ValueError(f"strides_bytes[{dim}] must be positive: its extent is {extent}")
        result.append(stride if extent > 1 else canonical[dim])
    return tuple(result)
