"""Leases on objects that a thread works with."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, Self

from mooncake.errors import MooncakeError

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake._runtime import _native

__all__ = ["Lease"]


class Lease:
    """Protect objects from eviction and unforced removal; a context manager.

    A thread renews the lease at an interval. Leaving the block lets the lease expire, which takes
    as long as the master is configured to hold it (``--default_kv_lease_ttl``).
    """

    __slots__ = ("_every_s", "_is_lost", "_is_over", "_keys", "_native", "_thread")

    def __init__(self, native: _native.Store, keys: list[str | bytes], every_s: float) -> None:
        """Called by `Store.lease`."""
        if not every_s > 0:
            raise ValueError("every_s must be more than 0 seconds")
        self._native = native
        self._keys = keys
        self._every_s = every_s
        self._is_lost = False
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def keys(self) -> tuple[str | bytes, ...]:
        """Keys of the objects."""
        return tuple(self._keys)

    @property
    def is_held(self) -> bool:
        """True while every renewal has found every object."""
        return self._thread is not None and not self._is_lost and not self._is_over.is_set()

    def renew(self) -> None:
        """Renew the lease.

        Raises:
            NotFoundError: An object no longer exists.
            MooncakeError: The master could not be asked.
        """
        for outcome in self._native.sizes(self._keys, lease=True):
            if isinstance(outcome, MooncakeError):
                self._is_lost = True
                raise outcome

    def __enter__(self) -> Self:
        self.renew()
        self._thread = threading.Thread(
            target=self._renew_until_closed, name="mooncake-lease", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        return False

    def _renew_until_closed(self) -> None:
        while not self._is_over.wait(self._every_s):
            try:
                self.renew()
            except MooncakeError:
                return
