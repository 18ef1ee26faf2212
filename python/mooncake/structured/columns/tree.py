"""Columns whose rows are nested dicts and lists with arrays or tensors in them.

Such a column is a tree: each dict and list that the rows have at a place is a node, with one child
for each key or index. Everything else is a leaf, which is encoded as a column of its own. A row
that lacks a key has `MISSING` there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from mooncake.structured.columns.blobs import is_bytes_like, is_image
from mooncake.structured.columns.decisions import CodecDecision, decide
from mooncake.structured.columns.inference import INFERRED, infer_leaf
from mooncake.structured.columns.leaf import (
    MISSING,
    EncodedLeaf,
    Payloads,
    UnsupportedColumnError,
    checked_nulls,
    payload_array,
)
from mooncake.structured.columns.ragged import is_tensor
from mooncake.structured.columns.table import codec_of

if TYPE_CHECKING:
    from mooncake.structured.payloads import Array

__all__ = ["CODEC", "decode_tree", "encode_tree", "has_arrays", "infer_structure", "tree_leaves"]

CODEC: Final = "structured_recursive"
_VERSION: Final = 1
_DEPTH_MAX: Final = 32
_PLAIN_TYPES: Final = {bool, float, int, str, type(None)}
# Nodes and leaves that a stored column may have.
_PARTS_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Node:
    """A place in the rows where dicts or lists are.

    Attributes:
        path: The place.
        node_type: ``dict`` or ``list``.
        children: Keys in their order, or indexes.
        values: What each row has there.
    """

    path: str
    node_type: Literal["dict", "list"]
    children: list[Any]
    values: list[Any] = field(repr=False)

    @property
    def row_mask(self) -> list[bool]:
        """True for each row that has a dict or list there."""
        kinds: Any = dict if self.node_type == "dict" else (list, tuple)
        return [isinstance(value, kinds) for value in self.values]

    @property
    def lengths(self) -> list[int] | None:
        """Number of items of each row, 0 for one without a list; None for dicts."""
        if self.node_type == "dict":
            return None
        return [len(value) if isinstance(value, list | tuple) else 0 for value in self.values]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A place in the rows where something else is.

    Attributes:
        path: The place.
        values: What each row has there.
    """

    path: str
    values: list[Any]

    @property
    def decision(self) -> CodecDecision:
        """The codec that upstream's package takes for the values, and why."""
        return decide(self.values)


@dataclass(frozen=True, slots=True)
class _Limits:
    """Which dicts and lists are split into their parts.

    Attributes:
        keys: Most keys of the dicts of a place.
        items: Most items of a list.
        is_arrays_only: True to split only lists that have arrays or bytes in them. Others are
            shorter as a leaf. False to split those whose items are all dicts, lists or None.
    """

    keys: int
    items: int
    is_arrays_only: bool


# What upstream splits.
_PUBLIC: Final = _Limits(keys=64, items=8, is_arrays_only=False)
# What is stored as a tree. Upstream reads trees of any size.
_STORED: Final = _Limits(keys=1024, items=64, is_arrays_only=True)


def has_arrays(values: Sequence[Any]) -> bool:
    """Return whether rows are dicts or lists that have arrays, tensors, bytes or images in them."""
    containers = [value for value in values if isinstance(value, dict | list | tuple)]
    return any(_holds_arrays(value, 0) for value in containers)


def encode_tree(path: str, values: Sequence[Any]) -> EncodedLeaf:
    """Encode rows that are nested dicts and lists.

    Args:
        path: Name of the column.
        values: The rows.

    Raises:
        UnsupportedColumnError: A part of the rows has no codec.
    """
    nodes: list[Node] = []
    leaves: list[Leaf] = []
    _split(path, list(values), leaves, nodes, _STORED, 0)
    payloads: Payloads = {}
    described_nodes: list[dict[str, Any]] = []
    for at, node in enumerate(nodes):
        prefix = f"node.{at}"
        described = {
            "id": at,
            "path": node.path,
            "node_type": node.node_type,
            "children": node.children,
            "missing_payload": f"{prefix}.missing",
            "row_mask_payload": f"{prefix}.row_mask",
        }
        payloads[f"{prefix}.missing"] = _flags([value is MISSING for value in node.values])
        payloads[f"{prefix}.row_mask"] = _flags(node.row_mask)
        lengths = node.lengths
        if lengths is not None:
            described["lengths_payload"] = f"{prefix}.lengths"
            payloads[f"{prefix}.lengths"] = np.array(lengths, dtype=np.int64)
        described_nodes.append(described)
    described_leaves = [_encode_tree_leaf(at, leaf, payloads) for at, leaf in enumerate(leaves)]
    metadata = {
        **INFERRED,
        "structure_version": _VERSION,
        "root_path": path,
        "nodes": described_nodes,
        "leaves": described_leaves,
    }
    return EncodedLeaf(CODEC, len(values), metadata, payloads)


def infer_structure(
    path: str, values: list[Any], leaves: list[Leaf], nodes: list[Node], *, _depth: int = 0
) -> None:
    """Split rows into the nodes and leaves of a tree, as upstream's package does.

    Dicts with at most 64 different keys are split, and lists of at most 8 items that are all dicts,
    lists or None. A row without a value has None in the parts; one without a key or an index has
    `MISSING`.

    Args:
        path: Place of the rows.
        values: The rows.
        leaves: Receives the leaves.
        nodes: Receives the nodes, parents before children.

    Raises:
        ValueError: The rows are nested too deeply.
    """
    _split(path, values, leaves, nodes, _PUBLIC, _depth)


def _split(
    path: str,
    values: list[Any],
    leaves: list[Leaf],
    nodes: list[Node],
    limits: _Limits,
    depth: int,
) -> None:
    if depth > _DEPTH_MAX:
        raise ValueError(f"infer_structure exceeded max depth {_DEPTH_MAX} at {path!r}")
    given = [value for value in values if value is not None and value is not MISSING]
    keys = _keys_of(path, given, limits)
    if keys is not None:
        nodes.append(Node(path, "dict", keys, values))
        for key in keys:
            children = [
                value.get(key, MISSING) if isinstance(value, dict) else None for value in values
            ]
            _split(_child_path(path, key), children, leaves, nodes, limits, depth + 1)
        return
    if not _is_split_list(given, limits):
        leaves.append(Leaf(path, values))
        return
    longest = max(map(len, given))
    nodes.append(Node(path, "list", list(range(longest)), values))
    for at in range(longest):
        children = [_item(value, at) for value in values]
        _split(f"{path}[{at}]", children, leaves, nodes, limits, depth + 1)


def tree_leaves(metadata: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the description of each leaf of a stored tree.

    Raises:
        ValueError: The description of the tree is not valid.
    """
    if metadata.get("structure_version") != _VERSION:
        raise ValueError(f"unsupported structure_version: {metadata.get('structure_version')!r}")
    return _descriptions(metadata, "leaves")


def decode_tree(payloads: Payloads, rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    """Return the rows of a tree.

    Args:
        payloads: Payloads of the nodes and leaves, by the names that the description has.
        rows: Number of rows.
        metadata: Description of the tree.

    Raises:
        ValueError: A payload is missing, or the description is not valid.
    """
    columns: dict[str, list[Any]] = {}
    for leaf in tree_leaves(metadata):
        columns[_path(leaf)] = _decode_tree_leaf(leaf, payloads, rows)
    nodes = _descriptions(metadata, "nodes")
    # Children come after their parents, so the last node has no nodes as children.
    for node in reversed(nodes):
        columns[_path(node)] = _decode_node(node, payloads, rows, columns)
    root = columns.get(str(metadata.get("root_path")))
    if root is None:
        raise ValueError("the description of a structured column has no root")
    return [None if value is MISSING else value for value in root]


def _encode_tree_leaf(at: int, leaf: Leaf, payloads: Payloads) -> dict[str, Any]:
    prefix = f"leaf.{at}"
    values = [None if value is MISSING else value for value in leaf.values]
    encoded = infer_leaf(leaf.path, values)
    own = {name: f"{prefix}.{name}" for name in encoded.payloads}
    payloads.update({own[name]: each for name, each in encoded.payloads.items()})
    own["missing"] = f"{prefix}.missing"
    payloads[own["missing"]] = _flags([value is MISSING for value in leaf.values])
    return {
        "id": at,
        "path": leaf.path,
        "codec": encoded.codec,
        "rows": encoded.rows,
        "metadata": encoded.metadata,
        "payload_members": own,
    }


def _decode_tree_leaf(leaf: Mapping[str, Any], payloads: Payloads, rows: int) -> list[Any]:
    members = leaf.get("payload_members")
    if not isinstance(members, Mapping):
        raise ValueError("a leaf of a structured column has no payload_members")
    own = {name: payloads[key] for name, key in members.items() if key in payloads}
    metadata = leaf.get("metadata")
    codec = codec_of(leaf.get("codec"))
    values = codec.decode(own, rows, metadata if isinstance(metadata, Mapping) else {})
    for row in np.flatnonzero(checked_nulls(own, rows, "missing")):
        values[row] = MISSING
    return values


def _decode_node(
    node: Mapping[str, Any], payloads: Payloads, rows: int, columns: dict[str, list[Any]]
) -> list[Any]:
    missing = checked_nulls(payloads, rows, str(node.get("missing_payload"))).tolist()
    mask = checked_nulls(payloads, rows, str(node.get("row_mask_payload"))).tolist()
    names = node.get("children")
    if not isinstance(names, list):
        raise ValueError("a node of a structured column has no children")
    path = _path(node)
    is_dict = node.get("node_type") == "dict"
    if not is_dict and node.get("node_type") != "list":
        raise ValueError(f"unsupported node_type: {node.get('node_type')!r}")
    children: list[list[Any]] = []
    for name in names:
        child = _child_path(path, name) if is_dict else f"{path}[{name}]"
        if child not in columns:
            raise ValueError(f"a structured column has no part {child!r}")
        children.append(columns.pop(child))
    if is_dict:
        pairs = list(zip(names, children, strict=True))
        return [
            MISSING
            if missing[row]
            else {name: column[row] for name, column in pairs if column[row] is not MISSING}
            if mask[row]
            else None
            for row in range(rows)
        ]
    lengths = payload_array(payloads, str(node.get("lengths_payload")))
    if lengths.shape != (rows,) or bool(((lengths < 0) | (lengths > len(children))).any()):
        raise ValueError("the lengths of the lists of a structured column are not valid")
    return [
        MISSING
        if missing[row]
        else [column[row] for column in children[: lengths[row]]]
        if mask[row]
        else None
        for row in range(rows)
    ]


def _descriptions(metadata: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    parts = metadata.get(name)
    if (
        not isinstance(parts, list)
        or len(parts) > _PARTS_MAX
        or not all(isinstance(part, Mapping) for part in parts)
    ):
        raise ValueError(f"the description of a structured column has no valid {name}")
    return parts


def _holds_arrays(container: Any, depth: int) -> bool:
    items = container.values() if isinstance(container, dict) else container
    # Most lists have plain items of few types, and many of them.
    if not set(map(type, items)) - _PLAIN_TYPES:
        return False
    for item in items:
        if isinstance(item, dict | list | tuple):
            if depth < _DEPTH_MAX and _holds_arrays(item, depth + 1):
                return True
        elif (
            isinstance(item, np.ndarray) or is_bytes_like(item) or is_tensor(item) or is_image(item)
        ):
            return True
    return False


def _keys_of(path: str, rows: Sequence[Any], limits: _Limits) -> list[str] | None:
    """Return the keys of rows that are dicts, sorted; None if the rows are a leaf."""
    if not rows or not all(isinstance(row, dict) for row in rows):
        return None
    keys = {key for row in rows for key in row}
    if limits is _STORED and not all(isinstance(key, str) for key in keys):
        raise UnsupportedColumnError(f"the keys of the dicts at {path!r} are not all str")
    if limits is _STORED and len(keys) > limits.keys:
        raise UnsupportedColumnError(
            f"the dicts at {path!r} have {len(keys)} different keys, at most {limits.keys} are "
            "stored"
        )
    if len(keys) > limits.keys or not all(isinstance(key, str) for key in keys):
        return None
    return sorted(keys)


def _is_split_list(rows: Sequence[Any], limits: _Limits) -> bool:
    if not rows or not all(isinstance(row, list | tuple) for row in rows):
        return False
    if max(map(len, rows)) > limits.items:
        return False
    if limits.is_arrays_only:
        return has_arrays(rows)
    return all(
        item is None or isinstance(item, dict | list | tuple) for row in rows for item in row
    )


def _child_path(path: str, key: Any) -> str:
    escaped = str(key).replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")
    return f"{path}.{escaped}"


def _item(value: Any, at: int) -> Any:
    if not isinstance(value, list | tuple):
        return None
    return value[at] if at < len(value) else MISSING


def _path(part: Mapping[str, Any]) -> str:
    return str(part.get("path"))


def _flags(values: Sequence[bool]) -> Array:
    return np.array(values, dtype=np.bool_)
