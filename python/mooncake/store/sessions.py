"""Sessions: objects that are read or written in many calls between a start and an end."""

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
    """Reading and writing in sessions. A session is known by its key."""

    __slots__ = ()

    def batch_get_session_start(self, keys: Sequence[Key]) -> list[int]:
        """Find objects, to read parts of them in later calls.

        Args:
            keys: Their names. One whose session has started is found anew.

        Returns:
            For each key 0 or a negative number: -704 if there is none, -703 if it is still being
            written. Nothing before `setup`.
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
        """Read parts of objects whose session has started.

        Args:
            keys: Their names.
            all_buffer_ptrs: For each key where its parts go.
            all_sizes: For each key how long its parts are.
            all_src_offsets: For each key where its parts begin in the object.

        Returns:
            For each key how many bytes were read, or a negative number: -600 without a session, if
            a part is outside of the object, and for all if the lists differ in length.
        """
        if not _is_even(keys, all_buffer_ptrs, all_sizes, all_src_offsets):
            return [INVALID_PARAMS] * len(keys)
        return as_numbers(
            self._call_batch(
                len(keys),
                lambda native: native.read_begun(keys, all_buffer_ptrs, all_src_offsets, all_sizes),
            )
        )

    def batch_get_session_end(self, keys: Sequence[Key]) -> int:
        """End sessions; reading needs another start.

        Args:
            keys: Their names. One without a session is passed over.

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
        """Reserve room for objects, to write them in later calls.

        Nobody can read them before the session ends. What does not end within the master's
        ``put_start_discard_timeout_sec`` may be thrown away.

        Args:
            keys: Their names.
            sizes: How many bytes each will have.
            config: Copies, pins and placement.

        Returns:
            For each key 0 or a negative number: -705 if there is such an object, -600 if its
            session has started or its size is 0, and for all if the lists differ in length.
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
        """Write parts of objects whose session has started.

        Args:
            keys: Their names.
            all_buffer_ptrs: For each key where its parts come from.
            all_sizes: For each key how long its parts are.
            all_dst_offsets: For each key where its parts begin in the object.

        Returns:
            For each key how many bytes were written, or a negative number: -600 without a session,
            if a part is outside of the object, and for all if the lists differ in length.
        """
        if not _is_even(keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
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
        """Make objects readable whose session has started.

        Args:
            keys: Their names.

        Returns:
            For each key 0 or a negative number: -600 without a session.
        """
        return as_codes(self._call_batch(len(keys), lambda native: native.end_writes(keys)))

    def batch_put_session_revoke(self, keys: Sequence[Key]) -> list[int]:
        """Drop objects whose session has started, with what was written.

        Args:
            keys: Their names.

        Returns:
            For each key 0 or a negative number: -600 without a session.
        """
        return as_codes(
            self._call_batch(len(keys), lambda native: native.end_writes(keys, is_revoked=True))
        )


def _is_even(keys: Sequence[Key], *columns: Columns) -> bool:
    check_lists(keys, *columns)
    if all(len(column) == len(keys) for column in columns):
        return True
    invalid_argument("the lists differ in length")
    return False
