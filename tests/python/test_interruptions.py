"""Ctrl-C and `timeout_s` end calls that wait for a master or a holder that does not answer."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import MIB, MasterProcess, freeze, start_master

import mooncake
from mooncake import AsyncStore, Store, StoreConfig
from mooncake.tensor import Layout
from mooncake.tensor.calls import run
from mooncake.tensor.read import Arrays, Request, read

# The guide promises 0.2 s; the rest is for a busy machine. The limits of the client are 30 s.
SOON_S = 1.0
HOLDER = """
import sys, mooncake
config = mooncake.StoreConfig(segment_bytes="64MB", is_tcp_forced=True)
with mooncake.Store(sys.argv[1], config) as store:
    here = mooncake.PutOptions(preferred_segments=[store.name])
    store.put("held", b"h" * (8 << 20), options=here)
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process for a block."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send SIGINT to this process while the block waits; expect that the block ends soon."""
    # A finalizer of what earlier tests left swallows the interrupt that meets it.
    gc.collect()
    begin = time.monotonic()
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        assert time.monotonic() - begin < seconds + SOON_S
    finally:
        timer.join()


@pytest.fixture
def holder(master: MasterProcess) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the object ``held``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, master.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("absent"),
        lambda store: store.put("new", b"value"),
        lambda store: store.put_many({f"n/{at}": b"v" for at in range(4000)}),
        lambda store: list(store.keys()),
        lambda store: store.delete("absent"),
    ],
    ids=["get", "put", "put_many", "keys", "delete"],
)
def test_interruption_ends_a_call_to_a_stopped_master(master, call):
    with Store(master.address) as store:
        store.exists("warm")
        with frozen(master.process.pid), interrupted_after(0.3):
            call(store)
        store.check()


def test_interruption_ends_a_join(master):
    with frozen(master.process.pid), interrupted_after(0.3):
        Store(master.address, StoreConfig(connect_timeout_s=60))


def test_interrupted_read_no_longer_writes_into_memory(master, holder):
    config = StoreConfig(is_tcp_forced=True)
    with Store(master.address, config) as store:
        assert store.get("held") == b"h" * (8 * MIB)
        target = bytearray(8 * MIB)
        with frozen(holder.pid):
            with interrupted_after(0.3):
                store.get_into("held", target)
            before = bytes(target)
        assert store.get("held") == b"h" * (8 * MIB), "the holder works again"
        assert target == before


def test_put_after_an_interrupted_put_stores_the_new_value(master):
    with Store(master.address, StoreConfig(segment_bytes=16 * MIB)) as store:
        store.put("k", b"old")
        with frozen(master.process.pid), interrupted_after(0.3):
            store.put("k", b"interrupted", overwrite=True)
        assert store.get("k") in (b"old", b"interrupted")
        assert store.put("k", b"new", overwrite=True)
        assert store.get("k") == b"new"


def test_handler_that_does_not_raise_interrupts_nothing(master):
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with Store(master.address) as store:
            freeze(master.process.pid)
            resume = threading.Timer(0.5, os.kill, (master.process.pid, signal.SIGCONT))
            notify = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
            resume.start()
            notify.start()
            assert store.exists("absent") is False
            resume.join()
            notify.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_interrupted_command_prints_no_traceback(master):
    with frozen(master.process.pid):
        program = "import sys; from mooncake._command.main import main; sys.exit(main())"
        process = subprocess.Popen(
            [sys.executable, "-c", program, "ls", "--master", master.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        # The command waits for the master as soon as it has a socket.
        deadline = time.monotonic() + 30
        while not any("socket:" in name for name in open_files(process.pid)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=60)
        assert time.monotonic() - begin < SOON_S
        assert (process.returncode, output) == (130, ("", ""))


@pytest.mark.parametrize("module", ["mooncake._command.main", "mooncake._api.store"])
def test_command_interrupted_while_it_loads_ends_silently(module):
    program = f"""
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
runpy.run_module("mooncake", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_command_and_module_have_one_entry_point():
    project = Path(__file__).parents[2] / "pyproject.toml"
    scripts = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts["mooncake"] == "mooncake._command.entry:main"


@pytest.mark.parametrize(
    ("method", "words", "text"),
    [
        ("put", ["put", "fresh"], "nothing was stored"),
        ("put", ["cp", "source", "fresh"], "nothing was stored"),
        ("put", ["put", "source", "--overwrite"], "source has its old value, or the new one whole"),
        ("delete_many", ["rm", "source"], "at least 0 objects of 1 removed"),
    ],
)
def test_interrupted_command_says_what_was_done(master, method, words, text):
    with Store(master.address, StoreConfig(segment_bytes=64 * MIB)) as lender:
        lender.put("source", b"value", overwrite=True)
        # The command interrupts itself.
        program = f"""
import os, signal, sys
from mooncake import Store
from mooncake._command.main import main
call = Store.{method}
def interrupted(self, *args, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return call(self, *args, **options)
Store.{method} = interrupted
sys.exit(main([*{words!r}, "--master", {master.address!r}]))
"""
        done = subprocess.run(
            [sys.executable, "-c", program],
            input="value",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (130, "")
        assert done.stderr == f"mooncake: interrupted: {text}\n"
        assert lender.exists_many(["source", "fresh"]) == [True, False]


def open_files(pid: int) -> list[str]:
    """Return what the descriptors of a process refer to."""
    names = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(entry.path))
        except FileNotFoundError:
            continue
    return names


def test_timeout_of_a_call_ends_it(master):
    with Store(master.address) as store, frozen(master.process.pid):
        # The first call waits for its answer, the next ones wait for a new connection.
        for _ in range(3):
            begin = time.monotonic()
            with pytest.raises(mooncake.DeadlineError):
                store.get("k", timeout_s=0.2)
            assert time.monotonic() - begin < SOON_S


CALLS: dict[str, Callable[[Any], Any]] = {
    "put": lambda store: store.put("k", b"v", timeout_s=0.05),
    "put_many": lambda store: store.put_many({"k": b"v"}, timeout_s=0.05),
    "put_stream": lambda store: store.put_stream("k", [b"v"], timeout_s=0.05),
    "get": lambda store: store.get("k", timeout_s=0.05),
    "get_many": lambda store: store.get_many(["k"], timeout_s=0.05),
    "get_buffer": lambda store: store.get_buffer("k", timeout_s=0.05),
    "get_buffers": lambda store: store.get_buffers(["k"], timeout_s=0.05),
    "get_into": lambda store: store.get_into("k", bytearray(1), timeout_s=0.05),
    "get_into_many": lambda store: store.get_into_many(["k"], [bytearray(1)], timeout_s=0.05),
    "get_range": lambda store: store.get_range("k", 0, 1, timeout_s=0.05),
    "get_range_into": lambda store: store.get_range_into("k", 0, bytearray(1), timeout_s=0.05),
    "reader": lambda store: store.reader("k", timeout_s=0.05),
    "chunks": lambda store: first_of(store.chunks("k", timeout_s=0.05)),
    "put_array": lambda store: store.put_array("k", ARRAY, timeout_s=0.05),
    "get_array": lambda store: store.get_array("k", timeout_s=0.05),
    "put_tensor": lambda store: store.put_tensor("k", ARRAY, timeout_s=0.05),
    "put_tensors": lambda store: store.put_tensors({"k": ARRAY}, timeout_s=0.05),
    "get_tensor": lambda store: store.get_tensor("k", timeout_s=0.05),
    "get_tensors": lambda store: store.get_tensors(["k"], timeout_s=0.05),
    "delete_tensor": lambda store: store.delete_tensor("k", timeout_s=0.05),
    "info": lambda store: store.info("k", timeout_s=0.05),
    "info_many": lambda store: store.info_many(["k"], timeout_s=0.05),
    "exists": lambda store: store.exists("k", timeout_s=0.05),
    "exists_many": lambda store: store.exists_many(["k"], timeout_s=0.05),
    "size": lambda store: store.size("k", timeout_s=0.05),
    "objects": lambda store: first_of(store.objects(timeout_s=0.05)),
    "keys": lambda store: first_of(store.keys(timeout_s=0.05)),
    "delete": lambda store: store.delete("k", timeout_s=0.05),
    "delete_many": lambda store: store.delete_many(["k"], timeout_s=0.05),
    "expire": lambda store: store.expire("k", 1, timeout_s=0.05),
    "persist": lambda store: store.persist("k", timeout_s=0.05),
    "clear": lambda store: store.clear(timeout_s=0.05),
    "lease": lambda store: store.lease("k", timeout_s=0.05).renew(),
    "copies": lambda store: store.copies("k", timeout_s=0.05),
    "copy": lambda store: store.copy("k", "to:1", timeout_s=0.05),
    "move": lambda store: store.move("k", "from:1", "to:1", timeout_s=0.05),
    "drain": lambda store: store.drain("from:1", timeout_s=0.05),
    "segments": lambda store: store.segments(timeout_s=0.05),
    "stats": lambda store: store.stats(timeout_s=0.05),
    "check": lambda store: store.check(timeout_s=0.05),
}
ARRAY = np.arange(4.0)


def first_of(items: Any) -> Any:
    """Return the first item of an iterator, or what awaits it."""
    return anext(items) if hasattr(items, "__anext__") else next(items)


@pytest.fixture(scope="module")
def stopped_master() -> Iterator[MasterProcess]:
    """A master that answers the stores that ask before `frozen`."""
    master = start_master()
    try:
        yield master
    finally:
        master.stop()


def test_every_call_takes_a_timeout():
    """But for those that make no call, or whose handles have methods with a timeout."""
    without = {"close", "task", "drain_of", "metrics_text", "from_url", "from_env", "of", "open"}
    for kind, own in ((Store, {"file"}), (AsyncStore, {"aclose"})):
        methods = {name for name in dir(kind) if callable(getattr(kind, name))}
        named = {name for name in methods if name[0] != "_"} - without - {"aclose"}
        assert named - own == CALLS.keys()
        for name in named:
            assert "timeout_s" in inspect.signature(getattr(kind, name)).parameters, name


def test_timeout_ends_every_call(stopped_master):
    with Store(stopped_master.address) as store:
        store.check()
        with frozen(stopped_master.process.pid):
            for name, call in CALLS.items():
                begin = time.monotonic()
                with pytest.raises(mooncake.DeadlineError):
                    call(store)
                assert time.monotonic() - begin < SOON_S, name
            with pytest.raises(mooncake.DeadlineError):
                store.file("k", timeout_s=0.05)


def test_timeout_ends_every_awaited_call(stopped_master):
    async def use() -> None:
        async with AsyncStore(stopped_master.address) as store:
            await store.check()
            with frozen(stopped_master.process.pid):
                for name, call in CALLS.items():
                    begin = time.monotonic()
                    with pytest.raises(mooncake.DeadlineError):
                        await call(store)
                    assert time.monotonic() - begin < SOON_S, name

    asyncio.run(use())


def test_timeout_is_that_of_all_steps(store):
    """A method that makes several native calls has one limit for their sum."""
    limits = []

    class Recorder:
        def within(self, timeout_s: float) -> Any:
            limits.append(timeout_s)
            return store._native.within(timeout_s)

    store.put_array("k", ARRAY, layout=Layout(2))
    run(Recorder(), read([Request(b"k", None, None)], Arrays()), 30.0)  # type: ignore[arg-type]
    assert len(limits) > 1
    assert limits == sorted(limits, reverse=True)
    assert len(set(limits)) == len(limits)
    assert limits[0] <= 30


def test_timeout_ends_a_read_from_a_stopped_holder(master, holder):
    with Store(master.address, StoreConfig(is_tcp_forced=True)) as store:
        assert store.get("held") == b"h" * (8 * MIB)
        target = bytearray(8 * MIB)
        with frozen(holder.pid):
            begin = time.monotonic()
            with pytest.raises(mooncake.DeadlineError):
                store.get_into("held", target, timeout_s=0.2)
            assert time.monotonic() - begin < SOON_S
        assert store.get("held", timeout_s=60) == b"h" * (8 * MIB)


def test_timeout_of_an_awaited_call_ends_it(master):
    async def use() -> None:
        async with AsyncStore(master.address) as store:
            with frozen(master.process.pid):
                for _ in range(3):
                    with pytest.raises(mooncake.DeadlineError):
                        await store.put("k", b"v", timeout_s=0.2)
            assert await store.exists("k", timeout_s=60) is False

    asyncio.run(use())


@pytest.mark.parametrize("is_left", [True, False])
def test_lease_is_lost_and_left_without_a_master(master, monkeypatch, is_left):
    """A renewal ends when the lease could have ended; the end of the block does not wait for it."""
    monkeypatch.setattr("mooncake._api.blocking.leases._GRANTED_S", 20.0 if is_left else 0.5)
    begun, losses, told = threading.Event(), [], threading.Event()

    def lose(loss: mooncake.LeaseLostError) -> None:
        losses.append(loss)
        told.set()

    def begin(*arguments: Any) -> Any:
        if is_frozen:
            begun.set()
        return run(*arguments)

    monkeypatch.setattr("mooncake._api.blocking.leases.run", begin)
    is_frozen = False
    with Store(master.address, StoreConfig(segment_bytes=64 * MIB)) as store:
        store.put("k", b"v", overwrite=True)
        lease = store.lease("k", every_s=0.05, on_lost=lose)
        with lease:
            freeze(master.process.pid)
            is_frozen = True
            try:
                assert begun.wait(10)
                if not is_left:
                    assert told.wait(10)
                    assert not lease.is_held
                began = time.monotonic()
                lease.__exit__(None, None, None)
                assert time.monotonic() - began < SOON_S
            finally:
                os.kill(master.process.pid, signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "mooncake-lease":
            thread.join(30)
    assert [type(loss.__cause__) for loss in losses] == [mooncake.DeadlineError][is_left:]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), 1e300])
def test_timeout_is_a_positive_number(store, timeout_s):
    with pytest.raises(mooncake.InvalidArgumentError, match="timeout_s"):
        store.get("k", timeout_s=timeout_s)
