"""Tensors in shards: every call gives the same answer about their keys."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import mooncake
from mooncake.tensor import Axis, Layout, Shard

MIB = 1 << 20
ARRAY = np.arange(12.0).reshape(6, 2)
PARTS = ["w__parallelism_manifest", "w_tp_0", "w_tp_1"]


@pytest.fixture(scope="module")
def pool() -> Iterator[mooncake.Store]:
    """A store with a pool of its own."""
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        yield store


@pytest.fixture
def store(pool: mooncake.Store) -> mooncake.Store:
    """The store with a tensor in shards, and objects with similar keys."""
    pool.clear(force=True, pinned=True)
    pool.put_array("w", ARRAY, layout=Layout(2))
    pool.put_many({"w/x": b"1", "mine_tp_0": b"2", "wide": b"3"})
    return pool


def command(store: mooncake.Store, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake", *words],
        env={**os.environ, "MOONCAKE_MASTER": store.master_address},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_tensor_exists_by_its_key(store):
    assert store.exists("w")
    assert "w" in store
    assert store.exists_many(["w", "none", "w/x"]) == [True, False, True]
    assert not store.exists("mine"), "the object mine_tp_0 is no shard"


def test_lookups_cost_one_call_that_is_there_or_not(store):
    def calls(look_up: Callable[[], object]) -> int:
        before = probes()
        look_up()
        return probes() - before

    def probes() -> int:
        return int(store.stats()["store"]["rpcs"]["ExistKey"]["latency"]["calls"])

    store.exists("wide")
    names = [f"none/{number}" for number in range(1000)]
    assert calls(lambda: store.exists("wide")) == 1
    assert calls(lambda: store.exists("none")) == 1
    assert calls(lambda: store.exists_many(["wide", *names])) == 1
    assert calls(lambda: store.get("wide")) == 0
    assert calls(lambda: store.get("none", None)) == 1
    assert calls(lambda: store.get_many(names)) == 1
    assert calls(lambda: store.delete("wide")) == 0


ONE_OBJECT: dict[str, Callable[[mooncake.Store], object]] = {
    "get": lambda store: store.get("w"),
    "get with a default": lambda store: store.get("w", None),
    "get_many": lambda store: store.get_many(["w"]),
    "get_buffer": lambda store: store.get_buffer("w"),
    "get_into": lambda store: store.get_into("w", bytearray(1000)),
    "get_range": lambda store: store.get_range("w", 0),
    "file": lambda store: store.file("w"),
    "size": lambda store: store.size("w"),
    "copies": lambda store: store.copies("w"),
    "copy": lambda store: store.copy("w", "elsewhere"),
    "move": lambda store: store.move("w", "here", "elsewhere"),
    "expire": lambda store: store.expire("w", 60),
    "delete of a version": lambda store: store.delete("w", if_version=7),
}


@pytest.mark.parametrize("call", ONE_OBJECT.values(), ids=ONE_OBJECT)
def test_calls_for_one_object_name_the_other_call(store, call):
    with pytest.raises(mooncake.ShardedTensorError) as caught:
        call(store)
    assert isinstance(caught.value, mooncake.InvalidArgumentError)
    assert caught.value.key == "w"
    assert re.search(r"get_tensor|internal=True|without if_version", caught.value.remedy)
    assert store.exists("w")


def test_lease_covers_all_objects_of_a_tensor(store):
    with store.lease("wide", "w") as lease:
        assert lease.is_held
        names = ["w", *PARTS, "wide"]
        assert list(store.delete_many(names).kept) == names
        store.put_array("w", ARRAY, layout=Layout(3), overwrite=True)
        lease.renew()
        assert list(store.delete_many(["w_tp_2"]).kept) == ["w_tp_2"]
    with pytest.raises(mooncake.NotFoundError, match="mine"), store.lease("w", "mine"):
        pass


def streamed(store: mooncake.Store, *, overwrite: bool, size: int | None) -> bool:
    return store.put_stream("w", [b"by", b"tes"], overwrite=overwrite, size=size)


def written(store: mooncake.Store, mode: Literal["wb", "xb"], size: int | None) -> None:
    with store.file("w", mode, size=size) as file:
        file.write(b"bytes")


def in_loop(store: mooncake.Store, *, overwrite: bool) -> bool:
    async def put() -> bool:
        async with mooncake.AsyncStore(store.master_address) as joined:
            return await joined.put("w", b"bytes", overwrite=overwrite)

    return asyncio.run(put())


def from_file(store: mooncake.Store, tmp_path: Path, *words: str) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    done = command(store, "put", "w", str(tmp_path / "file"), *words)
    assert done.returncode == 0, done.stderr


REPLACEMENTS: dict[str, Callable[[mooncake.Store, Path], object]] = {
    "item": lambda store, _: store.__setitem__("w", b"bytes"),
    "put": lambda store, _: store.put("w", b"bytes", overwrite=True),
    "put_many": lambda store, _: store.put_many({"v": b"1", "w": b"bytes"}, overwrite=True),
    "put_stream": lambda store, _: streamed(store, overwrite=True, size=None),
    "put_stream with a size": lambda store, _: streamed(store, overwrite=True, size=5),
    "file": lambda store, _: written(store, "wb", None),
    "file with a size": lambda store, _: written(store, "wb", 5),
    "AsyncStore": lambda store, _: in_loop(store, overwrite=True),
    "command": lambda store, tmp_path: from_file(store, tmp_path, "--overwrite"),
}


@pytest.mark.parametrize("put", REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_bytes_that_replace_remove_all_shards(store, tmp_path, put):
    put(store, tmp_path)
    assert store.get("w") == b"bytes"
    assert "w" in list(store.keys(internal=True))
    assert not set(PARTS) & set(store.keys(internal=True))
    store.delete("w")
    assert "w" not in store
    with pytest.raises(mooncake.NotFoundError):
        store.get_array("w")


KEPT: dict[str, Callable[[mooncake.Store], object]] = {
    "put": lambda store: store.put("w", b"bytes"),
    "put of a version": lambda store: store.put("w", b"bytes", overwrite=True, if_version=7),
    "put_many": lambda store: store.put_many({"wide": b"1", "w": b"bytes"})[1],
    "put_stream": lambda store: streamed(store, overwrite=False, size=None),
    "put_stream with a size": lambda store: streamed(store, overwrite=False, size=5),
    "AsyncStore": lambda store: in_loop(store, overwrite=False),
}


@pytest.mark.parametrize("put", KEPT.values(), ids=KEPT)
def test_tensor_is_kept_as_an_object_is(store, put):
    assert put(store) is False
    assert "w" not in list(store.keys(internal=True))
    np.testing.assert_array_equal(store.get_array("w"), ARRAY)


@pytest.mark.parametrize("size", [None, 5])
def test_new_file_is_refused_where_a_tensor_is(store, size):
    with pytest.raises(mooncake.AlreadyExistsError):
        written(store, "xb", size)
    assert "w" not in list(store.keys(internal=True))


def test_command_does_not_let_a_tensor_expire(store):
    done = command(store, "expire", "w", "1h")
    assert done.returncode == 1
    assert "tensor that is stored in shards" in done.stderr
    assert "internal=True" in done.stderr


def test_command_keeps_a_tensor(store, tmp_path):
    (tmp_path / "file").write_bytes(b"bytes")
    assert command(store, "put", "w", str(tmp_path / "file")).returncode == 1
    np.testing.assert_array_equal(store.get_array("w"), ARRAY)


@pytest.mark.parametrize("overwrite", [False, True])
def test_objects_with_names_of_shards_prevent_no_put(store, overwrite):
    assert store.put("mine", b"bytes", overwrite=overwrite)
    assert streamed_mine(store)
    assert store.get_many(["mine", "mine_tp_0", "mine2"]) == [b"bytes", b"2", b"more"]


def streamed_mine(store: mooncake.Store) -> bool:
    store.put("mine2_tp_0", b"2")
    return store.put_stream("mine2", [b"mo", b"re"], size=4)


def test_refused_item_of_a_batch_has_its_own_options(store):
    options = mooncake.PutOptions(groups=["a", "b", "c"])
    items = {"new": b"1", "w": b"2", "mine": b"3"}
    assert store.put_many(items, options=options, overwrite=True) == [True] * 3
    assert store.get_many(["new", "w", "mine"]) == [b"1", b"2", b"3"]
    assert not set(PARTS) & set(store.keys(internal=True))


def test_missing_object_is_still_missing(store):
    assert store.get("none", None) is None
    assert store.get_many(["none", "mine"]) == [None, None]
    with pytest.raises(mooncake.NotFoundError):
        store.get("none")
    with pytest.raises(mooncake.NotFoundError) as caught:
        store.copy("none", "elsewhere")
    assert caught.value.key == "none"


def test_listings_show_the_tensor_and_hide_its_objects(store):
    assert sorted(store.keys()) == ["mine_tp_0", "w", "w/x", "wide"]
    sizes = {found.key: found.size for found in store.objects("w")}
    assert sizes["w"] == sum(store.size(part) for part in PARTS)
    assert list(store.keys("w_", internal=True)) == PARTS

    async def keys() -> list[str]:
        async with mooncake.AsyncStore(store.master_address) as joined:
            return [key async for key in joined.keys()]  # noqa: SIM118

    assert sorted(asyncio.run(keys())) == ["mine_tp_0", "w", "w/x", "wide"]


def test_shards_of_experts_are_one_tensor_in_a_listing(store):
    expert = Shard((Axis.ep(0, 2, 5), Axis.tp(0, 2)))
    store.put_array("e", ARRAY[:3], layout=expert, shape=ARRAY.shape)
    assert list(store.keys("e")) == ["e"]
    store.put_array("e", ARRAY, overwrite=False, layout=Layout(2, axes=(Axis.ep(1, 2, 6),)))
    assert list(store.keys("e")) == ["e"]


def test_whole_tensor_with_stale_shards_is_listed_once(store):
    store.put("w", b"whole")
    assert list(store.keys("w")).count("w") == 1


def test_delete_removes_the_whole_tensor(store):
    store.delete("w")
    assert list(store.keys(internal=True)) == ["mine_tp_0", "w/x", "wide"]
    with pytest.raises(mooncake.NotFoundError):
        store.delete("w")
    store.put_array("w", ARRAY, layout=Layout(2))
    deleted = store.delete_many(["w", "none", "wide"])
    assert (deleted, deleted.missing) == ([True, False, True], ["none"])
    assert list(store.keys(internal=True)) == ["mine_tp_0", "w/x"]


def test_delete_of_a_missing_key_leaves_similar_objects(store):
    with pytest.raises(mooncake.NotFoundError):
        store.delete("mine")
    assert store.exists("mine_tp_0")


def test_leased_shard_keeps_the_tensor_busy(store):
    with store.lease("w_tp_1"):
        with pytest.raises(mooncake.BusyError):
            store.delete("w")
        assert store.delete_many(["w"]).kept.keys() == {"w"}
    store.delete("w", force=True)


def test_clear_counts_a_tensor_as_one(store):
    cleared = store.clear("w")
    assert (cleared, cleared.kept) == (3, 0), "w, w/x and wide"
    assert list(store.keys(internal=True)) == ["mine_tp_0"]
    assert store.clear() == 1


def test_command_agrees_with_the_calls(store):
    assert command(store, "exists", "w").stdout == "yes  w\n"
    listed = command(store, "ls", "--keys").stdout.split()
    assert sorted(listed) == ["mine_tp_0", "w", "w/x", "wide"]
    assert command(store, "ls", "--keys", "--internal", "w_").stdout.split() == PARTS
    got = command(store, "get", "w")
    assert (got.returncode, "get_tensor" in got.stderr) == (1, True)
    dry = json.loads(command(store, "rm", "w", "--dry-run", "--json").stdout)
    assert dry["would_remove"] == ["w"]
    assert command(store, "rm", "w").returncode == 0
    assert list(store.keys("w_", internal=True)) == []
    assert command(store, "rm", "w").returncode == 1
