"""The native store as the calls of our own API see it: blocking, or awaited by event loops."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any, ParamSpec, TypeAlias, TypeVar

from mooncake._api.async_calls import AsyncCalls
from mooncake._hints import asyncio
from mooncake._runtime import _native

__all__ = [
    "AsyncNative",
    "Located",
    "Native",
    "apart",
    "async_apart",
    "async_each",
    "async_pause",
    "blocking",
    "each",
    "pause",
]

T = TypeVar("T")
P = ParamSpec("P")

Native: TypeAlias = _native.Store
"""The native store, whose calls block."""

Located: TypeAlias = _native.Located
pause = time.sleep

# Time for calls that nobody awaits any more, before a store is closed.
_CANCELLED_S = 3.0


async def async_pause(seconds: float) -> None:
    """Wait without blocking the event loop."""
    await asyncio.sleep(seconds)


def apart(function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks."""
    return function(*args, **keywords)


async def async_apart(function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks in a thread; however often it is cancelled, it ends first."""
    call = functools.partial(function, *args, **keywords)
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([future])
        # The failure is looked at, or the loop would log it.
        future.exception()
        raise


def each(items: Iterable[T]) -> Iterable[T]:
    """Return the items."""
    return items


async def async_each(items: AsyncIterable[T] | Iterable[T]) -> AsyncIterator[T]:
    """Iterate over items of an iterator of either kind."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def blocking(native: Native | AsyncNative) -> Native:
    """Return the native store itself, whose calls block."""
    return native.limited() if isinstance(native, AsyncNative) else native


class AsyncNative(AsyncCalls):
    """The calls of a native store as coroutines of any number of event loops."""

    __slots__ = ("__weakref__", "_loops", "_timeout_s", "store")

    def __init__(self) -> None:
        """Make the calls of a store that is opened later."""
        self.store: _native.Store | None = None
        self._loops: dict[int, _LoopCalls] = {}
        self._timeout_s: float | None = None

    def within(self, timeout_s: float) -> AsyncNative:
        """Return the same calls with a limit for the duration of each call."""
        limited = AsyncNative()
        limited.store = self.store
        limited._loops = self._loops
        limited._timeout_s = timeout_s
        return limited

    def opened(self) -> _native.Store:
        """Return the native store.

        Raises:
            ClosedError: The store is not open yet.
        """
        if self.store is None:
            raise _native.failure(
                -600, "the store is not open; use `async with` or await open()", is_closed=True
            )
        return self.store

    def limited(self) -> _native.Store:
        """Return the native store, with the limit for the duration of each call."""
        store = self.opened()
        return store if self._timeout_s is None else store.within(self._timeout_s)

    @property
    def is_closed(self) -> bool:
        """True if the store is not open yet, was closed, or was opened before a fork."""
        return self.store is None or self.store.is_closed

    @property
    def http_address(self) -> str | None:
        """Address of the HTTP server of the store."""
        return self.opened().http_address

    @property
    def master_address(self) -> str:
        """Address of the master."""
        return self.opened().master_address

    @property
    def hostname(self) -> str:
        """Name of the store's segments."""
        return self.opened().hostname

    def metrics(self) -> dict[str, Any]:
        """Return the counters of the store."""
        return self.opened().metrics()

    def metrics_text(self) -> str:
        """Return the counters as Prometheus text."""
        return self.opened().metrics_text()

    async def close(self) -> None:
        """Wait for the calls of this loop that tasks await, and close the store.

        Calls whose tasks were cancelled have 3 s more: a master that does not answer would
        prolong them. Closing ends them; and all calls if the wait for them is cancelled.
        """
        loop = asyncio.get_running_loop()
        calls = self._loops.pop(id(loop), None)
        try:
            if calls is not None:
                await calls.wait_for_awaited()
                await calls.wait_for_all(_CANCELLED_S)
        finally:
            if self.store is not None:
                await asyncio.to_thread(self.store.close)
            if calls is not None:
                await calls.close()

    @property
    def has_open_loops(self) -> bool:
        """True if the store is open and a loop that made calls is not closed."""
        return not self.is_closed and any(not calls.is_over for calls in self._loops.values())

    async def outcome_of(self, begin: Callable[[_native.Pending], _native.Begun[T]]) -> T:
        """Begin a call in the running loop and wait for its outcome."""
        loop = asyncio.get_running_loop()
        calls = self._loops.get(id(loop))
        if calls is None or calls.loop is not loop:
            store = self.opened()
            for number in [n for n, other in self._loops.items() if other.is_over]:
                self._loops.pop(number, None)
            calls = self._loops[id(loop)] = _LoopCalls(loop, store)
        outcome: T = await calls.begin(begin, self._timeout_s)
        return outcome


class _LoopCalls:
    """Calls in flight of one loop: their futures, and the descriptor that signals completions."""

    __slots__ = ("_calls", "_futures", "_idle", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, store: _native.Store) -> None:
        self.loop = loop
        self._calls = _native.Pending(store)
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._idle: asyncio.Future[None] | None = None
        loop.add_reader(self._calls.fileno(), self._take)

    @property
    def is_over(self) -> bool:
        """True if the loop is closed."""
        return self.loop.is_closed()

    def begin(
        self, begin: Callable[[_native.Pending], int], timeout_s: float | None
    ) -> asyncio.Future[Any]:
        """Begin a call. A cancelled future stays registered until its call has ended."""
        calls = self._calls if timeout_s is None else self._calls.within(timeout_s)
        number = begin(calls)
        future = self._futures[number] = self.loop.create_future()
        return future

    async def wait_for_awaited(self) -> None:
        """Wait for the calls in flight whose tasks were not cancelled."""
        awaited = [future for future in self._futures.values() if not future.done()]
        if awaited:
            await asyncio.wait(awaited)

    async def wait_for_all(self, timeout_s: float | None = None) -> None:
        """Wait until no call is in flight, or for that time."""
        if self._futures:
            self._idle = self.loop.create_future()
            await asyncio.wait([self._idle], timeout=timeout_s)

    async def close(self) -> None:
        """Wait until no call is in flight, and stop watching the descriptor."""
        await self.wait_for_all()
        self.loop.remove_reader(self._calls.fileno())

    def _take(self) -> None:
        for number, value in self._calls.take():
            future = self._futures.pop(number)
            if future.done():
                continue
            if isinstance(value, BaseException):
                future.set_exception(value)
            else:
                future.set_result(value)
        if self._idle is not None and not self._idle.done() and not self._futures:
            self._idle.set_result(None)
