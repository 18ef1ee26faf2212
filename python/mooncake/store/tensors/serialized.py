"""Tensors as bytes and back, without a store: upstream's functions for its own Python modules."""

from __future__ import annotations

from mooncake._hints import Readable, torch
from mooncake.store.tensors.base import item_of
from mooncake.tensor import memory
from mooncake.tensor.format import METADATA_BYTES, FormatError, TensorMetadata

__all__ = ["deserialize_tensor", "serialize_tensor", "tensor_metadata_size"]


def tensor_metadata_size() -> int:
    """Return the length of the metadata of a tensor in bytes: 304."""
    return METADATA_BYTES


def serialize_tensor(tensor: torch.Tensor, /) -> tuple[bytes, int, int, object]:
    """Return a tensor as the parts of an object.

    Args:
        tensor: A torch tensor.

    Returns:
        The metadata (for a jagged tensor also the offsets of its sequences), the address and the
        length of the elements, and the object that keeps them.

    Raises:
        ValueError: The tensor cannot be stored; the message has the reason.
    """
    try:
        item = item_of(tensor)
    except TypeError as error:
        raise ValueError(
            f"unsupported tensor for Mooncake tensor serialization: {error}"
        ) from error
    metadata, found = item.head.data, item.memory
    if found.offsets is not None:
        metadata += bytes(memory.at_address(found.offsets.address, found.offsets.nbytes))
    return metadata, found.address, found.nbytes, found.owner


def deserialize_tensor(data: Readable, /) -> torch.Tensor:
    """Return the tensor of a serialized object, in memory of its own.

    Args:
        data: The metadata, followed by the elements.

    Raises:
        ValueError: The bytes are not a tensor; the message has the reason.
        ImportError: torch is not installed.
    """
    whole = bytearray(data)
    try:
        return memory.restore(whole, TensorMetadata.decode(whole, total=len(whole)))
    except FormatError as error:
        raise ValueError(f"invalid serialized Mooncake tensor payload: {error}") from error
