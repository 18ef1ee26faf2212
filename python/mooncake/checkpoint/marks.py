"""Marks: objects with a lease by which a running save shows whose parts it uses."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable
from typing import Any, Final

from mooncake._api.blocking.leases import Lease
from mooncake.checkpoint.names import Keys
from mooncake.checkpoint.transfer import put_options
from mooncake.errors import BusyError, MooncakeError, NotFoundError, NotReadyError

__all__ = ["Marks", "in_use", "is_mark"]

MARK: Final = "~lease."
_LEASE_EVERY_S = 0.5
_ID_CHARACTERS = 16
_ATTEMPTS_MAX = 4


def is_mark(key: str) -> bool:
    """Return whether an object of a save is a mark."""
    return key.rpartition("/")[2].startswith(MARK)


def in_use(native: Any, marks: Iterable[str], ended: Container[str] = ()) -> list[str]:
    """Remove marks of saves that have ended; return those that a running save holds.

    A save whose process was killed counts as running until its leases are over.

    Args:
        native: The native store.
        marks: Keys of marks.
        ended: Ids of saves whose marks are removed in any case: if they run, they fail.
    """
    groups: dict[bool, list[str]] = {}
    for key in marks:
        groups.setdefault(_holder_of(key) in ended, []).append(key)
    held = []
    for force, keys in groups.items():
        for key, outcome in zip(keys, native.remove(keys, force=force), strict=True):
            if isinstance(outcome, BusyError | NotReadyError):
                held.append(key)
            elif isinstance(outcome, MooncakeError) and not isinstance(outcome, NotFoundError):
                raise outcome
    return held


def _holder_of(mark: str) -> str:
    return mark.rpartition(MARK)[2][:_ID_CHARACTERS]


class Marks:
    """The marks of one save.

    A mark lies among the parts that it protects, and belongs to their group. While its lease lasts,
    the group is not evicted, and no other save removes the parts. It is an object of its own, so
    that parts can be removed right after the save, when a lease is not over yet.
    """

    def __init__(self, native: Any, keys: Keys, replicas: int) -> None:
        """Begin without marks.

        Args:
            native: The native store.
            keys: Keys of the checkpoint.
            replicas: Number of copies of a mark.
        """
        self._native, self._keys, self._replicas = native, keys, replicas
        self._versions: dict[str, int] = {}
        self._others: list[str] = []
        self._leases = contextlib.ExitStack()

    def put(self, owner: str, holder: str, group: str, *, is_needed: bool = True) -> None:
        """Put a mark, and hold a lease on it.

        Args:
            owner: Id of the save whose parts are used.
            holder: Id of the save that uses them, with a suffix if it has several marks there.
            group: Group of the parts.
            is_needed: The save needs the parts; `are_there` looks for the mark.

        Raises:
            NoSpaceError: The pool is full.
        """
        # No part is put or used before: a mark that was removed may be put again.
        key = self._keys.of(f"@{owner}/{MARK}{holder}")
        options = put_options("soft", self._replicas, group, 1)
        for _ in range(_ATTEMPTS_MAX):
            put = self._native.put_versions
            (outcome,) = put([key], [b"lease"], options=options, is_upsert=True)
            if isinstance(outcome, MooncakeError):
                raise outcome
            if is_needed:
                self._versions[key] = outcome
            else:
                self._others.append(key)
            try:
                lease = Lease(self._native, [key], _LEASE_EVERY_S, lambda _: None)
                self._leases.enter_context(lease)
            except NotFoundError:
                # Another save has removed it as one without a lease.
                continue
            return

    def are_there(self) -> bool:
        """Return whether no other save has removed a mark, and then perhaps parts.

        Raises:
            MooncakeError: The master could not be asked.
        """
        keys = [*self._versions]
        for key, known in zip(keys, self._native.describe(keys) if keys else (), strict=True):
            if isinstance(known, NotFoundError):
                return False
            if isinstance(known, MooncakeError):
                raise known
            if known["version"] != self._versions[key]:
                return False
        return True

    def end(self) -> None:
        """End the leases and remove the marks. Idempotent."""
        with contextlib.suppress(MooncakeError):
            self._leases.close()
        keys = [*self._versions, *self._others]
        self._versions, self._others = {}, []
        with contextlib.suppress(MooncakeError):
            if keys:
                self._native.remove(keys, force=True)
