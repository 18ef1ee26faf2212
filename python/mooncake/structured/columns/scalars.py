"""Columns of numbers, each with a flag for None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mooncake.structured.columns.leaf import (
    LeafCodec,
    Payloads,
    Selection,
    UnsupportedColumnError,
    checked_dtype,
    checked_nulls,
    nulls_of,
    payload_array,
)

if TYPE_CHECKING:
    from mooncake.structured.payloads import Array

__all__ = ["SCALARS", "is_number"]

_NUMBERS: Final = (bool, int, float, complex, np.bool_, np.number)


def is_number(value: object) -> bool:
    """Return whether a value is a number or a boolean, of Python or numpy."""
    return isinstance(value, _NUMBERS)


def _encode(values: Sequence[Any], options: Mapping[str, Any]) -> tuple[dict[str, Any], Payloads]:
    given = [value for value in values if value is not None]
    dtype: Any = checked_dtype(options)
    if dtype is None and len({_kind(value) for value in given}) > 1:
        raise UnsupportedColumnError("the rows are numbers of different types")
    nulls = nulls_of(values)
    try:
        filled = [0 if value is None else value for value in values] if nulls.any() else values
        if dtype is None and given and isinstance(given[0], bool | np.bool_):
            dtype = "bool"
        elif dtype is None and given and isinstance(given[0], int):
            # numpy would turn integers above the largest int64 into floats.
            dtype = np.int64 if max(given) < 1 << 63 else np.uint64
        data = np.array(filled, dtype=dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise UnsupportedColumnError(f"the rows do not fit a dtype of numpy: {error}") from error
    if data.ndim != 1 or data.dtype.kind not in "biufc":
        raise UnsupportedColumnError("the rows are not numbers")
    metadata = {"dtype": str(data.dtype), "shape": [len(values)]}
    return metadata, {"data": data, "nulls": nulls}


def _decode(payloads: Payloads, rows: int, _metadata: Mapping[str, Any]) -> list[Any]:
    nulls = checked_nulls(payloads, rows)
    data = payload_array(payloads, "data")
    if data.shape != (rows,):
        raise ValueError(f"the payload data has shape {data.shape}, expected ({rows},)")
    values: list[Any] = data.tolist()
    for row in np.flatnonzero(nulls):
        values[row] = None
    return values


def _select(payloads: Payloads, rows: int, metadata: Mapping[str, Any], chosen: Array) -> Selection:
    nulls = checked_nulls(payloads, rows)
    return Selection({"nulls": nulls[chosen]}, metadata, chosen, chosen + 1)


def _kind(value: Any) -> Any:
    """Return what a column of one dtype has in common."""
    if isinstance(value, np.generic):
        return value.dtype.kind
    if isinstance(value, bool):
        return "b"
    return "i" if isinstance(value, int) else "f" if isinstance(value, float) else "c"


SCALARS: Final = LeafCodec(_encode, _decode, _select, ("nulls",))
