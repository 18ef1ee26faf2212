"""The native store as the calls of our own API see it: blocking, or awaited by event loops."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

from mooncake._api.types import Key
from mooncake._hints import Readable, asyncio
from mooncake._runtime import Buffer, PutOptions, _native
from mooncake.errors import MooncakeError

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
Keys: TypeAlias = Sequence[Key]

_List: TypeAlias = list
Native: TypeAlias = _native.Store
"""The native store, whose calls block."""

Located: TypeAlias = _native.Located
pause = time.sleep


async def async_pause(seconds: float) -> None:
    """Wait without blocking the event loop."""
    await asyncio.sleep(seconds)


def apart(function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks."""
    return function(*args, **keywords)


async def async_apart(function: Callable[P, T], /, *args: P.args, **keywords: P.kwargs) -> T:
    """Call a function that blocks in a thread; a cancelled call ends before it is left."""
    call = functools.partial(function, *args, **keywords)
    future = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
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


class AsyncNative:
    """The calls of a native store as coroutines of any number of event loops.

    The methods have the names, arguments and results of the native store.
    """

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

    async def put(
        self,
        keys: Keys,
        values: Sequence[Readable | Sequence[Readable]],
        *,
        options: PutOptions | None = None,
        is_upsert: bool = False,
        if_absent: _native.AbsentSuffixes | None = None,
    ) -> list[bool | MooncakeError]:
        """Put values."""
        return await self.outcome_of(
            lambda calls: calls.put(
                keys, values, options=options, is_upsert=is_upsert, if_absent=if_absent
            )
        )

    async def get(self, keys: Keys, *, lease: bool = True) -> list[bytes | MooncakeError]:
        """Get objects as bytes, which the loop's thread copies."""
        return await self.outcome_of(lambda calls: calls.get(keys, as_bytes=True, lease=lease))

    async def get_buffers(self, keys: Keys, *, lease: bool = True) -> list[Buffer | MooncakeError]:
        """Get objects as buffers."""
        return await self.outcome_of(lambda calls: calls.get(keys, lease=lease))

    async def read_into(
        self, keys: Keys, buffers: Sequence[Readable], *, lease: bool = True
    ) -> list[int | MooncakeError]:
        """Get objects into writable memory; return their lengths."""
        return await self.outcome_of(lambda calls: calls.read_into(keys, buffers, lease=lease))

    async def locate(
        self, keys: Keys, *, lease: bool = True
    ) -> list[_native.Located | MooncakeError]:
        """Locate objects, to read ranges of them."""
        return await self.outcome_of(lambda calls: calls.locate(keys, lease=lease))

    async def read_located(self, located: _native.Located, offset: int, length: int) -> bytes:
        """Read a range of a located object."""
        return await self.outcome_of(lambda calls: calls.read_located(located, offset, length))

    async def read_located_into(
        self, located: _native.Located, offset: int, buffer: Readable
    ) -> int:
        """Read a range of a located object into writable memory."""
        return await self.outcome_of(lambda calls: calls.read_located_into(located, offset, buffer))

    async def exists(
        self, keys: Keys, *, lease: bool = True, prefetch: bool = False
    ) -> list[bool | MooncakeError]:
        """Return which objects exist."""
        return await self.outcome_of(
            lambda calls: calls.exists(keys, lease=lease, prefetch=prefetch)
        )

    async def exists_or_suffixed(
        self, keys: Keys, suffixes: Sequence[bytes]
    ) -> _List[int | MooncakeError]:
        """Look for objects with the keys, or else with keys that are these with a suffix."""
        return await self.outcome_of(lambda calls: calls.exists_or_suffixed(keys, suffixes))

    async def sizes(self, keys: Keys, *, lease: bool = True) -> list[int | MooncakeError]:
        """Return the lengths of objects."""
        return await self.outcome_of(lambda calls: calls.sizes(keys, lease=lease))

    async def describe(self, keys: Keys) -> _List[dict[str, Any] | MooncakeError]:
        """Return what the master knows of objects."""
        return await self.outcome_of(lambda calls: calls.describe(keys))

    async def set_expiry(self, keys: Keys, ttl_ms: int | None) -> _List[bool | MooncakeError]:
        """Let objects expire after a time from now, or never."""
        return await self.outcome_of(lambda calls: calls.set_expiry(keys, ttl_ms))

    async def remove(
        self,
        keys: Keys,
        *,
        force: bool = False,
        spare_pinned: bool = False,
        if_version: int | None = None,
    ) -> _List[bool | MooncakeError]:
        """Remove objects, or those that have a version."""
        return await self.outcome_of(
            lambda calls: calls.remove(
                keys, force=force, spare_pinned=spare_pinned, if_version=if_version
            )
        )

    async def remove_matching(
        self,
        *,
        regex: str | None = None,
        prefix: bytes | None = None,
        force: bool = False,
        spare_pinned: bool = False,
    ) -> tuple[int, int, int, int]:
        """Remove all objects, or those that a prefix or a regular expression selects.

        Returns:
            Numbers of objects: removed, and left because they are leased, hard-pinned or being
            copied.
        """
        return await self.outcome_of(
            lambda calls: calls.remove_matching(
                regex=regex, prefix=prefix, force=force, spare_pinned=spare_pinned
            )
        )

    async def list(
        self, *, prefix: bytes = b"", after: bytes | None = None, limit: int = 0
    ) -> tuple[Sequence[tuple[bytes, int, bool, int, int]], bool]:
        """Return a page of a listing."""
        return await self.outcome_of(
            lambda calls: calls.list(prefix=prefix, after=after, limit=limit)
        )

    async def replicas(
        self, keys: Keys, *, lease: bool = True
    ) -> Sequence[_List[dict[str, Any]] | MooncakeError]:
        """Describe the copies of objects."""
        return await self.outcome_of(lambda calls: calls.replicas(keys, lease=lease))

    async def copy_object(self, key: Key, targets: Sequence[str]) -> tuple[int, int]:
        """Create a copy task; return its id."""
        return await self.outcome_of(lambda calls: calls.copy_object(key, targets))

    async def move_object(self, key: Key, source: str, target: str) -> tuple[int, int]:
        """Create a move task; return its id."""
        return await self.outcome_of(lambda calls: calls.move_object(key, source, target))

    async def task(self, task_id: tuple[int, int]) -> dict[str, Any]:
        """Return the state of a task."""
        return await self.outcome_of(lambda calls: calls.task(task_id))

    async def drain(
        self,
        segments: Sequence[str],
        *,
        targets: Sequence[str] = (),
        concurrency: int = 0,
        may_evict: bool = False,
    ) -> dict[str, Any]:
        """Start a drain; return its state."""
        return await self.outcome_of(
            lambda calls: calls.drain(
                segments, targets=targets, concurrency=concurrency, may_evict=may_evict
            )
        )

    async def drain_info(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Return the state of a drain."""
        return await self.outcome_of(lambda calls: calls.drain_info(job_id))

    async def cancel_drain(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Cancel a drain; return its state."""
        return await self.outcome_of(lambda calls: calls.cancel_drain(job_id))

    async def segments(self) -> Sequence[dict[str, Any]]:
        """Return the segments of the pool."""
        return await self.outcome_of(lambda calls: calls.segments())

    async def status(self) -> dict[str, Any]:
        """Return the status of the master."""
        return await self.outcome_of(lambda calls: calls.status())

    async def health(self) -> None:
        """Raise unless the master answers and knows this client."""
        await self.outcome_of(lambda calls: calls.health())

    async def close(self) -> None:
        """Wait for the calls of this loop that are in flight, and close the store."""
        loop = asyncio.get_running_loop()
        calls = self._loops.pop(id(loop), None)
        if calls is not None:
            await calls.close()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

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

    async def close(self) -> None:
        """Wait until no call is in flight, and stop watching the descriptor."""
        if self._futures:
            self._idle = self.loop.create_future()
            await self._idle
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
