"""The interpreter is free for other threads for the whole of a call, not only while it asks."""

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

# So long the lender is at rest, which is time enough for a call to come to its transfer.
REST_SECONDS = 0.3


@pytest.fixture(scope="module")
def pool() -> Iterator[tuple[MooncakeDistributedStore, list[int]]]:
    """A store that lends nothing, and the processes that each of its calls needs."""
    master = start_master()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", "1")
        lender = lend(master)
        store = MooncakeDistributedStore()
        assert set_up(store, master.address, segment=0) == 0
    assert store.put("there", VALUE) == 0
    yield store, [master.process.pid, lender.pid]
    store.close()
    lender.communicate(timeout=30)
    master.stop()


def lend(master: MasterProcess) -> subprocess.Popen[str]:
    """Starts a process that lends memory, and nothing else."""
    command = [sys.executable, "-c", LENDER, master.address]
    lender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert lender.stdout is not None
    assert lender.stdout.readline() == "ready\n"
    return lender


@contextmanager
def woken_by_a_thread(processes: list[int]) -> Iterator[None]:
    """Stops the processes, and has a thread of Python wake one after the other.

    No thread is made to give the interpreter away, so that this one runs only when the caller lets
    go of it. A call that held on to it would wait for a process that nobody wakes.
    """
    has_begun = threading.Event()

    def wake() -> None:
        has_begun.set()
        for process in processes:
            time.sleep(REST_SECONDS)
            os.kill(process, signal.SIGCONT)

    interval = sys.getswitchinterval()
    waker = threading.Thread(target=wake)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    try:
        sys.setswitchinterval(1000)
        waker.start()
        has_begun.wait()
        yield
        waker.join()
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
    "get": lambda store, _: store.get("there") == VALUE,
    "get_batch": lambda store, _: store.get_batch(["there"]) == [VALUE],
    "get_buffer": lambda store, _: len(store.get_buffer("there")) == SIZE,
    "get_into": lambda store, at: store.get_into("there", at, SIZE) == SIZE,
    "batch_get_into": lambda store, at: store.batch_get_into(["there"], [at], [SIZE]) == [SIZE],
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_release_the_gil_while_they_wait(name, pool):
    store, processes = pool
    memory = bytearray(VALUE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with woken_by_a_thread(processes):
        is_done = CALLS[name](store, address)
    assert is_done, name
    assert memory == VALUE
