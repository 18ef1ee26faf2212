"""Ctrl-C and `timeout_s` end calls that wait for a master or a holder that does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from conftest import MIB, MasterProcess, freeze

import mooncake
from mooncake import AsyncStore, Store, StoreConfig

# Far below the limits of the client (30 s), and above what a busy machine needs.
SOON_S = 5.0
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
    """Stops a process for a block."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Sends SIGINT to this process while the block waits; expects that the block ends soon."""
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


def open_files(pid: int) -> list[str]:
    """Returns what the descriptors of a process refer to."""
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


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), 1e300])
def test_timeout_is_a_positive_number(store, timeout_s):
    with pytest.raises(mooncake.InvalidArgumentError, match="timeout_s"):
        store.get("k", timeout_s=timeout_s)
