"""Jagged nested tensors: three tensors, one after the other, in one payload."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mooncake.structured.payloads import Array, Payload, bytes_payload
from mooncake.tensor import dtypes, format as tensor_format, memory

__all__ = ["decode_nested", "encode_nested", "select_nested"]

# Alignment of the elements of any type.
_ALIGNMENT: Final = 16


def encode_nested(value: Any) -> tuple[dict[str, Any], Payload]:
    """Return the description of a jagged tensor, and its bytes.

    Raises:
        TypeError: The tensor is nested in another layout.
    """
    torch = dtypes.load_torch()
    if value.layout is not torch.jagged:
        raise TypeError(
            "nested tensors of layout strided are not supported: convert with "
            "torch.nested.nested_tensor(tensor.unbind(), layout=torch.jagged)"
        )
    lengths = value.lengths()
    tensors = [value.values(), value.offsets(), *([] if lengths is None else [lengths])]
    addresses: list[int] = []
    sizes: list[int] = []
    owners: list[object] = []
    part_bytes: list[int] = []
    for tensor in tensors:
        host = memory.of(tensor.detach().cpu())
        metadata = host.metadata()
        header = bytes_payload(metadata.encode(), "metadata")
        pieces = host.ranges()
        addresses += [*header.addresses, *(address for address, _ in pieces)]
        sizes += [*header.sizes, *(size for _, size in pieces)]
        owners += [header.owner, host.owner]
        part_bytes.append(metadata.total_bytes)
    field = {
        "encoding": "torch_tensor",
        "dtype": str(value.dtype),
        "nested": True,
        "format": "tensor_parts",
        "part_bytes": part_bytes,
        "has_lengths": lengths is not None,
        "ragged_idx": int(getattr(value, "_ragged_idx", 1)),
    }
    return field, Payload(addresses, sizes, owners)


def decode_nested(name: str, field: Mapping[str, Any], data: Array) -> Any:
    """Return the jagged tensor whose payload was read.

    Raises:
        ValueError: The payload and its description do not agree, or it is pickled.
    """
    if field.get("format") != "tensor_parts":
        raise ValueError(
            f"structured nested tensor {name} has the unsupported format "
            f"{field.get('format')!r}; pickled tensors are not read"
        )
    sizes = field.get("part_bytes")
    count = 3 if field.get("has_lengths") else 2
    if (
        not isinstance(sizes, list)
        or len(sizes) != count
        or not all(type(size) is int and size > 0 for size in sizes)
        or sum(sizes) != data.nbytes
    ):
        raise ValueError(
            f"structured nested tensor {name}: part_bytes={sizes} does not match "
            f"bytes={data.nbytes}"
        )
    tensors: list[Any] = []
    at = 0
    for size in sizes:
        part = data[at : at + size]
        if part.__array_interface__["data"][0] % _ALIGNMENT:
            part = part.copy()
        metadata = tensor_format.TensorMetadata.decode(part.data, total=size)
        tensors.append(memory.restore(part.data, metadata))
        at += size
    values, offsets, lengths = tensors[0], tensors[1], tensors[2] if count == 3 else None
    ragged = field.get("ragged_idx", 1)
    if type(ragged) is not int or not 1 <= ragged <= values.dim():
        raise ValueError(f"structured nested tensor {name}: ragged_idx={ragged!r}")
    _check_offsets(name, offsets, lengths, values.shape[ragged - 1])
    torch = dtypes.load_torch()
    return torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths=lengths, jagged_dim=ragged
    )


def select_nested(value: Any, rows: Any) -> Any:
    """Return some rows of a jagged tensor, in the order of their numbers."""
    torch = dtypes.load_torch()
    if len(rows) == 0:
        empty = value.values()[:0]
        offsets = torch.zeros(1, dtype=value.offsets().dtype)
        return torch.nested.nested_tensor_from_jagged(empty, offsets)
    sequences = value.unbind()
    return torch.nested.nested_tensor(
        [sequences[row] for row in rows], layout=torch.jagged, dtype=value.dtype
    )


def _check_offsets(name: str, offsets: Any, lengths: Any, total: int) -> None:
    is_valid = offsets.dim() == 1 and len(offsets) > 0 and not offsets.is_floating_point()
    if is_valid:
        gaps = offsets[1:] - offsets[:-1]
        is_valid = bool(offsets[0] >= 0 and offsets[-1] <= total and (gaps >= 0).all())
        if is_valid and lengths is not None:
            is_valid = lengths.shape == gaps.shape and bool(
                ((lengths >= 0) & (lengths <= gaps)).all()
            )
    if not is_valid:
        raise ValueError(f"structured nested tensor {name}: the offsets are not valid")
