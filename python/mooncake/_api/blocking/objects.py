"""Objects: puts, gets, listings, copies, and queries of the pool."""

# Generated from asynchronous/objects.py by scripts/generate_blocking_api.py; do not edit.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

from mooncake._api.blocking.jobs import Drain, Task
from mooncake._api.blocking.leases import Lease
from mooncake._api.blocking.puts import put_bytes
from mooncake._api.blocking.removals import RemovalCalls
from mooncake._api.blocking.sharded import explained, of_one_object
from mooncake._api.buffers import Readable, Writable, readable, writable
from mooncake._api.config import StoreConfig
from mooncake._api.limits import limited
from mooncake._api.native_calls import Native
from mooncake._api.outcomes import MISSING, all_of, batches, only, options_of, or_default
from mooncake._api.tasks import CopyInfo, JobId, copies_of
from mooncake._api.types import Key, ObjectInfo, Progress, SegmentInfo
from mooncake._api.values import (
    Seconds,
    decoded,
    encoded,
    key_list,
    name_list,
    pairs_of,
    with_terms,
)
from mooncake._runtime import Buffer, PutOptions
from mooncake.errors import LeaseLostError, MooncakeError, NotFoundError
from mooncake.tensor.calls import run
from mooncake.tensor.format import GUIDE_SUFFIXES
from mooncake.tensor.sharded import OF_SHARDS, TensorListing, are_split

__all__ = ["ObjectCalls"]

T = TypeVar("T")


class ObjectCalls(RemovalCalls):
    """The methods of `Store` for objects, and for the pool that they are in."""

    __slots__ = ()

    _native: Native
    _config: StoreConfig

    def _within(self, timeout_s: float | None) -> Native:
        return self._native if timeout_s is None else self._native.within(timeout_s)

    # Writing

    def put(
        self,
        key: Key,
        value: Readable,
        *,
        overwrite: bool = False,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        if_version: int | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Put bytes under a key.

        The memory of `value` is read in place; it must be contiguous and must not change until the
        call has ended. Only the bytes are stored; `put_array` and `put_tensor` keep dtype and
        shape.

        Args:
            key: Key of the object.
            value: Any object with the buffer protocol, array of numpy or DLPack array in host
                memory; at least one byte.
            overwrite: Replace an existing object, or a tensor in shards with all of its shards;
                otherwise it is kept.
            options: Number of copies, pins, placement.
            ttl_s: Time after which the object is removed, even if it is leased; None: never.
            tags: Text stored beside the object: at most 32 names and values, 1 KiB in all.
            if_version: Replace the object only if it has this version, which `info` returns.
            timeout_s: Longest duration of the call; None uses the limits of the configuration.

        Returns:
            True if the value was stored; false if an existing object was kept, or did not have the
            version `if_version`. An object that another client is still writing counts as
            existing, although no read finds it before it is complete.

        Raises:
            NoSpaceError: No segment has enough free space, and nothing may be evicted.
            DeadlineError: The call took longer than `timeout_s`. The value is not stored, or is
                stored whole.
        """
        source = readable(value, key)
        native = limited(self._native, timeout_s)
        options = with_terms(options, ttl_s=ttl_s, tags=tags, if_version=if_version)
        return only(put_bytes(native, [key], [source], options=options, is_upsert=overwrite))

    def put_many(
        self,
        items: Mapping[str, Readable] | Mapping[bytes, Readable] | Iterable[tuple[Key, Readable]],
        *,
        overwrite: bool = False,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Put many objects in one batch.

        Args:
            items: Keys and values.
            overwrite: Replace existing objects; otherwise they are kept.
            options: Number of copies, pins, placement; its groups and versions are one for each
                item.
            ttl_s: Time after which the objects are removed; None: never.
            tags: Text stored beside each object.
            progress: Called with the number of finished items and of all items; the items are then
                split into several batches.
            timeout_s: Longest duration of each batch.

        Returns:
            For each item in order the result of `put`.

        Raises:
            MooncakeError: The first failure, after every item was tried. Its attribute `outcomes`
                has for each item the result of `put`, or its failure.
        """
        pairs = pairs_of(items)
        keys, values = [key for key, _ in pairs], [readable(value, key) for key, value in pairs]
        options = with_terms(options, ttl_s=ttl_s, tags=tags)
        outcomes: list[bool | MooncakeError] = []
        for part in batches(len(keys), progress):
            outcomes += put_bytes(
                limited(self._native, timeout_s),
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
    def get(self, key: Key, *, timeout_s: float | None = None) -> bytes: ...
    @overload
    def get(self, key: Key, default: T, *, timeout_s: float | None = None) -> bytes | T: ...
    def get(self, key: Key, default: Any = MISSING, *, timeout_s: float | None = None) -> Any:
        """Get an object as bytes, which are copied once more; `get_buffer` avoids that copy.

        Takes no lease: the object can be removed and evicted at once. A read that is in progress
        then ends with the bytes of one version, or fails.

        Args:
            key: Key of the object.
            default: Value to return if the object does not exist.
            timeout_s: Longest duration of the call; None uses the limits of the configuration.

        Raises:
            NotFoundError: The object does not exist, and no default was given. Also a `KeyError`.
            ShardedTensorError: The key is that of a tensor in shards; use `get_tensor`.
            DeadlineError: The call took longer than `timeout_s`.
        """
        native = limited(self._native, timeout_s)
        outcomes = native().get([key], lease=False)
        return or_default((explained(native, [key], outcomes))[0], default)

    def get_many(
        self,
        keys: Iterable[Key],
        *,
        default: T | None = None,
        progress: Progress | None = None,
        timeout_s: float | None = None,
    ) -> list[bytes | T | None]:
        """Get many objects in one batch.

        Args:
            keys: Keys of the objects.
            default: Value to return for an object that does not exist.
            progress: Called with the number of finished items and of all items; the items are then
                split into several batches.
            timeout_s: Longest duration of each batch.

        Raises:
            MooncakeError: The first failure other than a missing object.
        """
        wanted = key_list(keys)
        values: list[bytes | MooncakeError] = []
        for part in batches(len(wanted), progress):
            native = limited(self._native, timeout_s)
            got = native().get(wanted[part], lease=False)
            values += explained(native, wanted[part], got)
            if progress is not None:
                progress(len(values), len(wanted))
        return all_of([default if isinstance(value, NotFoundError) else value for value in values])

    def get_buffer(self, key: Key, *, timeout_s: float | None = None) -> Buffer:
        """Get an object as a buffer that owns its memory and is writable.

        ``memoryview`` and ``numpy.asarray`` use that memory without a copy.

        Raises:
            NotFoundError: The object does not exist.
        """
        native = limited(self._native, timeout_s)
        buffers = native().get_buffers([key], lease=False)
        return only(explained(native, [key], buffers))

    def get_buffers(
        self, keys: Iterable[Key], *, timeout_s: float | None = None
    ) -> list[Buffer | None]:
        """Get many objects as buffers in one batch; None for an object that does not exist.

        Raises:
            MooncakeError: The first failure other than a missing object.
        """
        wanted, native = key_list(keys), limited(self._native, timeout_s)
        buffers = native().get_buffers(wanted, lease=False)
        values = explained(native, wanted, buffers)
        return all_of([None if isinstance(value, NotFoundError) else value for value in values])

    def get_into(self, key: Key, buffer: Writable, *, timeout_s: float | None = None) -> int:
        """Get an object into writable, contiguous memory; return its length.

        Raises:
            NotFoundError: The object does not exist.
            InvalidArgumentError: The memory is smaller than the object.
        """
        target, native = writable(buffer), limited(self._native, timeout_s)
        lengths = native().read_into([key], [target], lease=False)
        return only(explained(native, [key], lengths))

    def get_into_many(
        self,
        keys: Iterable[Key],
        buffers: Iterable[Writable],
        *,
        timeout_s: float | None = None,
    ) -> list[int | None]:
        """Get many objects into memory of the caller in one batch.

        Args:
            keys: Keys of the objects.
            buffers: Writable, contiguous memory for each key: buffers, arrays, or parts of them.
            timeout_s: Longest duration of the call.

        Returns:
            For each key in order the length of the object; None if it does not exist.

        Raises:
            MooncakeError: The first failure other than a missing object, after every object was
                tried. Its attribute `outcomes` has the length or the failure of each.

        Example:
            >>> cache = numpy.empty((64, 4096), numpy.float16)
            >>> store.get_into_many([f"block/{at}" for at in range(64)], cache)
        """
        targets = [writable(buffer) for buffer in buffers]
        wanted, native = key_list(keys), limited(self._native, timeout_s)
        read = native().read_into(wanted, targets, lease=False)
        lengths = explained(native, wanted, read)
        return all_of([None if isinstance(length, NotFoundError) else length for length in lengths])

    def lease(
        self,
        *keys: Key,
        every_s: float = 1.0,
        on_lost: Callable[[LeaseLostError], object] | None = None,
        timeout_s: float | None = None,
    ) -> Lease:
        """Lease objects while a block runs: ``with store.lease("a", "b"): ...``.

        The objects are not evicted and not removed without force, even if the block outlasts the
        master's lease. All objects of a tensor in shards are leased by its key.

        Args:
            keys: Keys of the objects and tensors.
            every_s: Interval of renewals; must be shorter than the master's lease.
            on_lost: Called once with the loss, in the background, as soon as a renewal fails; the
                end of the block then raises nothing. It must not block.
            timeout_s: Longest duration of the call that takes the lease, and of each renewal. A
                renewal also ends 10 s after the one before has begun (twice the interval if that is
                longer): the lease could have ended, so that it is lost.

        Raises:
            NotFoundError: On entry, an object does not exist.
            LeaseLostError: At the end of the block, a renewal had failed, and there is no callback.
        """
        return Lease(self._native, key_list(keys), every_s, on_lost, timeout_s)

    def exists(self, key: Key, *, prefetch: bool = False, timeout_s: float | None = None) -> bool:
        """Return whether an object, or a tensor in shards, exists and is complete.

        Takes no lease.

        Args:
            key: Key of the object or tensor.
            prefetch: Have the pool bring the object into memory if only a disk has it, so that a
                read shortly afterwards need not wait for the disk. The call does not wait for
                that, and an object that was asked for in the last 30 s is not asked for again. Has
                no effect on the shards of a tensor.
            timeout_s: Longest duration of the call.
        """
        native, name = limited(self._native, timeout_s), encoded(key)
        if prefetch and only(native().exists([name], lease=False, prefetch=True)):
            return True
        found = only(native().exists_or_suffixed([name], GUIDE_SUFFIXES))
        if found <= 1:
            return found == 1
        return (run(native(), are_split([name], [found])))[0]

    def exists_many(
        self, keys: Iterable[Key], *, prefetch: bool = False, timeout_s: float | None = None
    ) -> list[bool]:
        """Do what `exists` does for many keys in one batch."""
        wanted, native = key_list(keys), limited(self._native, timeout_s)
        if prefetch and all(all_of(native().exists(wanted, lease=False, prefetch=True))):
            return [True] * len(wanted)
        found = all_of(native().exists_or_suffixed(wanted, GUIDE_SUFFIXES))
        if max(found, default=0) <= 1:
            return [each == 1 for each in found]
        split = run(native(), are_split([encoded(key) for key in wanted], found))
        return [each == 1 or is_split for each, is_split in zip(found, split, strict=True)]

    def size(self, key: Key, *, timeout_s: float | None = None) -> int:
        """Return the length of an object in bytes; `info` also has that of a tensor in shards.

        Raises:
            NotFoundError: The object does not exist.
            ShardedTensorError: The key is that of a tensor in shards.
        """
        native = limited(self._native, timeout_s)
        sizes = native().sizes([key], lease=False)
        return only(explained(native, [key], sizes))

    def objects(
        self, prefix: Key = b"", *, internal: bool = False, timeout_s: float | None = None
    ) -> Iterator[ObjectInfo]:
        """Iterate over the objects whose key has a prefix, in byte order of the keys.

        A tensor in shards is one object with the key of the tensor, which follows the keys of its
        shards. Objects that are added or removed meanwhile may or may not be listed.

        Args:
            prefix: Beginning of the keys.
            internal: List the shards and manifests of such tensors instead.
            timeout_s: Longest duration of each call to the master, which returns many objects.
        """
        start, after = encoded(prefix), None
        native, tensors = self._within(timeout_s), TensorListing(start)
        while True:
            page, is_last = native.list(prefix=start, after=after)
            for key, size, is_complete, replicas, on_disk in page:
                found = ObjectInfo(decoded(key), size, is_complete, replicas, on_disk)
                for each in [found] if internal else tensors.add(found):
                    yield each
            if is_last or not page:
                break
            after = page[-1][0]
        for each in tensors.rest():
            yield each

    @overload
    def keys(
        self,
        prefix: Key = b"",
        *,
        as_bytes: Literal[False] = False,
        internal: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[str]: ...
    @overload
    def keys(
        self,
        prefix: Key = b"",
        *,
        as_bytes: Literal[True],
        internal: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[bytes]: ...
    def keys(
        self,
        prefix: Key = b"",
        *,
        as_bytes: bool = False,
        internal: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Any]:
        """Iterate over the keys of the complete objects and tensors, in the order of `objects`.

        Args:
            prefix: Beginning of the keys.
            as_bytes: Return the keys as bytes. As text, bytes that are not valid UTF-8 are
                surrogates, as Python has them in names of files; every call takes such keys.
            internal: List the keys of the shards and manifests of tensors instead of their own.
            timeout_s: Longest duration of each call to the master, which returns many keys.
        """
        for found in self.objects(prefix, internal=internal, timeout_s=timeout_s):
            if found.is_complete:
                yield found.key_bytes if as_bytes else found.key

    # Copies

    def copies(self, key: Key, *, timeout_s: float | None = None) -> list[CopyInfo]:
        """Return where the copies of an object are.

        Args:
            key: Key of the object.
            timeout_s: Longest duration of the call.

        Raises:
            NotFoundError: The object does not exist.
            NotReadyError: The object is still being written.
        """
        native = limited(self._native, timeout_s)
        places = list(native().replicas([key], lease=False))
        return copies_of(only(explained(native, [key], places)))

    def copy(self, key: Key, to: str | Sequence[str], *, timeout_s: float | None = None) -> Task:
        """Create a task that copies an object to more segments; it runs in the background.

        Args:
            key: Key of the object.
            to: Names of the segments, or one name. Segments that have a copy are skipped.
            timeout_s: Longest duration of this call, not of the task.

        Raises:
            NotFoundError: The object or a segment does not exist.
            InvalidArgumentError: No segment is named.
        """
        native, names = limited(self._native, timeout_s), name_list(to)
        task = of_one_object(native, key, lambda: native().copy_object(key, names), OF_SHARDS)
        return Task(self._native, task)

    def move(self, key: Key, source: str, target: str, *, timeout_s: float | None = None) -> Task:
        """Create a task that moves a copy of an object to another segment, in the background.

        Args:
            key: Key of the object.
            source: Name of the segment that loses the copy.
            target: Name of the segment that gets the copy.
            timeout_s: Longest duration of this call, not of the task.

        Raises:
            NotFoundError: The object or a segment does not exist.
            InvalidArgumentError: The source has no copy, or both segments are the same.
        """
        native = limited(self._native, timeout_s)
        task = of_one_object(
            native, key, lambda: native().move_object(key, source, target), OF_SHARDS
        )
        return Task(self._native, task)

    def task(self, task_id: JobId) -> Task:
        """Return a handle on the task with an id, which any process may have created.

        Args:
            task_id: Id of the task.
        """
        return Task(self._native, task_id)

    def drain(
        self,
        segments: str | Sequence[str],
        *,
        to: str | Sequence[str] = (),
        concurrency: int = 0,
        may_evict: bool = False,
        timeout_s: float | None = None,
    ) -> Drain:
        """Start a drain: the segments accept no new objects, and their copies are moved elsewhere.

        A copy that does not fit into free memory elsewhere stays where it is, and the drain fails
        at its end, unless it may evict other objects.

        Args:
            segments: Names of the segments, or one name.
            to: Names of the segments that receive the copies, or one name; by default any segment
                with free space.
            concurrency: Number of copies that are moved at a time; 0 uses the master's default.
            may_evict: Whether other objects are evicted where a copy does not fit into free memory.
            timeout_s: Longest duration of this call, not of the drain.

        Raises:
            NotFoundError: A segment does not exist.
            InvalidArgumentError: No segment is named, or one is both source and target.

        Example:
            >>> with store.drain("10.0.0.2:15000") as drain:
            ...     info = drain.info()
            ...     print(info.state)
            running
        """
        begun = self._within(timeout_s).drain(
            name_list(segments),
            targets=name_list(to),
            concurrency=concurrency,
            may_evict=may_evict,
        )
        return Drain(self._native, begun["id"])

    def drain_of(self, job_id: JobId) -> Drain:
        """Return a handle on the drain with an id, which any process may have started.

        Args:
            job_id: Id of the drain.
        """
        return Drain(self._native, job_id)

    # Queries

    def segments(self, *, timeout_s: float | None = None) -> list[SegmentInfo]:
        """Return the segments of the pool."""
        found = self._within(timeout_s).segments()
        return [SegmentInfo(**segment) for segment in found]

    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the status of the pool (``pool``) and the counters of this store (``store``).

        ``store["operations"]`` has counts, bytes and latencies by operation, ``store["rpcs"]`` by
        call to the master. ``store["by_transport"]`` has the bytes by transport, and
        ``store["peer_errors"]`` the failures by peer.
        """
        status = self._within(timeout_s).status()
        return {"pool": status, "store": self._native.metrics()}

    def metrics_text(self) -> str:
        """Return the counters of this store as Prometheus text."""
        return self._native.metrics_text()

    def check(self, *, timeout_s: float | None = None) -> None:
        """Raise unless the master answers and knows this store."""
        self._within(timeout_s).health()

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
        """Settings with which the store joins its pool."""
        return self._config

    @property
    def is_closed(self) -> bool:
        """True if the store is not open yet, was closed, or was opened before a fork."""
        return self._native.is_closed
