"""`put_stream`: objects from iterators, which end well or badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from conftest import MIB

import mooncake

PIECES = [b"a", b"b" * 100_000, b"", bytearray(b"c" * 3), memoryview(b"d" * MIB)]
WHOLE = b"".join(PIECES)


def failing() -> Iterator[bytes]:
    yield b"x" * 100_000
    raise RuntimeError("the source failed")


async def async_pieces(pieces) -> AsyncIterator[bytes]:
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


@pytest.mark.parametrize("size", [None, len(WHOLE)])
def test_pieces_become_one_object(store, size):
    assert store.put_stream("x", iter(PIECES), size=size, tags={"a": "b"}) is True
    assert store.get("x") == WHOLE
    assert store.info("x").tags == {"a": "b"}
    assert store.put_stream("x", [b"y"], size=size and 1) is False
    assert store.get("x") == WHOLE
    assert store.put_stream("x", [b"y"], size=size and 1, overwrite=True) is True
    assert store.get("x") == b"y"


@pytest.mark.parametrize("size", [None, 3 * MIB])
def test_memory_of_pieces_may_be_used_again(store, size):
    def pieces():
        buffer = bytearray(MIB)
        for letter in b"abc":
            buffer[:] = bytes([letter]) * MIB
            yield buffer

    store.put_stream("x", pieces(), size=size)
    assert store.get("x") == b"a" * MIB + b"b" * MIB + b"c" * MIB


@pytest.mark.parametrize("size", [None, 200_000])
def test_source_that_fails_stores_nothing(store, size):
    store.put("x", b"old")
    with pytest.raises(RuntimeError, match="the source failed"):
        store.put_stream("x", failing(), size=size, overwrite=True)
    assert store.get("x") == b"old"
    with pytest.raises(RuntimeError, match="the source failed"):
        store.put_stream("y", failing(), size=size)
    assert list(store.objects()) == list(store.objects("x"))
    # No write is left open.
    assert store.put_stream("y", [b"x" * 200_000], size=size)


def test_lengths_are_checked(store):
    for pieces, size, text in [
        ([b"abc"], 2, "more bytes"),
        ([b"a"], 2, "fewer bytes"),
        ([b"a"], 0, "at least one"),
        ([b"a"], -1, "at least one"),
        ([], None, "empty"),
        ([b""], None, "empty"),
        ([], 1, "fewer bytes"),
    ]:
        with pytest.raises(mooncake.InvalidArgumentError, match=text):
            store.put_stream("x", pieces, size=size)
    assert not store.exists("x")


def test_values_that_are_no_pieces_are_refused(store):
    for value in (b"abc", "abc", bytearray(b"a"), None, 3):
        with pytest.raises(TypeError, match="put stores a single value"):
            store.put_stream("x", value)
    with pytest.raises(TypeError, match="encode it"):
        store.put_stream("x", ["text"])


def test_object_without_space_asks_for_no_piece(store):
    asked = []
    with pytest.raises(mooncake.NoSpaceError):
        store.put_stream("x", (asked.append(at) for at in range(3)), size=100 * MIB)
    assert asked == []


@pytest.mark.parametrize("size", [None, len(WHOLE)])
def test_async_sources(size):
    async def work():
        async with mooncake.AsyncStore() as store:
            assert await store.put_stream("x", async_pieces(PIECES), size=size)
            assert await store.get("x") == WHOLE
            assert await store.put_stream("x", PIECES, size=size) is False
            assert await store.put_stream("y", PIECES, size=size)
            with pytest.raises(RuntimeError, match="the source failed"):
                await store.put_stream("z", async_pieces(failing()), size=size and 200_000)
            assert not await store.exists("z")

    asyncio.run(work())


@pytest.mark.parametrize("size", [None, 10])
def test_cancelled_stream_stores_nothing(size):
    async def work():
        async with mooncake.AsyncStore() as store:
            begun, never = asyncio.Event(), asyncio.Event()

            async def pieces():
                yield b"12345"
                begun.set()
                await never.wait()

            task = asyncio.create_task(store.put_stream("x", pieces(), size=size))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await store.exists("x")
            assert await store.put_stream("x", [b"1234567890"], size=size)

    asyncio.run(work())
