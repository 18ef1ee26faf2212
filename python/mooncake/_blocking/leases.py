"""Leases on objects that a block works with."""

# Generated from _asynchronous/leases.py by scripts/generate_blocking_api.py; do not edit.

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from mooncake._background import Repeater
from mooncake.errors import MooncakeError

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake._native_calls import Native
    from mooncake._store_types import Key

__all__ = ["Lease"]


class Lease:
    """Protect objects from eviction and unforced removal; use it with ``with``.

    The lease is renewed in the background at an interval. Leaving the block lets the lease expire,
    which takes as long as the master is configured to hold it (``--default_kv_lease_ttl``).
    """

    __slots__ = ("_is_lost", "_keys", "_native", "_renewals")

    def __init__(self, native: Native, keys: list[Key], every_s: float) -> None:
        """Called by `Store.lease`."""
        if not every_s > 0:
            raise ValueError("every_s must be more than 0 seconds")
        self._native = native
        self._keys = keys
        self._is_lost = False
        self._renewals = Repeater(self._renew_again, every_s, "mooncake-lease")

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the objects."""
        return tuple(self._keys)

    @property
    def is_held(self) -> bool:
        """True while every renewal has found every object."""
        return self._renewals.is_started and not self._is_lost

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
        self._renewals.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        self._renewals.stop()
        return False

    def _renew_again(self) -> bool:
        try:
            self.renew()
        except MooncakeError:
            return False
        return True
