"""The codec that upstream's package takes for the values at a place of a column, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from mooncake.structured.columns.blobs import is_bytes_like, is_image
from mooncake.structured.columns.leaf import MISSING, UnsupportedColumnError
from mooncake.structured.columns.media import is_media_list
from mooncake.structured.columns.ragged import is_numeric_array, is_tensor
from mooncake.structured.columns.table import encode_leaf

__all__ = ["CodecDecision", "decide"]

_NUMBERS: Final = (bool, int, float, np.bool_, np.integer, np.floating)
_ANYTHING: Final = "msgpack_ragged"


@dataclass(frozen=True)
class CodecDecision:
    """What is known about the values of a leaf.

    Attributes:
        accepted: True if the codec can store the values.
        codec: Name of the codec.
        reason: Why it was taken.
        normalized_type: What the values have in common.
        metadata: Options of the codec.
    """

    accepted: bool
    codec: str
    reason: str
    normalized_type: str
    metadata: dict[str, Any] = field(default_factory=dict)


def decide(values: Sequence[Any]) -> CodecDecision:
    """Return the codec for values, of which any may be None or `MISSING`."""
    given = [value for value in values if value is not None and value is not MISSING]
    if not given:
        return CodecDecision(False, _ANYTHING, "all rows are null", "msgpack")
    for rule in (_of_blobs, _of_numbers, _of_tensors, _of_arrays, _of_lists, _of_packed):
        decision = rule(given)
        if decision is not None:
            return decision
    return CodecDecision(False, _ANYTHING, "no codec matched", "python object")


def _of_blobs(given: Sequence[Any]) -> CodecDecision | None:
    if _are(given, lambda value: isinstance(value, str)):
        return CodecDecision(True, "utf8_ragged", "all rows are str", "str")
    if _are(given, is_bytes_like):
        return CodecDecision(True, "bytes_ragged", "all rows are bytes-like", "bytes-like")
    if _are(given, is_image):
        return CodecDecision(True, "media_bytes", "all rows are PIL images", "media bytes")
    if _are(given, is_media_list) and any(len(value) for value in given):
        kind = "media list"
        return CodecDecision(True, "media_list_ragged", "all rows are media lists", kind)
    return None


def _of_numbers(given: Sequence[Any]) -> CodecDecision | None:
    if not _are(given, lambda value: isinstance(value, _NUMBERS)):
        return None
    try:
        dtype = np.asarray(list(given)).dtype
    except (OverflowError, ValueError):
        return None
    if dtype.kind not in "biuf":
        return None
    reason = "all rows are numeric scalar"
    return CodecDecision(True, "ndarray", reason, "numeric scalar", {"dtype": str(dtype)})


def _of_tensors(given: Sequence[Any]) -> CodecDecision | None:
    if not _are(given, is_tensor):
        return None
    names = sorted({str(value.dtype) for value in given})
    kind = "torch.Tensor"
    if len(names) > 1:
        return CodecDecision(False, "ragged_tensor", f"mixed tensor dtype: {names}", kind)
    reason = "all non-null rows are Tensor"
    return CodecDecision(True, "ragged_tensor", reason, kind, {"dtype": names[0]})


def _of_arrays(given: Sequence[Any]) -> CodecDecision | None:
    if not _are(given, lambda value: isinstance(value, np.ndarray)):
        return None
    if not _are(given, is_numeric_array):
        return CodecDecision(False, _ANYTHING, "object ndarray rows", "python object")
    reason, kind = "all rows are numeric ndarray", "numeric sequence"
    return CodecDecision(True, "typed_ragged", reason, kind, {"recursive_source": "ndarray"})


def _of_lists(given: Sequence[Any]) -> CodecDecision | None:
    if not _are(given, lambda value: isinstance(value, list | tuple)):
        return None
    try:
        arrays = [np.asarray(value) for value in given]
        dtype = np.result_type(*arrays)
    except (TypeError, ValueError, OverflowError):
        return None
    if dtype.kind not in "iuf":
        return None
    reason, kind = "all rows are numeric sequences", "numeric sequence"
    return CodecDecision(True, "typed_ragged", reason, kind, {"dtype": str(dtype)})


def _of_packed(given: Sequence[Any]) -> CodecDecision | None:
    is_packed = _are(given, lambda value: isinstance(value, dict)) or _are(
        given, lambda value: isinstance(value, list | tuple)
    )
    if not is_packed:
        return None
    try:
        encode_leaf(_ANYTHING, given)
    except UnsupportedColumnError:
        return None
    return CodecDecision(True, _ANYTHING, "all rows are msgpack-like", "msgpack")


def _are(values: Sequence[Any], test: Callable[[Any], bool]) -> bool:
    return all(map(test, values))
