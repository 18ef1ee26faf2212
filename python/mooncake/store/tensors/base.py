"""The common part of the calls for tensors: batches of tensors to objects, and back."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from mooncake._runtime import _native
from mooncake.errors import MooncakeError
from mooncake.store.base import StoreBase
from mooncake.store.batch import Key, as_codes, check_lists, have_same_length, invalid_argument
from mooncake.store.codes import INVALID_PARAMS
from mooncake.store.config import ReplicateConfig, put_options
from mooncake.tensor import memory
from mooncake.tensor.dtypes import load_torch
from mooncake.tensor.format import METADATA_BYTES, FormatError, TensorMetadata
from mooncake.tensor.memory import TensorMemory

if TYPE_CHECKING:
    import torch

    from mooncake._runtime import Buffer
    from mooncake.tensor.dtypes import DType

__all__ = ["Item", "TensorBase", "head_of", "item_of", "tensor_memory"]

_log = logging.getLogger("mooncake.store")


class Head(NamedTuple):
    """Encoded metadata.

    Attributes:
        data: The bytes.
        address: Address of the first one; valid while `data` lives.
    """

    data: bytes
    address: int


class Item(NamedTuple):
    """A tensor to put, whose memory is read in place.

    Attributes:
        head: The encoded metadata.
        memory: The elements, and the offsets of a jagged tensor.
    """

    head: Head
    memory: TensorMemory

    def ranges(self) -> list[tuple[int, int]]:
        """Return address and length of each piece of the object; valid while the item lives."""
        return [(self.head.address, METADATA_BYTES), *self.memory.ranges()]


def item_of(value: object) -> Item:
    """Return a torch tensor as an item.

    Raises:
        TypeError: The value is no torch tensor, or is of a kind that cannot be stored.
    """
    found = tensor_memory(value)
    if found.offsets is None:
        return Item(_head_of_whole(found.dtype, found.shape), found)
    return Item(head_of(found.metadata()), found)


def head_of(metadata: TensorMetadata) -> Head:
    """Return encoded metadata with its address."""
    data = metadata.encode()
    # The content of a `bytes` object does not move while the object lives.
    return Head(data, ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0)


@functools.lru_cache(maxsize=1024)
def _head_of_whole(dtype: DType, shape: tuple[int, ...]) -> Head:
    """Return the head of a dense, whole tensor; tensors of one shape and dtype share it."""
    return head_of(TensorMetadata(dtype, shape, shape))


def tensor_memory(value: object) -> TensorMemory:
    """Return the memory of a torch tensor.

    Raises:
        TypeError: The value is no torch tensor, or is of a kind that cannot be stored.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return memory.of(value)
    kind = type(value).__name__
    remedy = ": torch.from_numpy(array) shares its memory" if kind == "ndarray" else ""
    raise TypeError(f"a tensor must be a torch.Tensor, not {kind}{remedy}")


class TensorBase(StoreBase):
    """Batches of tensors; a call for one tensor is a batch of one."""

    __slots__ = ()

    def _put_tensors(
        self,
        keys: Sequence[Key],
        tensors: Sequence[object],
        config: ReplicateConfig | None = None,
        *,
        is_upsert: bool = False,
    ) -> list[int]:
        check_lists(keys, tensors)
        if len(keys) != len(tensors):
            invalid_argument(
                f"the lists differ in length keys={len(keys)} tensors_list={len(tensors)}"
            )
            return [INVALID_PARAMS] * len(keys)
        items: list[Item | str] = []
        for tensor in tensors:
            try:
                items.append(item_of(tensor))
            except TypeError as error:
                items.append(str(error))
        return self._put_items(keys, items, config, is_upsert=is_upsert)

    def _put_items(
        self,
        keys: Sequence[Key],
        items: Sequence[Item | str],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        """Put items; text in the place of an item is the reason why that item fails."""
        ranges = [[] if isinstance(item, str) else item.ranges() for item in items]
        reasons = {at: item for at, item in enumerate(items) if isinstance(item, str)}
        return self._put_ranges(keys, ranges, reasons, config, is_upsert=is_upsert)

    def _put_ranges(
        self,
        keys: Sequence[Key],
        ranges: Sequence[list[tuple[int, int]]],
        reasons: dict[int, str],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        """Put memory at addresses. Items with a reason have no ranges, and fail for that reason."""
        if not keys:
            return []

        def call(native: _native.Store) -> list[bool | MooncakeError]:
            options = put_options(config)
            return native.put_from(keys, ranges, options=options, is_upsert=is_upsert)

        codes = as_codes(self._call_batch(len(keys), call))
        if self._native is not None:
            for at, reason in reasons.items():
                codes[at] = self._refuse(keys[at], reason)
        return codes

    def _get_tensors(self, keys: Sequence[Key]) -> list[torch.Tensor | None]:
        """Get tensors that own their memory; None for each failure."""
        check_lists(keys)
        if self._native is not None:
            load_torch()
        fetched = self._call_batch(len(keys), lambda native: native.get_buffers(keys))
        return [self._restore(key, value) for key, value in zip(keys, fetched, strict=True)]

    def _restore(self, key: Key, value: Buffer | MooncakeError) -> torch.Tensor | None:
        if isinstance(value, MooncakeError):
            return None
        try:
            return memory.restore(value, TensorMetadata.decode(value, total=len(value)))
        except (FormatError, TypeError) as error:
            self._refuse(key, str(error))
            return None

    def _get_tensors_into(
        self, keys: Sequence[Key], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[torch.Tensor | None]:
        """Get tensors that share the caller's memory; None for each failure."""
        if self._native is not None:
            load_torch()
        if len(keys) == 1:
            lengths = [self._call_one(_native.get_one, keys[0], addresses[0], sizes[0])]
        else:
            lengths = self._call_codes(
                len(keys), lambda native: _native.get_columns(native, keys, addresses, sizes)
            )
        return [
            self._tensor_at(key, address, length) if length >= 0 else None
            for key, address, length in zip(keys, addresses, lengths, strict=True)
        ]

    def _tensor_at(self, key: Key, address: int, length: int) -> torch.Tensor | None:
        """Return the tensor whose object is at an address; None if it is no tensor."""
        try:
            metadata = read_metadata(address, length)
            return memory.restore(memory.at_address(address, length), metadata)
        except (FormatError, TypeError) as error:
            self._refuse(key, str(error))
            return None

    def _put_tensors_from(
        self,
        keys: Sequence[Key],
        addresses: Sequence[int],
        sizes: Sequence[int],
        *,
        is_upsert: bool = False,
    ) -> list[int]:
        """Put serialized tensors from addresses, after checking their metadata."""
        if not have_same_length(keys, addresses, sizes):
            return [INVALID_PARAMS] * len(keys)
        ranges: list[list[tuple[int, int]]] = []
        reasons: dict[int, str] = {}
        for at, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
            try:
                read_metadata(address, size)
                ranges.append([(address, size)])
            except FormatError as error:
                ranges.append([])
                reasons[at] = str(error)
        return self._put_ranges(keys, ranges, reasons, None, is_upsert=is_upsert)

    def _refuse(self, key: Key, reason: str) -> int:
        """Log and record why a tensor was refused; return the code."""
        _log.warning("%s key=%r", reason, key)
        return _native.failure(INVALID_PARAMS, reason, key=key).code


def read_metadata(address: int, length: int) -> TensorMetadata:
    """Return the metadata of an object at an address of this process.

    Raises:
        FormatError: The memory cannot be read, or holds no tensor of that length.
    """
    try:
        head = _native.read_memory(address, min(length, METADATA_BYTES))
    except MooncakeError as error:
        raise FormatError(f"{error}: the metadata must be in memory of this process") from error
    return TensorMetadata.decode(head, total=length)
