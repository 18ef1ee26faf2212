"""`Store`: our own face of the pool, typed and with exceptions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, overload

from mooncake._leases import Lease
from mooncake._runtime import Buffer, PutOptions, _native
from mooncake._tasks import CopyInfo, Drain, JobId, Task, copies_of
from mooncake._units import parse_size
from mooncake._values import check_value, encoded, key_list, name_list
from mooncake.errors import MooncakeError, NotFoundError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer as Readable

__all__ = [
    "MISSING",
    "Key",
    "ObjectInfo",
    "Progress",
    "SegmentInfo",
    "Store",
    "StoreConfig",
    "all_of",
    "batches",
    "decoded",
    "only",
    "options_of",
    "or_default",
]

Key: TypeAlias = str | bytes
T = TypeVar("T")

Progress: TypeAlias = Callable[[int, int], object]
"""Told how many items are done, and how many there are."""

_EMBEDDED_BYTES = 1 << 30
_INVALID_PARAMS = -600
_PROGRESS_ITEMS = 64
MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """How a store joins its pool.

    Attributes:
        segment_bytes: How much memory to lend to the pool, as a number or as text like
            ``"512MB"``. None lends 1 GiB to a pool that this store begins, and nothing to one
            that it joins: what a process lends is gone when it ends. Memory is taken from the
            system only where objects are put.
        name: ``host[:port]`` by which peers reach this process; "" finds it out.
        metadata: ``"P2PHANDSHAKE"``, or the URL of a metadata server.
        tenant: Whose namespace the keys live in. A master without tenants has one for all.
        is_tcp_forced: Move bytes over TCP only; None does as ``MC_FORCE_TCP`` says. What lies in
            this store's own memory is copied all the same, unless ``MC_STORE_MEMCPY=0``.
        rpc_timeout_s: How long the master may take to answer a call.
        connect_timeout_s: How long to try to reach the master.
        listen: Where the master of an embedded store listens, as ``host[:port]``; "" is loopback
            and a free port.
        has_checksums: Keep a checksum with every object that is put whole, and check it when one
            is read whole; None does as ``MOONCAKE_STORE_CHECKSUM`` says. Parts of objects are
            read and written without.
        http_port: Where to serve ``/health``, ``/metrics`` and ``/metrics/summary`` of this store
            over HTTP; 0 takes any free port, None serves nothing.
    """

    segment_bytes: int | str | None = None
    name: str = ""
    metadata: str = "P2PHANDSHAKE"
    tenant: str = "default"
    is_tcp_forced: bool | None = None
    rpc_timeout_s: float | None = None
    connect_timeout_s: float | None = None
    listen: str = ""
    has_checksums: bool | None = None
    http_port: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    Attributes:
        key: Its key; as bytes where it is no UTF-8.
        size: Its length in bytes.
        is_complete: Whether it can be read; not while somebody writes it.
        replicas: How many copies there are.
    """

    key: Key
    size: int
    is_complete: bool
    replicas: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A piece of memory that a process lends to the pool.

    Attributes:
        id: Its identity.
        name: The name of the process that lends it.
        endpoint: Where its transfer engine is reached.
        protocol: How bytes get there, at least.
        base: Its first address in its process.
        capacity_bytes: Its length.
        used_bytes: How much of it objects hold.
        takes_objects: Whether new objects may be put there.
    """

    id: str
    name: str
    endpoint: str
    protocol: str
    base: int
    capacity_bytes: int
    used_bytes: int
    takes_objects: bool


class Store:
    """A handle on a pool of memory, in which objects are put and got by key.

    Without an address it begins a pool of its own, with the master in this process; others join
    at its `master_address`. With `daemon` it is a guest of the daemon of this host. It may be used
    by any number of threads. Close it, or use it as a context manager.

    Example:
        >>> with Store() as store:
        ...     store.put("greeting", b"Hello!")
        ...     store.get("greeting")
        True
        b'Hello!'
    """

    __slots__ = ("__weakref__", "_config", "_native")

    def __init__(
        self,
        master: str = "embedded",
        config: StoreConfig | None = None,
        *,
        daemon: str | None = None,
    ) -> None:
        """Join the pool of a master, directly or through a daemon, or begin a pool.

        Args:
            master: ``host:port`` of the master, or ``"embedded"``.
            config: How to join.
            daemon: ``host:port`` of the daemon of this host (`mooncake_client`), which lends the
                memory and knows the master. The store is then a guest of it, and takes its name,
                its tenant and its metadata server from it.

        Raises:
            UnavailableError: The master or the daemon cannot be reached.
            InvalidArgumentError: An address or a setting is wrong, or does not go with a daemon.
        """
        self._config = config = config or StoreConfig()
        self._native = (
            _connect(master, config) if daemon is None else _connect_dummy(daemon, master, config)
        )

    # Writing

    def put(
        self,
        key: Key,
        value: Readable,
        *,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> bool:
        """Put bytes under a key.

        The memory of `value` is read in place; it must be contiguous and must not change during
        the call.

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
        return only(self._native.put([key], [value], options=options, is_upsert=overwrite))

    def put_many(
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
            outcomes += self._native.put(
                keys[part],
                values[part],
                options=options_of(options, part) if progress else options,
                is_upsert=overwrite,
            )
            if progress is not None:
                progress(len(outcomes), len(keys))
        return all_of(outcomes)

    # Reading

    @overload
    def get(self, key: Key) -> bytes: ...
    @overload
    def get(self, key: Key, default: T) -> bytes | T: ...
    def get(self, key: Key, default: Any = MISSING) -> Any:
        """Get an object as bytes.

        Args:
            key: The name of the object.
            default: What to return where there is no such object.

        Raises:
            NotFoundError: There is no such object, and no default was given. Also a `KeyError`.
        """
        return or_default(self._native.get([key])[0], default)

    def get_many(
        self,
        keys: Iterable[Key],
        *,
        default: T | None = None,
        progress: Progress | None = None,
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
            values += self._native.get(wanted[part])
            if progress is not None:
                progress(len(values), len(wanted))
        return all_of([default if isinstance(value, NotFoundError) else value for value in values])

    def get_buffer(self, key: Key) -> Buffer:
        """Get an object as a buffer that owns its memory and can be written.

        ``numpy.frombuffer`` and ``memoryview`` use that memory without a copy.

        Raises:
            NotFoundError: There is no such object.
        """
        return only(self._native.get_buffers([key]))

    def get_into(self, key: Key, buffer: Readable) -> int:
        """Get an object into writable, contiguous memory; return its length.

        Raises:
            NotFoundError: There is no such object.
            InvalidArgumentError: The memory is smaller than the object.
        """
        with memoryview(buffer) as view:
            return only(self._native.get_into([key], [[_native.writable_range(view)]]))

    def get_buffers(self, keys: Iterable[Key]) -> list[Buffer | None]:
        """Get many objects as buffers in one go; None where there is none.

        Raises:
            MooncakeError: The first failure that is not a missing object.
        """
        values = self._native.get_buffers(key_list(keys))
        return all_of([None if isinstance(value, NotFoundError) else value for value in values])

    def lease(self, *keys: Key, every_s: float = 1.0) -> Lease:
        """Keep objects while a block runs: ``with store.lease("a", "b"): ...``.

        They are not evicted and not removed without force, even if the block outlasts the master's
        lease.

        Args:
            keys: Their names.
            every_s: How often the lease is taken anew; more often than it lasts at the master.

        Raises:
            NotFoundError: On entry, there is no such object.
        """
        return Lease(self._native, key_list(keys), every_s)

    def exists(self, key: Key) -> bool:
        """Say whether an object is there and complete, without leasing it."""
        return only(self._native.exists([key], lease=False))

    def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Say for each key whether an object is there and complete, without leasing any."""
        return all_of(self._native.exists(key_list(keys), lease=False))

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes.

        Raises:
            NotFoundError: There is no such object.
        """
        return only(self._native.sizes([key], lease=False))

    def objects(self, prefix: Key = b"") -> Iterator[ObjectInfo]:
        """Go through the objects whose key has a prefix, in the byte order of keys.

        Objects that come or go meanwhile may or may not be seen.
        """
        start, after = encoded(prefix), None
        while True:
            page, is_last = self._native.list(prefix=start, after=after)
            for key, size, is_complete, replicas in page:
                yield ObjectInfo(decoded(key), size, is_complete, replicas)
            if is_last or not page:
                return
            after = page[-1][0]

    def keys(self, prefix: Key = b"") -> Iterator[Key]:
        """Go through the keys of the objects that can be read, in byte order."""
        return (found.key for found in self.objects(prefix) if found.is_complete)

    # Removing

    def delete(self, key: Key, *, force: bool = False, missing_ok: bool = False) -> None:
        """Remove an object.

        Args:
            key: The name of the object.
            force: Also one that was read a moment ago and is still leased.
            missing_ok: A missing object is no failure.

        Raises:
            NotFoundError: There is no such object.
            BusyError: Somebody read it a moment ago.
        """
        outcome = self._native.remove([key], force=force)[0]
        if not (missing_ok and isinstance(outcome, NotFoundError)):
            only([outcome])

    def clear(self, prefix: Key = b"", *, force: bool = False) -> int:
        """Remove the objects whose key has a prefix, but not leased ones unless forced.

        Returns:
            How many were removed.
        """
        return self._native.remove_matching(prefix=encoded(prefix) or None, force=force)

    # Copies

    def copies(self, key: Key) -> list[CopyInfo]:
        """Return where the copies of an object lie, and lease the object.

        Args:
            key: The name of the object.

        Raises:
            NotFoundError: There is no such object.
            NotReadyError: It is still being written.
        """
        return copies_of(only(self._native.replicas([key])))

    def copy(self, key: Key, to: str | Sequence[str]) -> Task:
        """Ask for copies of an object in more segments. They are made a moment later.

        Args:
            key: The name of the object.
            to: The names of the segments, or of the only one. One that has a copy needs no other.

        Raises:
            NotFoundError: There is no such object.
            InvalidArgumentError: There is no such segment, or none is named.

        Example:
            >>> store.copy("weights", to="10.0.0.2:15000").wait().state
            'success'
        """
        targets = name_list(to)
        return Task(self._native, self._native.copy_object(key, targets))

    def move(self, key: Key, source: str, target: str) -> Task:
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
        return Task(self._native, self._native.move_object(key, source, target))

    def task(self, task_id: JobId) -> Task:
        """Name a task by its id, which any process may have asked for.

        Args:
            task_id: Its id.
        """
        return Task(self._native, task_id)

    def drain(
        self, segments: str | Sequence[str], *, to: str | Sequence[str] = (), concurrency: int = 0
    ) -> Drain:
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
            >>> with store.drain("10.0.0.2:15000") as drain:
            ...     print(drain.info().state)
            running
        """
        begun = self._native.drain(
            name_list(segments), targets=name_list(to), concurrency=concurrency
        )
        return Drain(self._native, begun["id"])

    def drain_of(self, job_id: JobId) -> Drain:
        """Name a drain by its id, which any process may have begun.

        Args:
            job_id: Its id.
        """
        return Drain(self._native, job_id)

    # Looking

    def segments(self) -> list[SegmentInfo]:
        """Return the memory that the pool is made of."""
        return [SegmentInfo(**segment) for segment in self._native.segments()]

    def stats(self) -> dict[str, Any]:
        """Return what the master says of the pool (``pool``) and what this store did (``store``).

        ``store["operations"]`` has counts, bytes and latencies by operation, ``store["rpcs"]`` by
        call to the master; ``store["by_transport"]`` says over which transport the bytes went, and
        ``store["peer_errors"]`` which peers failed how often.
        """
        return {"pool": self._native.status(), "store": self._native.metrics()}

    def metrics_text(self) -> str:
        """Return what this store did as text that Prometheus reads."""
        return self._native.metrics_text()

    def check(self) -> None:
        """Raise unless the master answers and knows this store."""
        self._native.health()

    @property
    def http_address(self) -> str | None:
        """Where this store serves its health and metrics, as ``host:port``; None: nowhere."""
        return self._native.http_address

    @property
    def master_address(self) -> str:
        """Where the master is, and others join with ``Store(address)``; of a guest: its daemon."""
        return self._native.master_address

    @property
    def name(self) -> str:
        """The name by which the pool knows this process."""
        return self._native.hostname

    @property
    def config(self) -> StoreConfig:
        """How it joined."""
        return self._config

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or opened before this process was forked."""
        return self._native.is_closed

    # Life

    def close(self) -> None:
        """Leave the pool; what this process lent is gone. Closing again does nothing."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        self.close()
        return False

    def __del__(self) -> None:
        native = getattr(self, "_native", None)
        if native is not None and not native.is_closed:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)

    # What a mapping would do, where a store honestly can

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | bytes) and self.exists(key)

    def __getitem__(self, key: Key) -> bytes:
        return self.get(key)

    def __setitem__(self, key: Key, value: Readable) -> None:
        self.put(key, value, overwrite=True)

    def __delitem__(self, key: Key) -> None:
        self.delete(key)

    def __repr__(self) -> str:
        native = self._native
        kind = "guest" if native.is_dummy else "embedded" if native.is_embedded else "joined"
        state = "closed" if native.is_closed else kind
        way = "daemon" if native.is_dummy else "master"
        return f"<mooncake.Store {native.hostname} {way}={native.master_address} {state}>"


def _connect(master: str, config: StoreConfig) -> _native.Store:
    lent = config.segment_bytes
    if lent is None:
        lent = _EMBEDDED_BYTES if master == "embedded" else 0
    return _native.Store.connect(
        master=master,
        name=config.name,
        metadata=config.metadata,
        segment_bytes=parse_size(lent),
        tenant=config.tenant,
        is_tcp_forced=config.is_tcp_forced,
        rpc_timeout_s=config.rpc_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        listen=config.listen,
        has_checksums=config.has_checksums,
        http_port=config.http_port,
    )


def _connect_dummy(daemon: str, master: str, config: StoreConfig) -> _native.Store:
    defaults = StoreConfig()
    wrong = [
        name
        for name in ("segment_bytes", "name", "metadata", "tenant", "listen")
        if getattr(config, name) != getattr(defaults, name)
    ]
    wrong += ["master"] if master != "embedded" else []
    if wrong:
        text = f"a guest of a daemon is told this by its daemon: {', '.join(wrong)}"
        raise _native.failure(_INVALID_PARAMS, text)
    return _native.Store.connect_daemon(
        daemon,
        is_tcp_forced=config.is_tcp_forced,
        rpc_timeout_s=config.rpc_timeout_s,
        connect_timeout_s=config.connect_timeout_s,
        has_checksums=config.has_checksums,
        http_port=config.http_port,
    )


def only(outcomes: Sequence[T | MooncakeError]) -> T:
    """Return the one value of a batch of one, or raise its failure."""
    outcome = outcomes[0]
    if isinstance(outcome, MooncakeError):
        raise outcome
    return outcome


def all_of(outcomes: Sequence[T | MooncakeError]) -> list[T]:
    """Return the values of a batch, or raise its first failure."""
    values: list[T] = []
    failures: list[MooncakeError] = []
    for outcome in outcomes:
        if isinstance(outcome, MooncakeError):
            failures.append(outcome)
        else:
            values.append(outcome)
    if failures:
        failures[0].add_note(f"{len(failures)} of {len(outcomes)} items failed")
        raise failures[0]
    return values


def or_default(outcome: bytes | MooncakeError, default: Any) -> Any:
    """Return a value, or the default where there is no object, or raise the failure."""
    if isinstance(outcome, NotFoundError) and default is not MISSING:
        return default
    return only([outcome])


def batches(count: int, progress: Progress | None) -> Iterator[slice]:
    """Cut so many items into batches: one, if nobody wants to be told."""
    step = count if progress is None else _PROGRESS_ITEMS
    for first in range(0, count, max(step, 1)):
        yield slice(first, min(first + step, count))


def options_of(options: PutOptions | None, part: slice) -> PutOptions | None:
    """Return the options for a part of the items: their groups are one for each."""
    if options is None or options.groups is None:
        return options
    return PutOptions(
        replicas=options.replicas,
        soft_pin=options.soft_pin,
        soft_pin_ttl_ms=options.soft_pin_ttl_ms,
        is_hard_pinned=options.is_hard_pinned,
        preferred_segments=options.preferred_segments,
        prefers_own_segments=options.prefers_own_segments,
        data_type=options.data_type,
        groups=options.groups[part],
    )


def decoded(key: bytes) -> Key:
    """Return a key as text, or as it is where it is none."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key
