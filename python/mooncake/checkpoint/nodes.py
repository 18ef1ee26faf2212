"""A state dict as JSON values: nested containers, scalars, and the numbers of tensors.

A value that JSON has (text, true, false, null, a small integer, a finite number) stands for itself.
Everything else is an object with one member, whose name says what it is.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, TypeAlias

from mooncake.checkpoint.names import INVALID, error_of
from mooncake.tensor.dtypes import DType

__all__ = ["Node", "Path", "decode", "encode", "encode_scalar", "merge", "path_text"]

Node: TypeAlias = Any
"""A JSON value."""

Path: TypeAlias = tuple[Any, ...]

DEPTH_MAX: Final = 200
_EXACT = 1 << 53
_CONTAINERS = ("dict", "ordered", "list", "tuple")
_SCALARS = ("int", "float", "complex", "bytes", "dtype", "size", "device", "tuple")
_UNKNOWN: Any = object()


def path_text(path: Path) -> str:
    """Return a path as text: keys and indices with dots between them."""
    return ".".join(str(each) for each in path) or "the state dict"


def encode(value: Any, leaf: Callable[[Any, Path], Node | None], path: Path = ()) -> Node:
    """Return a value as a node.

    Args:
        value: A container, a tensor or a scalar.
        leaf: Returns the node of a tensor; None for other values.
        path: Where the value is.

    Raises:
        TypeError: The value, or one in it, cannot be stored; the message has its path.
    """
    if len(path) > DEPTH_MAX:
        text = f"{path_text(path[:3])}… is nested deeper than {DEPTH_MAX}, or contains itself"
        raise TypeError(text)
    if isinstance(value, dict):
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        pairs = []
        for key, each in value.items():
            inner = (*path, key)
            pairs.append([_key(key, inner), encode(each, leaf, inner)])
        return {kind: pairs}
    if type(value) in (list, tuple):
        items = [encode(each, leaf, (*path, at)) for at, each in enumerate(value)]
        return {type(value).__name__: items}
    node = leaf(value, path)
    if node is None:
        node = encode_scalar(value)
    if node is _UNKNOWN:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(
            f"{path_text(path)} is of type {kind}, which a checkpoint cannot store: it has "
            "tensors, arrays, text, numbers, bytes, None, and dicts, lists and tuples of these"
        )
    return node


def encode_scalar(value: Any) -> Node:
    """Return a scalar as a node; a marker that equals nothing if it is none."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= _EXACT else {"int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is complex:
        return {"complex": [encode_scalar(value.real), encode_scalar(value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    torch = sys.modules.get("torch")
    if torch is not None:
        if kind is torch.Size:
            return {"size": [*value]}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
    return _UNKNOWN


def _key(key: Any, path: Path) -> Node:
    node = {"tuple": [_key(each, path) for each in key]} if type(key) is tuple else None
    if node is None:
        node = encode_scalar(key)
    if node is _UNKNOWN:
        kind = type(key).__qualname__
        raise TypeError(f"the key {path_text(path)} is of type {kind}, which cannot be stored")
    return node


def decode(node: Node, leaf: Callable[[str, Any], Any]) -> Any:
    """Return the value of a node.

    Args:
        node: A node of a checked tree.
        leaf: Returns the value of a node of a kind that is no container and no scalar.
    """
    if not isinstance(node, dict):
        return node
    ((kind, inner),) = node.items()
    if kind in ("dict", "ordered"):
        pairs = [(decode(key, leaf), decode(each, leaf)) for key, each in inner]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    if kind in ("list", "tuple"):
        items = [decode(each, leaf) for each in inner]
        return tuple(items) if kind == "tuple" else items
    return _scalar(kind, inner, leaf) if kind in _SCALARS else leaf(kind, inner)


def _scalar(kind: str, inner: Any, leaf: Callable[[str, Any], Any]) -> Any:
    if kind == "int":
        return int(inner)
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(*(decode(each, leaf) for each in inner))
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    from mooncake.tensor.dtypes import load_torch

    torch = load_torch()
    if kind == "size":
        return torch.Size(inner)
    if kind == "device":
        return torch.device(inner)
    return DType.of_name(inner).torch()


def checked_tree(node: Node, tensors: int, blobs: Container[str], depth: int = 0) -> None:
    """Check a tree that was read.

    Args:
        node: The root.
        tensors: Number of tensors.
        blobs: Names of blobs.
        depth: Depth of the root.

    Raises:
        ValueError: It is no tree of nodes.
    """
    if not isinstance(node, dict):
        if node is not None and type(node) not in (bool, str, int, float):
            raise ValueError(f"a value is of an unknown kind: {node!r:.60}")
        return
    if len(node) != 1 or depth > DEPTH_MAX:
        raise ValueError(f"a value is nested too deep or of an unknown kind: {[*node]!r:.60}")
    ((kind, inner),) = node.items()
    if kind in ("dict", "ordered"):
        for key, each in inner:
            checked_tree(key, 0, (), depth + 1)
            hash(decode(key, _no_leaf))
            checked_tree(each, tensors, blobs, depth + 1)
    elif kind in ("list", "tuple"):
        if not isinstance(inner, list):
            raise ValueError(f"the items of a {kind} are no list")
        for each in inner:
            checked_tree(each, tensors, blobs, depth + 1)
    elif kind in ("tensor", "array", "number"):
        if not isinstance(inner, int) or not 0 <= inner < tensors:
            raise ValueError(f"there is no tensor {inner!r:.60}")
    elif kind == "composed":
        for name in ("shape", "members", "layout"):
            inner[name]
        for each in inner["members"].values():
            checked_tree(each, tensors, blobs, depth + 1)
    elif kind == "blob":
        if inner not in blobs:
            raise ValueError(f"there are no bytes {inner!r:.60}")
    elif kind in ("dtype", "size", "device"):
        if kind == "dtype":
            DType.of_name(inner)
    elif kind in _SCALARS:
        _scalar(kind, inner, _no_leaf)
    else:
        raise ValueError(f"a value is of an unknown kind: {kind!r:.60}")


def _no_leaf(kind: str, inner: Any) -> Any:
    raise ValueError(f"a {kind} is no key: {inner!r:.60}")


def merge(
    nodes: Sequence[tuple[int, Node]],
    tensor: Callable[[Sequence[tuple[int, int]]], int],
    path: Path = (),
) -> Node:
    """Return the tree that the trees of several ranks make up.

    A rank may have keys that others lack. Lists have the same length at all ranks that have them.
    A scalar is that of the first rank.

    Args:
        nodes: Ranks and their trees.
        tensor: Returns the number of a tensor of the whole, given ranks and their own numbers.
        path: Where the trees are.

    Raises:
        InvalidArgumentError: The trees have different kinds of values in one place.
    """
    first = nodes[0][1]
    kind = next(iter(first)) if isinstance(first, dict) else ""
    for rank, node in nodes:
        own = next(iter(node)) if isinstance(node, dict) else ""
        is_same_container = own == kind or not {own, kind} & {*_CONTAINERS, "tensor", "array"}
        if not is_same_container:
            text = "ranks have values of different kinds in one place"
            kinds = f"{kind or 'scalar'}, {own or 'scalar'}"
            raise error_of(INVALID, text, value=path_text(path), kinds=kinds, rank=rank)
    if kind in ("dict", "ordered"):
        found: dict[str, tuple[Node, list[tuple[int, Node]]]] = {}
        for rank, node in nodes:
            for key, each in node[kind]:
                found.setdefault(repr(key), (key, []))[1].append((rank, each))
        return {kind: [[k, merge(own, tensor, (*path, _shown(k)))] for k, own in found.values()]}
    if kind in ("list", "tuple"):
        lengths = {len(node[kind]) for _, node in nodes}
        if len(lengths) > 1:
            text = f"ranks have a {kind} of different lengths in one place"
            lengths_text = ", ".join(map(str, sorted(lengths)))
            raise error_of(INVALID, text, value=path_text(path), lengths=lengths_text)
        rows = [[(rank, node[kind][at]) for rank, node in nodes] for at in range(len(first[kind]))]
        return {kind: [merge(row, tensor, (*path, at)) for at, row in enumerate(rows)]}
    if kind in ("tensor", "array", "number"):
        return {kind: tensor([(rank, node[kind]) for rank, node in nodes])}
    if kind == "composed":
        members = first[kind]["members"]
        merged = {
            name: merge([(rank, node[kind]["members"][name]) for rank, node in nodes], tensor, path)
            for name in members
        }
        return {kind: {**first[kind], "members": merged}}
    return first


def _shown(key: Node) -> Any:
    return decode(key, _no_leaf) if not isinstance(key, dict) else next(iter(key.values()))
