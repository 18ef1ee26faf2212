"""Columns whose rows are dictionaries of tensors: one ragged column for each key."""

from __future__ import annotations

from collections import Counter
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
_SEPARATORS: Final = (".", "/", "\\")


def encode_tensor_dicts(values: Sequence[Any], options: Mapping[str, Any]) -> EncodedLeaf:
    """Encode rows that are dictionaries of tensors, or None.

    Args:
        values: The rows. A row that lacks a key comes back without it.
        options: ``keys`` names the keys; without it, those of the rows are used, sorted.

    Raises:
        TypeError: A key is not text, or a row is no dictionary, or has None under a key.
        UnsupportedColumnError: A key cannot be stored, or a row has one that is not named.
    """
    declared = options.get("keys")
    if declared is not None:
        _check_keys(list(declared))
    for row, value in enumerate(values):
        _check_row(row, value)
    found = {key for value in values if value is not None for key in value}
    if declared is None:
        _check_keys(list(found))
    keys = sorted(found) if declared is None else list(declared)
    for row, value in enumerate(values):
        unknown = sorted(key for key in value or () if key not in keys)
        if unknown:
            raise UnsupportedColumnError(
                f"ragged_tensor_dict row {row} has keys not declared in FieldSchema "
                f"metadata['keys']: {unknown}"
            )
    payloads: Payloads = {_NULL_MASK: nulls_of(values)}
    codecs: dict[str, Any] = {}
    for key in keys:
        column = [None if value is None else value.get(key) for value in values]
        leaf = encode_leaf("ragged_tensor", column)
        codecs[key] = leaf.metadata
        payloads.update({f"{key}.{name}": each for name, each in leaf.payloads.items()})
    return EncodedLeaf(CODEC, len(values), {"keys": keys, "key_codecs": codecs}, payloads)


def _check_keys(keys: Sequence[Any]) -> None:
    """Check the keys of a column, which are parts of the names of its payloads.

    Raises:
        TypeError: One is not text.
        UnsupportedColumnError: One is empty, is there twice, or could be mistaken for another.
    """
    if not all(isinstance(key, str) for key in keys):
        raise TypeError(f"ragged_tensor_dict keys must be strings, got {keys!r}")
    for key in keys:
        if not key:
            raise UnsupportedColumnError("ragged_tensor_dict keys must not be empty")
        if any(sign in key for sign in _SEPARATORS):
            raise UnsupportedColumnError(
                f"ragged_tensor_dict keys must not contain '.', '/' or '\\': {key!r}"
            )
    twice = sorted(key for key, count in Counter(keys).items() if count > 1)
    if twice:
        raise UnsupportedColumnError(
            f"ragged_tensor_dict keys must not contain a duplicate key: {twice}"
        )


def _check_row(row: int, value: Any) -> None:
    """Check that a row is a dictionary of tensors or None.

    Raises:
        TypeError: It is something else, or has None under a key.
    """
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise TypeError(
            f"ragged_tensor_dict rows must be mappings or None; row {row} is {type(value).__name__}"
        )
    missing = [key for key, each in value.items() if each is None]
    if missing:
        raise TypeError(
            f"ragged_tensor_dict row {row} has an explicit None for {missing}, which would come "
            "back as absent keys"
        )


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
