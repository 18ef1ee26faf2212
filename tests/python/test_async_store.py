"""`AsyncStore`: calls that are awaited, cancelled or abandoned, and calls from several loops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import selectors
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import MIB, assert_quiet, freeze, run_script, start_master

import mooncake
from mooncake import AsyncStore, StoreConfig
from mooncake._api.native_calls import _LoopCalls, async_apart

CONFIG = StoreConfig(segment_bytes=64 * MIB)


def run_in(loop: asyncio.AbstractEventLoop, main):
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


def new_uvloop():
    uvloop = pytest.importorskip("uvloop", reason="needs uvloop: pip install uvloop")
    return uvloop.new_event_loop()


LOOPS = {
    "default": asyncio.new_event_loop,
    "poll": lambda: asyncio.SelectorEventLoop(selectors.PollSelector()),
    "uvloop": new_uvloop,
}


@pytest.mark.parametrize("name", LOOPS)
def test_async_calls_match_sync_calls(name):
    async def main():
        async with AsyncStore(config=CONFIG) as store:
            assert store.config == CONFIG
            assert await store.put("a/1", b"one")
            assert not await store.put("a/1", b"other")
            assert await store.put("a/1", b"ONE", overwrite=True)
            assert await store.put_many({"a/2": bytearray(b"two"), b"\xff": b"raw"}) == [True, True]
            assert await store.get("a/1") == b"ONE"
            assert await store.get("nope", None) is None
            with pytest.raises(KeyError):
                await store.get("nope")
            assert await store.get_many(["a/1", "nope", "a/2"]) == [b"ONE", None, b"two"]
            assert bytes(await store.get_buffer("a/2")) == b"two"
            first, missing = await store.get_buffers(["a/1", "nope"])
            assert bytes(first) == b"ONE"
            assert missing is None
            target = bytearray(5)
            assert await store.get_into("a/1", target) == 3
            assert target == b"ONE\0\0"
            with pytest.raises(mooncake.InvalidArgumentError):
                await store.get_into("a/1", bytearray(2))
            with pytest.raises(BufferError):
                await store.get_into("a/1", b"read only")
            assert await store.exists("a/1")
            assert await store.exists_many(["nope", "a/2"]) == [False, True]
            assert await store.size("a/2") == 3
            assert [key async for key in store.keys("a/")] == ["a/1", "a/2"]
            assert [found.size async for found in store.objects()] == [3, 3, 3]
            (segment,) = await store.segments()
            assert segment.capacity_bytes == 64 * MIB
            assert (await store.stats())["pool"]["keys"] == 3
            await store.check()
            await store.delete("a/1", force=True)
            await store.delete("a/1", missing_ok=True)
            with pytest.raises(mooncake.NotFoundError):
                await store.delete("a/1")
            assert await store.clear("a/", force=True) == 1
        assert store.is_closed

    loop = LOOPS[name]()
    run_in(loop, main())


def test_concurrent_calls_share_few_threads():
    async def main():
        async with AsyncStore(config=CONFIG) as store:
            value = bytes(range(256)) * 16
            assert all(await asyncio.gather(*(store.put(str(i), value) for i in range(500))))
            got = await asyncio.gather(*(store.get(str(i)) for i in range(500)))
            assert got == [value] * 500
            names = threads_named("mooncake-async")
            assert 1 <= names <= 16

    asyncio.run(main())


def threads_named(name: str) -> int:
    """Count the threads of this process with that name, which the kernel cuts to 15 characters."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            count += (task / "comm").read_text().strip() == name[:15]
    return count


def test_one_store_serves_several_event_loops():
    async def prepare(store):
        await store.open()
        await store.put("k", b"v" * 1000)

    async def work(store, number):
        for turn in range(30):
            assert await store.get("k") == b"v" * 1000
            assert await store.put(f"{number}/{turn}", b"w")

    store = AsyncStore(config=CONFIG)
    asyncio.run(prepare(store))
    failures = []

    def run(number):
        try:
            asyncio.run(work(store, number))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    asyncio.run(store.close())


def test_cancelled_call_keeps_its_buffer_until_it_ends(mortal_master):
    async def main():
        config = StoreConfig(segment_bytes=64 * MIB, rpc_timeout_s=20)
        async with AsyncStore(mortal_master.address, config) as store:
            await store.put("k", b"v")
            freeze(mortal_master.process.pid)
            try:
                value = bytearray(b"w" * 1000)
                task = asyncio.create_task(store.put("slow", value))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                with pytest.raises(BufferError):
                    value.append(1)
            finally:
                mortal_master.process.send_signal(signal.SIGCONT)
            # Closing waits for the call, which then releases its buffer.
        value.append(1)

    asyncio.run(main())


MEMORY_CALLS = {
    "put": lambda store, key, memory: store.put(key, memory),
    "put_many": lambda store, key, memory: store.put_many({key: memory}),
    "put_stream": lambda store, key, memory: store.put_stream(key, [memory]),
    "put_array": lambda store, key, memory: store.put_array(key, np.frombuffer(memory)),
    "get_into": lambda store, _, memory: store.get_into("bytes", memory),
    "get_into_many": lambda store, _, memory: store.get_into_many(["bytes"], [memory]),
    "get_range_into": lambda store, _, memory: store.get_range_into("bytes", 8, memory),
    "readinto": lambda store, _, memory: read_into(store, memory),
    "get_array": lambda store, _, memory: store.get_array("array", out=np.frombuffer(memory)),
}


async def read_into(store, memory):
    return await (await store.reader("bytes")).readinto(memory)


@pytest.mark.parametrize("name", MEMORY_CALLS)
def test_cancelled_call_with_memory_raises_cancelled_error(store, monkeypatch, name):
    """The task is cancelled when its first native call is in flight, its second, and so on."""
    begin, begun, cancelled_at = _LoopCalls.begin, 0, 0
    memories: list[bytearray] = []

    def begin_and_cancel(calls, *arguments):
        nonlocal begun
        begun += 1
        future = begin(calls, *arguments)
        if begun == cancelled_at:
            asyncio.current_task().cancel()
        return future

    async def outcome(wrapper, at):
        nonlocal begun, cancelled_at
        begun, cancelled_at = 0, at
        memories.append(bytearray(1000))
        call = MEMORY_CALLS[name](wrapper, f"new{at}", memories[-1])
        (outcome,) = await asyncio.gather(asyncio.create_task(call), return_exceptions=True)
        return type(outcome)

    async def main():
        wrapper = AsyncStore.of(store)
        assert not issubclass(await outcome(wrapper, 0), BaseException)
        assert begun > 0
        for at in range(1, begun + 1):
            assert await outcome(wrapper, at) is asyncio.CancelledError
        await wrapper.close()

    store.put("bytes", bytes(1000))
    store.put_array("array", np.zeros(125))
    monkeypatch.setattr(_LoopCalls, "begin", begin_and_cancel)
    asyncio.run(main())
    gc.collect()
    for memory in memories:
        memory.append(1)  # no call holds it any more


def test_close_ends_cancelled_calls_and_awaits_others(mortal_master, monkeypatch):
    monkeypatch.setattr("mooncake._api.native_calls._CANCELLED_S", 0.05)

    async def main():
        config = StoreConfig(segment_bytes=64 * MIB, rpc_timeout_s=20)
        store = await AsyncStore(mortal_master.address, config).open()
        await store.put("k", b"v")
        freeze(mortal_master.process.pid)
        try:
            awaited, cancelled = (asyncio.create_task(store.get("k")) for _ in range(2))
            await asyncio.sleep(0)
            cancelled.cancel()
            closed = asyncio.create_task(store.close())
            done, _ = await asyncio.wait([closed], timeout=0.2)
            assert not done, "a call is awaited"
            assert not store.is_closed
        finally:
            mortal_master.process.send_signal(signal.SIGCONT)
        assert await awaited == b"v"
        await closed

        store = await AsyncStore(mortal_master.address, config).open()
        await store.exists("k")
        freeze(mortal_master.process.pid)
        try:
            task = asyncio.create_task(store.exists("k"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait_for(store.close(), 10)
            assert store.is_closed
        finally:
            mortal_master.process.send_signal(signal.SIGCONT)

    asyncio.run(main())


def test_call_in_a_thread_ends_before_it_is_left():
    gate, ended = threading.Event(), threading.Event()

    def work():
        gate.wait(30)
        ended.set()
        raise OSError("is not logged")

    async def main():
        task = asyncio.create_task(async_apart(work))
        for _ in range(4):
            await asyncio.sleep(0)
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()

    asyncio.run(main())


def test_timeout_ends_the_wait(mortal_master):
    async def main():
        config = StoreConfig(segment_bytes=64 * MIB, rpc_timeout_s=20)
        async with AsyncStore(mortal_master.address, config) as store:
            freeze(mortal_master.process.pid)
            try:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(store.exists("k"), 0.05)
            finally:
                mortal_master.process.send_signal(signal.SIGCONT)
            assert not await store.exists("k")

    asyncio.run(main())


def test_unopened_store_raises_closed_error():
    async def main():
        store = AsyncStore()
        assert store.is_closed
        with pytest.raises(mooncake.ClosedError, match="async with"):
            await store.get("k")
        await store.close()
        async with AsyncStore(config=CONFIG) as store:
            await store.put("k", b"v")
        with pytest.raises(mooncake.ClosedError):
            await store.get("k")
        await store.close()
        with pytest.raises(mooncake.ClosedError, match="make a new one"):
            await store.open()
        with pytest.raises(mooncake.ClosedError, match="make a new one"):
            async with store:
                raise AssertionError("the block must not run")

    asyncio.run(main())


def test_aclosing_closes_a_store():
    async def main():
        async with contextlib.aclosing(await AsyncStore(config=CONFIG).open()) as store:
            await store.put("k", b"v")
        assert store.is_closed

    asyncio.run(main())


def test_concurrent_opens_make_one_store():
    async def main():
        store = AsyncStore(config=CONFIG)
        await asyncio.gather(store.open(), store.open())
        await store.put("k", b"v")
        assert len(await store.segments()) == 1
        await store.close()

    asyncio.run(main())


def test_sync_and_async_api_share_a_store(store):
    async def main():
        wrapper = AsyncStore.of(store)
        await wrapper.put("k", b"v")
        assert store.get("k") == b"v"
        assert wrapper.master_address == store.master_address
        await wrapper.close()

    asyncio.run(main())
    assert store.is_closed


def test_finished_event_loops_leak_no_descriptors():
    store = mooncake.Store(config=CONFIG)
    wrapper = AsyncStore.of(store)

    async def once():
        await wrapper.put("k", b"v", overwrite=True)

    asyncio.run(once())
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        asyncio.run(once())
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    store.close()


def test_calls_of_a_closed_loop_release_their_buffers(store):
    values = [bytearray(2 * MIB) for _ in range(20)]
    wrapper = AsyncStore.of(store)

    async def begin_and_leave(wrapper):
        puts = [
            asyncio.create_task(wrapper.put(str(number), value, overwrite=True))
            for number, value in enumerate(values)
        ]
        await asyncio.sleep(0)
        assert not all(put.done() for put in puts)

    asyncio.run(begin_and_leave(wrapper))
    other = AsyncStore.of(store)
    del wrapper
    gc.collect()

    async def until_free():
        async with asyncio.timeout(30):
            while True:
                await other.exists("k")
                try:
                    for value in values:
                        value.append(1)
                        value.pop()
                except BufferError:
                    continue
                return

    asyncio.run(until_free())
    asyncio.run(other.close())


def test_cancelling_at_any_moment_is_safe(store):
    async def main():
        wrapper = AsyncStore.of(store)
        value = bytes(range(256)) * 400
        await wrapper.put("k", value)
        for turn in range(200):
            tasks = [
                asyncio.create_task(wrapper.get("k")),
                asyncio.create_task(wrapper.put("k", value, overwrite=True)),
                asyncio.create_task(wrapper.get_into("k", bytearray(len(value)))),
                asyncio.create_task(wrapper.get_buffer("k")),
            ]
            for _ in range(turn % 7):
                await asyncio.sleep(0)
            tasks[turn % 4].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for number, outcome in enumerate(outcomes):
                if number != turn % 4:
                    assert not isinstance(outcome, BaseException), outcome
        assert await wrapper.get("k") == value
        await wrapper.close()

    asyncio.run(main())


SCRIPTS = {
    "left_open": """
async def main():
    store = await AsyncStore().open()
    await store.put("k", b"v")
    import warnings; warnings.simplefilter("ignore")
asyncio.run(main())
""",
    "exit_in_the_middle_of_calls": """
async def main():
    store = await AsyncStore().open()
    value = bytearray(8 << 20)
    tasks = [asyncio.create_task(store.put(str(i), value)) for i in range(40)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    import warnings; warnings.simplefilter("ignore")
asyncio.run(main())
""",
    "system_exit_in_a_task": """
async def main():
    async with AsyncStore() as store:
        await store.put("k", b"v")
        raise SystemExit(0)
asyncio.run(main())
""",
    "forked_child_uses_parents_store": """
import os
store = AsyncStore()
asyncio.run(store.open())
async def put():
    return await store.put("k", b"v", overwrite=True)
assert asyncio.run(put())
child = os.fork()
if child == 0:
    try:
        asyncio.run(put())
    except mooncake.ClosedError:
        async def reopen():
            async with AsyncStore() as own:
                return await own.put("k", b"v")
        os._exit(0 if asyncio.run(reopen()) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert asyncio.run(put())
asyncio.run(store.close())
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_exits_cleanly(name):
    opening = "import asyncio, mooncake\nfrom mooncake import AsyncStore\n"
    assert_quiet(run_script(opening + SCRIPTS[name]))


def test_rejects_arguments_of_ambiguous_type():
    async def work() -> None:
        async with mooncake.AsyncStore() as store:
            await store.put("k", b"v")
            for call in (
                lambda: store.put("x", [b"a", b"b"]),  # type: ignore[arg-type]
                lambda: store.put_many({"x": (b"a",)}),  # type: ignore[dict-item]
                lambda: store.get_many("key"),
                lambda: store.get_buffers("key"),
                lambda: store.exists_many("key"),
                lambda: store.clear(None, force=True),  # type: ignore[arg-type]
            ):
                with pytest.raises(TypeError):
                    await call()
            assert await store.get("k") == b"v"
            assert not await store.exists("x")

    asyncio.run(work())


def test_long_batch_reports_progress():
    async def work() -> None:
        async with mooncake.AsyncStore(config=CONFIG) as store:
            seen: list[tuple[int, int]] = []
            items = {f"k{at}": b"v" * (at + 1) for at in range(150)}
            groups = mooncake.PutOptions(groups=["g"] * len(items))

            def log(done: int, of: int) -> None:
                seen.append((done, of))

            assert await store.put_many(items, options=groups, progress=log) == [True] * 150
            assert seen[-1] == (150, 150)
            assert len(seen) > 1
            seen.clear()
            assert await store.get_many([*items, "nope"], progress=log) == [
                *items.values(),
                None,
            ]
            assert seen[-1] == (151, 151)

    asyncio.run(work())


def test_lease_is_renewed_beyond_master_ttl():
    master = start_master("--default_kv_lease_ttl=1500ms")

    async def work() -> None:
        async with mooncake.AsyncStore(master.address, CONFIG) as store:
            await store.put("kept", b"v")
            async with store.lease("kept", every_s=0.1) as lease:
                loop = asyncio.get_running_loop()
                until = loop.time() + 3
                while loop.time() < until:
                    with pytest.raises(mooncake.BusyError):
                        await store.delete("kept")
                    await asyncio.sleep(0.05)
                assert lease.is_held
                assert lease.keys == ("kept",)
            assert not lease.is_held
            await store.delete("kept", force=True)
            with pytest.raises(mooncake.NotFoundError):
                async with store.lease("kept"):
                    raise AssertionError("the block must not run")
            with pytest.raises(ValueError, match="every_s"):
                store.lease("kept", every_s=0)

    try:
        asyncio.run(work())
    finally:
        assert master.stop() == 0


def test_lease_ends_when_its_object_is_deleted():
    async def work() -> None:
        async with mooncake.AsyncStore(config=CONFIG) as store:
            await store.put("gone", b"v")
            async with asyncio.timeout(30), store.lease("gone", every_s=0.01) as lease:
                await store.delete("gone", force=True)
                while lease.is_held:
                    await asyncio.sleep(0.01)
                with pytest.raises(mooncake.NotFoundError):
                    await lease.renew()

    with pytest.raises(mooncake.LeaseLostError, match="no object") as lost:
        asyncio.run(work())
    assert lost.value.key == "gone"
