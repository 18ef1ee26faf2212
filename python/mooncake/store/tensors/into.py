"""Tensors in the caller's memory: as serialized objects at addresses, or as tensors to fill."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mooncake._aliases import accept_aliases
from mooncake._hints import torch
from mooncake._variants import variants
from mooncake.store.batch import Key, as_numbers, check_lists, have_same_length, invalid_argument
from mooncake.store.codes import INVALID_PARAMS
from mooncake.store.tensors.base import TensorBase, tensor_memory
from mooncake.tensor.format import METADATA_BYTES, FormatError, TensorMetadata

if TYPE_CHECKING:
    from mooncake._runtime import _native
    from mooncake.errors import MooncakeError
    from mooncake.tensor.memory import TensorMemory

__all__ = ["TensorBufferCalls"]


class TensorBufferCalls(TensorBase):
    """Puts from and gets into the caller's memory.

    A serialized tensor is 304 bytes of metadata, followed by the elements.
    """

    __slots__ = ()

    def get_tensor_into(self, key: Key, buffer_ptr: int, size: int) -> torch.Tensor | None:
        """Read a serialized tensor into memory; return the tensor, which shares that memory.

        Args:
            key: Key of the object.
            buffer_ptr: Address of the memory, which must outlive the returned tensor.
            size: Length of the memory; at least the length of the object.

        Returns:
            The tensor; None if there is none, or the memory is too small.

        Raises:
            ImportError: torch is not installed.
        """
        return self._get_tensors_into([key], [buffer_ptr], [size])[0]

    @accept_aliases(base_keys="keys")
    def batch_get_tensor_into(
        self, keys: Sequence[Key], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[Any]:
        """Read many serialized tensors into memory; return the tensors, which share that memory.

        Args:
            keys: Keys of the objects; also named ``base_keys``.
            buffer_ptrs: Address of the memory for each object.
            sizes: Length of the memory for each object.

        Returns:
            For each key the tensor, or None; -600 for all if the lists differ in length, and before
            `setup`.

        Raises:
            ImportError: torch is not installed.
        """
        if self._native is None or not have_same_length(keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get_tensors_into(keys, buffer_ptrs, sizes)

    def _put_tensor_from(self, is_upsert: bool, key: Key, buffer_ptr: int, size: int) -> int:
        """Store a serialized tensor from memory{an existing object}.

        Args:
            key: Key of the object.
            buffer_ptr: Address of the metadata, which the elements follow.
            size: Length of both together.

        Returns:
            0, or a negative number: -600 if the memory does not hold a tensor of exactly that
            length.
        """
        return self._put_tensors_from([key], [buffer_ptr], [size], is_upsert=is_upsert)[0]

    put_tensor_from, upsert_tensor_from = variants(
        _put_tensor_from, "put_tensor_from", "upsert_tensor_from"
    )

    def _batch_put_tensor_from(
        self,
        is_upsert: bool,
        keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
    ) -> list[int]:
        """Store many serialized tensors from memory{existing objects}.

        Args:
            keys: Keys of the objects.
            buffer_ptrs: Address of each serialized tensor.
            sizes: Length of each serialized tensor.

        Returns:
            For each key 0 or a negative number; -600 for all if the lists differ in length.
        """
        return self._put_tensors_from(keys, buffer_ptrs, sizes, is_upsert=is_upsert)

    batch_put_tensor_from, batch_upsert_tensor_from = variants(
        _batch_put_tensor_from, "batch_put_tensor_from", "batch_upsert_tensor_from"
    )

    def get_tensor_into_cuda(self, key: Key, tensor: torch.Tensor) -> int:
        """Read the elements of a tensor into an existing tensor.

        Work that was submitted to torch's current stream has ended before the elements are written.

        Args:
            key: Key of the object.
            tensor: A contiguous tensor of the dtype and shape of the object, on a CUDA device or on
                the host.

        Returns:
            The number of bytes written, or a negative number: -600 if the object has another dtype
            or shape. After a failure the content of the tensor is undefined.
        """
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    @accept_aliases(tensors="tensors_list")
    def batch_get_tensor_into_cuda(
        self, keys: Sequence[Key], tensors_list: Sequence[torch.Tensor]
    ) -> list[int]:
        """Read the elements of many tensors into existing tensors.

        Args:
            keys: Keys of the objects.
            tensors_list: A tensor for each key, as for `get_tensor_into_cuda`; also named
                ``tensors``.

        Returns:
            For each key the number of bytes written, or a negative number; -600 for all if the
            lists differ in length.
        """
        check_lists(keys, tensors_list)
        if len(keys) != len(tensors_list):
            invalid_argument(
                f"the lists differ in length keys={len(keys)} tensors_list={len(tensors_list)}"
            )
            return [INVALID_PARAMS] * len(keys)
        heads = ctypes.create_string_buffer(METADATA_BYTES * len(keys))
        targets: list[TensorMemory | str] = []
        ranges: list[list[tuple[int, int]]] = []
        for at, tensor in enumerate(tensors_list):
            target = _target(tensor)
            targets.append(target)
            head = (ctypes.addressof(heads) + at * METADATA_BYTES, METADATA_BYTES)
            ranges.append([] if isinstance(target, str) else [head, *target.ranges()])

        def call(native: _native.Store) -> list[int | MooncakeError]:
            return native.get_into(keys, ranges)

        numbers = as_numbers(self._call_batch(len(keys), call))
        if self._native is None:
            return numbers
        read = memoryview(heads)
        for at, target in enumerate(targets):
            if isinstance(target, str):
                numbers[at] = self._refuse(keys[at], target)
            elif numbers[at] >= 0:
                metadata = read[at * METADATA_BYTES :][:METADATA_BYTES]
                numbers[at] = self._check_target(keys[at], target, metadata, numbers[at])
        return numbers

    def _check_target(self, key: Key, target: TensorMemory, data: memoryview, length: int) -> int:
        """Return the length of a tensor that was read, after comparing it with its metadata."""
        try:
            metadata = TensorMetadata.decode(data, total=length)
        except FormatError as error:
            return self._refuse(key, str(error))
        if (metadata.dtype, metadata.local_shape) == (target.dtype, target.shape):
            return target.nbytes
        return self._refuse_target(key, metadata, target)

    def _refuse_target(self, key: Key, metadata: TensorMetadata, target: TensorMemory) -> int:
        return self._refuse(
            key,
            f"the object has another dtype or shape object={metadata.dtype.name}"
            f"{metadata.local_shape} tensor={target.dtype.name}{target.shape}",
        )


def _target(tensor: Any) -> TensorMemory | str:
    """Return the memory of a tensor to fill, or the reason why it cannot be filled."""
    try:
        found = tensor_memory(tensor)
    except TypeError as error:
        return str(error)
    if found.offsets is not None or found.owner.data_ptr() != tensor.data_ptr():
        return "the tensor to fill must be dense, contiguous, and on the host or a CUDA device"
    return found
