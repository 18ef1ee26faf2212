"""I/O sessions: objects that are read or written by many calls between a start and an end."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.store.base import StoreBase
from mooncake.store.batch import (
    Key,
    as_codes,
    as_numbers,
    check_lists,
    invalid_argument,
    not_set_up,
)
from mooncake.store.codes import INTERNAL_ERROR, INVALID_PARAMS
from mooncake.store.config import ReplicateConfig, put_options

__all__ = ["SessionCalls"]

Columns = Sequence[Sequence[int]]


class SessionCalls(StoreBase):
    """Reads and writes in sessions. A session is identified by its key."""

    __slots__ = ()

    def batch_get_session_start(self, keys: Sequence[Key]) -> list[int]:
        """Locate objects, to read parts of them in later calls.

        Args:
            keys: Keys of the objects. Objects with an open session are located again.

        Returns:
            For each key 0 or a negative number: -704 if the object does not exist, -703 if it is
                still being written. An empty list before `setup`.
        """
        if self._native is None:
            not_set_up()
            return []
        return as_codes(self._call_batch(len(keys), lambda native: native.begin_reads(keys)))

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[Key],
        all_buffer_ptrs: Columns,
        all_sizes: Columns,
        all_src_offsets: Columns,
    ) -> list[int]:
        """Read parts of objects with an open session.

        Args:
            keys: Keys of the objects.
            all_buffer_ptrs: For each key the destinations of its parts.
            all_sizes: For each key the lengths of its parts.
            all_src_offsets: For each key the offsets of its parts in the object.

        Returns:
            For each key the number of bytes read, or a negative number: -600 without a session, if
                a part is outside of the object, and for all if the lists differ in length.
        """
        if not _have_same_length(keys, all_buffer_ptrs, all_sizes, all_src_offsets):
            return [INVALID_PARAMS] * len(keys)
        return as_numbers(
            self._call_batch(
                len(keys),
                lambda native: native.read_begun(keys, all_buffer_ptrs, all_src_offsets, all_sizes),
            )
        )

    def batch_get_session_end(self, keys: Sequence[Key]) -> int:
        """Close read sessions.

        Args:
            keys: Keys of the objects. Keys without a session are ignored.

        Returns:
            0, or -1 before `setup`.
        """
        if self._native is None:
            not_set_up()
            return INTERNAL_ERROR
        return self._call_status(lambda native: native.end_reads(keys))

    def batch_put_session_start(
        self, keys: Sequence[Key], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Reserve space for objects, to write them in later calls.

        The objects are not readable before the session ends. The master may discard a session that
        does not end within its ``put_start_discard_timeout_sec``.

        Args:
            keys: Keys of the objects.
            sizes: Length of each object in bytes.
            config: Number of copies, pins and placement.

        Returns:
            For each key 0 or a negative number: -705 if the object exists, -600 if its session is
                open or its size is 0, and for all if the lists differ in length.
        """
        check_lists(keys, sizes)
        if len(keys) != len(sizes):
            invalid_argument(f"the lists differ in length keys={len(keys)} sizes={len(sizes)}")
            return [INVALID_PARAMS] * len(keys)
        return as_codes(
            self._call_batch(
                len(keys),
                lambda native: native.begin_writes(keys, sizes, options=put_options(config)),
            )
        )

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[Key],
        all_buffer_ptrs: Columns,
        all_sizes: Columns,
        all_dst_offsets: Columns,
    ) -> list[int]:
        """Write parts of objects with an open session.

        Args:
            keys: Keys of the objects.
            all_buffer_ptrs: For each key the sources of its parts.
            all_sizes: For each key the lengths of its parts.
            all_dst_offsets: For each key the offsets of its parts in the object.

        Returns:
            For each key the number of bytes written, or a negative number: -600 without a session,
                if a part is outside of the object, and for all if the lists differ in length.
        """
        if not _have_same_length(keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
            return [INVALID_PARAMS] * len(keys)
        return as_numbers(
            self._call_batch(
                len(keys),
                lambda native: native.write_begun(
                    keys, all_buffer_ptrs, all_dst_offsets, all_sizes
                ),
            )
        )

    def batch_put_session_end(self, keys: Sequence[Key]) -> list[int]:
        """End write sessions and make their objects readable.

        Args:
            keys: Keys of the objects.

        Returns:
            For each key 0 or a negative number: -600 without a session.
        """
        return as_codes(self._call_batch(len(keys), lambda native: native.end_writes(keys)))

    def batch_put_session_revoke(self, keys: Sequence[Key]) -> list[int]:
        """Revoke write sessions and discard their objects.

        Args:
            keys: Keys of the objects.

        Returns:
            For each key 0 or a negative number: -600 without a session.
        """
        return as_codes(
            self._call_batch(len(keys), lambda native: native.end_writes(keys, is_revoked=True))
        )


def _have_same_length(keys: Sequence[Key], *columns: Columns) -> bool:
    check_lists(keys, *columns)
    if all(len(column) == len(keys) for column in columns):
        return True
    invalid_argument("the lists differ in length")
    return False
