"""`AsyncStore`: our own face for event loops, with native futures and no thread per call."""

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

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer as Readable

__all__ = ["AsyncStore"]

T = TypeVar("T")


class AsyncStore:
    """A handle on a pool of memory for event loops: what `Store` does, awaited.

    Calls are made by at most 16 native threads that all stores of the process share; a loop hears
    of their ends through one descriptor. Calls may be made from any number of loops, each in a
    thread of its own.

    Cancelling a call stops the wait, not the call: a put that was cancelled may still store its
    object, and memory that was lent to a call is held until it has really ended.

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
        """Say which pool; `open` or ``async with`` joins it.

        Args:
            master: ``host:port`` of the master, or ``"embedded"`` to begin a pool.
            config: How to join.
            daemon: ``host:port`` of the daemon of this host, to join as a guest of it.
        """
        self._master = master
        self._config = config
        self._daemon = daemon
        self._store: Store | None = None
        self._loops: dict[int, _LoopCalls] = {}

    @classmethod
    def of(cls, store: Store) -> Self:
        """Return the asynchronous face of a store that is open; closing either closes both."""
        made = cls(store.master_address, store.config)
        made._store = store
        return made

    async def open(self) -> Self:
        """Join the pool, or begin one; does nothing if that was done.

        Raises:
            UnavailableError: The master cannot be reached.
            InvalidArgumentError: An address or a setting is wrong.
        """
        if self._store is None:
            store = await asyncio.to_thread(Store, self._master, self._config, daemon=self._daemon)
            if self._store is None:
                self._store = store
            else:
                # Another task was faster.
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

        The memory of `value` is read in place; it must be contiguous and must not change until
        the call has ended.

        Args:
            key: The name of the object.
            value: Anything that speaks the buffer protocol; at least one byte.
            overwrite: Replace an object that is there; otherwise it is kept.
            options: Copies, pins, placement.

        Returns:
            Whether it was stored; false if an object of that key was there and was kept.

        Raises:
            NoSpaceError: No segment has room, and nothing may be evicted.
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
        """Put many objects in one go.

        Args:
            items: Keys and values.
            overwrite: Replace objects that are there; otherwise they are kept.
            options: Copies, pins, placement; groups are one for each item.
            progress: Called with how many items are done and how many there are, every now and
                then; the items then go in several batches.

        Returns:
            For each item in order what `put` would say.

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
        """Get an object as bytes, which the loop's thread copies; `get_buffer` copies nothing.

        Args:
            key: The name of the object.
            default: What to return where there is no such object.

        Raises:
            NotFoundError: There is no such object, and no default was given. Also a `KeyError`.
        """
        values = await self._call(lambda calls: calls.get([key], as_bytes=True))
        return or_default(values[0], default)

    async def get_many(
        self, keys: Iterable[Key], *, default: T | None = None, progress: Progress | None = None
    ) -> list[bytes | T | None]:
        """Get many objects in one go; `default` stands where there is none.

        Args:
            keys: Their names.
            default: What to return for an object that is not there.
            progress: Called with how many are done and how many there are, every now and then; they
                then come in several batches.

        Raises:
            MooncakeError: The first failure that is not a missing object.
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
        """Get an object as a buffer that owns its memory and can be written.

        Raises:
            NotFoundError: There is no such object.
        """
        outcomes: list[Buffer] = await self._call(lambda calls: calls.get([key]))
        return only(outcomes)

    async def get_buffers(self, keys: Iterable[Key]) -> list[Buffer | None]:
        """Get many objects as buffers in one go; None where there is none.

        Raises:
            MooncakeError: The first failure that is not a missing object.
        """
        wanted = key_list(keys)
        values = await self._call(lambda calls: calls.get(wanted))
        return all_of([None if isinstance(value, NotFoundError) else value for value in values])

    async def get_into(self, key: Key, buffer: Readable) -> int:
        """Get an object into writable, contiguous memory; return its length.

        Raises:
            NotFoundError: There is no such object.
            InvalidArgumentError: The memory is smaller than the object.
        """
        outcomes: list[int] = await self._call(lambda calls: calls.get_into([key], [buffer]))
        return only(outcomes)

    def lease(self, *keys: Key, every_s: float = 1.0) -> AsyncLease:
        """Keep objects while a block runs: ``async with store.lease("a", "b"): ...``.

        They are not evicted and not removed without force, even if the block outlasts the master's
        lease.

        Args:
            keys: Their names.
            every_s: How often the lease is taken anew; more often than it lasts at the master.

        Raises:
            NotFoundError: On entry, there is no such object.
        """
        wanted = list(keys)

        async def probe() -> list[int | MooncakeError]:
            found: list[int | MooncakeError] = await self._call(
                lambda calls: calls.sizes(wanted, lease=True)
            )
            return found

        return AsyncLease(probe, wanted, every_s)

    async def exists(self, key: Key) -> bool:
        """Say whether an object is there and complete, without leasing it."""
        outcomes: list[bool] = await self._call(lambda calls: calls.exists([key], lease=False))
        return only(outcomes)

    async def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Say for each key whether an object is there and complete, without leasing any."""
        wanted = key_list(keys)
        return all_of(await self._call(lambda calls: calls.exists(wanted, lease=False)))

    async def size(self, key: Key) -> int:
        """Return the length of an object in bytes.

        Raises:
            NotFoundError: There is no such object.
        """
        outcomes: list[int] = await self._call(lambda calls: calls.sizes([key], lease=False))
        return only(outcomes)

    async def objects(self, prefix: Key = b"") -> AsyncIterator[ObjectInfo]:
        """Go through the objects whose key has a prefix, in the byte order of keys.

        Objects that come or go meanwhile may or may not be seen.
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
        """Go through the keys of the objects that can be read, in byte order."""
        async for found in self.objects(prefix):
            if found.is_complete:
                yield found.key

    # Removing

    async def delete(self, key: Key, *, force: bool = False, missing_ok: bool = False) -> None:
        """Remove an object.

        Args:
            key: The name of the object.
            force: Also one that was read a moment ago and is still leased.
            missing_ok: A missing object is no failure.

        Raises:
            NotFoundError: There is no such object.
            BusyError: Somebody read it a moment ago.
        """
        outcomes = await self._call(lambda calls: calls.remove([key], force=force))
        if not (missing_ok and isinstance(outcomes[0], NotFoundError)):
            only(outcomes)

    async def clear(self, prefix: Key = b"", *, force: bool = False) -> int:
        """Remove the objects whose key has a prefix, but not leased ones unless forced.

        Returns:
            How many were removed.
        """
        start = encoded(prefix) or None
        removed: int = await self._call(
            lambda calls: calls.remove_matching(prefix=start, force=force)
        )
        return removed

    # Copies

    async def copies(self, key: Key) -> list[CopyInfo]:
        """Return where the copies of an object lie, and lease the object.

        Args:
            key: The name of the object.

        Raises:
            NotFoundError: There is no such object.
            NotReadyError: It is still being written.
        """
        return copies_of(only(await self._call(lambda calls: calls.replicas([key]))))

    async def copy(self, key: Key, to: str | Sequence[str]) -> AsyncTask:
        """Ask for copies of an object in more segments. They are made a moment later.

        Args:
            key: The name of the object.
            to: The names of the segments, or of the only one. One that has a copy needs no other.

        Raises:
            NotFoundError: There is no such object.
            InvalidArgumentError: There is no such segment, or none is named.
        """
        targets = name_list(to)
        begun = await self._call(lambda calls: calls.copy_object(key, targets))
        return AsyncTask(self._call, begun)

    async def move(self, key: Key, source: str, target: str) -> AsyncTask:
        """Ask for the move of a copy of an object to another segment. It happens a moment later.

        Args:
            key: The name of the object.
            source: The name of the segment that the copy leaves.
            target: The name of the segment that it goes to.

        Raises:
            NotFoundError: There is no such object.
            InvalidArgumentError: There is no such segment, the source has no copy, or it is the
                target.
        """
        begun = await self._call(lambda calls: calls.move_object(key, source, target))
        return AsyncTask(self._call, begun)

    def task(self, task_id: JobId) -> AsyncTask:
        """Name a task by its id, which any process may have asked for.

        Args:
            task_id: Its id.
        """
        return AsyncTask(self._call, task_id)

    async def drain(
        self, segments: str | Sequence[str], *, to: str | Sequence[str] = (), concurrency: int = 0
    ) -> AsyncDrain:
        """Begin to empty segments: they take no more objects, and what lies in them is moved.

        Args:
            segments: The names of the segments, or of the only one.
            to: The names of the segments that the copies go to, or of the only one; none: wherever
                there is room.
            concurrency: How many copies are moved at a time; 0 leaves it to the master.

        Raises:
            NotFoundError: There is no such segment.
            InvalidArgumentError: None is named, or one is to be emptied and filled.

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
        """Name a drain by its id, which any process may have begun.

        Args:
            job_id: Its id.
        """
        return AsyncDrain(self._call, job_id)

    # Looking

    async def segments(self) -> list[SegmentInfo]:
        """Return the memory that the pool is made of."""
        described = await self._call(lambda calls: calls.segments())
        return [SegmentInfo(**segment) for segment in described]

    async def stats(self) -> dict[str, Any]:
        """Return what the master says (``pool``) and what this store did (``store``)."""
        pool = await self._call(lambda calls: calls.status())
        return {"pool": pool, "store": self._open_store()._native.metrics()}

    def metrics_text(self) -> str:
        """Return what this store did as text that Prometheus reads."""
        return self._open_store().metrics_text()

    async def check(self) -> None:
        """Raise unless the master answers and knows this store."""
        await self._call(lambda calls: calls.health())

    @property
    def http_address(self) -> str | None:
        """Where this store serves its health and metrics, as ``host:port``; None: nowhere."""
        return self._open_store().http_address

    @property
    def master_address(self) -> str:
        """Where the master is; other processes join with ``Store(address)``."""
        return self._open_store().master_address

    @property
    def name(self) -> str:
        """The name by which the pool knows this process."""
        return self._open_store().name

    @property
    def config(self) -> StoreConfig:
        """How it joins."""
        return self._config or StoreConfig()

    @property
    def is_closed(self) -> bool:
        """Whether it is not open: not yet, no more, or not in this process."""
        return self._store is None or self._store.is_closed

    # Life

    async def close(self) -> None:
        """Wait for the calls of this loop that are under way, and leave the pool.

        What this process lent is gone. Closing again does nothing.
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
        way = f"master={self._master}" if self._daemon is None else f"daemon={self._daemon}"
        return f"<mooncake.AsyncStore {way} {state}>"

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
            store._native.metrics()  # raises where the store is closed
            for number in [n for n, other in self._loops.items() if other.is_over]:
                self._loops.pop(number, None)
            calls = self._loops[id(loop)] = _LoopCalls(loop, store._native)
        return await calls.begin(begin)

    @staticmethod
    def _page(start: bytes, after: bytes | None) -> Callable[[_native.Pending], int]:
        return lambda calls: calls.list(prefix=start, after=after)


class _LoopCalls:
    """The calls of one loop: their futures, and the descriptor that tells of their ends."""

    __slots__ = ("_calls", "_futures", "_idle", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, store: _native.Store) -> None:
        self.loop = loop
        self._calls = _native.Pending(store)
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._idle: asyncio.Future[None] | None = None
        loop.add_reader(self._calls.fileno(), self._take)

    @property
    def is_over(self) -> bool:
        """Whether its loop has ended."""
        return self.loop.is_closed()

    def begin(self, begin: Callable[[_native.Pending], int]) -> asyncio.Future[Any]:
        """Begin a call. A future that is cancelled stays here until its call has ended."""
        number = begin(self._calls)
        future = self._futures[number] = self.loop.create_future()
        return future

    async def close(self) -> None:
        """Wait until no call is under way, and let go of the descriptor."""
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
