"""Queries for objects, and removal of objects."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake._aliases import accept_aliases
from mooncake._runtime import _native
from mooncake.store.base import StoreBase
from mooncake.store.batch import Key, as_bool, as_codes, as_numbers
from mooncake.store.config import ExistOptions

__all__ = ["QueryCalls"]


class QueryCalls(StoreBase):
    """Queries and removal."""

    __slots__ = ()

    def is_exist(self, key: Key, options: ExistOptions | None = None) -> int:
        """Return 1 if an object exists and is complete, 0 if not, a negative number on failure.

        Args:
            key: Key of the object.
            options: With `ExistOptions.prefetch_to_memory` an object that only a disk has is
                brought into memory, so that a `get` shortly afterwards need not wait for the disk.
        """
        if _prefetches(options):
            return self._presence([key], prefetch=True)[0]
        return self._call_one(_native.is_present, key)

    def batch_is_exist(self, keys: Sequence[Key], options: ExistOptions | None = None) -> list[int]:
        """Return for each key 1, 0, or a negative number.

        Args:
            keys: Keys of the objects.
            options: As for `is_exist`.
        """
        return self._presence(keys, prefetch=_prefetches(options))

    def _presence(self, keys: Sequence[Key], *, prefetch: bool) -> list[int]:
        # The most frequent query of servers, with the most keys: returns plain numbers.
        return self._call_codes(len(keys), lambda native: native.presence(keys, prefetch=prefetch))

    def get_size(self, key: Key) -> int:
        """Return the length of an object in bytes, or a negative number."""
        return as_numbers(self._call_batch(1, lambda native: native.sizes([key])))[0]

    def remove(self, key: Key, force: bool = False) -> int:
        """Remove an object.

        Args:
            key: Key of the object.
            force: Remove the object even if it was read or probed recently.

        Returns:
            0, or a negative number: -704 if the object does not exist, -706 if it is leased.
        """
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[Key], force: bool = False) -> list[int]:
        """Remove many objects.

        Args:
            keys: Keys of the objects.
            force: Remove also objects that were read or probed recently.

        Returns:
            For each key 0 or a negative number.
        """
        is_forced = as_bool("force", force)
        return as_codes(
            self._call_batch(len(keys), lambda native: native.remove(keys, force=is_forced))
        )

    @accept_aliases(regex="regex_pattern", pattern="regex_pattern")
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the objects whose key matches a regular expression anywhere.

        Args:
            regex_pattern: The expression; also named ``regex`` or ``pattern``.
            force: Remove also objects that were read or probed recently; otherwise they are
                skipped.

        Returns:
            Number of removed objects, or a negative number.
        """
        if not isinstance(regex_pattern, str):
            raise TypeError(f"regex_pattern must be a str, not {type(regex_pattern).__name__}")
        is_forced = as_bool("force", force)
        return self._call_count(
            lambda native: native.remove_matching(regex=regex_pattern, force=is_forced)[0]
        )

    def remove_all(self, force: bool = False) -> int:
        """Remove every object of the tenant.

        Args:
            force: Remove also objects that were read or probed recently; otherwise they are
                skipped.

        Returns:
            Number of removed objects, or a negative number.
        """
        is_forced = as_bool("force", force)
        return self._call_count(lambda native: native.remove_matching(force=is_forced)[0])


def _prefetches(options: ExistOptions | None) -> bool:
    if options is None:
        return False
    if not isinstance(options, ExistOptions):
        raise TypeError(f"options must be ExistOptions, not {type(options).__name__}")
    return options.prefetch_to_memory
