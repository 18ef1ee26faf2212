"""Expiry, tags, versions, and puts and removals of one version only."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import numpy as np
import pytest
from conftest import start_master
from test_commands import command

import mooncake
from mooncake import AsyncStore, PutOptions, Store

LIMIT_S = 20


def await_gone(store: Store, key: str) -> None:
    end = time.monotonic() + LIMIT_S
    while store.exists(key):
        assert time.monotonic() < end, f"{key} did not expire"


def test_object_expires_even_if_it_is_leased(store):
    assert store.put("k", b"1", ttl_s=0.3)
    assert store.put("stays", b"1", ttl_s=600)
    store.lease("k").renew()
    await_gone(store, "k")
    with pytest.raises(mooncake.NotFoundError):
        store.get("k")
    assert 590 < store.info("stays").expires_in_s <= 600
    assert store.put("k", b"2"), "an expired object does not keep a put out"
    assert store.info("k").expires_in_s is None


def test_lease_of_an_expired_object_is_lost(store):
    store.put("k", b"1", ttl_s=0.2)
    lost = threading.Event()
    with store.lease("k", every_s=0.05, on_lost=lambda _: lost.set()):
        assert lost.wait(LIMIT_S)
    assert not store.exists("k")


def test_expiry_is_changed_and_taken_back(store):
    store.put("k", b"1", ttl_s=0.2)
    store.persist("k")
    assert store.info("k").expires_in_s is None
    store.expire("k", 0.05)
    await_gone(store, "k")
    for call in (lambda: store.persist("k"), lambda: store.expire("k", 1)):
        with pytest.raises(mooncake.NotFoundError) as caught:
            call()
        assert caught.value.key == "k"


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
def test_time_to_live_is_positive(store, ttl_s):
    with pytest.raises(mooncake.InvalidArgumentError, match="positive number of seconds"):
        store.put("k", b"1", ttl_s=ttl_s)
    with pytest.raises(mooncake.InvalidArgumentError, match="positive number of seconds"):
        store.expire("k", ttl_s)
    with pytest.raises(mooncake.InvalidArgumentError, match="longer than zero"):
        PutOptions(ttl_ms=0)


def test_tags_are_stored_beside_the_object(store):
    tags = {"model": "llama", "größe": "8x"}
    store.put_many({"a": b"1", "b": b"2"}, tags=tags, options=PutOptions(is_hard_pinned=True))
    info = store.info("a")
    assert (info.tags, info.is_hard_pinned, info.size) == (tags, True, 1)
    store.put("a", b"3", overwrite=True)
    assert store.info("a").tags == {}, "a new value has the tags of its own put"
    for bad in ({"": "x"}, {"a": "x" * 1024}, {str(number): "" for number in range(33)}):
        with pytest.raises(mooncake.InvalidArgumentError, match="tag"):
            store.put("c", b"1", tags=bad)


def test_info_many_describes_in_one_batch(store):
    store.put_many({f"k{number}": bytes(number + 1) for number in range(5)})
    found = store.info_many([*(f"k{number}" for number in range(5)), "absent"])
    assert [info and info.size for info in found] == [1, 2, 3, 4, 5, None]
    assert len({info.version for info in found[:5]}) == 5
    with pytest.raises(mooncake.NotFoundError):
        store.info("absent")


def test_put_replaces_only_the_version_it_names(store):
    store.put("counter", b"0")
    first = store.info("counter").version
    assert store.put("counter", b"1", if_version=first)
    assert not store.put("counter", b"x", if_version=first), "another writer was first"
    assert store.get("counter") == b"1"
    assert not store.put("absent", b"x", if_version=first)
    assert not store.exists("absent")
    second = store.info("counter").version
    options = PutOptions(if_versions=[second, first])
    assert store.put_many({"counter": b"2", "other": b"x"}, options=options) == [True, False]
    with pytest.raises(mooncake.InvalidArgumentError, match="if_versions"):
        store.put_many({"counter": b"3"}, options=options)


def test_concurrent_increments_lose_none():
    tasks, rounds = 8, 5

    async def increment(store):
        while True:
            version = (await store.info("counter")).version
            value = int(await store.get("counter"))
            if await store.put("counter", str(value + 1).encode(), if_version=version):
                return

    async def run():
        async with AsyncStore() as store:
            await store.put("counter", b"0")
            for _ in range(rounds):
                await asyncio.gather(*(increment(store) for _ in range(tasks)))
            assert int(await store.get("counter")) == tasks * rounds

    asyncio.run(run())


def test_delete_removes_only_the_version_it_names(store):
    store.put("k", b"1")
    first = store.info("k").version
    store.put("k", b"2", overwrite=True)
    with pytest.raises(mooncake.AlreadyExistsError, match="another version") as caught:
        store.delete("k", if_version=first, force=True)
    assert caught.value.key == "k"
    assert "replaced meanwhile" in caught.value.remedy
    store.delete("k", if_version=store.info("k").version)
    assert not store.exists("k")


def test_stat_takes_no_lease():
    master = start_master()
    with Store(master.address, mooncake.StoreConfig(segment_bytes=64 << 20)) as store:
        store.put_many({"short": b"v", "long": bytes(1000)})
        store.put_array("array", np.arange(8.0))
        for key in ("short", "long", "array") * 2:
            done = command("stat", key, "--json", "--master", master.address)
            assert json.loads(done.stdout)["lease_left_ms"] == 0
        assert store.delete_many(["short", "long", "array"]) == [True] * 3
    master.stop()


def test_expiry_and_tags_survive_a_restart_of_the_master(tmp_path):
    flags = (f"--state_dir={tmp_path}", "--log_sync=always")
    master = start_master(*flags)
    port = master.address.rpartition(":")[2]
    with Store(master.address, mooncake.StoreConfig(segment_bytes=64 << 20)) as store:
        store.put("k", b"1", ttl_s=600, tags={"a": "b"})
        version = store.info("k").version
        master.kill()
        master = start_master(*flags, f"--rpc_port={port}")
        info = store.info("k")  # waits for the owner of the memory, as a read does
        assert (info.tags, info.version) == ({"a": "b"}, version)
        assert 500 < info.expires_in_s <= 600
    master.stop()


def test_command_sets_and_shows_expiry_and_tags(tmp_path):
    master = start_master()
    path = tmp_path / "value"
    path.write_bytes(b"v")
    with Store(master.address, mooncake.StoreConfig(segment_bytes=64 << 20)) as store:

        def run(*words: object) -> str:
            done = command(*words, "--master", master.address)
            assert done.returncode == 0, done.stderr
            return done.stdout

        run("put", "k", path, "--ttl=1h", "--tag=model=llama", "--tag=empty=")
        text = run("stat", "k")
        assert "model=llama" in text
        assert "expires" in text
        found = json.loads(run("stat", "k", "--json"))
        assert found["tags"] == {"model": "llama", "empty": ""}
        assert 3_500_000 < found["expires_in_ms"] <= 3_600_000
        run("expire", "k", "never")
        assert json.loads(run("stat", "k", "--json"))["expires_in_ms"] is None
        run("expire", "k", "50ms")
        await_gone(store, "k")
        for words in (
            ("put", "k", path, "--ttl=soon"),
            ("put", "k", path, "--tag=none"),
            ("expire", "k", "0s"),
        ):
            assert command(*words, "--master", master.address).returncode == 2
    master.stop()
