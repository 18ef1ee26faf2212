"""The tensors of a state dict in this process: which boxes of which tensors it holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mooncake.checkpoint.nodes import Node, Path, decode, encode, path_text
from mooncake.tensor.dtypes import DType, load_torch

__all__ = ["Block", "Box", "LocalTensor", "LocalTensors", "blocks_of", "shape_of"]

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and length in each dimension."""

_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a tensor and the tensor or array that has its elements.

    Attributes:
        offset: First index in each dimension.
        shape: Length in each dimension.
        value: The elements.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    value: Any


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor, of which this process holds some boxes.

    Attributes:
        name: Its path.
        dtype: Type of the elements.
        shape: Shape of the whole tensor.
        blocks: The boxes.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    def document(self) -> dict[str, Any]:
        """Return what other ranks need to know."""
        return {
            "name": self.name,
            "dtype": self.dtype.name,
            "shape": self.shape,
            "boxes": [[block.offset, block.shape] for block in self.blocks],
        }


class LocalTensors:
    """The tensors of a state dict, and the tree with their numbers."""

    def __init__(self, state_dict: Any) -> None:
        """Walk through a state dict.

        Raises:
            TypeError: A value cannot be stored; the message has its path.
        """
        self.tensors: list[LocalTensor] = []
        self._known: dict[Any, int] = {}
        self._names: dict[str, int] = {}
        self.tree: Node = encode(state_dict, self._leaf)

    def check(self) -> None:
        """Do nothing: the caller sees to it that memory does not change."""

    def document(self) -> dict[str, Any]:
        """Return what other ranks need to know."""
        return {"tree": self.tree, "tensors": [each.document() for each in self.tensors]}

    def _leaf(self, value: Any, path: Path) -> Node | None:
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        try:
            if torch is not None and isinstance(value, torch.Tensor):
                return self._tensor(torch, value, path)
            if _is_sharded(value):
                return {"tensor": self._add(value, path)}
            if numpy is not None and isinstance(value, numpy.ndarray):
                return {"array": self._add(value, path)}
            if numpy is not None and isinstance(value, numpy.generic):
                return {"number": self._add(numpy.asarray(value), path)}
        except (TypeError, ValueError) as error:
            # A failure has one path, that of the innermost value.
            raise TypeError(f"{path_text(path)} cannot be stored: {error}") from error
        return None

    def _tensor(self, torch: Any, value: Any, path: Path) -> Node:
        if value.device.type == "meta" or type(value).__name__ == "FakeTensor":
            raise TypeError(f"a tensor of the device {value.device} has no elements to store")
        if hasattr(value, "to_local"):
            return {"tensor": self._add(value, path)}
        if hasattr(value, "__tensor_flatten__") and value.layout is not torch.jagged:
            kind = type(value).__name__
            raise TypeError(f"a {kind} consists of several tensors: store each of them")
        if value.layout is torch.strided and not value.is_nested:
            return {"tensor": self._add(value, path)}
        value, layout = value.detach(), str(value.layout).removeprefix("torch.")
        if layout == "sparse_coo":
            value = value.coalesce()
            members = {"indices": value.indices(), "values": value.values()}
        elif layout in _COMPRESSED:
            members = {name: getattr(value, name)() for name in _COMPRESSED[layout]}
            members["values"] = value.values()
        elif layout == "jagged":
            packed = value if value.lengths() is None else value.contiguous()
            members = {"values": packed.values(), "offsets": packed.offsets()}
            ragged = next(at for at, each in enumerate(packed.shape) if not isinstance(each, int))
            return self._composed(layout, [ragged], members, path)
        else:
            raise TypeError(f"tensors of layout {layout} are not supported")
        return self._composed(layout, [*value.shape], members, path)

    def _composed(self, layout: str, shape: list[int], members: dict[str, Any], path: Path) -> Node:
        nodes = {name: {"tensor": self._add(each, (*path, name))} for name, each in members.items()}
        return {"composed": {"layout": layout, "shape": shape, "members": nodes}}

    def _add(self, value: Any, path: Path) -> int:
        """Return the number of a tensor; tensors that are the same memory have the same number."""
        known = _identity(value)
        if known is not None and known in self._known:
            return self._known[known]
        name = path_text(path)
        times = self._names[name] = self._names.get(name, 0) + 1
        if times > 1:
            # The keys 1 and "1" have the same text.
            name = f"{name}~{times}"
        blocks = blocks_of(value)
        self.tensors.append(LocalTensor(name, dtype_of(value), shape_of(value), blocks))
        number = len(self.tensors) - 1
        if known is not None:
            self._known[known] = number
        return number


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a whole tensor or array."""
    return tuple(value.metadata().size) if _is_sharded(value) else (*value.shape,)


def dtype_of(value: Any) -> DType:
    """Return the type of the elements of a tensor or array.

    Raises:
        TypeError: It cannot be stored.
    """
    torch = sys.modules.get("torch")
    if _is_sharded(value) or (torch is not None and isinstance(value, torch.Tensor)):
        return DType.of_torch(value.dtype)
    return DType.of_numpy(value.dtype)


def blocks_of(value: Any) -> tuple[Block, ...]:
    """Return the boxes of a tensor that this process holds, over the same memory.

    Raises:
        TypeError: The tensor is of a kind that cannot be stored.
    """
    if _is_sharded(value):
        return tuple(
            Block(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes), s.tensor.detach())
            for s in value.local_shards()
        )
    if hasattr(value, "to_local") and hasattr(value, "placements"):
        return _blocks_of_dtensor(value)
    shape = (*value.shape,)
    return (Block((0,) * len(shape), shape, value.detach() if hasattr(value, "detach") else value),)


def _blocks_of_dtensor(value: Any) -> tuple[Block, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(each.is_partial() for each in value.placements):
        raise TypeError("a DTensor with partial sums is not supported: redistribute it first")
    if value.device_mesh.get_coordinate() is None:
        return ()
    own, offset = compute_local_shape_and_global_offset(
        value.shape, value.device_mesh, value.placements
    )
    local = value.detach().to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    if math.prod(own) == 0:
        return ()
    if tuple(local.shape) != tuple(own):
        raise TypeError(f"the shard of a DTensor has the shape {(*local.shape,)}, not {(*own,)}")
    return (Block(tuple(offset), tuple(own), local),)


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "local_shards") and hasattr(value, "metadata")


def _identity(value: Any) -> Any:
    """Return what two tensors over the same memory have in common; None if that is unknown."""
    torch = sys.modules.get("torch")
    if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if value.numel() == 0 or value.device.type == "meta" or value.layout is not torch.strided:
        return None
    place = value.device, value.data_ptr()
    return (*place, value.dtype, (*value.shape,), value.stride(), value.is_conj(), value.is_neg())


def value_of(tree: Node, tensors: Sequence[Any] | Mapping[int, Any], blob: Any) -> Any:
    """Return the state dict of a tree.

    Args:
        tree: The checked tree.
        tensors: The tensors by number.
        blob: Returns the value of a blob by its name, and may raise.
    """

    def leaf(kind: str, inner: Any) -> Any:
        if kind in ("tensor", "array"):
            return tensors[inner]
        if kind == "number":
            return tensors[inner][()]
        if kind == "blob":
            return blob(inner)
        return _composed_value(inner, {k: decode(each, leaf) for k, each in members(inner)})

    return decode(tree, leaf)


def members(inner: Node) -> list[tuple[str, Node]]:
    """Return the names and nodes of the tensors that make up a composed one."""
    return list(inner["members"].items())


def _composed_value(inner: Node, parts: dict[str, Any]) -> Any:
    torch, layout = load_torch(), inner["layout"]
    values = parts["values"]
    if layout == "jagged":
        dim = inner["shape"][0]
        return torch.nested.nested_tensor_from_jagged(values, parts["offsets"], jagged_dim=dim)
    if layout == "sparse_coo":
        return torch.sparse_coo_tensor(
            parts["indices"], values, inner["shape"], is_coalesced=True, check_invariants=True
        )
    first, second = (parts[name] for name in _COMPRESSED[layout])
    return torch.sparse_compressed_tensor(
        first,
        second,
        values,
        inner["shape"],
        layout=getattr(torch, layout),
        check_invariants=True,
    )
