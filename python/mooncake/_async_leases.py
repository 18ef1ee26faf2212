"""Leases on objects that a task of an event loop works with."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal, Self

from mooncake.errors import MooncakeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

__all__ = ["AsyncLease"]


class AsyncLease:
    """Protect objects from eviction and unforced removal; an asynchronous context manager.

    A task renews the lease at an interval. Leaving the block lets the lease expire, which takes as
    long as the master is configured to hold it (``--default_kv_lease_ttl``).
    """

    __slots__ = ("_every_s", "_is_lost", "_keys", "_probe", "_task")

    def __init__(
        self,
        probe: Callable[[], Awaitable[Sequence[int | MooncakeError]]],
        keys: list[str | bytes],
        every_s: float,
    ) -> None:
        """Called by `AsyncStore.lease`."""
        if not every_s > 0:
            raise ValueError("every_s must be more than 0 seconds")
        self._probe = probe
        self._keys = keys
        self._every_s = every_s
        self._is_lost = False
        self._task: asyncio.Task[None] | None = None

    @property
    def keys(self) -> tuple[str | bytes, ...]:
        """Keys of the objects."""
        return tuple(self._keys)

    @property
    def is_held(self) -> bool:
        """True while every renewal has found every object."""
        return self._task is not None and not self._is_lost

    async def renew(self) -> None:
        """Renew the lease.

        Raises:
            NotFoundError: An object no longer exists.
            MooncakeError: The master could not be asked.
        """
        for outcome in await self._probe():
            if isinstance(outcome, MooncakeError):
                self._is_lost = True
                raise outcome

    async def __aenter__(self) -> Self:
        await self.renew()
        self._task = asyncio.create_task(self._renew_until_closed(), name="mooncake-lease")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        return False

    async def _renew_until_closed(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except MooncakeError:
                return
