"""Puts and gets at addresses: the caller's memory is read and written in place."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake._aliases import accept_aliases
from mooncake._runtime import _native
from mooncake._variants import variants
from mooncake.errors import BusyError
from mooncake.store.base import StoreBase
from mooncake.store.batch import Key, as_codes, as_numbers, have_same_length, not_set_up, ranges_of
from mooncake.store.codes import INVALID_PARAMS, OK
from mooncake.store.config import ReplicateConfig, put_options

if TYPE_CHECKING:
    from mooncake.errors import MooncakeError

__all__ = ["PointerCalls"]


class PointerCalls(StoreBase):
    """Puts and gets at addresses."""

    __slots__ = ()

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory of this process, so that peers can access it. Touches no page.

        Args:
            buffer_ptr: First address.
            size: Length in bytes.

        Returns:
            0, or -600 if the memory is null, empty or overlaps registered memory.
        """
        return self._call_status(lambda native: native.register_buffer(buffer_ptr, size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregister memory.

        Args:
            buffer_ptr: First address.

        Returns:
            0: no peer accesses the memory any more. -714: a peer still does, so the memory must not
                be freed yet. -600: no memory was registered at the address.
        """

        def withdraw(native: _native.Store) -> list[bool | MooncakeError]:
            native.unregister_buffer(buffer_ptr)
            return [True]

        outcome = self._call_batch(1, withdraw)[0]
        if isinstance(outcome, BusyError):
            return outcome.code
        return OK if outcome is True else INVALID_PARAMS

    def _put_from_address(
        self,
        is_upsert: bool,
        key: Key,
        buffer_ptr: int,
        size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store the bytes at an address{an existing object}.

        Args:
            key: Key of the object.
            buffer_ptr: Address of the first byte.
            size: Number of bytes; 0 {stores|changes} nothing and succeeds.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        if size == 0 and self._native is not None:
            return self._skip_empty(key)
        if config is not None:
            return self._put_columns([key], [buffer_ptr], [size], config, is_upsert=is_upsert)[0]
        return self._call_one(_native.put_one, key, buffer_ptr, size, None, is_upsert)

    put_from, upsert_from = variants(_put_from_address, "put_from", "upsert_from")

    def put_from_with_metadata(
        self,
        key: Key,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store metadata, followed by data, as one object. An existing object is kept.

        Args:
            key: Key of the object.
            buffer_ptr: Address of the data.
            metadata_buffer_ptr: Address of the metadata.
            size: Length of the data in bytes; 0 stores nothing and succeeds.
            metadata_size: Length of the metadata in bytes; 0 for none.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        if size == 0 and self._native is not None:
            return self._skip_empty(key)
        parts = [(metadata_buffer_ptr, metadata_size), (buffer_ptr, size)]
        ranges = [parts[1:] if metadata_size == 0 else parts]
        return as_codes(self._put_from([key], ranges, config))[0]

    def _batch_put_from_addresses(
        self,
        is_upsert: bool,
        keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store many objects from addresses{existing objects}.

        Args:
            keys: Keys of the objects.
            buffer_ptrs: Address of each value.
            sizes: Length of each value in bytes.
            config: Number of copies, pins and placement.

        Returns:
            For each key 0 or a negative number; -600 for all if the lists differ in length.
        """
        if not have_same_length(keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put_columns(keys, buffer_ptrs, sizes, config, is_upsert=is_upsert)

    batch_put_from, batch_upsert_from = variants(
        _batch_put_from_addresses, "batch_put_from", "batch_upsert_from"
    )

    @accept_aliases(all_ptrs="all_buffer_ptrs", sizes="all_sizes")
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[Key],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store many objects, each the concatenation of buffers. Existing objects are kept.

        Args:
            keys: Keys of the objects.
            all_buffer_ptrs: For each key the addresses of its buffers; also named ``all_ptrs``.
            all_sizes: For each key the lengths of its buffers; also named ``sizes``.
            config: Number of copies, pins and placement.

        Returns:
            For each key 0 or a negative number; an empty list before `setup`.
        """
        if self._native is None:
            not_set_up()
            return []
        ranges = ranges_of(keys, all_buffer_ptrs, all_sizes)
        if ranges is None:
            return [INVALID_PARAMS] * len(keys)
        return as_codes(self._put_from(keys, ranges, config, may_prefer_own=True))

    def get_into(self, key: Key, buffer_ptr: int, size: int) -> int:
        """Read an object into memory.

        Args:
            key: Key of the object.
            buffer_ptr: Address of the memory.
            size: Length of the memory; at least the length of the object.

        Returns:
            The length of the object, or a negative number.
        """
        return self._call_one(_native.get_one, key, buffer_ptr, size)

    def batch_get_into(
        self, keys: Sequence[Key], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Read many objects into memory.

        Args:
            keys: Keys of the objects.
            buffer_ptrs: Address of the memory for each object.
            sizes: Length of the memory for each object.

        Returns:
            For each key the length of the object or a negative number; -600 for all if the lists
            differ in length.
        """
        if not have_same_length(keys, buffer_ptrs, sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._call_codes(
            len(keys), lambda native: _native.get_columns(native, keys, buffer_ptrs, sizes)
        )

    @accept_aliases(all_ptrs="all_buffer_ptrs", sizes="all_sizes")
    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[Key],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,  # noqa: ARG002
    ) -> list[int]:
        """Read many objects, each into buffers that are filled in order.

        Args:
            keys: Keys of the objects.
            all_buffer_ptrs: For each key the addresses of its buffers; also named ``all_ptrs``.
            all_sizes: For each key the lengths of its buffers, which add up to the length of the
                object; also named ``sizes``.
            prefer_alloc_in_same_node: Accepted; the nearest copy is read anyway.

        Returns:
            For each key the length of the object or a negative number: -600 if the buffers are too
                small, -800 if they are too large.
        """
        ranges = ranges_of(keys, all_buffer_ptrs, all_sizes)
        if ranges is None:
            return [INVALID_PARAMS] * len(keys)
        return as_numbers(
            self._call_batch(len(keys), lambda native: native.get_into(keys, ranges, is_exact=True))
        )

    def _put_from(
        self,
        keys: Sequence[Key],
        ranges: Sequence[tuple[int, int] | list[tuple[int, int]]],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool = False,
        may_prefer_own: bool = False,
    ) -> list[bool | MooncakeError]:
        def call(native: _native.Store) -> list[bool | MooncakeError]:
            options = put_options(config, may_prefer_own=may_prefer_own)
            return native.put_from(keys, ranges, options=options, is_upsert=is_upsert)

        return self._call_batch(len(keys), call)

    def _put_columns(
        self,
        keys: Sequence[Key],
        addresses: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        def call(native: _native.Store) -> tuple[list[int], MooncakeError | None]:
            options = put_options(config)
            return _native.put_columns(native, keys, addresses, sizes, options, is_upsert)

        return self._call_codes(len(keys), call)
