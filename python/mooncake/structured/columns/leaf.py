"""What all codecs share: encoded columns, checks of payloads, and the selection of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from mooncake.structured.payloads import Array

__all__ = [
    "MISSING",
    "EncodedLeaf",
    "FieldSchema",
    "LeafCodec",
    "Payloads",
    "SchemaMismatchError",
    "Selection",
    "UnsupportedColumnError",
    "checked_dtype",
    "checked_nulls",
    "checked_offsets",
    "lengths_of",
    "nulls_of",
    "offsets_of",
]

Payloads: TypeAlias = dict[str, Any]


class _Missing:
    """The type of `MISSING`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<MISSING>"


MISSING: Final = _Missing()
"""A key that a row lacks, as opposed to a key whose value is None."""


class UnsupportedColumnError(ValueError):
    """A codec cannot represent the rows of a column."""


class SchemaMismatchError(UnsupportedColumnError, TypeError, AttributeError):
    """The codec of a schema cannot represent the rows of a column.

    It has several bases because upstream raises whatever its codec happens to raise.
    """


@dataclass(frozen=True)
class FieldSchema:
    """How a column is stored.

    Attributes:
        codec: Name of the codec; ``auto`` infers it from the rows.
        nullable: False if no row may be None.
        metadata: Options of the codec, such as ``dtype`` of ``typed_ragged``.
    """

    codec: str
    nullable: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EncodedLeaf:
    """A column, or a part of one, as payloads.

    Attributes:
        codec: Name of the codec.
        rows: Number of rows.
        metadata: What the decoder needs besides the payloads; has a JSON form.
        payloads: Array or bytes of each payload name.
    """

    codec: str
    rows: int
    metadata: dict[str, Any]
    payloads: Payloads


@dataclass(frozen=True, slots=True)
class Selection:
    """Some rows of a leaf.

    Attributes:
        payloads: The payloads of these rows, except for ``data``.
        metadata: The metadata of these rows.
        starts: First item of each row in ``data``.
        ends: End of each row in ``data``.
    """

    payloads: Payloads
    metadata: Mapping[str, Any]
    starts: Array
    ends: Array


@dataclass(frozen=True, slots=True)
class LeafCodec:
    """A codec of a column that does not consist of columns.

    Attributes:
        encode: Returns a column of values; takes the options of the schema.
        decode: Returns the values; takes the payloads, the number of rows and the metadata.
        select: Returns some rows; takes the payloads except for ``data``, the number of rows, the
            metadata and the numbers of the rows.
        payloads: Names of the payloads besides ``data``.
    """

    encode: Callable[[Sequence[Any], Mapping[str, Any]], tuple[dict[str, Any], Payloads]]
    decode: Callable[[Payloads, int, Mapping[str, Any]], list[Any]]
    select: Callable[[Payloads, int, Mapping[str, Any], Array], Selection]
    payloads: tuple[str, ...]


def checked_dtype(options: Mapping[str, Any]) -> np.dtype[Any] | None:
    """Return the dtype that the options of a schema have, or None.

    Raises:
        UnsupportedColumnError: It is unknown, or none of numbers or booleans.
    """
    given = options.get("dtype")
    if given is None:
        return None
    try:
        dtype: np.dtype[Any] = np.dtype(given)
    except TypeError as error:
        raise UnsupportedColumnError(
            f"invalid FieldSchema metadata['dtype']: {given!r}: {error}"
        ) from error
    if dtype.kind not in "biufc":
        raise UnsupportedColumnError(
            f"FieldSchema metadata['dtype'] must be numeric or bool, got {dtype}"
        )
    return dtype


def nulls_of(values: Sequence[Any]) -> Array:
    """Return for each row whether it is None."""
    return np.fromiter((value is None for value in values), np.bool_, len(values))


def offsets_of(lengths: Sequence[int] | Array) -> Array:
    """Return the offset of each row, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def lengths_of(offsets: Array) -> Array:
    """Return the length of each row."""
    return np.diff(offsets)


def checked_nulls(payloads: Payloads, rows: int, name: str = "nulls") -> Array:
    """Return the payload that tells for each row whether it is None.

    Raises:
        ValueError: The payload is missing or has another length.
    """
    nulls = _payload(payloads, name)
    if nulls.shape != (rows,):
        raise ValueError(f"the payload {name} has shape {nulls.shape}, expected ({rows},)")
    return nulls.astype(np.bool_, copy=False)


def checked_offsets(
    payloads: Payloads, rows: int, total: int | None, name: str = "offsets"
) -> Array:
    """Return the payload with the offset of each row.

    Args:
        payloads: All payloads.
        rows: Number of rows.
        total: Items of ``data``, at which the last row must end; None if they are not read yet.
        name: Name of the payload.

    Raises:
        ValueError: The offsets do not rise from 0, or do not end at `total`.
    """
    offsets = _payload(payloads, name)
    if offsets.shape != (rows + 1,) or offsets.dtype.kind not in "iu":
        raise ValueError(
            f"the payload {name} has shape {offsets.shape} and dtype {offsets.dtype}, "
            f"expected {rows + 1} integers"
        )
    if offsets[0] != 0 or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"the payload {name} does not rise from 0")
    if total is not None and int(offsets[-1]) != total:
        raise ValueError(
            f"the payload {name} ends at {int(offsets[-1])}, but the data has {total} items"
        )
    return offsets


def payload_array(payloads: Payloads, name: str) -> Array:
    """Return a payload as an array; bytes become unsigned bytes.

    Raises:
        ValueError: The payload is missing.
    """
    return _payload(payloads, name)


def _payload(payloads: Payloads, name: str) -> Array:
    value = payloads.get(name)
    if value is None:
        raise ValueError(f"the payload {name} is missing")
    return value if isinstance(value, np.ndarray) else np.frombuffer(value, dtype=np.uint8)
