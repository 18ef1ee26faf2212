"""`AsyncStore`: our own API for event loops, with native futures and no thread per call."""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Literal, Self

from mooncake._api.asynchronous.objects import AsyncObjectCalls
from mooncake._api.asynchronous.ranges import AsyncRangeCalls
from mooncake._api.asynchronous.streams import AsyncStreamCalls
from mooncake._api.asynchronous.tensors import AsyncTensorCalls
from mooncake._api.config import (
    StoreConfig,
    at_url,
    check_address,
    check_open,
    checked_config,
    master_of_environment,
)
from mooncake._api.keywords import suggesting, suggesting_methods
from mooncake._api.native_calls import AsyncNative
from mooncake._api.store import Store

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["AsyncStore"]


@suggesting_methods
class AsyncStore(AsyncObjectCalls, AsyncRangeCalls, AsyncStreamCalls, AsyncTensorCalls):
    """A handle on a pool of memory for event loops: the methods of `Store` as coroutines.

    At most 16 native threads, shared by all stores of the process, make the calls; a loop is
    notified of completions through one descriptor. Calls may be made from any number of loops, each
    in its own thread.

    Cancelling a call stops the wait, not the call: a cancelled put may still store its object, and
    the memory of a call is held until the call has really ended.

    Example:
        >>> import asyncio
        >>> async def greet():
        ...     async with AsyncStore() as store:
        ...         await store.put("greeting", b"Hello!")
        ...         return await store.get("greeting")
        >>> asyncio.run(greet())
        b'Hello!'
    """

    __slots__ = ("__weakref__", "_config", "_daemon", "_master", "_native", "_store")

    @suggesting
    def __init__(
        self,
        master: str = "embedded",
        config: StoreConfig | None = None,
        *,
        daemon: str | None = None,
    ) -> None:
        """Choose the pool; `open` or ``async with`` joins it.

        Args:
            master: ``host:port`` of the master, or ``"embedded"`` to start a pool.
            config: Settings.
            daemon: ``host:port`` of the daemon of this host, to join as its dummy client.
        """
        check_address(master)
        self._master = master
        self._config = checked_config(config)
        self._daemon = daemon
        self._store: Store | None = None
        self._native = AsyncNative()

    @classmethod
    def of(cls, store: Store) -> Self:
        """Return an asynchronous handle on an open store; closing either closes both."""
        made = cls(store._pool_address, store.config)
        made._attach(store)
        return made

    @classmethod
    def from_url(cls, url: str, config: StoreConfig | None = None) -> Self:
        """Choose the pool of a master at a URL; see `Store.from_url`."""
        return cls(*at_url(url, config))

    @classmethod
    def from_env(cls) -> Self:
        """Choose the pool that the environment names; see `Store.from_env`."""
        return cls(master_of_environment(), StoreConfig.from_env())

    async def open(self) -> Self:
        """Join the pool, or start one. Does nothing if the store is open.

        Raises:
            ClosedError: The store was closed.
            UnavailableError: The master cannot be reached.
            InvalidArgumentError: An address or a setting is invalid.
        """
        if self._store is None:
            store = await asyncio.to_thread(Store, self._master, self._config, daemon=self._daemon)
            if self._store is None:
                self._attach(store)
            else:
                # Another task opened the store first.
                await asyncio.to_thread(store.close)
        check_open(self._native)
        return self

    async def close(self) -> None:
        """Wait for the calls of this loop that tasks await, and leave the pool.

        Calls whose tasks were cancelled have 3 s more; leaving ends them. Objects in the
        memory that this process lent are lost. Idempotent.
        """
        await self._native.close()

    async def aclose(self) -> None:
        """Do what `close` does; `contextlib.aclosing` calls it by this name."""
        await self.close()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        await self.close()
        return False

    def __repr__(self) -> str:
        if self._store is None:
            role = f"master={self._master}" if self._daemon is None else f"daemon={self._daemon}"
            return f"<mooncake.AsyncStore {role} not open yet>"
        return repr(self._store).replace("mooncake.Store", "mooncake.AsyncStore", 1)

    def __del__(self) -> None:
        native = getattr(self, "_native", None)
        if native is not None and native.has_open_loops:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def _attach(self, store: Store) -> None:
        self._store = store
        self._native.store = store._native
