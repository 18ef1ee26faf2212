"""Columns whose rows are lists of binary values or images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mooncake.structured.columns.blobs import (
    is_bytes_like,
    is_image,
    joined_bytes,
    media_bytes,
    restored_media,
)
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

if TYPE_CHECKING:
    from mooncake.structured.payloads import Array

__all__ = ["MEDIA_LISTS", "is_media_list"]


def is_media_list(value: Any) -> bool:
    """Return whether a value is a list of binary values and images."""
    return isinstance(value, list | tuple) and all(
        is_bytes_like(item) or is_image(item) for item in value
    )


def _encode(values: Sequence[Any], _options: Mapping[str, Any]) -> tuple[dict[str, Any], Payloads]:
    parts: list[Any] = []
    encodings: list[dict[str, Any]] = []
    counts: list[int] = []
    for value in values:
        if value is not None and not isinstance(value, list | tuple):
            raise UnsupportedColumnError(f"a row is {type(value).__name__}, not a list of bytes")
        items = () if value is None else value
        counts.append(len(items))
        for item in items:
            part, encoding = media_bytes(item)
            parts.append(part)
            encodings.append(encoding)
    metadata = {"encode_source": "raw_pixels_from_object", "media_encodings": encodings}
    return metadata, {
        "data": joined_bytes(parts),
        "row_offsets": offsets_of(counts),
        "byte_offsets": offsets_of([len(part) for part in parts]),
        "nulls": nulls_of(values),
    }


def _decode(payloads: Payloads, rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    view = payload_array(payloads, "data").view(np.uint8).data
    row_offsets, byte_offsets, encodings = _checked(payloads, rows, metadata, view.nbytes)
    nulls = checked_nulls(payloads, rows).tolist()
    bounds = byte_offsets.tolist()
    items: list[Any] = []
    for at, encoding in enumerate(encodings):
        is_null = isinstance(encoding, Mapping) and encoding.get("kind") == "null"
        data = bytes(view[bounds[at] : bounds[at + 1]])
        items.append(None if is_null else restored_media(data, encoding))
    ends = row_offsets.tolist()
    return [None if nulls[row] else items[ends[row] : ends[row + 1]] for row in range(rows)]


def _select(payloads: Payloads, rows: int, metadata: Mapping[str, Any], chosen: Array) -> Selection:
    row_offsets, byte_offsets, encodings = _checked(payloads, rows, metadata, None)
    nulls = checked_nulls(payloads, rows)
    firsts, lasts = row_offsets[chosen], row_offsets[chosen + 1]
    items = [at for first, last in zip(firsts, lasts, strict=True) for at in range(first, last)]
    lengths = np.diff(byte_offsets)[items] if items else np.zeros(0, dtype=np.int64)
    selected = {
        "row_offsets": offsets_of(lasts - firsts),
        "byte_offsets": offsets_of(lengths),
        "nulls": nulls[chosen],
    }
    kept = {**metadata, "media_encodings": [encodings[at] for at in items]}
    return Selection(selected, kept, byte_offsets[firsts], byte_offsets[lasts])


def _checked(
    payloads: Payloads, rows: int, metadata: Mapping[str, Any], total: int | None
) -> tuple[Array, Array, Sequence[Any]]:
    """Return the offsets of the rows in items, those of the items in bytes, and the encodings."""
    byte_offsets = payload_array(payloads, "byte_offsets")
    count = len(byte_offsets) - 1
    byte_offsets = checked_offsets(payloads, count, total, "byte_offsets")
    row_offsets = checked_offsets(payloads, rows, count, "row_offsets")
    encodings = metadata.get("media_encodings") or [None] * count
    if not isinstance(encodings, list) or len(encodings) != count:
        raise ValueError(f"media_encodings does not describe {count} items")
    return row_offsets, byte_offsets, encodings


MEDIA_LISTS: Final = LeafCodec(_encode, _decode, _select, ("row_offsets", "byte_offsets", "nulls"))
