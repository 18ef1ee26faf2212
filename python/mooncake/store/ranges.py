"""Reads of parts of many objects into many buffers, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from mooncake.errors import MooncakeError, NotReadyError
from mooncake.store.base import StoreBase
from mooncake.store.batch import Key, as_numbers, check_lists, invalid_argument
from mooncake.store.codes import INVALID_PARAMS

__all__ = ["RangeCalls"]

Offsets = Sequence[Sequence[Sequence[int]]]


class RangeCalls(StoreBase):
    """Reads of parts of objects."""

    __slots__ = ()

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[Key]],
        all_dst_offsets: Offsets,
        all_src_offsets: Offsets,
        all_sizes: Offsets,
    ) -> list[list[list[int]]]:
        """Read fragments of objects into registered buffers.

        Fragment ``k`` of key ``j`` of buffer ``i`` is the `all_sizes` ``[i][j][k]`` bytes of
        `all_keys` ``[i][j]`` from offset `all_src_offsets` ``[i][j][k]``; it is written to
        `buffer_ptrs` ``[i]`` plus `all_dst_offsets` ``[i][j][k]``.

        Args:
            buffer_ptrs: Addresses of the buffers; each in memory that was registered, or leased
                from a `BufferPool`.
            all_keys: For each buffer the keys to read.
            all_dst_offsets: For each buffer and key the destinations of its fragments.
            all_src_offsets: For each buffer and key the offsets of its fragments in the object.
            all_sizes: For each buffer and key the lengths of its fragments; 0 reads nothing.

        Returns:
            The length of each fragment in the same shape, or a negative number: -704 if the object
                does not exist; -600 if a fragment is outside of its object or of registered memory,
                and for all fragments whose lists differ in length.
        """
        columns = (all_dst_offsets, all_src_offsets, all_sizes)
        check_lists(buffer_ptrs, all_keys, *columns)
        count = len(all_keys)
        if any(len(each) != count for each in (buffer_ptrs, *columns)):
            invalid_argument(
                f"the lists differ in length buffer_ptrs={len(buffer_ptrs)} all_keys={count} "
                f"all_dst_offsets={len(all_dst_offsets)} all_src_offsets={len(all_src_offsets)} "
                f"all_sizes={len(all_sizes)}"
            )
            return [_refused(*row) for row in zip_longest(all_keys, *columns, fillvalue=())]
        results: list[list[list[int]]] = []
        rows: list[tuple[int, int]] = []
        for at, row in enumerate(zip(all_keys, *columns, strict=True)):
            keys, parts = row[0], row[1:]
            results.append(_refused(*row))
            if any(len(column) != len(keys) for column in parts):
                invalid_argument(f"the lists of a buffer differ in length buffer={at}")
                continue
            for of_key, fragments in enumerate(zip(*parts, strict=True)):
                if len({len(column) for column in fragments}) > 1:
                    invalid_argument(
                        f"the fragments of a key differ in number key={keys[of_key]!r}"
                    )
                else:
                    rows.append((at, of_key))
        outcomes = self._call_batch(
            len(rows),
            lambda native: native.get_parts(
                [all_keys[at][of_key] for at, of_key in rows],
                [buffer_ptrs[at] for at, _ in rows],
                *([column[at][of_key] for at, of_key in rows] for column in columns),
                is_registered=True,
            ),
        )
        for (at, of_key), outcome in zip(rows, outcomes, strict=True):
            cells = results[at][of_key]
            if not isinstance(outcome, MooncakeError):
                results[at][of_key] = as_numbers(outcome)
            elif not isinstance(outcome, NotReadyError):
                results[at][of_key] = as_numbers([outcome]) * len(cells)
            # An object that is still being written keeps the invalid-argument code, as in upstream.
        return results


def _refused(keys: Sequence[Key], *columns: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the results of a refused buffer, in the shape of its arguments."""
    count = max(len(keys), *(len(column) for column in columns))

    def fragments(of_key: int) -> int:
        given = [len(column[of_key]) for column in columns if of_key < len(column)]
        return max(given, default=1)

    return [[INVALID_PARAMS] * fragments(of_key) for of_key in range(count)]
