"""`BufferPool`, its leases, and memory of the host."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

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
def pool(established):
    """A pool of a store whose local buffer has 16 MiB."""
    pool = BufferPool(established)
    yield pool
    pool.close()


def test_the_names_are_one_class():
    assert BufferPool is RegisteredBufferPool is mooncake.BufferPool is mooncake.store.BufferPool


def test_a_lease_is_read_into_and_returned(established, pool):
    assert established.put("k", b"0123456789") == 0
    with pool.buffer(MIB) as lease:
        assert isinstance(lease, BufferLease)
        assert lease.size == MIB
        assert established.get_into("k", lease.ptr, lease.size) == 10
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


def test_memory_that_was_returned_is_lent_again(pool):
    first = pool.acquire(100_000)
    at = first.ptr
    first.release()
    second = pool.acquire(120_000)
    assert second.ptr == at
    second.release()


def test_a_view_keeps_its_lease(pool):
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


def test_a_lease_that_is_dropped_goes_back_and_its_views_stay_valid(pool):
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


def test_what_is_lent_has_a_bound(established):
    pool = BufferPool(established, block_on_exhaustion=False)
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


def test_the_bound_is_never_below_the_local_buffer(established):
    for max_bytes, capacity in ((1, 16 * MIB), (20 * MIB, 20 * MIB)):
        pool = BufferPool(established, max_bytes=max_bytes)
        pool.acquire(capacity).release()
        with pytest.raises(RuntimeError, match="exceeds"):
            pool.acquire(capacity + 1)
        pool.close()


def test_leases_are_counted_where_that_is_asked_for(established):
    pool = BufferPool(established, max_regions=2, block_on_exhaustion=False)
    leases = [pool.acquire(1), pool.acquire(0)]
    assert (leases[1].size, len(leases[1].buffer)) == (0, 0)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1)
    for lease in leases:
        lease.release()
    pool.close()


def test_one_who_waits_gets_what_another_returns(pool):
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


def test_a_pool_wants_a_store_that_is_set_up_with_a_local_buffer(established):
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
            return established._get_pyclient_capsule()

    BufferPool(Wrapper()).close()
    for wrong in ({"alignment": 3}, {"alignment": 4}):
        with pytest.raises(RuntimeError, match="alignment must be a power of two"):
            BufferPool(established, **wrong)
    for wrong in ({"alignment": 0}, {"min_size_class": 0}):
        with pytest.raises(RuntimeError, match="min_size_class and alignment must be positive"):
            BufferPool(established, **wrong)


def test_a_lease_outlives_its_store(established):
    pool = BufferPool(established, prewarm_size=1000, prewarm_count=2)
    lease = pool.acquire(1000)
    assert established.close() == 0
    lease.buffer[:] = b"x" * 1000
    assert ctypes.string_at(lease.ptr, 1000) == b"x" * 1000
    lease.release()
    pool.close()


def test_many_threads_share_a_pool(established):
    pool = BufferPool(established, max_bytes=16 * MIB)
    failures = []

    def work(number):
        try:
            for turn in range(50):
                key, value = f"{number}/{turn}", bytes([number]) * (100_000 + turn)
                assert established.put(key, value) == 0
                with pool.buffer(2 * MIB, timeout=30) as lease:
                    assert established.get_into(key, lease.ptr, lease.size) == len(value)
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


def test_memory_of_the_host_is_named_by_its_address(established):
    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(100_000)
    assert at % 4096 == 0
    assert ctypes.string_at(at, 100_000) == bytes(100_000)
    ctypes.memset(at, 7, 100_000)
    assert established.register_buffer(at, 100_000) == 0
    assert established.put_from("k", at, 100_000) == 0
    assert established.get("k") == b"\7" * 100_000
    assert established.unregister_buffer(at) == 0
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


def test_arguments_of_a_wrong_kind_are_refused_by_name(established):
    for name, wrong in {
        "max_bytes": -1,
        "max_size_class": "x",
        "default_timeout": "x",
        "max_regions": -1,
        "prewarm_count": 1.5,
    }.items():
        with pytest.raises(TypeError, match=name):
            BufferPool(established, **{name: wrong})
    with pytest.raises(RuntimeError, match="timeout must be non-negative"):
        BufferPool(established, default_timeout=float("nan"))
    pool = BufferPool(established)
    for size in (-1, None, "x", 1.5, 1 << 64):
        with pytest.raises(TypeError, match="size"):
            pool.acquire(size)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timeout"):
        pool.acquire(1, timeout="x")  # type: ignore[arg-type]
    with pool.acquire(10, timeout=float("inf")) as lease:
        assert lease.size == 10
    with pytest.raises(TypeError):
        bind_to_numa_node("x")  # type: ignore[arg-type]


def test_a_thread_keeps_to_a_node_and_a_node_that_is_not_there_changes_nothing(caplog):
    seen = []

    def bind():
        before = os.sched_getaffinity(0)
        assert bind_to_numa_node(9999) is None
        assert os.sched_getaffinity(0) == before
        assert bind_to_numa_node(0) is None
        seen.append(os.sched_getaffinity(0) <= before or os.sched_getaffinity(0))

    thread = threading.Thread(target=bind)
    thread.start()
    thread.join()
    assert seen
    assert "9999" in caplog.text
