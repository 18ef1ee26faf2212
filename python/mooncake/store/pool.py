"""`BufferPool`: registered scratch memory for the reads and writes of a store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from mooncake._runtime import Buffer as BufferLeaseView, _native
from mooncake.errors import BusyError, MooncakeError
from mooncake.store.base import StoreBase
from mooncake.store.batch import unsigned

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["BufferLease", "BufferLeaseView", "BufferPool", "client_capsule", "inner_store"]

_POINTER_BYTES: Final = 8
_LARGE_BYTES: Final = 16 << 20
# Pause before a buffer that a peer still uses is withdrawn again.
_RETRY_S: Final = 1.0


class BufferPool:
    """A pool of registered buffers for calls like `get_into`.

    Returned buffers are cached for later leases of about the same size, up to the size of the
    store's local buffer. Any number of threads may use one pool.
    """

    __slots__ = (
        "__weakref__",
        "_alignment",
        "_blocks",
        "_cached",
        "_cached_bytes",
        "_capacity",
        "_condition",
        "_default_timeout",
        "_deferred",
        "_is_changing",
        "_is_closed",
        "_leases",
        "_local",
        "_max_regions",
        "_min_class",
        "_store",
        "_used",
    )

    def __init__(  # noqa: PLR0913 (upstream's signature)
        self,
        store: Any,
        max_bytes: int = 0,
        min_size_class: int = 65536,
        max_size_class: int | None = None,
        alignment: int = 8388608,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        """Make a pool for a store.

        Args:
            store: A store that is set up with a local buffer, or a wrapper of one that has
                ``_get_pyclient_capsule()``.
            max_bytes: Maximum number of leased bytes; 0 is twice the local buffer. Values below the
                size of the local buffer are raised to that size.
            min_size_class: Size of the smallest buffers.
            max_size_class: Accepted; the largest lease is `max_bytes`.
            alignment: Alignment of the registered buffers, a power of two. Each lease begins at the
                beginning of its buffer, and also at a multiple of the page size.
            block_on_exhaustion: True if `acquire` waits while the pool is exhausted.
            default_timeout: Seconds that `acquire` waits; None waits without limit.
            max_regions: Maximum number of leases at the same time; None for no limit.
            prewarm_size: Size for `prewarm`, with `prewarm_count`.
            prewarm_count: Count for `prewarm`, with `prewarm_size`.

        Raises:
            RuntimeError: The store cannot have a pool, or an argument is out of range.
        """
        unsigned("max_bytes", max_bytes)
        unsigned("prewarm_count", prewarm_count)
        for name, number in (("max_size_class", max_size_class), ("max_regions", max_regions)):
            if number is not None:
                unsigned(name, number)
        _seconds("default_timeout", default_timeout)
        if min_size_class <= 0 or alignment <= 0:
            raise RuntimeError("min_size_class and alignment must be positive")
        if alignment & (alignment - 1) or alignment < _POINTER_BYTES:
            raise RuntimeError("alignment must be a power of two and at least sizeof(void*)")
        self._store = _native_of(store)
        local: int = inner_store(store)._local_bytes
        if local == 0:
            raise RuntimeError("BufferPool requires a store configured with a local buffer")
        self._local = local
        self._capacity = max(max_bytes, local) if max_bytes else 2 * local
        self._min_class = max(min_size_class, 1)
        self._alignment = alignment
        self._blocks = block_on_exhaustion
        self._default_timeout = default_timeout
        self._max_regions = max_regions
        # Re-entrant: the garbage collector may end a lease while a method of the same pool runs.
        self._condition = threading.Condition(threading.RLock())
        self._is_changing = False
        self._deferred: list[tuple[BufferLeaseView, int]] = []
        self._cached: dict[int, list[BufferLeaseView]] = {}
        self._cached_bytes = 0
        self._used = 0
        self._leases = 0
        self._is_closed = False
        if max_size_class is not None and max_size_class <= 0:
            raise RuntimeError("max_size_class must be positive")
        if prewarm_size is not None and prewarm_count > 0:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(
        self, size: int, block: bool | None = None, timeout: float | None = None
    ) -> BufferLease:
        """Lease a buffer.

        Args:
            size: Length in bytes.
            block: True to wait while the pool is exhausted; None uses the pool's setting.
            timeout: Seconds to wait; None uses the pool's setting.

        Raises:
            RuntimeError: The pool is exhausted or closed, the wait timed out, or `size` exceeds the
                capacity of the pool.
        """
        timeout = _seconds("timeout", self._default_timeout if timeout is None else timeout)
        size = unsigned("size", size)
        if size > self._capacity:
            raise RuntimeError("requested buffer size exceeds pool capacity")
        deadline = None if timeout is None else time.monotonic() + timeout
        may_wait = self._blocks if block is None else block
        with self._condition:
            while not self._has_room(size):
                if not may_wait:
                    raise RuntimeError("buffer pool is exhausted")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RuntimeError("timed out waiting for buffer")
                # Nothing announces that a peer is done with a buffer.
                pause = _RETRY_S if _kept_bytes(self._store) else threading.TIMEOUT_MAX
                self._condition.wait(pause if left is None else min(pause, left))
            with self._changing():
                memory = self._reuse_or_allocate(size)
                self._used += size
                self._leases += 1
            return BufferLease(self, memory, size)

    def buffer(
        self, size: int, block: bool | None = None, timeout: float | None = None
    ) -> BufferLease:
        """Lease a buffer; the same as `acquire`, for ``with``.

        Args:
            size: Length in bytes.
            block: True to wait while the pool is exhausted.
            timeout: Seconds to wait.
        """
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Allocate and register buffers in advance, up to the size of the local buffer.

        Args:
            size: Length of each buffer in bytes.
            count: Number of buffers.
        """
        unsigned("size", size)
        unsigned("count", count)
        with self._condition, self._changing():
            made = [self._reuse_or_allocate(size) for _ in range(count) if self._has_room(size)]
            for memory in made:
                self._cache(memory)

    def close(self) -> None:
        """Free the buffers. Idempotent.

        Raises:
            RuntimeError: A lease is not released.
        """
        with self._condition:
            if self._leases:
                raise RuntimeError("cannot close buffer pool with active leases")
            with self._changing():
                self._is_closed = True
                for memory in [each for kept in self._cached.values() for each in kept]:
                    self._unregister(memory)
                self._cached.clear()
                self._cached_bytes = 0
            self._condition.notify_all()

    def _has_room(self, size: int) -> bool:
        if self._is_closed:
            raise RuntimeError("buffer pool is closed")
        is_few = self._max_regions is None or self._leases < self._max_regions
        _withdraw_kept()
        return is_few and self._used + _kept_bytes(self._store) + size <= self._capacity

    def _class_of(self, size: int) -> int:
        bits = max(size - 1, 0).bit_length()
        # Of a large buffer at most an eighth may be unused: what is kept for reuse is limited.
        step = 1 << (bits if size < _LARGE_BYTES else bits - 4)
        return max(self._min_class, -(-size // step) * step)

    def _reuse_or_allocate(self, size: int) -> BufferLeaseView:
        """Return a cached buffer, or a new one that is registered."""
        kept = self._cached.get(self._class_of(size))
        if kept:
            memory = kept.pop()
            self._cached_bytes -= len(memory)
            return memory
        memory = BufferLeaseView.allocate(self._class_of(size), self._alignment)
        with contextlib.suppress(MooncakeError):  # a closed store needs no registration
            self._store.register_buffer(memory.ptr(), len(memory))
        return memory

    def _cache(self, memory: BufferLeaseView) -> None:
        is_kept = not self._is_closed and self._cached_bytes + len(memory) <= self._local
        if not is_kept:
            self._unregister(memory)
            return
        self._cached_bytes += len(memory)
        self._cached.setdefault(len(memory), []).append(memory)

    def _unregister(self, memory: BufferLeaseView) -> None:
        try:
            self._store.unregister_buffer(memory.ptr())
        except BusyError:
            _kept.append(_Kept(self._store, memory, time.monotonic() + _RETRY_S))
        except MooncakeError:
            pass  # the store is closed

    def _return(self, memory: BufferLeaseView, size: int) -> None:
        with self._condition:
            if self._is_changing:
                # The garbage collector runs in the middle of a change; the lease ends right after
                # it.
                self._deferred.append((memory, size))
                return
            with self._changing():
                self._end_lease(memory, size)
            self._condition.notify_all()

    def _end_lease(self, memory: BufferLeaseView, size: int) -> None:
        self._used -= size
        self._leases -= 1
        if memory.exports:
            # A view is still alive, so the buffer now belongs to the view's owner.
            self._unregister(memory)
        else:
            self._cache(memory)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._is_changing = True
        try:
            yield
        finally:
            if self._deferred:
                self._condition.notify_all()
            while self._deferred:
                self._end_lease(*self._deferred.pop())
            self._is_changing = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """A buffer that could not be withdrawn, because a peer still reads or writes it."""

    store: _native.Store
    memory: BufferLeaseView
    retry_at: float


# Outlives the pools: the memory must not be freed before the peers are done with it. Changed only
# by single calls of `list`, since the garbage collector may end a lease at any moment.
_kept: list[_Kept] = []


def _withdraw_kept() -> None:
    """Try again to withdraw the oldest buffer that could not be withdrawn, if it is due.

    The buffers count as leased in the pools of their store. One is tried at a time, since each may
    take as long as the engine waits for peers.
    """
    if not _kept or time.monotonic() < _kept[0].retry_at:
        return
    try:
        first = _kept.pop(0)
    except IndexError:  # another thread tries it
        return
    if not _is_withdrawn(first):
        _kept.append(replace(first, retry_at=time.monotonic() + _RETRY_S))


def _is_withdrawn(kept: _Kept) -> bool:
    try:
        kept.store.unregister_buffer(kept.memory.ptr())
    except BusyError:
        return False
    except MooncakeError:
        pass  # the store is closed
    return True


def _kept_bytes(store: _native.Store) -> int:
    return sum(len(each.memory) for each in list(_kept) if each.store is store)


class BufferLease:
    """A leased buffer; a context manager that releases it."""

    __slots__ = ("_memory", "_pool", "_size")

    def __init__(self, pool: BufferPool, memory: BufferLeaseView, size: int) -> None:
        """Prepare the value that `BufferPool.acquire` returns."""
        self._pool = pool
        self._memory: BufferLeaseView | None = memory
        self._size = size

    @property
    def ptr(self) -> int:
        """Address of the first byte."""
        if self._memory is None:
            raise RuntimeError("buffer lease is closed")
        return self._memory.ptr()

    @property
    def size(self) -> int:
        """Requested length in bytes."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """New writable view of the memory, of unsigned bytes."""
        if self._memory is None:
            raise BufferError("buffer lease is closed")
        return memoryview(self._memory)[: self._size]

    def release(self) -> None:
        """Return the buffer to the pool. Idempotent.

        Raises:
            RuntimeError: A view of the memory is alive.
        """
        if self._memory is None:
            return
        if self._memory.exports:
            raise RuntimeError("cannot release buffer while exported views exist")
        memory, self._memory = self._memory, None
        self._pool._return(memory, self._size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        self.release()
        return False

    def __del__(self) -> None:
        memory, self._memory = getattr(self, "_memory", None), None
        if memory is not None:
            self._pool._return(memory, self._size)


def client_capsule(wrapper: Any) -> object:
    """Return the object that a wrapper of a store passes to a `BufferPool`; None before setup.

    Args:
        wrapper: A `MooncakeDistributedStore`, or an object with ``_get_pyclient_capsule()``.
    """
    capsule = getattr(wrapper, "_get_pyclient_capsule", None)
    if capsule is None:
        raise TypeError(f"expected a store or a wrapper of a store, not {type(wrapper).__name__}")
    passed: object = capsule()
    return passed


def inner_store(store: Any) -> StoreBase:
    """Return the store behind a wrapper, or the store itself.

    Args:
        store: A store that is set up, or an object with ``_get_pyclient_capsule()``.

    Raises:
        RuntimeError: The argument is neither.
    """
    capsule = getattr(store, "_get_pyclient_capsule", None)
    if store is None:
        raise RuntimeError("MooncakeDistributedStore is not initialized")
    if capsule is None:
        raise RuntimeError(
            "BufferPool store parameter must be a PyClient or store wrapper that implements "
            "_get_pyclient_capsule()"
        )
    inner = capsule()
    if not isinstance(inner, StoreBase):
        raise RuntimeError("MooncakeDistributedStore is not initialized")
    return inner


def _native_of(store: Any) -> _native.Store:
    native = inner_store(store)._native
    if native is None:
        raise RuntimeError("MooncakeDistributedStore is not initialized")
    return native


def _seconds(name: str, value: float | None) -> float | None:
    """Return a timeout in seconds, None for no limit; raise for any other value."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not value >= 0:
        raise RuntimeError("timeout must be non-negative")
    # A timeout longer than a thread can wait means no limit.
    return value if value <= threading.TIMEOUT_MAX else None
