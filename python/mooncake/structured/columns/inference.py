"""The choice of a codec for a column without a schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from mooncake.structured.columns.blobs import is_bytes_like, is_image
from mooncake.structured.columns.leaf import EncodedLeaf, UnsupportedColumnError
from mooncake.structured.columns.media import is_media_list
from mooncake.structured.columns.ragged import EXACT, is_numeric_array, is_tensor
from mooncake.structured.columns.scalars import is_number
from mooncake.structured.columns.table import encode_leaf

__all__ = ["INFERRED", "infer_leaf", "is_sequence"]

INFERRED: Final = {"schema_source": "inferred_from_runtime_values"}
_OF_ARRAYS: Final = {"recursive_source": "ndarray"}

# For each codec: the test that every row which is not None must pass, and the words for it that are
# stored with the column. A column that fails to encode is left to the next codec.
_RULES: Final = (
    ("utf8_ragged", lambda value: isinstance(value, str), "all rows are str", "str"),
    ("bytes_ragged", is_bytes_like, "all rows are bytes-like", "bytes-like"),
    ("ndarray", is_number, "all rows are numeric scalar", "numeric scalar"),
    ("ragged_tensor", is_tensor, "all non-null rows are Tensor", "torch.Tensor"),
    (
        "typed_ragged",
        lambda value: is_numeric_array(value) or isinstance(value, list | tuple),
        "all rows are numeric sequences",
        "numeric sequence",
    ),
    ("media_bytes", is_image, "all rows are PIL images", "media bytes"),
    ("media_list_ragged", is_media_list, "all rows are media lists", "media list"),
    ("msgpack_ragged", lambda _: True, "all rows are msgpack-like", "msgpack"),
)


def infer_leaf(path: str, values: Sequence[Any]) -> EncodedLeaf:
    """Encode a column with the first codec that returns its rows as they are.

    Args:
        path: Name of the column, for the error.
        values: The rows.

    Raises:
        UnsupportedColumnError: No codec can represent the rows.
    """
    given = [value for value in values if value is not None]
    if not given:
        # Every codec can represent rows that are None; this one is the shortest.
        return _described(encode_leaf("utf8_ragged", values), "all rows are null", "null")
    reasons: list[str] = []
    for codec, matches, reason, kind in _RULES:
        if all(map(matches, given)):
            try:
                leaf = encode_leaf(codec, values, EXACT)
                if codec == "typed_ragged" and leaf.metadata["row_format"] == "ndarray":
                    leaf = replace(leaf, metadata={**leaf.metadata, **_OF_ARRAYS})
                    reason = "all rows are numeric ndarray"
                return _described(leaf, reason, kind)
            except UnsupportedColumnError as error:
                reasons.append(f"{codec}: {error}")
    raise UnsupportedColumnError(
        f"unsupported structured non-tensor field {path}: no codec matched ({'; '.join(reasons)})"
    )


def is_sequence(value: Any) -> bool:
    """Return whether a value is a list, a tuple or an array that is no text."""
    return isinstance(value, list | tuple | np.ndarray)


def _described(leaf: EncodedLeaf, reason: str, kind: str) -> EncodedLeaf:
    metadata = {
        **leaf.metadata,
        **INFERRED,
        "decision_reason": reason,
        "normalized_type": kind,
    }
    return EncodedLeaf(leaf.codec, leaf.rows, metadata, leaf.payloads)
