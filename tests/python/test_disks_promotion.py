"""Objects that come back from disk to memory, through upstream's API and our own."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess, start_master
from test_disks import joined, tiers, until

import mooncake
from mooncake._http import Reply, Request
from mooncake.mooncake_store_service import MooncakeStoreService
from mooncake.store import ExistOptions, MooncakeDistributedStore

VALUES = {f"k{size}": os.urandom(size) for size in (1, 70_001, 3 * MIB)}


@contextmanager
def only_on_disk(path: Path, *options: str) -> Iterator[MasterProcess]:
    """A pool whose objects are on the disk of a process, and in no memory."""
    master = start_master("--enable_offload=true", "--default_kv_lease_ttl=1ms", *options)
    owner = joined(master, 0, enable_ssd_offload=True, ssd_offload_path=str(path))
    lender = joined(master)
    for key, value in VALUES.items():
        assert lender.put(key, value) == 0
        until(lambda key=key: tiers(owner, key) == ["memory", "disk"])
    lender.close()
    for key in VALUES:
        until(lambda key=key: tiers(owner, key) == ["disk"])
    try:
        yield master
    finally:
        owner.close()
        master.stop()


def prefetching() -> ExistOptions:
    options = ExistOptions()
    assert not options.prefetch_to_memory
    options.prefetch_to_memory = True
    return options


def test_probe_with_the_option_brings_objects_into_memory(tmp_path):
    first, *others = VALUES
    with only_on_disk(tmp_path) as master:
        store = joined(master)
        assert store.batch_is_exist(list(VALUES)) == [1] * len(VALUES)
        assert store.is_exist(first, ExistOptions()) == 1
        keys = [*others, "nothing"]
        assert store.batch_is_exist(keys, prefetching()) == [1] * len(others) + [0]
        for key in others:
            until(lambda key=key: tiers(store, key) == ["memory", "disk"])
        assert tiers(store, first) == ["disk"], "it was probed without the option"
        reads = store.get_offload_rpc_read_count()
        for key in others:
            assert store.get(key) == VALUES[key]
        assert store.get_offload_rpc_read_count() == reads
        assert store.is_exist(first, prefetching()) == 1
        until(lambda: tiers(store, first) == ["memory", "disk"])
        store.close()


def test_get_waits_for_what_its_store_prefetched(tmp_path):
    with only_on_disk(tmp_path) as master:
        store = joined(master, ssd_get_wait_ms=30_000)
        for key, value in VALUES.items():
            assert store.is_exist(key, prefetching()) == 1
            assert store.get(key) == value
        assert store.get_offload_rpc_read_count() == 0
        store.close()


def test_setup_switches_prefetching_off(tmp_path):
    with only_on_disk(tmp_path) as master:
        config = {
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_addr": master.address,
            "global_segment_size": 64 * MIB,
            "enable_ssd_prefetch": "false",
            "ssd_prefetch_cooldown_sec": "0",
            "ssd_prefetch_dedup_ttl_sec": 1,
            "ssd_get_wait_ms": "0",
        }
        store = MooncakeDistributedStore()
        assert store.setup(config) == 0
        assert store.batch_is_exist(list(VALUES), prefetching()) == [1] * len(VALUES)
        for key, value in VALUES.items():
            assert store.get(key) == value
            assert tiers(store, key) == ["disk"]
        assert store.setup({**config, "ssd_get_wait_ms": "-1"}) == -600
        assert store.setup({**config, "ssd_get_wait_ms": "soon"}) == -600


def test_wrong_options_are_refused(compat_store):
    with pytest.raises(TypeError, match="ExistOptions"):
        compat_store.is_exist("k", {"prefetch_to_memory": True})
    with pytest.raises(TypeError, match="bool"):
        ExistOptions().prefetch_to_memory = "yes"


def test_exists_prefetches(tmp_path):
    first, *others = VALUES
    with only_on_disk(tmp_path) as master, joined_store(master) as store:
        assert store.exists(first)
        assert store.exists_many(others, prefetch=True) == [True] * len(others)
        assert store.exists_many(["nothing", others[0]], prefetch=True) == [False, True]
        assert not store.exists("nothing", prefetch=True)
        watcher = joined(master, 0)
        for key in others:
            until(lambda key=key: tiers(watcher, key) == ["memory", "disk"])
            assert store.get(key) == VALUES[key]
        assert tiers(watcher, first) == ["disk"]
        assert store.exists(first, prefetch=True)
        until(lambda: tiers(watcher, first) == ["memory", "disk"])
        watcher.close()


def test_store_config_switches_prefetching_off(tmp_path):
    config = mooncake.StoreConfig(has_prefetch=False, prefetch_dedup_s=1, prefetch_wait_s=0)
    with only_on_disk(tmp_path) as master, mooncake.Store(master.address, config) as store:
        assert store.exists_many(list(VALUES), prefetch=True) == [True] * len(VALUES)
        watcher = joined(master, 0)
        for key, value in VALUES.items():
            assert store.get(key) == value
            assert tiers(watcher, key) == ["disk"]
        watcher.close()
    with pytest.raises(TypeError, match="prefetch_wait_s"):
        mooncake.StoreConfig(prefetch_wait_s="1")
    with pytest.raises(mooncake.InvalidArgumentError, match="cooldown_s"):
        mooncake.Store(config=mooncake.StoreConfig(prefetch_cooldown_s=-1))


def test_rest_probe_prefetches(tmp_path):
    first, second, third = VALUES
    with only_on_disk(tmp_path) as master:
        service = MooncakeStoreService(
            cli_config={
                "local_hostname": "localhost",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master.address,
                "global_segment_size": "64mb",
                "ssd_prefetch_dedup_ttl_sec": 1,
            }
        )
        assert asyncio.run(service.start_store_service())
        watcher = joined(master, 0)

        def probe(key: str, query: str) -> Reply:
            return service._answer(Request("GET", f"/api/exist/{key}", query, b""))

        assert probe(first, "").status == 200
        assert probe(second, "prefetch=false").status == 200
        assert probe(second, "prefetch=perhaps").status == 400
        assert probe(third, "prefetch=true").status == 200
        until(lambda: tiers(watcher, third) == ["memory", "disk"])
        assert tiers(watcher, first) == tiers(watcher, second) == ["disk"]
        watcher.close()
        asyncio.run(service.stop())


def test_second_read_brings_an_object_back(tmp_path):
    key = next(iter(VALUES))
    with only_on_disk(tmp_path, "--promotion_on_hit=true") as master, joined_store(master) as store:
        watcher = joined(master, 0)
        assert store.get(key) == VALUES[key]
        assert tiers(watcher, key) == ["disk"]
        assert store.get(key) == VALUES[key]
        until(lambda: tiers(watcher, key) == ["memory", "disk"])
        with urllib.request.urlopen(f"{master.admin}/metrics") as answer:
            metrics = answer.read().decode()
        assert "master_promotion_completed_total 1" in metrics
        assert "master_promotion_candidate_recorded_total 1" in metrics
        watcher.close()


@contextmanager
def joined_store(master: MasterProcess) -> Iterator[mooncake.Store]:
    with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes="64MB")) as store:
        yield store
