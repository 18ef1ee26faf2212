"""Reads of our own API take no lease; `lease` does, and a removal can wait for its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import start_master

import mooncake
from mooncake.tensor import Layout

MIB = 1 << 20
READS: dict[str, Callable[[mooncake.Store], object]] = {
    "get": lambda store: store.get("k"),
    "get_many": lambda store: store.get_many(["k"]),
    "get_buffer": lambda store: store.get_buffer("k"),
    "get_buffers": lambda store: store.get_buffers(["k"]),
    "get_into": lambda store: store.get_into("k", bytearray(8192)),
    "get_into_many": lambda store: store.get_into_many(["k"], [bytearray(8192)]),
    "get_range": lambda store: store.get_range("k", 1, 2),
    "get_range_into": lambda store: store.get_range_into("k", 1, bytearray(2)),
    "chunks": lambda store: list(store.chunks("k", 100)),
    "file": lambda store: store.file("k").read(),
    "get_array": lambda store: store.get_array("k"),
    "rows": lambda store: store.get_array("k", rows=slice(1, 2)),
    "info": lambda store: store.info("k"),
    "copies": lambda store: store.copies("k"),
}
ASYNC_READS: dict[str, Callable[[mooncake.AsyncStore], object]] = {
    "get": lambda store: store.get("k"),
    "get_buffer": lambda store: store.get_buffer("k"),
    "get_into": lambda store: store.get_into("k", bytearray(8192)),
    "get_range": lambda store: store.get_range("k", 1, 2),
    "get_array": lambda store: store.get_array("k"),
    "copies": lambda store: store.copies("k"),
}


@pytest.fixture(scope="module")
def store() -> Iterator[mooncake.Store]:
    """A store in a pool whose leases outlast the tests."""
    master = start_master("--default_kv_lease_ttl=600s")
    try:
        lends = mooncake.StoreConfig(segment_bytes=64 * MIB)
        with mooncake.Store(master.address, lends) as store:
            yield store
    finally:
        master.stop()


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_object_can_be_deleted_after_a_read(store, read):
    store.put_array("k", np.arange(40.0).reshape(10, 4))
    read(store)
    store.delete("k")
    assert not store.exists("k")


@pytest.mark.parametrize("read", ASYNC_READS.values(), ids=ASYNC_READS)
def test_async_reads_take_no_lease_either(store, read):
    async def use() -> None:
        async with mooncake.AsyncStore(store.master_address) as joined:
            await joined.put_array("k", np.arange(40.0).reshape(10, 4))
            await read(joined)
            await joined.delete("k")

    asyncio.run(use())


def test_reads_of_a_tensor_in_shards_take_no_lease(store):
    store.put_array("t", np.arange(40.0).reshape(10, 4), layout=Layout(2))
    for _ in range(3):
        store.get_array("t")
    store.delete("t")
    assert list(store.keys("t", internal=True)) == []


def test_clear_removes_what_was_read(store):
    store.put_many({f"read/{at}": b"1" for at in range(3)})
    store.get_many([f"read/{at}" for at in range(3)])
    with store.lease("read/1"):
        cleared = store.clear("read/")
    assert (cleared, cleared.leased) == (2, 1)
    assert store.clear("read/", force=True) == 1


def test_read_counts_as_a_use_for_eviction(store):
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=16 * MIB)) as small:
        small.put_many({f"k{at}": bytes(MIB) for at in range(12)})
        for _ in range(4):
            small.get("k0")
            small.get("k1")
        for at in range(12, 20):
            small.put(f"k{at}", bytes(MIB))
        assert small.exists_many(["k0", "k1", "k2", "k3"]) == [True, True, False, False]


def test_delete_waits_for_the_end_of_the_lease():
    master = start_master("--default_kv_lease_ttl=500ms")
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB)
    try:
        with mooncake.Store(master.address, lends) as store:
            store.put("k", b"1")
            store.lease("k").renew()
            begin = time.monotonic()
            with pytest.raises(mooncake.DeadlineError, match="lease_left_ms"):
                store.delete("k", wait=True, timeout_s=0.05)
            assert store.exists("k")
            store.delete("k", wait=True, timeout_s=60)
            assert time.monotonic() - begin > 0.4
            assert not store.exists("k")
            with pytest.raises(mooncake.NotFoundError):
                store.delete("k", wait=True)
    finally:
        master.stop()


def test_reader_without_lease_never_mixes_versions(store):
    """A writer replaces and removes the object all the time: bytes are of one version, or none."""
    size, rounds = 256 << 10, 150
    config = mooncake.StoreConfig(is_tcp_forced=True)
    with mooncake.Store(store.master_address, config) as reader:

        def replace() -> None:
            for at in range(rounds):
                store.put("race", bytes([at % 251]) * size, overwrite=True)
                if at % 5 == 0:
                    store.delete("race", missing_ok=True)

        async def use() -> list[int]:
            written = asyncio.create_task(asyncio.to_thread(replace))
            seen = []
            while not written.done():
                try:
                    value = await asyncio.to_thread(reader.get, "race", b"")
                except (mooncake.DeadlineError, mooncake.NotReadyError):
                    continue
                assert len(set(value)) <= 1, "bytes of two versions"
                assert len(value) in (0, size)
                seen.append(len(value))
            await written
            return seen

        assert any(asyncio.run(use()))
