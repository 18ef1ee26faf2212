"""`Store`: our own API of the pool, typed and with exceptions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, overload

from mooncake._leases import Lease
from mooncake._runtime import Buffer, PutOptions, _native
from mooncake._tasks import CopyInfo, Drain, JobId, Task, copies_of
from mooncake._units import parse_size
from mooncake._values import (
    check_value,
    decoded,
    encoded,
    key_list,
    name_list,
    with_groups,
)
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor.store import TensorCalls

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
"""Called with the number of finished items and the number of all items."""

_EMBEDDED_BYTES = 1 << 30
_INVALID_PARAMS = -600
_PROGRESS_ITEMS = 64
MISSING: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings with which a store joins its pool.

    Attributes:
        segment_bytes: Memory to lend to the pool, as a number or as text like ``"512MB"``. None
            lends 1 GiB to a pool that this store starts, and nothing to a pool that it joins: the
            memory that a process lends is lost when the process ends. Pages take physical memory
            only when objects are written to them.
        name: ``host[:port]`` by which peers reach this process; "" chooses it.
        metadata: ``"P2PHANDSHAKE"``, or the URL of a metadata server.
        tenant: Tenant in whose namespace the keys are. A master without ``--enable_multi_tenants``
            has one namespace for all, and is refused unless this is the default.
        is_tcp_forced: Transfer bytes over TCP only; None uses ``MC_FORCE_TCP``. Data in this
            store's own memory is still copied directly, unless ``MC_STORE_MEMCPY=0``.
        rpc_timeout_s: Timeout of a call to the master.
        connect_timeout_s: Timeout for connecting to the master.
        listen: Listen address of an embedded master as ``host[:port]``; "" is loopback and a free
            port.
        has_checksums: Store a checksum with every object that is put whole, and verify it when an
            object is read whole; None uses ``MOONCAKE_STORE_CHECKSUM``. Reads and writes of parts
            are not checked.
        http_port: Port that serves ``/health``, ``/metrics`` and ``/metrics/summary`` of this store
            over HTTP; 0 takes a free port, None disables the server.
        token: Secret that the master and its clients share, at least 8 bytes; None uses
            ``MOONCAKE_MASTER_TOKEN``. A pool that this store starts accepts only others that know
            it.
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
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    Attributes:
        key: Key of the object; bytes if it is not valid UTF-8.
        size: Length in bytes.
        is_complete: True if the object can be read; false while it is being written.
        replicas: Number of copies.
    """

    key: Key
    size: int
    is_complete: bool
    replicas: int


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A range of memory that a process lends to the pool.

    Attributes:
        id: Id of the segment.
        name: Name of the process that lends it.
        endpoint: Address of the transfer engine that owns it.
        protocol: Transport by which every peer can reach it.
        base: First address in the owner's process.
        capacity_bytes: Length.
        used_bytes: Bytes that objects occupy.
        takes_objects: True if new objects may be placed there.
    """

    id: str
    name: str
    endpoint: str
    protocol: str
    base: int
    capacity_bytes: int
    used_bytes: int
    takes_objects: bool


class Store(TensorCalls):
    """A handle on a pool of memory, in which objects are put and got by key.

    Without an address the store starts a pool of its own, with the master in this process; other
    processes join at its `master_address`. With `daemon` the store is a dummy client of the daemon
    of this host. Any number of threads may use a store. Close it, or use it as a context manager.

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
        """Join the pool of a master, directly or through a daemon, or start a pool.

        Args:
            master: ``host:port`` of the master, or ``"embedded"``.
            config: Settings.
            daemon: ``host:port`` of the daemon of this host (`mooncake_client`), which lends the
                memory and connects to the master. The store is then a dummy client and uses the
                name, tenant and metadata server of the daemon.

        Raises:
            UnavailableError: The master or the daemon cannot be reached.
            InvalidArgumentError: An address or a setting is invalid, or cannot be combined with a
                daemon.
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

        The memory of `value` is read in place; it must be contiguous and must not change during the
        call.

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
        return only(self._native.put([key], [value], options=options, is_upsert=overwrite))

    def put_many(
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
            key: Key of the object.
            default: Value to return if the object does not exist.

        Raises:
            NotFoundError: The object does not exist, and no default was given. Also a `KeyError`.
        """
        return or_default(self._native.get([key])[0], default)

    def get_many(
        self,
        keys: Iterable[Key],
        *,
        default: T | None = None,
        progress: Progress | None = None,
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
            values += self._native.get(wanted[part])
            if progress is not None:
                progress(len(values), len(wanted))
        return all_of([default if isinstance(value, NotFoundError) else value for value in values])

    def get_buffer(self, key: Key) -> Buffer:
        """Get an object as a buffer that owns its memory and is writable.

        ``numpy.frombuffer`` and ``memoryview`` use that memory without a copy.

        Raises:
            NotFoundError: The object does not exist.
        """
        return only(self._native.get_buffers([key]))

    def get_into(self, key: Key, buffer: Readable) -> int:
        """Get an object into writable, contiguous memory; return its length.

        Raises:
            NotFoundError: The object does not exist.
            InvalidArgumentError: The memory is smaller than the object.
        """
        with memoryview(buffer) as view:
            return only(self._native.get_into([key], [[_native.writable_range(view)]]))

    def get_buffers(self, keys: Iterable[Key]) -> list[Buffer | None]:
        """Get many objects as buffers in one batch; None for an object that does not exist.

        Raises:
            MooncakeError: The first failure other than a missing object.
        """
        values = self._native.get_buffers(key_list(keys))
        return all_of([None if isinstance(value, NotFoundError) else value for value in values])

    def lease(self, *keys: Key, every_s: float = 1.0) -> Lease:
        """Lease objects while a block runs: ``with store.lease("a", "b"): ...``.

        The objects are not evicted and not removed without force, even if the block outlasts the
        master's lease.

        Args:
            keys: Keys of the objects.
            every_s: Interval of renewals; must be shorter than the master's lease.

        Raises:
            NotFoundError: On entry, an object does not exist.
        """
        return Lease(self._native, key_list(keys), every_s)

    def exists(self, key: Key) -> bool:
        """Return whether an object exists and is complete, without leasing it."""
        return only(self._native.exists([key], lease=False))

    def exists_many(self, keys: Iterable[Key]) -> list[bool]:
        """Return for each key whether the object exists and is complete, without leasing it."""
        return all_of(self._native.exists(key_list(keys), lease=False))

    def size(self, key: Key) -> int:
        """Return the length of an object in bytes.

        Raises:
            NotFoundError: The object does not exist.
        """
        return only(self._native.sizes([key], lease=False))

    def objects(self, prefix: Key = b"") -> Iterator[ObjectInfo]:
        """Iterate over the objects whose key has a prefix, in byte order of the keys.

        Objects that are added or removed meanwhile may or may not be listed.
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
        """Iterate over the keys of the complete objects, in byte order."""
        return (found.key for found in self.objects(prefix) if found.is_complete)

    # Removing

    def delete(self, key: Key, *, force: bool = False, missing_ok: bool = False) -> None:
        """Remove an object.

        Args:
            key: Key of the object.
            force: Remove the object even if it was read recently and is still leased.
            missing_ok: Do not raise if the object does not exist.

        Raises:
            NotFoundError: The object does not exist.
            BusyError: The object is leased by a recent read.
        """
        outcome = self._native.remove([key], force=force)[0]
        if not (missing_ok and isinstance(outcome, NotFoundError)):
            only([outcome])

    def clear(self, prefix: Key = b"", *, force: bool = False) -> int:
        """Remove the objects whose key has a prefix; leased objects only with `force`.

        Returns:
            Number of removed objects.
        """
        return self._native.remove_matching(prefix=encoded(prefix) or None, force=force)

    # Copies

    def copies(self, key: Key) -> list[CopyInfo]:
        """Return where the copies of an object are, and lease the object.

        Args:
            key: Key of the object.

        Raises:
            NotFoundError: The object does not exist.
            NotReadyError: The object is still being written.
        """
        return copies_of(only(self._native.replicas([key])))

    def copy(self, key: Key, to: str | Sequence[str]) -> Task:
        """Create a task that copies an object to more segments; it runs in the background.

        Args:
            key: Key of the object.
            to: Names of the segments, or one name. Segments that have a copy are skipped.

        Raises:
            NotFoundError: The object does not exist.
            InvalidArgumentError: A segment does not exist, or no segment is named.

        Example:
            >>> store.copy("weights", to="10.0.0.2:15000").wait().state
            'success'
        """
        targets = name_list(to)
        return Task(self._native, self._native.copy_object(key, targets))

    def move(self, key: Key, source: str, target: str) -> Task:
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
        return Task(self._native, self._native.move_object(key, source, target))

    def task(self, task_id: JobId) -> Task:
        """Return a handle on the task with an id, which any process may have created.

        Args:
            task_id: Id of the task.
        """
        return Task(self._native, task_id)

    def drain(
        self, segments: str | Sequence[str], *, to: str | Sequence[str] = (), concurrency: int = 0
    ) -> Drain:
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
            >>> with store.drain("10.0.0.2:15000") as drain:
            ...     print(drain.info().state)
            running
        """
        begun = self._native.drain(
            name_list(segments), targets=name_list(to), concurrency=concurrency
        )
        return Drain(self._native, begun["id"])

    def drain_of(self, job_id: JobId) -> Drain:
        """Return a handle on the drain with an id, which any process may have started.

        Args:
            job_id: Id of the drain.
        """
        return Drain(self._native, job_id)

    # Queries

    def segments(self) -> list[SegmentInfo]:
        """Return the segments of the pool."""
        return [SegmentInfo(**segment) for segment in self._native.segments()]

    def stats(self) -> dict[str, Any]:
        """Return the status of the pool (``pool``) and the counters of this store (``store``).

        ``store["operations"]`` has counts, bytes and latencies by operation, ``store["rpcs"]`` by
        call to the master. ``store["by_transport"]`` has the bytes by transport, and
        ``store["peer_errors"]`` the failures by peer.
        """
        return {"pool": self._native.status(), "store": self._native.metrics()}

    def metrics_text(self) -> str:
        """Return the counters of this store as Prometheus text."""
        return self._native.metrics_text()

    def check(self) -> None:
        """Raise unless the master answers and knows this store."""
        self._native.health()

    @property
    def http_address(self) -> str | None:
        """Address of the HTTP server of this store as ``host:port``; None without one."""
        return self._native.http_address

    @property
    def master_address(self) -> str:
        """Address of the master, or of the daemon for a dummy client; others join with it."""
        return self._native.master_address

    @property
    def name(self) -> str:
        """Name by which the pool knows this process."""
        return self._native.hostname

    @property
    def config(self) -> StoreConfig:
        """Settings with which the store joined."""
        return self._config

    @property
    def is_closed(self) -> bool:
        """True if the store was closed, or opened before this process was forked."""
        return self._native.is_closed

    # Lifecycle

    def close(self) -> None:
        """Leave the pool; objects in the memory that this process lent are lost. Idempotent."""
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

    # Operators of a mapping that a store can honestly support

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
        kind = "dummy" if native.is_dummy else "embedded" if native.is_embedded else "joined"
        state = "closed" if native.is_closed else kind
        role = "daemon" if native.is_dummy else "master"
        return f"<mooncake.Store {native.hostname} {role}={native.master_address} {state}>"


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
        token=config.token,
    )


def _connect_dummy(daemon: str, master: str, config: StoreConfig) -> _native.Store:
    defaults = StoreConfig()
    wrong = [
        name
        for name in ("segment_bytes", "name", "metadata", "tenant", "listen", "token")
        if getattr(config, name) != getattr(defaults, name)
    ]
    wrong += ["master"] if master != "embedded" else []
    if wrong:
        text = f"a dummy client takes these settings from its daemon: {', '.join(wrong)}"
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
    """Return the value of a batch of one, or raise its failure."""
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
    """Return a value, the default if the object does not exist, or raise the failure."""
    if isinstance(outcome, NotFoundError) and default is not MISSING:
        return default
    return only([outcome])


def batches(count: int, progress: Progress | None) -> Iterator[slice]:
    """Split `count` items into batches: one batch if no progress is reported."""
    step = count if progress is None else _PROGRESS_ITEMS
    for first in range(0, count, max(step, 1)):
        yield slice(first, min(first + step, count))


def options_of(options: PutOptions | None, part: slice) -> PutOptions | None:
    """Return the options for a part of the items, with the groups of those items."""
    if options is None or options.groups is None:
        return options
    return with_groups(options, options.groups[part])
