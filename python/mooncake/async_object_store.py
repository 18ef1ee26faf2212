"""`AsyncStore`: our own API for event loops, with native futures and no thread per call."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from mooncake._async_leases import AsyncLease
from mooncake._async_tasks import AsyncDrain, AsyncTask
from mooncake._runtime import Buffer, PutOptions, _native
from mooncake._tasks import CopyInfo, JobId, copies_of
from mooncake._values import check_value, encoded, key_list, name_list
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.object_store import (
    MISSING,
    Key,
    ObjectInfo,
    Progress,
    SegmentInfo,
    Store,
    StoreConfig,
    all_of,
    batches,
    decoded,
    only,
    options_of,
    or_default,
)
from mooncake.tensor.store import AsyncTensorCalls

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer as Readable

__all__ = ["AsyncStore"]

T = TypeVar("T")


class AsyncStore(AsyncTensorCalls):
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

    __slots__ = ("__weakref__", "_config", "_daemon", "_loops", "_master", "_store")

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
        self._master = master
        self._config = config
        self._daemon = daemon
        self._store: Store | None = None
        self._loops: dict[int, _LoopCalls] = {}

    @classmethod
    def of(cls, store: Store) -> Self:
        """Return an asynchronous handle on an open store; closing either closes both."""
        made = cls(store.master_address, store.config)
        made._store = store
        return made

    async def open(self) -> Self:
        """Join the pool, or start one. Does nothing if the store is open.

        Raises:
            UnavailableError: The master cannot be reached.
            InvalidArgumentError: An address or a setting is invalid.
        """
        if self._store is None:
            store = await asyncio.to_thread(Store, self._master, self._config, daemon=self._daemon)
            if self._store is None:
                self._store = store
            else:
                # Another task opened the store first.
                await asyncio.to_thread(store.close)
        return self

    # Writing

    async def put(
        self,
        key: Key,
        value: Readable,
        *,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> bool:
        """Put bytes under a key.

        The memory of `value` is read in place; it must be contiguous and must not change until the
        call has ended.

        Args:
            key: Key of the object.
            value: Any object with the buffer protocol; at least one byte.
            overwrite: Replace an existing object; otherwise it is kept.
            options: Number of copies, pins, placement.

        Returns:
            True if the value was stored; false if an existing object was kept.

        Raises:
            NoSpaceError: No segment has enough free space, and nothing may be evicted.
        """
        check_value(value)
        outcomes: list[bool] = await self._call(
            lambda calls: calls.put([key], [value], options=options, is_upsert=overwrite)
        )
        return only(outcomes)

    async def put_many(
        self,
        items: Mapping[Key, Readable] | Iterable[tuple[Key, Readable]],
        *,
        overwrite: bool = False,
        options: PutOptions | None = None,
        progress: Progress | None = None,
    ) -> list[bool]:
        """Put many objects in one batch.

        Args:
            items: Keys and values.
            overwrite: Replace existing objects; otherwise they are kept.
            options: Number of copies, pins, placement; its groups are one for each item.
            progress: Called with the number of finished items and of all items; the items are then
                split into several batches.

        Returns:
            For each item in order the result of `put`.

        Raises:
            MooncakeError: The first failure, after every item was tried.
        """
        pairs = list(items.items() if isinstance(items, Mapping) else items)
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
        for value in values:
            check_value(value)
        outcomes: list[bool | MooncakeError] = []
        for part in batches(len(keys), progress):
            chosen = options_of(options, part) if progress else options

            def call(
                calls: _native.Pending, part: slice = part, chosen: PutOptions | None = chosen
            ) -> int:
                return calls.put(keys[part], values[part], options=chosen, is_upsert=overwrite)

            outcomes += await self._call(call)
            if progress is not None:
                progress(len(outcomes), len(keys))
        return all_of(outcomes)

    # Reading

    @overload
    async def get(self, key: Key) -> bytes: ...
    @overload
    async def get(self, key: Key, default: T) -> bytes | T: ...
    async def get(self, key: Key, default: Any = MISSING) -> Any:
        """Get an object as bytes. The loop's thread copies them; `get_buffer` avoids the copy.

        Args:
            key: Key of the object.
            default: Value to return if the object does not exist.

        Raises:
            NotFoundError: The object does not exist, and no default was given. Also a `KeyError`.
        """
        values = await self._call(lambda calls: calls.get([key], as_bytes=True))
        return or_default(values[0], default)

    async def get_many(
        self, keys: Iterable[Key], *, default: T | None = None, progress: Progress | None = None
    ) -> list[bytes | T | None]:
        """Get many objects in one batch.

        Args:
            keys: Keys of the objects.
            default: Value to return for an object that does not exist.
            progress: Called with the number of finished items and of all items; the items are then
                split into several batches.

        Raises:
            MooncakeError: The first failure other than a missing object.
        """
        wanted = key_list(keys)
        values: list[bytes | MooncakeError] = []
        for part in batches(len(wanted), progress):

            def call(calls: _native.Pending, part: slice = part) -> int:
                return calls.get(wanted[part], as_bytes=True)

            values += await self._call(call)
            if progress is not None:
                progress(len(values), len(wanted))
        return all_of([default if isinstance(value, NotFoundError) else value for value in values])

    async def get_buffer(self, key: Key) -> Buffer:
        """Get an object as a buffer that owns its memory and is writable.

        Raises:
            NotFoundError: The object does not exist.
        """
        outcomes: list[Buffer] = await self._call(lambda calls: calls.get([key]))
        return only(outcomes)

    async def get_buffers(self, keys: Iterable[Key]) -> list[Buffer | None]:
        """Get many objects as buffers in one batch; None for an object that does not exist.

        Raises:
            MooncakeError: The first failure other than a missing object.
        """
        wanted = key_list(keys)
        values = await self._call(lambda calls: calls.get(wanted))
        return all_of([None if isinstance(value, NotFoundError) else value for value in values])

    async def get_into(self, key: Key, buffer: Readable) -> int:
        """Get an object into writable, contiguous memory; return its length.

        Raises:
            NotFoundError: The object does not exist.
            InvalidArgumentError: The memory is smaller than the object.
        """
        outcomes: list[int] = await self._call(lambda calls: calls.get_into([key], [buffer]))
        return only(outcomes)

    def lease(self, *keys: Key, every_s: float = 1.0) -> AsyncLease:
        """Lease objects while a block runs: ``async with store.lease("a", "b"): ...``.

        The objects are not evicted and not removed without force, even if the block outlasts the
        master's lease.

        Args:
            keys: Keys of the objects.
            every_s: Interval of renewals; must be shorter than the master's lease.

        Raises:
            NotFoundError: On entry, an object does not exist.
        """
        wanted = list(keys)

        async def probe() -> list[int | MooncakeError]:
            found: list[int | MooncakeError] = await self._call(
                lambda calls: calls.sizes(wanted, lease=True)
            )
            return found

        return AsyncLease(probe, wanted, every_s)

    async def exists(self, key: Key) -> bool:
        """Return whether an object exists and is complete, without leasing it."""
        outcomes: list[bool] = await self._call(lambda calls: calls.exists([key], lease=False))
        return only(outcomes)

    async def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Return for each key whether the object exists and is complete, without leasing it."""
        wanted = key_list(keys)
        return all_of(await self._call(lambda calls: calls.exists(wanted, lease=False)))

    async def size(self, key: Key) -> int:
        """Return the length of an object in bytes.

        Raises:
            NotFoundError: The object does not exist.
        """
        outcomes: list[int] = await self._call(lambda calls: calls.sizes([key], lease=False))
        return only(outcomes)

    async def objects(self, prefix: Key = b"") -> AsyncIterator[ObjectInfo]:
        """Iterate over the objects whose key has a prefix, in byte order of the keys.

        Objects that are added or removed meanwhile may or may not be listed.
        """
        start, after = encoded(prefix), None
        while True:
            page, is_last = await self._call(self._page(start, after))
            for key, size, is_complete, replicas in page:
                yield ObjectInfo(decoded(key), size, is_complete, replicas)
            if is_last or not page:
                return
            after = page[-1][0]

    async def keys(self, prefix: Key = b"") -> AsyncIterator[Key]:
        """Iterate over the keys of the complete objects, in byte order."""
        async for found in self.objects(prefix):
            if found.is_complete:
                yield found.key

    # Removing

    async def delete(self, key: Key, *, force: bool = False, missing_ok: bool = False) -> None:
        """Remove an object.

        Args:
            key: Key of the object.
            force: Remove the object even if it was read recently and is still leased.
            missing_ok: Do not raise if the object does not exist.

        Raises:
            NotFoundError: The object does not exist.
            BusyError: The object is leased by a recent read.
        """
        outcomes = await self._call(lambda calls: calls.remove([key], force=force))
        if not (missing_ok and isinstance(outcomes[0], NotFoundError)):
            only(outcomes)

    async def clear(self, prefix: Key = b"", *, force: bool = False) -> int:
        """Remove the objects whose key has a prefix; leased objects only with `force`.

        Returns:
            Number of removed objects.
        """
        start = encoded(prefix) or None
        removed: int = await self._call(
            lambda calls: calls.remove_matching(prefix=start, force=force)
        )
        return removed

    # Copies

    async def copies(self, key: Key) -> list[CopyInfo]:
        """Return where the copies of an object are, and lease the object.

        Args:
            key: Key of the object.

        Raises:
            NotFoundError: The object does not exist.
            NotReadyError: The object is still being written.
        """
        return copies_of(only(await self._call(lambda calls: calls.replicas([key]))))

    async def copy(self, key: Key, to: str | Sequence[str]) -> AsyncTask:
        """Create a task that copies an object to more segments; it runs in the background.

        Args:
            key: Key of the object.
            to: Names of the segments, or one name. Segments that have a copy are skipped.

        Raises:
            NotFoundError: The object does not exist.
            InvalidArgumentError: A segment does not exist, or no segment is named.
        """
        targets = name_list(to)
        begun = await self._call(lambda calls: calls.copy_object(key, targets))
        return AsyncTask(self._call, begun)

    async def move(self, key: Key, source: str, target: str) -> AsyncTask:
        """Create a task that moves a copy of an object to another segment, in the background.

        Args:
            key: Key of the object.
            source: Name of the segment that loses the copy.
            target: Name of the segment that gets the copy.

        Raises:
            NotFoundError: The object does not exist.
            InvalidArgumentError: A segment does not exist, the source has no copy, or both are the
                same.
        """
        begun = await self._call(lambda calls: calls.move_object(key, source, target))
        return AsyncTask(self._call, begun)

    def task(self, task_id: JobId) -> AsyncTask:
        """Return a handle on the task with an id, which any process may have created.

        Args:
            task_id: Id of the task.
        """
        return AsyncTask(self._call, task_id)

    async def drain(
        self, segments: str | Sequence[str], *, to: str | Sequence[str] = (), concurrency: int = 0
    ) -> AsyncDrain:
        """Start a drain: the segments accept no new objects, and their copies are moved elsewhere.

        Args:
            segments: Names of the segments, or one name.
            to: Names of the segments that receive the copies, or one name; by default any segment
                with free space.
            concurrency: Number of copies that are moved at a time; 0 uses the master's default.

        Raises:
            NotFoundError: A segment does not exist.
            InvalidArgumentError: No segment is named, or one is both source and target.

        Example:
            >>> async with await store.drain("10.0.0.2:15000") as drain:
            ...     print((await drain.info()).state)
            running
        """
        sources, targets = name_list(segments), name_list(to)
        begun = await self._call(
            lambda calls: calls.drain(sources, targets=targets, concurrency=concurrency)
        )
        return AsyncDrain(self._call, begun["id"])

    def drain_of(self, job_id: JobId) -> AsyncDrain:
        """Return a handle on the drain with an id, which any process may have started.

        Args:
            job_id: Id of the drain.
        """
        return AsyncDrain(self._call, job_id)

    # Queries

    async def segments(self) -> list[SegmentInfo]:
        """Return the segments of the pool."""
        described = await self._call(lambda calls: calls.segments())
        return [SegmentInfo(**segment) for segment in described]

    async def stats(self) -> dict[str, Any]:
        """Return the status of the pool (``pool``) and the counters of this store (``store``)."""
        pool = await self._call(lambda calls: calls.status())
        return {"pool": pool, "store": self._open_store()._native.metrics()}

    def metrics_text(self) -> str:
        """Return the counters of this store as Prometheus text."""
        return self._open_store().metrics_text()

    async def check(self) -> None:
        """Raise unless the master answers and knows this store."""
        await self._call(lambda calls: calls.health())

    @property
    def http_address(self) -> str | None:
        """Address of the HTTP server of this store as ``host:port``; None without one."""
        return self._open_store().http_address

    @property
    def master_address(self) -> str:
        """Address of the master; other processes join with ``Store(address)``."""
        return self._open_store().master_address

    @property
    def name(self) -> str:
        """Name by which the pool knows this process."""
        return self._open_store().name

    @property
    def config(self) -> StoreConfig:
        """Settings with which the store joins."""
        return self._config or StoreConfig()

    @property
    def is_closed(self) -> bool:
        """True if the store is not open yet, was closed, or was opened before a fork."""
        return self._store is None or self._store.is_closed

    # Lifecycle

    async def close(self) -> None:
        """Wait for the calls of this loop that are in flight, and leave the pool.

        Objects in the memory that this process lent are lost. Idempotent.
        """
        loop = asyncio.get_running_loop()
        calls = self._loops.pop(id(loop), None)
        if calls is not None:
            await calls.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

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
        state = "closed" if self.is_closed else "open"
        role = f"master={self._master}" if self._daemon is None else f"daemon={self._daemon}"
        return f"<mooncake.AsyncStore {role} {state}>"

    def __del__(self) -> None:
        if any(not calls.is_over for calls in self._loops.values()) and not self.is_closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    def _open_store(self) -> Store:
        if self._store is None:
            raise _native.failure(
                -600, "the store is not open; use `async with` or await open()", is_closed=True
            )
        return self._store

    async def _call(self, begin: Callable[[_native.Pending], int]) -> Any:
        loop = asyncio.get_running_loop()
        calls = self._loops.get(id(loop))
        if calls is None or calls.loop is not loop:
            store = self._open_store()
            store._native.metrics()  # raises if the store is closed
            for number in [n for n, other in self._loops.items() if other.is_over]:
                self._loops.pop(number, None)
            calls = self._loops[id(loop)] = _LoopCalls(loop, store._native)
        return await calls.begin(begin)

    @staticmethod
    def _page(start: bytes, after: bytes | None) -> Callable[[_native.Pending], int]:
        return lambda calls: calls.list(prefix=start, after=after)


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

    def begin(self, begin: Callable[[_native.Pending], int]) -> asyncio.Future[Any]:
        """Begin a call. A cancelled future stays registered until its call has ended."""
        number = begin(self._calls)
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
