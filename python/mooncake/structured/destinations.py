"""Memory of the caller as the source or the destination of a member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake.structured.payloads import Array

__all__ = [
    "RawDestination",
    "TensorObjectBuffer",
    "checked_destination",
    "raw_bytes",
    "raw_destination",
    "tensor_object_buffer",
]


@dataclass(frozen=True, slots=True)
class TensorObjectBuffer:
    """A stored tensor in memory: 304 bytes of metadata, then the elements.

    Attributes:
        ptr: Address of the first byte.
        size: Length in bytes.
        owner: Keeps the memory alive.
        batch_size: Number of rows, if the tensor is a field of a batch.
    """

    ptr: int
    size: int
    owner: Any
    batch_size: int | None = None

    def __len__(self) -> int:
        if self.batch_size is None:
            raise TypeError("a tensor object buffer without batch_size has no rows")
        return self.batch_size


@dataclass(frozen=True, slots=True)
class RawDestination:
    """Memory that a member is read into.

    Attributes:
        ptr: Address of the first byte.
        size: Length in bytes.
        owner: Keeps the memory alive.
        pre_registered: True if the memory is registered with the store.
    """

    ptr: int
    size: int
    owner: Any
    pre_registered: bool = False


def tensor_object_buffer(
    ptr: int, size: int, owner: Any = None, batch_size: int | None = None
) -> TensorObjectBuffer:
    """Describe a stored tensor in memory, as a member to put or as a destination.

    A store that is not of this package reads and writes only memory that is registered with it.

    Args:
        ptr: Address of its 304 bytes of metadata, which the elements follow. A put does not look
            at them.
        size: Length of both in bytes.
        owner: Kept alive as long as the description.
        batch_size: Number of rows, if the tensor is a field of a batch.
    """
    return TensorObjectBuffer(int(ptr), int(size), owner, batch_size)


def raw_destination(
    ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False
) -> RawDestination:
    """Describe memory that a member is read into.

    Args:
        ptr: Address of the first byte.
        size: Length in bytes; at least that of the member.
        owner: Kept alive as long as the description.
        pre_registered: True if the memory is registered with the store.
    """
    return RawDestination(int(ptr), int(size), owner, pre_registered)


class _RawMemory:
    """Memory of the caller as numpy sees it: arrays over it keep its owner."""

    __slots__ = ("_owner", "address", "nbytes")

    def __init__(self, destination: RawDestination, nbytes: int) -> None:
        self._owner = destination.owner
        self.address = destination.ptr
        self.nbytes = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
        }


def raw_bytes(destination: RawDestination, nbytes: int) -> Array:
    """Return the first bytes of a destination as an array, which keeps its owner alive."""
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.asarray(_RawMemory(destination, nbytes))


def checked_destination(
    name: str, destination: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Array:
    """Return the destination of an array member.

    Raises:
        TypeError: The destination is not an array.
        ValueError: Its shape or dtype differs from the member, or its memory is not in C order.
    """
    if not isinstance(destination, np.ndarray):
        raise TypeError(
            f"structured ndarray field {name} destination must be a numpy.ndarray or "
            "raw_destination"
        )
    field = f"structured ndarray field {name} destination"
    if destination.shape != shape:
        raise ValueError(f"{field} shape mismatch: expected {shape}, got {destination.shape}")
    if destination.dtype != dtype:
        raise ValueError(
            f"{field} dtype mismatch: expected {dtype.str}, got {destination.dtype.str}"
        )
    if not destination.flags.c_contiguous:
        raise ValueError(f"{field} must be C-contiguous")
    if not destination.flags.writeable:
        raise ValueError(f"{field} must be writeable")
    return destination
