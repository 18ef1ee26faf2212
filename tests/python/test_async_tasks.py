"""`AsyncStore` mirrors `Store`; its copies, moves and drains can be awaited and cancelled."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from conftest import MIB, MasterProcess, freeze

import mooncake
from mooncake import AsyncStore, DrainInfo, StoreConfig

LIMIT_S = 60.0
CONFIG = StoreConfig(segment_bytes=32 * MIB)

# Names that only one of the two APIs has, with the reason.
ONLY_OF_STORE = {
    "__contains__": "`in` cannot be awaited; there is `exists`",
    "__getitem__": "an index cannot be awaited; there is `get`",
    "__setitem__": "an assignment cannot be awaited; there is `put`",
    "__delitem__": "`del` cannot be awaited; there is `delete`",
    "__iter__": "iteration over calls is `async for`; there is `keys`",
    "__len__": "refuses; AsyncStore has none",
    "__bool__": "goes with `__len__`",
    "__reduce__": "a store for event loops is made where it is used",
    "__copy__": "as `__reduce__`",
    "__deepcopy__": "as `__reduce__`",
    "file": "files of Python block; there is `reader`",
    "__enter__": "`async with` asks for `__aenter__`",
    "__exit__": "`async with` asks for `__aexit__`",
}
ONLY_OF_ASYNC_STORE = {
    "__aenter__": "as `__enter__`",
    "__aexit__": "as `__exit__`",
    "aclose": "the name that `contextlib.aclosing` calls",
    "open": "a constructor cannot be awaited",
    "of": "wraps a `Store`",
}
PAIRS = [
    (mooncake.Store, mooncake.AsyncStore, ONLY_OF_STORE, ONLY_OF_ASYNC_STORE),
    *[
        (one, other, {"__enter__": "", "__exit__": ""}, {"__aenter__": "", "__aexit__": ""})
        for one, other in [
            (mooncake.Task, mooncake.AsyncTask),
            (mooncake.Drain, mooncake.AsyncDrain),
            (mooncake.Lease, mooncake.AsyncLease),
        ]
    ],
]
# Calls that send no request, or that return an object which sends requests.
NOT_AWAITED = {
    "lease",
    "chunks",
    "from_url",
    "from_env",
    "task",
    "drain_of",
    "metrics_text",
    "objects",
    "keys",
    "__init__",
}


def names_of(api: type) -> set[str]:
    """Return the public names of a class, without those that every object has."""
    own = {name for kind in api.__mro__[:-1] for name in vars(kind)}
    plain = {"__doc__", "__module__", "__slots__", "__weakref__", "__del__"}
    plain |= {"__eq__", "__hash__", "__repr__", "__firstlineno__", "__static_attributes__"}
    return {name for name in own - plain if name.startswith("__") or not name.startswith("_")}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].__name__)
def test_async_api_mirrors_sync_api(pair):
    sync, awaited, only, only_awaited = pair
    assert names_of(sync) - names_of(awaited) <= set(only)
    assert names_of(awaited) - names_of(sync) <= set(only_awaited)
    for name in sorted(names_of(sync) & names_of(awaited)):
        one, other = getattr(sync, name), getattr(awaited, name)
        assert isinstance(one, property) == isinstance(other, property), name
        if name == "__init__" or not inspect.isfunction(one):
            continue
        parameters = [
            [
                (each.name, each.kind, each.default)
                for each in inspect.signature(call).parameters.values()
            ]
            for call in (one, other)
        ]
        assert parameters[0] == parameters[1], name
        is_awaited = inspect.iscoroutinefunction(other)
        assert is_awaited == (name not in NOT_AWAITED), name


@asynccontextmanager
async def pool(master: MasterProcess) -> AsyncIterator[tuple[AsyncStore, AsyncStore]]:
    """Open two stores that give memory to one pool."""
    async with (
        AsyncStore(master.address, CONFIG) as first,
        AsyncStore(master.address, CONFIG) as other,
    ):
        yield first, other


async def put_on(store: AsyncStore, key: str, value: bytes) -> None:
    options = mooncake.PutOptions(preferred_segments=[store.name])
    assert await store.put(key, value, options=options)


async def places(store: AsyncStore, key: str) -> set[str]:
    return {copy.segment for copy in await store.copies(key)}


def test_copy_adds_a_replica_and_move_relocates_it(quick_master: MasterProcess) -> None:
    async def main() -> None:
        async with pool(quick_master) as (first, other):
            await put_on(first, "k", b"value" * 1000)
            [copy] = await first.copies("k")
            assert (copy.segment, copy.size) == (first.name, 5000)
            task = await first.copy("k", to=other.name)
            info = await task.wait(LIMIT_S)
            assert (info.id, info.kind, info.state) == (task.id, "copy", "success")
            assert other.task(task.id) == task
            assert await other.task(task.id).info() == info
            assert await places(other, "k") == {first.name, other.name}
            await put_on(first, "moved", b"value")
            move = await first.move("moved", first.name, other.name)
            assert (await move.wait(LIMIT_S)).kind == "move"
            assert await places(first, "moved") == {other.name}
            assert await first.get("moved") == b"value"

    asyncio.run(main())


def test_invalid_tasks_are_rejected(quick_master: MasterProcess) -> None:
    async def main() -> None:
        async with pool(quick_master) as (first, other):
            await put_on(first, "k", b"value")
            wrong: list[tuple[Callable[[], Awaitable[object]], type[Exception]]] = [
                (lambda: first.copy("none", to=other.name), mooncake.NotFoundError),
                (lambda: first.copies("none"), mooncake.NotFoundError),
                (lambda: first.copy("k", to=[]), mooncake.InvalidArgumentError),
                (lambda: first.copy("k", to="nowhere:1"), mooncake.NotFoundError),
                (lambda: first.move("k", other.name, first.name), mooncake.InvalidArgumentError),
                (lambda: first.task((1, 2)).info(), mooncake.NotFoundError),
                (lambda: first.task((1, 2)).wait(LIMIT_S), mooncake.NotFoundError),
                (lambda: first.drain("nowhere:1"), mooncake.NotFoundError),
                (lambda: first.drain([]), mooncake.InvalidArgumentError),
                (lambda: first.drain_of((1, 2)).info(), mooncake.NotFoundError),
                (lambda: first.drain_of((1, 2)).cancel(), mooncake.NotFoundError),
                (lambda: first.copies(1), TypeError),  # type: ignore[arg-type]
                (lambda: first.copy("k", to=[1]), TypeError),  # type: ignore[list-item]
                (lambda: first.drain(first.name, concurrency=-1), OverflowError),
            ]
            for call, kind in wrong:
                with pytest.raises(kind):
                    await call()
            with pytest.raises(TypeError, match="two integers"):
                first.task("1-2")  # type: ignore[arg-type]
            assert repr(first.task((1, 2))) == "<mooncake.AsyncTask 1-2>"

    asyncio.run(main())


def test_drain_empties_segment_and_reports_progress(quick_master: MasterProcess) -> None:
    async def main() -> None:
        async with pool(quick_master) as (first, other):
            await asyncio.gather(
                *(put_on(first, f"d{at}", bytes([at]) * 10_000) for at in range(20))
            )
            seen: list[DrainInfo] = []
            drain = await other.drain(first.name)
            info = await drain.wait(LIMIT_S, progress=seen.append)
            assert (info.state, info.segments) == ("succeeded", [first.name])
            assert (info.succeeded, info.failed, info.active) == (20, 0, 0)
            assert seen[-1] == info
            assert other.drain_of(drain.id) == drain
            for at in range(20):
                assert await places(other, f"d{at}") == {other.name}
                assert await other.get(f"d{at}") == bytes([at]) * 10_000

    asyncio.run(main())


def test_drain_block_waits_and_cancels_on_error(
    quick_master: MasterProcess,
) -> None:
    async def main() -> None:
        async with pool(quick_master) as (first, other):
            await put_on(first, "k", b"value")
            async with await other.drain([first.name], to=[other.name]) as drain:
                pass
            assert (await drain.info()).state == "succeeded"
            with pytest.raises(ZeroDivisionError):
                async with await first.drain(other.name) as broken:
                    1 / 0  # noqa: B018
            assert (await broken.info()).is_over

    asyncio.run(main())


def test_cancelled_block_cancels_its_drain(quick_master: MasterProcess) -> None:
    begun = asyncio.Event()
    drains: list[mooncake.AsyncDrain] = []

    async def empty(store: AsyncStore, segment: str) -> None:
        async with await store.drain(segment) as drain:
            drains.append(drain)
            begun.set()
            await asyncio.Event().wait()

    async def main() -> None:
        with mooncake.Store(quick_master.address, CONFIG) as lender:
            async with AsyncStore(quick_master.address, CONFIG) as other:
                # An object that is being written cannot move, so that the drain does not end.
                options = mooncake.PutOptions(preferred_segments=[lender.name])
                assert lender._native.begin_writes(["w"], [1000], options=options) == [True]
                emptying = asyncio.create_task(empty(other, lender.name))
                await begun.wait()
                assert not (await drains[0].info()).is_over
                emptying.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await emptying
                assert (await drains[0].info()).state == "canceled"

    asyncio.run(main())


def test_cancelled_wait_leaves_task_running(mortal_master: MasterProcess) -> None:
    async def main() -> None:
        config = StoreConfig(segment_bytes=32 * MIB, rpc_timeout_s=60)
        async with (
            AsyncStore(mortal_master.address, config) as first,
            AsyncStore(mortal_master.address, config) as other,
        ):
            await put_on(first, "k", b"value")
            task = await first.copy("k", to=other.name)
            freeze(mortal_master.process.pid)
            try:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(task.wait(), 0.05)
            finally:
                mortal_master.process.send_signal(signal.SIGCONT)
            assert (await task.wait(LIMIT_S)).state == "success"
            assert await places(first, "k") == {first.name, other.name}

    asyncio.run(main())


def test_check_fails_without_master(mortal_master: MasterProcess) -> None:
    async def main() -> None:
        async with AsyncStore(mortal_master.address, CONFIG) as store:
            await store.check()
            mortal_master.kill()
            with pytest.raises(mooncake.UnavailableError):
                await store.check()

    asyncio.run(main())
