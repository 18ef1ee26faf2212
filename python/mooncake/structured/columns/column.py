"""Encoding and decoding of a column of any kind, and its parts for the selection of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake.structured.columns import tensor_dict, tree
from mooncake.structured.columns.inference import infer_leaf
from mooncake.structured.columns.leaf import (
    EncodedLeaf,
    FieldSchema,
    LeafCodec,
    Payloads,
    SchemaMismatchError,
    UnsupportedColumnError,
)
from mooncake.structured.columns.ragged import TENSORS
from mooncake.structured.columns.table import CODECS, codec_of, encode_leaf
from mooncake.structured.payloads import Array
from mooncake.tensor.dtypes import DType

__all__ = [
    "LeafPart",
    "column_parts",
    "decode_column",
    "encode_column",
    "object_array",
    "private_dtypes",
    "with_part_metadata",
]


@dataclass(frozen=True, slots=True)
class LeafPart:
    """A leaf of a column.

    Attributes:
        codec: How it is encoded.
        metadata: What the decoder needs besides the payloads.
        payloads: For each payload of the codec, its name among those of the column.
    """

    codec: LeafCodec
    metadata: Mapping[str, Any]
    payloads: Mapping[str, str]


def encode_column(
    path: str, values: Sequence[Any], schema: FieldSchema | None = None, name: str | None = None
) -> EncodedLeaf:
    """Encode the rows of a column.

    Args:
        path: Name of the member of the column, for errors.
        values: The rows.
        schema: How the column is stored; None infers it from the rows.
        name: Name of the field, for errors; None if it is the path.

    Raises:
        SchemaMismatchError: The rows cannot be stored with the codec of the schema.
        UnsupportedColumnError: The rows have no codec.
    """
    if schema is None:
        return _infer(path, values)
    try:
        return _encode_by_schema(path, values, schema)
    except (ValueError, TypeError, AttributeError) as error:
        raise SchemaMismatchError(
            f"failed to encode field {name or path!r} with FieldSchema codec {schema.codec!r}: "
            f"{error}"
        ) from error


def decode_column(
    codec: Any, payloads: Payloads, rows: int, metadata: Mapping[str, Any]
) -> list[Any]:
    """Return the rows of a column.

    Raises:
        ValueError: The codec is unknown, or a payload is missing or not valid.
    """
    if codec == tensor_dict.CODEC:
        return list(tensor_dict.decode_tensor_dicts(payloads, rows, metadata))
    if codec == tree.CODEC:
        return tree.decode_tree(payloads, rows, metadata)
    return codec_of(codec).decode(payloads, rows, metadata)


def column_parts(codec: Any, metadata: Mapping[str, Any]) -> list[LeafPart]:
    """Return the leaves of a column. Its other payloads have one item for each row.

    Raises:
        ValueError: The codec is unknown, or the description of the column is not valid.
    """
    if codec == tensor_dict.CODEC:
        of_key = codec_of("ragged_tensor")
        return [
            LeafPart(of_key, own, {name: f"{key}.{name}" for name in ("data", *of_key.payloads)})
            for key, own in tensor_dict.key_leaves(metadata)
        ]
    if codec == tree.CODEC:
        parts: list[LeafPart] = []
        for leaf in tree.tree_leaves(metadata):
            members = leaf.get("payload_members")
            own = leaf.get("metadata")
            if not isinstance(members, Mapping) or not isinstance(own, Mapping):
                raise ValueError("a leaf of a structured column is not valid")
            of_leaf = codec_of(leaf.get("codec"))
            names = {name: str(members.get(name)) for name in ("data", *of_leaf.payloads)}
            parts.append(LeafPart(of_leaf, own, names))
        return parts
    whole = codec_of(codec)
    return [LeafPart(whole, metadata, {name: name for name in ("data", *whole.payloads)})]


def with_part_metadata(
    codec: Any, metadata: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return the metadata of a column, with other metadata of each of its `column_parts`."""
    if codec == tensor_dict.CODEC:
        keys = [key for key, _ in tensor_dict.key_leaves(metadata)]
        return {**metadata, "key_codecs": dict(zip(keys, parts, strict=True))}
    if codec == tree.CODEC:
        leaves = zip(tree.tree_leaves(metadata), parts, strict=True)
        return {**metadata, "leaves": [{**leaf, "metadata": own} for leaf, own in leaves]}
    return parts[0]


def object_array(values: Sequence[Any]) -> Array:
    """Return an array of objects with one item for each value, also if the values are lists."""
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def private_dtypes(column: EncodedLeaf) -> list[str]:
    """Return the dtypes of tensors of a column that only this package reads.

    Upstream's package stores the elements of such columns as arrays of numpy, which lacks them.
    """
    parts = column_parts(column.codec, column.metadata)
    found = {str(part.metadata.get("dtype")) for part in parts if part.codec is TENSORS}
    return sorted(name for name in found if not DType.of_name(name).is_of_numpy)


def _encode_by_schema(path: str, values: Sequence[Any], schema: FieldSchema) -> EncodedLeaf:
    if not schema.nullable and any(value is None for value in values):
        raise ValueError(f"FieldSchema for {path!r} is not nullable, but a row is None")
    if schema.codec == tensor_dict.CODEC:
        return tensor_dict.encode_tensor_dicts(values, schema.metadata)
    if schema.codec == tree.CODEC:
        return tree.encode_tree(path, values)
    if schema.codec == "auto" or (
        schema.codec == "ndarray" and not schema.metadata and not _are_numbers(values)
    ):
        return _infer(path, values)
    if schema.codec not in CODECS:
        raise ValueError(f"unsupported schema codec: {schema.codec!r}")
    return encode_leaf(schema.codec, values, schema.metadata)


def _infer(path: str, values: Sequence[Any]) -> EncodedLeaf:
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {dict} and tree.has_arrays(values):
        return tree.encode_tree(path, values)
    try:
        leaf = infer_leaf(path, values)
    except UnsupportedColumnError:
        if tree.has_arrays(values):
            return tree.encode_tree(path, values)
        raise
    # Lists of numbers and lists of images have shorter codecs than a tree; lists of arrays do not.
    if leaf.codec == "msgpack_ragged" and tree.has_arrays(values):
        return tree.encode_tree(path, values)
    return leaf


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(
        value is None or (np.isscalar(value) and not isinstance(value, str | bytes))
        for value in values
    )
