"""Leases on objects that a block works with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from mooncake._background import AsyncRepeater
from mooncake.errors import MooncakeError

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake._native_calls import AsyncNative
    from mooncake._store_types import Key

__all__ = ["AsyncLease"]


class AsyncLease:
    """Protect objects from eviction and unforced removal; use it with ``async with``.

    The lease is renewed in the background at an interval. Leaving the block lets the lease expire,
    which takes as long as the master is configured to hold it (``--default_kv_lease_ttl``).
    """

    __slots__ = ("_is_lost", "_keys", "_native", "_renewals")

    def __init__(self, native: AsyncNative, keys: list[Key], every_s: float) -> None:
        """Called by `AsyncStore.lease`."""
        if not every_s > 0:
            raise ValueError("every_s must be more than 0 seconds")
        self._native = native
        self._keys = keys
        self._is_lost = False
        self._renewals = AsyncRepeater(self._renew_again, every_s, "mooncake-lease")

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the objects."""
        return tuple(self._keys)

    @property
    def is_held(self) -> bool:
        """True while every renewal has found every object."""
        return self._renewals.is_started and not self._is_lost

    async def renew(self) -> None:
        """Renew the lease.

        Raises:
            NotFoundError: An object no longer exists.
            MooncakeError: The master could not be asked.
        """
        for outcome in await self._native.sizes(self._keys, lease=True):
            if isinstance(outcome, MooncakeError):
                self._is_lost = True
                raise outcome

    async def __aenter__(self) -> Self:
        await self.renew()
        self._renewals.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        await self._renewals.stop()
        return False

    async def _renew_again(self) -> bool:
        try:
            await self.renew()
        except MooncakeError:
            return False
        return True
