"""`BufferPool`, its leases, the host allocator, and binding to NUMA nodes."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import MIB

import mooncake
from mooncake.buffer_pool import BufferPool, RegisteredBufferPool
from mooncake.store import (
    BufferLease,
    BufferLeaseView,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    bind_to_numa_node,
)


@pytest.fixture
def pool(compat_store):
    """A pool on a store with a local buffer of 16 MiB."""
    pool = BufferPool(compat_store)
    yield pool
    pool.close()


def test_pool_names_are_one_class():
    assert BufferPool is RegisteredBufferPool is mooncake.BufferPool is mooncake.store.BufferPool


def test_lease_is_filled_and_released(compat_store, pool):
    assert compat_store.put("k", b"0123456789") == 0
    with pool.buffer(MIB) as lease:
        assert isinstance(lease, BufferLease)
        assert lease.size == MIB
        assert compat_store.get_into("k", lease.ptr, lease.size) == 10
        view = lease.buffer
        assert (view.format, view.ndim, view.readonly, len(view)) == ("B", 1, False, MIB)
        assert isinstance(view.obj, BufferLeaseView)
        assert bytes(view[:10]) == b"0123456789"
        assert np.frombuffer(view, np.uint8).ctypes.data == lease.ptr
        del view
        gc.collect()
    with pytest.raises(RuntimeError, match="buffer lease is closed"):
        _ = lease.ptr
    with pytest.raises(BufferError):
        _ = lease.buffer
    assert lease.size == MIB
    lease.release()


def test_released_memory_is_reused(pool):
    first = pool.acquire(100_000)
    at = first.ptr
    first.release()
    second = pool.acquire(120_000)
    assert second.ptr == at
    second.release()


def test_view_keeps_its_lease(pool):
    lease = pool.acquire(100)
    view = lease.buffer
    part = np.frombuffer(view[10:20], np.uint8)
    del view
    with pytest.raises(RuntimeError, match="cannot release buffer while exported views exist"):
        lease.release()
    with pytest.raises(RuntimeError, match="exported views"), lease:
        pass
    del part
    lease.release()


def test_dropped_lease_keeps_its_views_valid(pool):
    lease = pool.acquire(100)
    view = lease.buffer
    view[:3] = b"abc"
    del lease
    others = [pool.acquire(100) for _ in range(5)]
    for other in others:
        other.buffer[:3] = b"xyz"
    assert bytes(view[:3]) == b"abc"
    del view, other, others
    gc.collect()
    pool.close()


def test_pool_capacity_is_limited(compat_store):
    pool = BufferPool(compat_store, block_on_exhaustion=False)
    with pytest.raises(RuntimeError, match="requested buffer size exceeds pool capacity"):
        pool.acquire(32 * MIB + 1)
    first, second = pool.acquire(16 * MIB), pool.acquire(16 * MIB)
    with pytest.raises(RuntimeError, match="buffer pool is exhausted"):
        pool.acquire(1)
    with pytest.raises(RuntimeError, match="timed out waiting for buffer"):
        pool.acquire(1, block=True, timeout=0.01)
    with pytest.raises(RuntimeError, match="timeout must be non-negative"):
        pool.acquire(1, timeout=-1)
    with pytest.raises(RuntimeError, match="cannot close buffer pool with active leases"):
        pool.close()
    first.release()
    pool.acquire(1).release()
    second.release()
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="buffer pool is closed"):
        pool.acquire(1)


def test_capacity_is_at_least_the_local_buffer(compat_store):
    for max_bytes, capacity in ((1, 16 * MIB), (20 * MIB, 20 * MIB)):
        pool = BufferPool(compat_store, max_bytes=max_bytes)
        pool.acquire(capacity).release()
        with pytest.raises(RuntimeError, match="exceeds"):
            pool.acquire(capacity + 1)
        pool.close()


def test_max_regions_limits_open_leases(compat_store):
    pool = BufferPool(compat_store, max_regions=2, block_on_exhaustion=False)
    leases = [pool.acquire(1), pool.acquire(0)]
    assert (leases[1].size, len(leases[1].buffer)) == (0, 0)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1)
    for lease in leases:
        lease.release()
    pool.close()


def test_waiting_acquire_gets_released_memory(pool):
    held = [pool.acquire(16 * MIB), pool.acquire(16 * MIB)]
    got = []
    waiting = [
        threading.Thread(target=lambda: got.append(pool.acquire(10 * MIB, timeout=20)))
        for _ in range(3)
    ]
    for thread in waiting:
        thread.start()
    held[0].release()
    held.pop().release()
    del held
    gc.collect()
    for thread in waiting:
        thread.join()
    assert len(got) == 3
    for lease in got:
        lease.release()


def test_waiter_gets_memory_of_a_lease_that_the_collector_ends(compat_store, monkeypatch):
    pool = BufferPool(compat_store)
    allocate = BufferPool._reuse_or_allocate

    def collecting(self, size):
        # The collector runs in the middle of a change.
        gc.collect()
        return allocate(self, size)

    monkeypatch.setattr(BufferPool, "_reuse_or_allocate", collecting)
    got = []
    waiting = threading.Thread(target=lambda: got.append(pool.acquire(16 * MIB, timeout=20)))
    cycle = [pool.acquire(20 * MIB)]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        waiting.start()
        while not pool._condition._waiters:
            assert waiting.is_alive()
            time.sleep(0.001)
        held = pool.acquire(4 * MIB)
        waiting.join()
    finally:
        gc.enable()
    assert len(got) == 1
    for lease in (held, *got):
        lease.release()
    pool.close()


def test_pool_needs_a_store_with_a_local_buffer(compat_store):
    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(None)
    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(MooncakeDistributedStore())
    with pytest.raises(RuntimeError, match="_get_pyclient_capsule"):
        BufferPool(object())
    bare = MooncakeDistributedStore()
    assert bare.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "embedded") == 0
    with pytest.raises(RuntimeError, match="local buffer"):
        BufferPool(bare)
    bare.close()

    class Wrapper:
        def _get_pyclient_capsule(self):
            return compat_store._get_pyclient_capsule()

    BufferPool(Wrapper()).close()
    for wrong in ({"alignment": 3}, {"alignment": 4}):
        with pytest.raises(RuntimeError, match="alignment must be a power of two"):
            BufferPool(compat_store, **wrong)
    for wrong in ({"alignment": 0}, {"min_size_class": 0}):
        with pytest.raises(RuntimeError, match="min_size_class and alignment must be positive"):
            BufferPool(compat_store, **wrong)


def test_lease_outlives_its_store(compat_store):
    pool = BufferPool(compat_store, prewarm_size=1000, prewarm_count=2)
    lease = pool.acquire(1000)
    assert compat_store.close() == 0
    lease.buffer[:] = b"x" * 1000
    assert ctypes.string_at(lease.ptr, 1000) == b"x" * 1000
    lease.release()
    pool.close()


def test_threads_share_a_pool(compat_store):
    pool = BufferPool(compat_store, max_bytes=16 * MIB)
    failures = []

    def work(number):
        try:
            for turn in range(50):
                key, value = f"{number}/{turn}", bytes([number]) * (100_000 + turn)
                assert compat_store.put(key, value) == 0
                with pool.buffer(2 * MIB, timeout=30) as lease:
                    assert compat_store.get_into(key, lease.ptr, lease.size) == len(value)
                    with lease.buffer[: len(value)] as view:
                        assert view == value
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    pool.close()


def test_host_allocator_returns_usable_addresses(compat_store):
    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(100_000)
    assert at % 4096 == 0
    assert ctypes.string_at(at, 100_000) == bytes(100_000)
    ctypes.memset(at, 7, 100_000)
    assert compat_store.register_buffer(at, 100_000) == 0
    assert compat_store.put_from("k", at, 100_000) == 0
    assert compat_store.get("k") == b"\7" * 100_000
    assert compat_store.unregister_buffer(at) == 0
    assert allocator.free(at) == 0
    for wrong in (at, 0, 4096):
        assert allocator.free(wrong) == -1
    with pytest.raises(RuntimeError, match="Failed to map shared memory: Invalid argument"):
        allocator.alloc(0)
    with pytest.raises(RuntimeError, match="Failed to map shared memory"):
        allocator.alloc(1 << 60)
    with pytest.raises(TypeError):
        allocator.alloc(size=1)  # type: ignore[call-arg]
    for kind in (None, -1, "x"):
        with pytest.raises(TypeError):
            allocator.free(kind)  # type: ignore[arg-type]


def test_type_errors_name_the_argument(compat_store):
    for name, wrong in {
        "max_bytes": -1,
        "max_size_class": "x",
        "default_timeout": "x",
        "max_regions": -1,
        "prewarm_count": 1.5,
    }.items():
        with pytest.raises(TypeError, match=name):
            BufferPool(compat_store, **{name: wrong})
    with pytest.raises(RuntimeError, match="timeout must be non-negative"):
        BufferPool(compat_store, default_timeout=float("nan"))
    pool = BufferPool(compat_store)
    for size in (-1, None, "x", 1.5, 1 << 64):
        with pytest.raises(TypeError, match="size"):
            pool.acquire(size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout"):
        pool.acquire(1, timeout="x")  # type: ignore[arg-type]
    with pool.acquire(10, timeout=float("inf")) as lease:
        assert lease.size == 10
    with pytest.raises(TypeError):
        bind_to_numa_node("x")  # type: ignore[arg-type]


def cores_of_node_0() -> set[int]:
    """Return the cores of the first NUMA node, or those of this thread if none is listed."""
    listed = Path("/sys/devices/system/node/node0/cpulist")
    if not listed.exists():
        return os.sched_getaffinity(0)
    ranges = listed.read_text().strip().split(",")
    ends = [text.partition("-")[::2] for text in ranges]
    return {core for first, last in ends for core in range(int(first), int(last or first) + 1)}


def test_binding_to_unknown_numa_node_changes_nothing(caplog):
    seen = []

    def bind():
        for node in (9999, 0):
            assert bind_to_numa_node(node) is None
            seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert seen[0] == os.sched_getaffinity(0)
    assert seen[1] <= cores_of_node_0()
    assert "9999" in caplog.text


@pytest.mark.parametrize("alignment", [8, 64, 4096, 1 << 16, 1 << 21, 8 * MIB])
@pytest.mark.parametrize("size", [1, 100, 5000, 65536, 100_000, 3 * MIB])
def test_leases_are_aligned(compat_store, alignment, size):
    pool = BufferPool(compat_store, min_size_class=1, alignment=alignment)
    leases = [pool.acquire(size) for _ in range(3)]
    step = max(64, alignment)
    assert [lease.ptr % step for lease in leases] == [0, 0, 0]
    for lease in leases:
        view = lease.buffer
        assert (view[0], view[size - 1]) == (0, 0), "the memory is zeroed"
        view[:] = b"x" * size
        del view
        lease.release()
    pool.close()


def test_aligned_leases_take_no_more_memory_than_they_hold(compat_store):
    def mapped():
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmSize:")[1].split()[0]) << 10

    pool = BufferPool(compat_store)
    before = mapped()
    leases = [pool.acquire(65536) for _ in range(64)]
    assert mapped() - before < 64 * MIB, "the alignment is 8 MiB"
    del leases
    pool.close()


class BusyStore:
    """A native store, some of whose buffers are in use by a peer."""

    def __init__(self, native):
        self.native = native
        self.busy: set[int] = set()
        self.refused = 0

    def register_buffer(self, address, length):
        self.native.register_buffer(address, length)

    def unregister_buffer(self, address):
        if address in self.busy:
            self.refused += 1
            raise mooncake.BusyError("the range is still in use")
        self.native.unregister_buffer(address)


def test_busy_memory_is_kept_until_its_peer_is_done(compat_store):
    pool = BufferPool(compat_store, max_bytes=24 * MIB, default_timeout=0.3)
    store = pool._store = BusyStore(pool._store)
    lease = pool.acquire(12 * MIB)
    view, at = lease.buffer, lease.ptr
    view[:4] = b"mine"
    store.busy.add(at)
    # The lease ends while a view of it lives, so the pool does not keep the buffer for reuse.
    del lease, view
    gc.collect()
    assert store.refused == 1
    assert ctypes.string_at(at, 4) == b"mine", "the memory is not freed"
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(12 * MIB)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(12 * MIB, block=False)
    pool.acquire(100).release()
    assert ctypes.string_at(at, 4) == b"mine"
    store.busy.clear()
    pool.acquire(12 * MIB, timeout=20).release()
    assert compat_store.register_buffer(at, 100) == -600, "the memory is freed"
    pool.close()


def test_busy_memory_outlives_its_pool(compat_store):
    pool = BufferPool(compat_store)
    store = pool._store = BusyStore(pool._store)
    with pool.buffer(MIB) as lease:
        at = lease.ptr
        lease.buffer[:4] = b"mine"
        gc.collect()
    store.busy.add(at)
    pool.close()
    del pool
    gc.collect()
    assert store.refused == 1
    assert ctypes.string_at(at, 4) == b"mine"
    store.busy.clear()
    other = BufferPool(compat_store)
    deadline = time.monotonic() + 20
    while mooncake.store.pool._kept:
        assert time.monotonic() < deadline
        other.acquire(1).release()
    other.close()
