"""A call releases the GIL while it waits for the master and while it waits for bytes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from conftest import MIB, MasterProcess, set_up, start_master

from mooncake.store import MooncakeDistributedStore

LENDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
store.close()
"""

SIZE = 4 * MIB
VALUE = os.urandom(SIZE)

# How long a process stays stopped: long enough for a call to reach its transfer.
STOPPED_SECONDS = 0.3


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[MooncakeDistributedStore, list[int]]]:
    """A store without a segment, and the processes that each of its calls needs."""
    master = start_master()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", "1")
        lender = start_lender(master)
        store = MooncakeDistributedStore()
        assert set_up(store, master.address, segment=0) == 0
    assert store.put("stored", VALUE) == 0
    yield store, [master.process.pid, lender.pid]
    store.close()
    lender.communicate(timeout=30)
    master.stop()


def start_lender(master: MasterProcess) -> subprocess.Popen[str]:
    """Start a process that only provides a segment."""
    command = [sys.executable, "-c", LENDER, master.address]
    lender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert lender.stdout is not None
    assert lender.stdout.readline() == "ready\n"
    return lender


@contextmanager
def continued_by_a_thread(processes: list[int]) -> Iterator[None]:
    """Stop the processes, and let a Python thread continue one after the other.

    The switch interval is so long that the thread runs only when the caller releases the GIL. A
    call that kept the GIL would wait forever for a stopped process.
    """
    has_started = threading.Event()

    def continue_processes() -> None:
        has_started.set()
        for process in processes:
            time.sleep(STOPPED_SECONDS)
            os.kill(process, signal.SIGCONT)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=continue_processes)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        sys.setswitchinterval(1000)
        thread.start()
        has_started.wait()
        yield
        thread.join()
    finally:
        sys.setswitchinterval(interval)
        for process in processes:
            os.kill(process, signal.SIGCONT)


Call = Callable[[MooncakeDistributedStore, int], bool]

CALLS: dict[str, Call] = {
    "put": lambda store, _: store.put("put", VALUE) == 0,
    "put_parts": lambda store, _: store.put_parts("put_parts", VALUE[:9], VALUE[9:]) == 0,
    "put_batch": lambda store, _: store.put_batch(["put_batch"], [VALUE]) == 0,
    "put_from": lambda store, at: store.put_from("put_from", at, SIZE) == 0,
    "batch_put_from": lambda store, at: store.batch_put_from(["b"], [at], [SIZE]) == [0],
    "upsert": lambda store, _: store.upsert("upsert", VALUE) == 0,
    "get": lambda store, _: store.get("stored") == VALUE,
    "get_batch": lambda store, _: store.get_batch(["stored"]) == [VALUE],
    "get_buffer": lambda store, _: len(store.get_buffer("stored")) == SIZE,
    "get_into": lambda store, at: store.get_into("stored", at, SIZE) == SIZE,
    "batch_get_into": lambda store, at: store.batch_get_into(["stored"], [at], [SIZE]) == [SIZE],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_release_the_gil_while_they_wait(name, pool):
    store, processes = pool
    memory = bytearray(VALUE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with continued_by_a_thread(processes):
        is_done = CALLS[name](store, address)
    assert is_done, name
    assert memory == VALUE
