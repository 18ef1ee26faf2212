"""Ranges, chunks, readers and files of objects; batches into memory of the caller."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json

import numpy as np
import pytest

import mooncake
from mooncake import AsyncStore, Store

VALUE = bytes(range(256)) * 4


@pytest.fixture
def key(store: Store) -> str:
    store.put("k", VALUE, overwrite=True)
    return "k"


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, 4, VALUE[:4]),
        (1000, None, VALUE[1000:]),
        (1000, 100, VALUE[1000:]),
        (1024, 1, b""),
        (5000, 1, b""),
        (3, 0, b""),
    ],
)
def test_range_is_cut_at_the_end_as_slices_are(store, key, offset, length, expected):
    assert store.get_range(key, offset, length) == expected


def test_range_refuses_negative_numbers_and_missing_objects(store, key):
    with pytest.raises(ValueError, match="offset=-1"):
        store.get_range(key, -1)
    with pytest.raises(ValueError, match="length=-2"):
        store.get_range(key, 0, -2)
    with pytest.raises(mooncake.NotFoundError) as caught:
        store.get_range("missing", 0)
    assert caught.value.key == "missing"


def test_range_fills_an_array_of_the_caller(store):
    rows = np.arange(200, dtype=np.float32).reshape(20, 10)
    store.put("rows", rows)
    target = np.empty((5, 10), np.float32)
    assert store.get_range_into("rows", 10 * 40, target) == target.nbytes
    assert (target == rows[10:15]).all()
    assert store.get_range_into("rows", 18 * 40, target) == 2 * 40
    with pytest.raises(BufferError, match="read-only"):
        store.get_range_into("rows", 0, bytes(4))


def test_chunks_are_the_object(store, key):
    chunks = list(store.chunks(key, 100))
    assert [len(chunk) for chunk in chunks] == [100] * 10 + [24]
    assert b"".join(chunks) == VALUE
    with pytest.raises(ValueError, match="not 0"):
        next(store.chunks(key, 0))


def test_reader_never_mixes_versions(store, key):
    reader = store.reader(key)
    first = reader.read(512)
    store.put(key, b"x" * len(VALUE), overwrite=True)
    with contextlib.suppress(mooncake.MooncakeError):
        assert first + reader.read() == VALUE
    assert store.reader(key).version != reader.version
    assert store.reader(key).read() == b"x" * len(VALUE)


def test_file_works_as_files_do(store, key):
    store.put("json", json.dumps({"a": [1, 2]}).encode())
    with store.file("json") as file:
        assert json.load(file) == {"a": [1, 2]}
    with pytest.raises(ValueError, match="closed"):
        file.read()
    with store.file(key, buffer_bytes=64) as file:
        assert file.seek(-3, io.SEEK_END) == len(VALUE) - 3
        assert file.read() == VALUE[-3:]
        assert file.read() == b""
        file.seek(0)
        assert file.read(300) == VALUE[:300]
        with pytest.raises(ValueError, match="negative"):
            file.raw.seek(-1)
    array = np.arange(6).reshape(2, 3)
    saved = io.BytesIO()
    np.save(saved, array)
    store.put("npy", saved.getvalue())
    with store.file("npy") as file:
        assert (np.load(file) == array).all()


def test_batch_fills_rows_of_one_array(store):
    blocks = np.arange(32, dtype=np.int64).reshape(4, 8)
    store.put_many({f"block/{at}": blocks[at] for at in range(4)})
    cache = np.zeros((5, 8), np.int64)
    keys = ["block/2", "missing", "block/0", "block/3", "block/1"]
    assert store.get_into_many(keys, cache) == [64, None, 64, 64, 64]
    assert (cache[[0, 2, 3, 4]] == blocks[[2, 0, 3, 1]]).all()
    assert (cache[1] == 0).all()
    with pytest.raises(mooncake.InvalidArgumentError, match="keys=5 buffers=2"):
        store.get_into_many(keys, [cache[0], cache[1]])


def test_batch_into_memory_names_the_items_that_failed(store):
    store.put_many({"a": b"12345678", "b": b"1234"})
    small, large = bytearray(4), bytearray(8)
    with pytest.raises(mooncake.InvalidArgumentError, match="smaller") as caught:
        store.get_into_many(["a", "b", "none"], [small, large, bytearray(1)])
    failed, length, missing = caught.value.outcomes
    assert isinstance(failed, mooncake.InvalidArgumentError)
    assert failed.key == "a"
    assert (length, missing) == (4, None)
    assert bytes(large[:4]) == b"1234"


def test_put_many_tells_what_was_stored(store):
    with pytest.raises(mooncake.NoSpaceError) as caught:
        store.put_many([("small", b"1"), ("huge", bytes(65 << 20)), ("other", b"2")])
    first, failed, last = caught.value.outcomes
    assert (first, last) == (True, True)
    assert failed.key == "huge"
    assert "1 of 3 items failed" in caught.value.__notes__
    assert store.get("other") == b"2"


def test_delete_many_says_which_objects_existed(store):
    store.put_many({"a": b"1", "b": b"2"})
    assert store.delete_many(["a", "none", "b"]) == [True, False, True]
    store.put_many({"c": b"3", "d": b"4"})
    with store.lease("c"):
        deleted = store.delete_many(["none", "c", "d"])
    assert deleted == [False, False, True]
    assert (deleted.removed, deleted.missing, list(deleted.kept)) == (["d"], ["none"], ["c"])
    assert isinstance(deleted.kept["c"], mooncake.BusyError)
    assert store.delete_many(["c"], force=True) == [True]


def test_async_store_has_the_same_calls(store, key):
    async def use() -> None:
        shared = AsyncStore.of(store)
        assert await shared.get_range(key, 1, 2) == VALUE[1:3]
        assert b"".join([chunk async for chunk in shared.chunks(key, 300)]) == VALUE
        reader = await shared.reader(key)
        target = bytearray(2000)
        assert await reader.readinto(target) == len(VALUE)
        assert target[: len(VALUE)] == VALUE
        blocks = [bytearray(1024), bytearray(1)]
        assert await shared.get_into_many([key, "none"], blocks) == [1024, None]
        assert await shared.delete_many(["none"]) == [False]
        with pytest.raises(mooncake.NotFoundError):
            await shared.get("none", timeout_s=30)

    asyncio.run(use())
