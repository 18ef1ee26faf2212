"""Members of a structured object: their description in the metadata, and their bytes."""

from __future__ import annotations

import functools
import io
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mooncake.structured.bundle import BundlePayload
from mooncake.structured.destinations import TensorObjectBuffer
from mooncake.structured.manifest import PayloadSpec, decoded_json, encoded_json
from mooncake.structured.nested import encode_nested
from mooncake.structured.payloads import Array, Payload, bytes_payload, payload_of_array
from mooncake.tensor import dtypes, format as tensor_format, memory

__all__ = [
    "STRUCTURED_FIELD_SPECS_KEY",
    "ArrayField",
    "FlatArray",
    "TensorField",
    "decode_metadata",
    "encode_member",
    "encode_metadata",
    "field_of",
    "is_pickled",
    "load_pickled",
    "tensor_metadata_bytes",
    "view_as",
]

STRUCTURED_FIELD_SPECS_KEY: Final = "__mooncake_structured_fields__"
METADATA_BYTES: Final = tensor_format.METADATA_BYTES
_PICKLED: Final = "torch_save"
# Shapes and dtypes of tensors whose metadata is kept.
_HEADERS_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class FlatArray:
    """A one-dimensional array whose items may lie in many pieces of memory.

    Attributes:
        payload: The memory.
        dtype: Type of the items; None for bytes.
    """

    payload: Payload
    dtype: np.dtype[Any] | None = None


@dataclass(frozen=True, slots=True)
class ArrayField:
    """The type of an array member.

    Attributes:
        dtype: Type of the items.
        shape: Length of each dimension.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def decode(cls, name: str, field: Mapping[str, Any], nbytes: int) -> ArrayField:
        """Parse the description of a member.

        Args:
            name: Name of the member.
            field: Its description.
            nbytes: Length of its payload, with which the description must agree.

        Raises:
            ValueError: The description is not valid.
        """
        shape = _shape(name, field)
        dtype = _dtype(name, field.get("dtype"))
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise ValueError(
                f"structured field {name}: dtype={dtype.str} and shape={shape} do not match "
                f"bytes={nbytes}"
            )
        return cls(dtype, shape)


@dataclass(frozen=True, slots=True)
class TensorField:
    """The type of a tensor member.

    Attributes:
        dtype: Type of the elements.
        shape: Length of each dimension.
    """

    dtype: dtypes.DType
    shape: tuple[int, ...]

    @classmethod
    def decode(cls, name: str, field: Mapping[str, Any], nbytes: int) -> TensorField:
        """Parse the description of a member, as `ArrayField.decode` does.

        Raises:
            ValueError: The description is not valid.
        """
        shape = _shape(name, field)
        try:
            dtype = dtypes.DType.of_name(str(field.get("dtype")))
        except TypeError as error:
            raise ValueError(f"structured field {name}: {error}") from error
        if METADATA_BYTES + math.prod(shape) * dtype.itemsize != nbytes:
            raise ValueError(
                f"structured field {name}: dtype={dtype.name} and shape={shape} do not match "
                f"bytes={nbytes}"
            )
        return cls(dtype, shape)


def encode_member(name: str, value: Any) -> tuple[dict[str, Any], BundlePayload]:
    """Return the description of a member, and its bytes.

    Args:
        name: Name of the member.
        value: An array, a tensor, bytes, or memory that `tensor_object_buffer` described.

    Raises:
        TypeError: The value is of another type, or its items are Python objects.
    """
    if isinstance(value, FlatArray):
        if value.dtype is None:
            return {"encoding": "bytes"}, BundlePayload(value.payload)
        length = value.payload.nbytes // value.dtype.itemsize
        return _array_field(name, value.dtype, (length,)), BundlePayload(value.payload)
    if isinstance(value, np.ndarray):
        return _array_field(name, value.dtype, value.shape), BundlePayload(payload_of_array(value))
    if isinstance(value, TensorObjectBuffer):
        return _encode_tensor_buffer(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.is_nested:
            field, payload = encode_nested(value)
            return field, BundlePayload(payload)
        return _encode_tensor(value)
    return {"encoding": "bytes"}, BundlePayload(bytes_payload(value, name))


def encode_metadata(metadata: Mapping[str, Any], fields: Mapping[str, Any], layout: str) -> bytes:
    """Return the metadata of an object as JSON, with the descriptions of its members.

    Raises:
        TypeError: A value has no JSON form.
        ValueError: The metadata has the reserved key, or a layout that is not text.
    """
    if STRUCTURED_FIELD_SPECS_KEY in metadata:
        raise ValueError(f"structured metadata key {STRUCTURED_FIELD_SPECS_KEY!r} is reserved")
    if not isinstance(metadata.get("layout", layout), str):
        raise ValueError("structured metadata layout must be a string")
    whole = {**metadata}
    whole.setdefault("layout", layout)
    whole[STRUCTURED_FIELD_SPECS_KEY] = fields
    if not fields:
        del whole[STRUCTURED_FIELD_SPECS_KEY]
    try:
        return encoded_json(whole)
    except (TypeError, ValueError) as error:
        raise TypeError(f"structured metadata must be JSON-serializable: {error}") from error


def decode_metadata(data: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the metadata of an object, and the description of each member in it.

    Raises:
        ValueError: The bytes are not such metadata.
    """
    metadata = decoded_json(data, "structured metadata") if data else {}
    fields = metadata.get(STRUCTURED_FIELD_SPECS_KEY, {})
    if not isinstance(fields, dict) or not all(isinstance(each, dict) for each in fields.values()):
        raise ValueError("structured metadata has no valid descriptions of its members")
    return metadata, fields


def field_of(fields: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the description of a member; one without a description is bytes."""
    return fields.get(name, {"encoding": "bytes"})


def tensor_metadata_bytes(spec: PayloadSpec) -> int:
    """Return the length of the metadata before the elements of a tensor member.

    Raises:
        ValueError: The payload is no tensor of a known form.
    """
    if spec.extra.get("metadata_bytes", METADATA_BYTES) != METADATA_BYTES or (
        "format" in spec.extra
    ):
        raise ValueError(
            f"unsupported structured tensor payload key={spec.key}: "
            f"format={spec.extra.get('format')!r}"
        )
    return METADATA_BYTES


def is_pickled(spec: PayloadSpec) -> bool:
    """Return whether a payload is a tensor as `torch.save` writes it."""
    return spec.extra.get("format") == _PICKLED


def load_pickled(name: str, data: Array) -> Any:
    """Return the tensor of a payload that `torch.save` wrote. No other objects are made.

    Raises:
        ValueError: The payload is anything else than a tensor.
    """
    torch = dtypes.load_torch()
    try:
        # Without this option the payload could run any code.
        value = torch.load(io.BytesIO(data.tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"structured tensor field {name} cannot be loaded: {error}") from error
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"structured tensor field {name} is a {type(value).__name__}, no tensor")
    return value


def _encode_tensor(tensor: Any) -> tuple[dict[str, Any], BundlePayload]:
    host = memory.of(tensor if tensor.is_cpu else tensor.detach().cpu())
    # Nested tensors are stored in another form, so that the elements are one piece.
    header = _tensor_header(host.dtype, host.shape)
    payload = header
    if host.nbytes:
        payload = Payload(
            [*header.addresses, host.address], [*header.sizes, host.nbytes], (header, host.owner)
        )
    named = {"dtype": f"torch.{host.dtype.name}", "shape": list(host.shape)}
    field = {"encoding": "torch_tensor", **named, "element_size": host.dtype.itemsize}
    extra = {"metadata_bytes": METADATA_BYTES}
    plain = tensor.detach()
    pickled = None if host.shape else (_pickled(plain), {"format": _PICKLED})
    typed = {"kind": "tensor", **named}
    return field, BundlePayload(payload, "tensor", extra, plain, typed, pickled)


@functools.lru_cache(maxsize=_HEADERS_MAX)
def _tensor_header(dtype: dtypes.DType, shape: tuple[int, ...]) -> Payload:
    """Return the metadata of a tensor; most batches have the same few shapes."""
    return bytes_payload(tensor_format.TensorMetadata(dtype, shape, shape).encode(), "metadata")


def _pickled(tensor: Any) -> Payload:
    stream = io.BytesIO()
    # A copy: the storage of a view would be saved whole.
    dtypes.load_torch().save(tensor.cpu().clone(), stream)
    return bytes_payload(stream.getvalue(), "tensor")


def _encode_tensor_buffer(value: TensorObjectBuffer) -> tuple[dict[str, Any], BundlePayload]:
    """Return memory of the caller as a member. Its content is not looked at."""
    pieces = ([value.ptr], [value.size]) if value.size else ([], [])
    return {"encoding": "torch_tensor"}, BundlePayload(Payload(*pieces, value.owner), "memory")


def _array_field(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    if dtype.hasobject:
        raise TypeError(
            f"{name} is an array of dtype {dtype}, which holds Python objects; store it as a "
            "column of a DataProto, or convert it"
        )
    if dtype.fields is not None or dtype.subdtype is not None:
        raise TypeError(f"{name} is an array of dtype {dtype}; store each of its fields")
    # numpy has no code for the types of ml_dtypes, only their names.
    code = dtype.name if dtype.kind == "V" and dtype.type is not np.void else dtype.str
    return {"encoding": "ndarray", "dtype": code, "shape": list(shape)}


def _dtype(name: str, code: Any) -> np.dtype[Any]:
    if not isinstance(code, str) or "," in code:
        raise ValueError(f"structured field {name}: invalid dtype {code!r}")
    try:
        dtype = np.dtype(code)
    except TypeError:
        try:
            dtype = dtypes.DType.of_name(code).numpy()
        except TypeError as error:
            raise ValueError(f"structured field {name}: invalid dtype {code!r}") from error
    if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        raise ValueError(f"structured field {name}: invalid dtype {code!r}")
    return dtype


def _shape(name: str, field: Mapping[str, Any]) -> tuple[int, ...]:
    shape = field.get("shape")
    if not isinstance(shape, list) or not all(type(each) is int and each >= 0 for each in shape):
        raise ValueError(f"structured field {name}: invalid shape {shape!r}")
    return tuple(shape)


def view_as(data: Array, field: ArrayField) -> Array:
    """Return bytes as the array that they are, without a copy."""
    return data.view(field.dtype).reshape(field.shape)
