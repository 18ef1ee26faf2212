"""Tensors that are split into equal shards for tensor parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mooncake._aliases import accept_aliases
from mooncake._hints import torch
from mooncake.store.batch import Key, check_lists, have_same_length, invalid_argument, unsigned
from mooncake.store.codes import INVALID_PARAMS, OK
from mooncake.store.config import ReplicateConfig
from mooncake.store.tensors.base import (
    Item,
    TensorBase,
    head_of,
    read_metadata,
    tensor_memory,
)
from mooncake.tensor import memory
from mooncake.tensor.dtypes import load_torch
from mooncake.tensor.format import AxisRecord, FormatError, TensorMetadata, shard_key

__all__ = ["TensorParallelCalls"]


class TensorParallelCalls(TensorBase):
    """Puts that split tensors into shards, and gets of one shard.

    The shard of rank ``r`` has the key ``<key>_tp_<r>``. With a `tp_size` of 1 a tensor is stored
    whole, under its own key.
    """

    __slots__ = ()

    def put_tensor_with_tp(
        self,
        key: Key,
        tensor: torch.Tensor,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Split a whole tensor and store all its shards. Existing shards are kept.

        Args:
            key: Key of the tensor.
            tensor: The whole tensor.
            tp_rank: Accepted; the shards of all ranks are stored.
            tp_size: Number of shards, which must divide the length of the dimension.
            split_dim: Dimension to split, from 0.
            config: Number of copies, pins and placement; groups are those of the shards.

        Returns:
            0, or the first failure; -600 if the tensor cannot be split so.
        """
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[
            0
        ]

    def pub_tensor_with_tp(
        self,
        key: Key,
        tensor: torch.Tensor,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Split a tensor and store all its shards as `put_tensor_with_tp` does.

        Args:
            key: Key of the tensor.
            tensor: The whole tensor.
            config: Number of copies, pins and placement; groups are those of the shards.
            tp_rank: Accepted; the shards of all ranks are stored.
            tp_size: Number of shards.
            split_dim: Dimension to split, from 0.

        Returns:
            0, or the first failure.
        """
        return self.batch_pub_tensor_with_tp([key], [tensor], config, tp_rank, tp_size, split_dim)[
            0
        ]

    @accept_aliases(keys="base_keys", tensors="tensors_list")
    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[Key],
        tensors_list: Sequence[torch.Tensor],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Split many tensors and store all their shards. Existing shards are kept.

        Args:
            base_keys: Keys of the tensors; also named ``keys``.
            tensors_list: A whole tensor for each key; also named ``tensors``.
            tp_rank: Accepted; the shards of all ranks are stored.
            tp_size: Number of shards of each tensor.
            split_dim: Dimension to split, from 0.
            config: Number of copies, pins and placement; groups are those of the shards.

        Returns:
            For each key 0 or its first failure; -600 for all if the lists differ in length.
        """
        return self.batch_pub_tensor_with_tp(
            base_keys, tensors_list, config, tp_rank, tp_size, split_dim
        )

    @accept_aliases(keys="base_keys", tensors="tensors_list")
    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[Key],
        tensors_list: Sequence[torch.Tensor],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,  # noqa: ARG002
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Split many tensors and store all their shards as `batch_put_tensor_with_tp` does.

        Args:
            base_keys: Keys of the tensors; also named ``keys``.
            tensors_list: A whole tensor for each key; also named ``tensors``.
            config: Number of copies, pins and placement; groups are those of the shards.
            tp_rank: Accepted; the shards of all ranks are stored.
            tp_size: Number of shards of each tensor.
            split_dim: Dimension to split, from 0.

        Returns:
            For each key 0 or its first failure.
        """
        if tp_size <= 1:
            return self._put_tensors(base_keys, tensors_list, config)
        check_lists(base_keys, tensors_list)
        if len(base_keys) != len(tensors_list):
            invalid_argument(
                f"the lists differ in length base_keys={len(base_keys)} "
                f"tensors_list={len(tensors_list)}"
            )
            return [INVALID_PARAMS] * len(base_keys)
        return self._put_shards(base_keys, tensors_list, config, tp_size, split_dim)

    def get_tensor_with_tp(
        self, key: Key, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        """Return the shard of one rank, as it was stored; None if there is none.

        Args:
            key: Key of the tensor.
            tp_rank: Rank of the shard.
            tp_size: Number of shards; 1 returns the whole tensor that is stored under `key`.
            split_dim: Accepted; the stored shard is returned whatever dimension was split.

        Raises:
            ImportError: torch is not installed.
        """
        return self._get_tensors([_key_of_shard(key, tp_rank, tp_size, split_dim)])[0]

    @accept_aliases(keys="base_keys")
    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[Key], tp_rank: int = 0, tp_size: int = 1
    ) -> list[torch.Tensor | None]:
        """Return the shards of one rank of many tensors; None for each failure.

        Args:
            base_keys: Keys of the tensors; also named ``keys``.
            tp_rank: Rank of the shards.
            tp_size: Number of shards of each tensor; 1 returns whole tensors.

        Raises:
            ImportError: torch is not installed.
        """
        check_lists(base_keys)
        return self._get_tensors([_key_of_shard(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self,
        key: Key,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> torch.Tensor | None:
        """Read the serialized shard of one rank into memory; return the shard, which shares it.

        Args:
            key: Key of the tensor.
            buffer_ptr: Address of the memory, which must outlive the returned tensor.
            size: Length of the memory; at least the length of the shard's object.
            tp_rank: Rank of the shard.
            tp_size: Number of shards; 1 reads the whole tensor that is stored under `key`.
            split_dim: Accepted; the stored shard is returned whatever dimension was split.

        Returns:
            The shard; None if there is none, or the memory is too small.

        Raises:
            ImportError: torch is not installed.
        """
        shard = _key_of_shard(key, tp_rank, tp_size, split_dim)
        return self._get_tensors_into([shard], [buffer_ptr], [size])[0]

    @accept_aliases(keys="base_keys")
    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """Read the serialized shards of one rank of many tensors into memory.

        Args:
            base_keys: Keys of the tensors; also named ``keys``.
            buffer_ptrs: Address of the memory for each shard.
            sizes: Length of the memory for each shard.
            tp_rank: Rank of the shards.
            tp_size: Number of shards of each tensor; 1 reads whole tensors.

        Returns:
            For each key the shard, which shares the memory, or None; -600 for all if the lists
            differ in length, and before `setup`.

        Raises:
            ImportError: torch is not installed.
        """
        if self._native is None or not have_same_length(base_keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(base_keys)
        shards = [_key_of_shard(key, tp_rank, tp_size) for key in base_keys]
        return self._get_tensors_into(shards, buffer_ptrs, sizes)

    def put_tensor_with_tp_from(
        self,
        key: Key,
        buffer_ptr: int,
        size: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """Split a serialized whole tensor in memory and store all its shards.

        Args:
            key: Key of the tensor.
            buffer_ptr: Address of the metadata, which the elements follow.
            size: Length of both together.
            tp_rank: Accepted; the shards of all ranks are stored.
            tp_size: Number of shards; 1 stores the tensor whole.
            split_dim: Dimension to split, from 0.

        Returns:
            0, or the first failure.
        """
        return self.batch_put_tensor_with_tp_from(
            [key], [buffer_ptr], [size], tp_rank, tp_size, split_dim
        )[0]

    @accept_aliases(keys="base_keys")
    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,  # noqa: ARG002
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """Split many serialized whole tensors in memory and store all their shards.

        Args:
            base_keys: Keys of the tensors; also named ``keys``.
            buffer_ptrs: Address of each serialized tensor.
            sizes: Length of each serialized tensor.
            tp_rank: Accepted; the shards of all ranks are stored.
            tp_size: Number of shards of each tensor; 1 stores the tensors whole.
            split_dim: Dimension to split, from 0.

        Returns:
            For each key 0 or its first failure; -600 for all if the lists differ in length.
        """
        if tp_size <= 1:
            return self._put_tensors_from(base_keys, buffer_ptrs, sizes)
        if self._native is None or not have_same_length(base_keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(base_keys)
        load_torch()
        wholes = [_whole_at(*place) for place in zip(buffer_ptrs, sizes, strict=True)]
        return self._put_shards(base_keys, wholes, None, tp_size, split_dim)

    def _put_shards(
        self,
        keys: Sequence[Key],
        tensors: Sequence[object],
        config: ReplicateConfig | None,
        size: int,
        dim: int,
    ) -> list[int]:
        """Put the shards of all tensors in one batch; text stands for a tensor that is refused."""
        shards: list[Key] = []
        items: list[Item | str] = []
        starts = [0]
        for key, tensor in zip(keys, tensors, strict=True):
            split = tensor if isinstance(tensor, str) else _split(tensor, size, dim)
            if isinstance(split, str):
                shards.append(key)
                items.append(split)
            else:
                shards += [_key_of_shard(key, rank, size, dim) for rank in range(size)]
                items += split
            starts.append(len(items))
        codes = self._put_items(shards, items, config, is_upsert=False)
        return [
            next((code for code in codes[start:end] if code != OK), OK)
            for start, end in itertools.pairwise(starts)
        ]


def _key_of_shard(key: Key, rank: int, size: int, dim: int = 0) -> Key:
    if size <= 1:
        return key
    return shard_key(key, [AxisRecord("tp", unsigned("tp_rank", rank), size, dim)])


def _whole_at(address: int, length: int) -> object:
    """Return the whole tensor that is serialized at an address, or the reason why there is none."""
    try:
        metadata = read_metadata(address, length)
        if metadata.axes:
            return "the memory holds a shard, not a whole tensor"
        return memory.restore(memory.at_address(address, length), metadata)
    except (FormatError, TypeError) as error:
        return str(error)


def _split(tensor: Any, size: int, dim: int) -> list[Item] | str:
    """Return the shards of a tensor, or the reason why it cannot be split."""
    try:
        shape = tensor_memory(tensor).shape
        if tensor.is_nested:
            return "a jagged tensor cannot be split: store its values() and offsets()"
        if not 0 <= dim < len(shape):
            return f"the dimension to split is out of range split_dim={dim} shape={shape}"
        extent, rest = divmod(shape[dim], size)
        if rest != 0:
            return (
                f"the dimension cannot be split evenly split_dim={dim} tp_size={size} shape={shape}"
            )
        return [
            _shard(tensor.narrow(dim, rank * extent, extent), shape, rank, size, dim)
            for rank in range(size)
        ]
    except TypeError as error:
        return str(error)


def _shard(part: Any, shape: tuple[int, ...], rank: int, size: int, dim: int) -> Item:
    found = tensor_memory(part)
    axis = AxisRecord("tp", rank, size, dim, extent=found.shape[dim])
    metadata = TensorMetadata(found.dtype, shape, found.shape, (axis,))
    return Item(head_of(metadata), found)
