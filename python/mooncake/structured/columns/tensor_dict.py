"""Columns whose rows are dictionaries of tensors: one ragged column for each key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mooncake.structured.columns.leaf import (
    EncodedLeaf,
    Payloads,
    UnsupportedColumnError,
    checked_nulls,
    nulls_of,
)
from mooncake.structured.columns.table import codec_of, encode_leaf

__all__ = ["CODEC", "decode_tensor_dicts", "encode_tensor_dicts", "key_leaves"]

CODEC: Final = "ragged_tensor_dict"
_NULL_MASK: Final = "null_mask"


def encode_tensor_dicts(values: Sequence[Any], options: Mapping[str, Any]) -> EncodedLeaf:
    """Encode rows that are dictionaries of tensors, or None.

    Args:
        values: The rows.
        options: ``keys`` names the keys; without it, those of the rows are used.

    Raises:
        UnsupportedColumnError: A row is not a dictionary, or has a key that is not named.
    """
    given = [value for value in values if value is not None]
    if not all(isinstance(value, Mapping) for value in given):
        raise UnsupportedColumnError("a row is no dictionary of tensors")
    found = list(dict.fromkeys(key for value in given for key in value))
    keys = list(options.get("keys") or found)
    unknown = [key for key in found if key not in keys]
    if unknown or not all(isinstance(key, str) and key and "/" not in key for key in keys):
        raise UnsupportedColumnError(f"the keys of a row are not those of the column: {unknown}")
    payloads: Payloads = {_NULL_MASK: nulls_of(values)}
    codecs: dict[str, Any] = {}
    for key in keys:
        column = [None if value is None else value.get(key) for value in values]
        leaf = encode_leaf("ragged_tensor", column)
        codecs[key] = leaf.metadata
        payloads.update({f"{key}.{name}": each for name, each in leaf.payloads.items()})
    return EncodedLeaf(CODEC, len(values), {"keys": keys, "key_codecs": codecs}, payloads)


def key_leaves(metadata: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each key of such a column, and the metadata of its ragged column.

    Raises:
        ValueError: The metadata is not valid.
    """
    keys, codecs = metadata.get("keys"), metadata.get("key_codecs")
    if not isinstance(keys, list) or not isinstance(codecs, Mapping):
        raise ValueError("a column of dictionaries of tensors has no keys")
    if not all(isinstance(key, str) and isinstance(codecs.get(key), Mapping) for key in keys):
        raise ValueError("a column of dictionaries of tensors has invalid keys")
    return [(key, codecs[key]) for key in keys]


def decode_tensor_dicts(
    payloads: Payloads, rows: int, metadata: Mapping[str, Any]
) -> list[dict[str, Any] | None]:
    """Return the rows of such a column.

    Raises:
        ValueError: A payload is missing or not valid.
    """
    nulls = checked_nulls(payloads, rows, _NULL_MASK)
    decode = codec_of("ragged_tensor").decode
    columns: dict[str, list[Any]] = {}
    for key, of_key in key_leaves(metadata):
        prefix = f"{key}."
        own = {
            name.removeprefix(prefix): each
            for name, each in payloads.items()
            if name.startswith(prefix)
        }
        columns[key] = decode(own, rows, of_key)
    return [
        None
        if nulls[row]
        else {key: column[row] for key, column in columns.items() if column[row] is not None}
        for row in range(rows)
    ]
