"""Columns whose rows are bytes: texts, binary values, and values packed as JSON or msgpack."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from mooncake.structured.columns.leaf import (
    LeafCodec,
    Payloads,
    Selection,
    UnsupportedColumnError,
    checked_nulls,
    checked_offsets,
    nulls_of,
    offsets_of,
    payload_array,
)
from mooncake.structured.members import FlatArray
from mooncake.structured.payloads import Array, bytes_payload, concatenated

__all__ = ["BYTES", "JSON", "MSGPACK", "TEXT", "is_bytes_like", "joined_bytes"]

# Longer rows are read where they are; shorter ones are joined first.
_JOINED_BYTES_MAX: Final = 16 << 10


def is_bytes_like(value: object) -> bool:
    """Return whether a value is bytes, a bytearray or a memoryview."""
    return isinstance(value, bytes | bytearray | memoryview)


def joined_bytes(parts: Sequence[Any]) -> FlatArray:
    """Return the bytes of many bytes-like objects, one after the other."""
    total = sum(len(part) for part in parts)
    if total < _JOINED_BYTES_MAX * max(len(parts), 1):
        return FlatArray(bytes_payload(b"".join(parts), "data"))
    return FlatArray(concatenated([np.frombuffer(part, np.uint8) for part in parts if len(part)]))


def _encode_text(
    values: Sequence[Any], _options: Mapping[str, Any]
) -> tuple[dict[str, Any], Payloads]:
    texts = ["" if value is None else value for value in values]
    if not all(isinstance(text, str) for text in texts):
        raise UnsupportedColumnError("a row is not str")
    whole = "".join(texts)
    try:
        data = whole.encode()
        # The length in bytes is that in characters only for ASCII.
        is_ascii = len(data) == len(whole)
        lengths = list(map(len, texts if is_ascii else [text.encode() for text in texts]))
    except UnicodeEncodeError as error:
        raise UnsupportedColumnError(f"a row is no Unicode text: {error}") from error
    return {}, {
        "data": FlatArray(bytes_payload(data, "data")),
        "offsets": offsets_of(lengths),
        "nulls": nulls_of(values),
    }


def _decode_text(payloads: Payloads, rows: int, _metadata: Mapping[str, Any]) -> list[Any]:
    data, offsets, nulls = _checked(payloads, rows)
    whole = data.tobytes()
    bounds = offsets.tolist()
    try:
        if whole.isascii():
            text = whole.decode("ascii")
            values: list[Any] = [text[bounds[row] : bounds[row + 1]] for row in range(rows)]
        else:
            values = [whole[bounds[row] : bounds[row + 1]].decode() for row in range(rows)]
    except UnicodeDecodeError as error:
        raise ValueError(f"a row is not UTF-8: {error}") from error
    return _with_nulls(values, nulls)


def _encode_bytes(
    values: Sequence[Any], _options: Mapping[str, Any]
) -> tuple[dict[str, Any], Payloads]:
    parts: list[Any] = []
    encodings: list[dict[str, Any]] = []
    for value in values:
        part, encoding = media_bytes(value)
        parts.append(part)
        encodings.append(encoding)
    metadata: dict[str, Any] = {}
    if any(encoding["kind"] == "pil_raw" for encoding in encodings):
        metadata = {
            "media_encodings": encodings,
            "media_types": ["image/raw"],
            "encode_source": "raw_pixels_from_object",
        }
    return metadata, _ragged(values, parts)


def _decode_bytes(payloads: Payloads, rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    data, offsets, nulls = _checked(payloads, rows)
    bounds = offsets.tolist()
    view = data.data
    values: list[Any] = [bytes(view[bounds[row] : bounds[row + 1]]) for row in range(rows)]
    encodings = metadata.get("media_encodings")
    if encodings is not None:
        if not isinstance(encodings, list) or len(encodings) != rows:
            raise ValueError(f"media_encodings does not describe {rows} rows")
        values = [restored_media(*each) for each in zip(values, encodings, strict=True)]
    return _with_nulls(values, nulls)


def media_bytes(value: Any) -> tuple[Any, dict[str, Any]]:
    """Return the bytes of a binary value, an array or an image of PIL, and how to restore it.

    Arrays come back as bytes.

    Raises:
        UnsupportedColumnError: The value is none of these.
    """
    if value is None:
        return b"", {"kind": "null"}
    if is_bytes_like(value):
        view = memoryview(value)
        return (view.cast("B") if view.c_contiguous else view.tobytes()), {"kind": "bytes"}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.tobytes(), {"kind": "bytes"}
    if is_image(value):
        encoding = {"mode": value.mode, "size": list(value.size), "format": value.format}
        return value.tobytes(), {"kind": "pil_raw", **encoding}
    raise UnsupportedColumnError(f"a row is {type(value).__name__}, not bytes")


def is_image(value: Any) -> bool:
    """Return whether a value is an image of PIL, without an import of PIL."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes")


def restored_media(data: bytes, encoding: Any) -> Any:
    """Return an image of PIL if the bytes are one and PIL is installed, else the bytes.

    Raises:
        ValueError: The bytes are not the image that the description claims.
    """
    if not isinstance(encoding, Mapping) or encoding.get("kind") != "pil_raw":
        return data
    try:
        from PIL import Image  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return data
    try:
        image = Image.frombytes(encoding["mode"], tuple(encoding["size"]), data)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the description of an image is not valid: {error}") from error
    image.format = encoding.get("format")
    return image


def _encode_packed(
    pack: Callable[[Any], bytes], values: Sequence[Any], _options: Mapping[str, Any]
) -> tuple[dict[str, Any], Payloads]:
    try:
        parts = [b"" if value is None else pack(value) for value in values]
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnsupportedColumnError(f"a row cannot be packed: {error}") from error
    return {}, _ragged(values, parts)


def _decode_packed(
    unpack: Callable[[bytes], Any], payloads: Payloads, rows: int, _metadata: Mapping[str, Any]
) -> list[Any]:
    data, offsets, nulls = _checked(payloads, rows)
    whole, bounds, is_null = data.tobytes(), offsets.tolist(), nulls.tolist()
    try:
        return [
            None if is_null[row] else unpack(whole[bounds[row] : bounds[row + 1]])
            for row in range(rows)
        ]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a packed row is not valid: {error}") from error


def _select(payloads: Payloads, rows: int, metadata: Mapping[str, Any], chosen: Array) -> Selection:
    offsets = checked_offsets(payloads, rows, None)
    nulls = checked_nulls(payloads, rows)
    starts, ends = offsets[chosen], offsets[chosen + 1]
    kept = dict(metadata)
    encodings = metadata.get("media_encodings")
    if isinstance(encodings, list) and len(encodings) == rows:
        kept["media_encodings"] = [encodings[row] for row in chosen]
    return Selection(
        {"offsets": offsets_of(ends - starts), "nulls": nulls[chosen]}, kept, starts, ends
    )


def _pack_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _pack_msgpack(value: Any) -> bytes:
    packb: Callable[..., bytes] = _msgpack().packb
    try:
        # This option gives tuples and objects of derived classes to `_plain`, which refuses them.
        return packb(value, default=_plain, strict_types=True)
    except TypeError:
        packed = packb(value, default=_plain)
    # A tuple that is a key would become a list, which is none: such a row cannot be unpacked.
    _unpack_msgpack(packed)
    return packed


def _unpack_msgpack(data: bytes) -> Any:
    msgpack = _msgpack()
    try:
        # Extension types would be objects of msgpack, of which timestamps are the only ones.
        return msgpack.unpackb(data, strict_map_key=False)
    except (msgpack.exceptions.UnpackException, TypeError) as error:
        raise ValueError(f"not msgpack: {error}") from error


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python, for msgpack."""
    # A time of numpy would become an integer, and a record a list.
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    raise TypeError(f"msgpack has no {type(value).__name__}")


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise ImportError(
            "columns of lists and dicts need msgpack: install mooncake-transfer-engine[structured],"
            " or store them with FieldSchema('json_ragged')",
            name="msgpack",
        ) from error
    return msgpack


def _ragged(values: Sequence[Any], parts: Sequence[Any]) -> Payloads:
    return {
        "data": joined_bytes(parts),
        "offsets": offsets_of([len(part) for part in parts]),
        "nulls": nulls_of(values),
    }


def _checked(payloads: Payloads, rows: int) -> tuple[Array, Array, Array]:
    """Return data, offsets and nulls, after checking that they agree."""
    data = payload_array(payloads, "data").view(np.uint8)
    return (
        data,
        checked_offsets(payloads, rows, data.nbytes),
        checked_nulls(payloads, rows),
    )


def _with_nulls(values: list[Any], nulls: Array) -> list[Any]:
    for row in np.flatnonzero(nulls):
        values[row] = None
    return values


_PAYLOADS: Final = ("offsets", "nulls")

TEXT: Final = LeafCodec(_encode_text, _decode_text, _select, _PAYLOADS)
BYTES: Final = LeafCodec(_encode_bytes, _decode_bytes, _select, _PAYLOADS)
JSON: Final = LeafCodec(
    partial(_encode_packed, _pack_json), partial(_decode_packed, json.loads), _select, _PAYLOADS
)
MSGPACK: Final = LeafCodec(
    partial(_encode_packed, _pack_msgpack),
    partial(_decode_packed, _unpack_msgpack),
    _select,
    _PAYLOADS,
)
