"""A state dict of the caller that is filled from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mooncake.checkpoint.local import (
    Block,
    blocks_of,
    dtype_of,
    shape_of,
    value_of,
)
from mooncake.checkpoint.manifest import Manifest, Tensor
from mooncake.checkpoint.names import INVALID, NOT_FOUND, error_of
from mooncake.checkpoint.nodes import Node, Path, decode, path_text
from mooncake.checkpoint.transfer import Request
from mooncake.tensor import memory
from mooncake.tensor.format import DIMS_MAX

__all__ = ["Destinations"]

_MISSING: Any = object()


class Destinations:
    """Which boxes are read to where, and what is done when they are there.

    Attributes:
        requests: The boxes to read.
    """

    def __init__(self, manifest: Manifest, into: Any) -> None:
        """Compare a state dict with a manifest, and change nothing yet.

        Raises:
            NotFoundError: The checkpoint lacks a value; the message names it.
            ValueError: A tensor has another shape or dtype; the message names it.
        """
        self.requests: list[Request] = []
        self._manifest = manifest
        self._into = into
        self._steps: list[Callable[[], object]] = []
        self._kept: list[Any] = []
        self._filled: set[Any] = set()
        self._match(manifest.tree, into, (), self._set_root)

    def finish(self) -> Any:
        """Put what was read into its place; return the state dict."""
        for step in self._steps:
            step()
        return self._into

    def _set_root(self, value: Any) -> None:
        self._into = value

    def _match(self, node: Node, target: Any, path: Path, replace: Callable[[Any], object]) -> None:
        """Plan how a value is filled.

        Args:
            node: What the checkpoint has.
            target: The value.
            path: Where it is.
            replace: Puts another value in its place.
        """
        kind = next(iter(node)) if isinstance(node, dict) else ""
        if isinstance(target, dict) and kind in ("dict", "ordered"):
            self._match_dict(node[kind], target, path)
        elif type(target) in (list, tuple) and kind in ("list", "tuple"):
            if len(target) != len(node[kind]):
                text = "a list has another length than in the checkpoint"
                sizes = f"{len(node[kind])}, {len(target)}"
                raise error_of(INVALID, text, value=path_text(path), stored_and_given=sizes)
            self._match_items(node[kind], target, path, replace)
        elif _is_tensor(target) and kind in ("tensor", "array", "number"):
            self._fill(self._manifest.tensors[node[kind]], target, path)
        elif _is_tensor(target) or isinstance(target, dict) or type(target) in (list, tuple):
            text = "the checkpoint has a value of another kind there"
            given = type(target).__name__
            where = path_text(path)
            raise error_of(INVALID, text, value=where, stored=kind or "scalar", given=given)
        else:
            self._replace(node, path, replace)

    def _match_dict(self, pairs: list[list[Node]], target: dict[Any, Any], path: Path) -> None:
        stored = {_key(key): each for key, each in pairs}
        for key, value in target.items():
            node = stored.get((type(key), key), _MISSING)
            inner = (*path, key)
            if node is _MISSING:
                text = "the checkpoint has no such value"
                raise error_of(NOT_FOUND, text, value=path_text(inner))

            def put(new: Any, key: Any = key) -> None:
                target[key] = new

            self._match(node, value, inner, put)

    def _match_items(
        self, nodes: list[Node], target: Any, path: Path, replace: Callable[[Any], object]
    ) -> None:
        items = target if isinstance(target, list) else [*target]

        def put_at(at: int) -> Callable[[Any], None]:
            def put(new: Any) -> None:
                items[at] = new

            return put

        for at, (node, value) in enumerate(zip(nodes, target, strict=True)):
            self._match(node, value, (*path, at), put_at(at))
        if isinstance(target, tuple):
            self._steps.append(lambda: replace(tuple(items)))

    def _replace(self, node: Node, path: Path, replace: Callable[[Any], object]) -> None:
        """Replace a value that is no tensor."""
        from mooncake.checkpoint.loading import arrays_of, new_tensor

        tensors = _numbers_in(node)
        values: dict[int, Any] = {}
        arrays = arrays_of(node)
        for number in tensors:
            request, value = new_tensor(self._manifest.tensors[number], as_array=number in arrays)
            values[number] = value
            if request is not None:
                self.requests.append(request)

        def put() -> None:
            replace(value_of(node, values, _refuse(path)))

        self._steps.append(put)

    def _fill(self, tensor: Tensor, target: Any, path: Path) -> None:
        """Plan to read a tensor into one of the caller."""
        shape, dtype = shape_of(target), dtype_of(target)
        if shape != tensor.shape or dtype is not tensor.dtype:
            text = "a tensor has another shape or dtype than in the checkpoint"
            raise error_of(
                INVALID,
                text,
                tensor=path_text(path),
                stored=f"{tensor.dtype.name}{[*tensor.shape]}",
                given=f"{dtype.name}{[*shape]}",
            )
        for block in blocks_of(target):
            self._fill_block(tensor, block, path)

    def _fill_block(self, tensor: Tensor, block: Block, path: Path) -> None:
        from mooncake.checkpoint.loading import new_tensor

        value = block.value
        identity = None
        if _is_in_place(value):
            place = memory.of(value if value.ndim <= DIMS_MAX else value.reshape(-1))
            identity = (place.address, block.offset, block.shape, tensor.name)
            self._kept.append(place)
            if place.nbytes and identity not in self._filled:
                box = (block.offset, block.shape)
                self.requests.append(Request(tensor, box, place.address))
            self._filled.add(identity)
            return
        if _is_read_only(value):
            text = "an array of the state dict is read-only"
            raise error_of(INVALID, text, tensor=path_text(path))
        is_array = not hasattr(value, "layout")
        request, new = new_tensor(tensor, (block.offset, block.shape), as_array=is_array)
        if request is not None:
            self.requests.append(request)

        def copy() -> None:
            if is_array:
                value[...] = new
            else:
                value.copy_(new)

        self._steps.append(copy)


def _is_tensor(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        return hasattr(value, "to_local") or value.layout is torch.strided
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    return hasattr(value, "local_shards") and hasattr(value, "metadata")


def _is_in_place(value: Any) -> bool:
    """Return whether a value is one block of writable host memory in row-major order."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        is_plain = value.device.type == "cpu" and value.is_contiguous()
        return bool(is_plain and not value.is_conj() and not value.is_neg())
    flags = value.flags
    return bool(flags.c_contiguous and flags.writeable and value.dtype.isnative)


def _is_read_only(value: Any) -> bool:
    return not hasattr(value, "layout") and not value.flags.writeable


def _key(node: Node) -> tuple[type, Any]:
    key = decode(node, _no_leaf)
    return type(key), key


def _no_leaf(kind: str, inner: Any) -> Any:
    raise ValueError(f"a {kind} is no key: {inner!r:.60}")


def _numbers_in(node: Node) -> list[int]:
    """Return the numbers of the tensors in a tree."""
    if isinstance(node, list):
        return [number for each in node for number in _numbers_in(each)]
    if not isinstance(node, dict):
        return []
    ((kind, inner),) = node.items()
    if kind in ("tensor", "array", "number"):
        return [inner]
    if kind == "composed":
        return [number for each in inner["members"].values() for number in _numbers_in(each)]
    return _numbers_in(inner) if kind in ("dict", "ordered", "list", "tuple") else []


def _refuse(path: Path) -> Callable[[str], Any]:
    def blob(name: str) -> Any:
        text = "torch's planner has pickled the value; load with torch.distributed.checkpoint"
        raise error_of(INVALID, text, value=path_text(path), name=name)

    return blob
