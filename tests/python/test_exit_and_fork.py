"""Programs that exit, fork or are interrupted in every state of a store end cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from conftest import assert_quiet, run_script

OPEN = """
import mooncake, os, sys, threading, time
from mooncake.store import MooncakeDistributedStore
def open_store():
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 1 << 20, "tcp", "", "embedded") == 0
    return store
"""

# Kills a child that hangs, so that the test fails instead of hanging.
WAIT = """
def wait_for(child):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hung"
"""

SCRIPTS = {
    "left_open": """
store = open_store()
assert store.put("k", b"v") == 0
""",
    "left_open_own_api": """
store = mooncake.Store()
store.put("k", b"v")
""",
    "left_open_in_a_cycle": """
store = mooncake.Store()
holder = [store]; holder.append(holder); del store, holder
""",
    "never_set_up": """
store = MooncakeDistributedStore()
assert store.put("k", b"v") == -600
""",
    "closed_twice_then_used": """
store = open_store()
store.close(); store.close()
assert store.get("k") == b""
""",
    "closed_by_an_exit_hook": """
import atexit
store = open_store()
atexit.register(lambda: print(store.put("late", b"v"), store.close()))
""",
    "used_in_del_at_exit": """
class Late:
    def __init__(self): self.store = open_store()
    def __del__(self): self.store.put("late", b"v"); self.store.close()
late = Late()
""",
    "buffers_outlive_everything": """
store = open_store()
store.put("k", b"v" * 1000)
view = memoryview(store.get_buffer("k"))
store.close(); del store
assert bytes(view) == b"v" * 1000
""",
    "daemon_threads_in_put_and_get": """
store = open_store()
value = bytes(1 << 20)
count = [0]
def work(name):
    while True:
        store.upsert(name, value); store.get(name); store.is_exist("nope"); store.get("nope")
        count[0] += 1
for i in range(6):
    threading.Thread(target=work, args=(f"k{i}",), daemon=True).start()
while count[0] < 20:
    time.sleep(0.001)
""",
    "daemon_threads_in_own_api": """
store = mooncake.Store()
count = [0]
def work(name):
    while True:
        try:
            store[name] = b"v" * 100000; store[name]; store.get(name + "nope", None)
        except mooncake.MooncakeError:
            pass
        count[0] += 1
for i in range(6):
    threading.Thread(target=work, args=(f"k{i}",), daemon=True).start()
while count[0] < 20:
    time.sleep(0.001)
""",
    "daemon_thread_in_a_call_that_ends_during_finalization": """
import socket
silent = socket.socket()
silent.bind(("127.0.0.1", 0))
silent.listen()
address = "127.0.0.1:%d" % silent.getsockname()[1]
config = mooncake.StoreConfig(rpc_timeout_s=0.5, connect_timeout_s=0.5)
threading.Thread(target=lambda: mooncake.Store(address, config), daemon=True).start()
class Slow:
    # Flushed after the exit hooks; a thread that then takes the GIL is ended.
    closed = is_over = False
    def flush(self): time.sleep(1.5 * self.is_over)
    def write(self, text): pass
connection = silent.accept()  # the thread is now in the native call for half a second
sys.stdout = Slow()
import atexit
atexit.register(setattr, Slow, "is_over", True)
""",
    "log_thread_at_exit": """
import logging
mooncake.log_to_python()
store = open_store()
store.put("k", b"v")
""",
    "forked_child_uses_parents_store": """
store = open_store()
store.put("k", b"v")
child = os.fork()
if child == 0:
    assert store.put("l", b"w") == -600
    assert store.get("k") == b""
    assert store.is_exist("k") == -600
    assert store.health_check() == 1
    assert isinstance(mooncake.last_error(), mooncake.ClosedError)
    assert store.close() == 0
    sys.exit(0)
assert wait_for(child) == 0
assert store.get("k") == b"v"
assert store.put("l", b"w") == 0
assert store.close() == 0
""",
    "forked_child_calls_setup_again": """
store = open_store()
store.put("k", b"v")
child = os.fork()
if child == 0:
    assert store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 0, "tcp", "", "embedded") == 0
    assert store.put("k", b"child") == 0
    assert store.get("k") == b"child"
    other = open_store()
    assert other.put("k", b"other") == 0
    sys.exit(0)
assert wait_for(child) == 0
assert store.get("k") == b"v"
""",
    "forked_child_joins_parents_pool": """
store = open_store()
store.put("k", b"v" * 100000)
address = mooncake.Store and store._native.master_address
child = os.fork()
if child == 0:
    with mooncake.Store(address) as own:
        assert own.get("k") == b"v" * 100000
        own.put("from-child", b"c")
    sys.exit(0)
assert wait_for(child) == 0
assert store.get("from-child") == b"c"
""",
    "forked_child_drops_the_store": """
store = mooncake.Store()
store.put("k", b"v")
child = os.fork()
if child == 0:
    del store
    sys.exit(0)
assert wait_for(child) == 0
assert store["k"] == b"v"
store.close()
""",
    "forked_while_threads_work": """
store = open_store()
is_done = threading.Event()
def work(name):
    while not is_done.is_set():
        store.upsert(name, b"v" * 100000); store.get(name)
threads = [threading.Thread(target=work, args=(f"k{i}",)) for i in range(4)]
for thread in threads: thread.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        assert store.get("k0") == b""
        os._exit(0 if store.put("k", b"v") == -600 else 1)
    assert wait_for(child) == 0
is_done.set()
for thread in threads: thread.join()
store.close()
""",
    "multiprocessing_fork_with_its_own_store": """
import multiprocessing
def work(address, queue):
    with mooncake.Store(address) as own:
        queue.put(own.get("k"))
with mooncake.Store() as store:
    store.put("k", b"v")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=work, args=(store.master_address, queue))
    process.start()
    assert queue.get(timeout=20) == b"v"
    process.join(20)
    assert process.exitcode == 0
""",
    "multiprocessing_spawn_with_its_own_store": """
import multiprocessing, pathlib, tempfile
# A spawned process imports its function from a file.
folder = tempfile.mkdtemp()
pathlib.Path(folder, "spawned.py").write_text(
    "import mooncake\\n"
    "def work(address, queue):\\n"
    "    with mooncake.Store(address) as own:\\n"
    "        queue.put(own.get('k'))\\n"
)
sys.path.insert(0, folder)
import spawned
with mooncake.Store() as store:
    store.put("k", b"v")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=spawned.work, args=(store.master_address, queue))
    process.start()
    assert queue.get(timeout=40) == b"v"
    process.join(40)
    assert process.exitcode == 0
""",
    "leases_and_sessions_left_open": """
from mooncake.buffer_pool import BufferPool
store = open_store()
pool = BufferPool(store)
lease = pool.acquire(100000)
view = lease.buffer
mounted = store.allocate_and_mount_segment(16 << 20)
assert store.unmount_and_free_segment(mounted["segment_ids"], 60) == 0
""",
    "dropped_in_every_order": """
import gc, itertools, random
from mooncake.buffer_pool import BufferPool
from mooncake.engine import TransferEngine
def make():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 << 20, 1 << 20, "tcp", "", "embedded",
                       engine.get_engine()) == 0
    store.put("k", b"v" * 1000)
    buffer = store.get_buffer("k")
    pool = BufferPool(store)
    lease = pool.acquire(1000)
    return [engine, store, buffer, memoryview(buffer), pool, lease]
orders = list(itertools.permutations(range(6)))
random.Random(7).shuffle(orders)
for order in orders[:6]:
    things = make()
    for at in order:
        things[at] = None
        if at % 3 == 0:
            gc.collect()
cycle = make(); cycle.append(cycle); del cycle
gc.collect()
""",
    "os_exit_with_an_open_store": """
store = open_store()
store.put("k", b"v")
sys.stdout.flush()
os._exit(0)
""",
    "system_exit_in_a_thread": """
store = open_store()
def work():
    store.put("k", b"v")
    raise SystemExit
thread = threading.Thread(target=work); thread.start(); thread.join()
assert store.get("k") == b"v"
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_exits_cleanly(name):
    done = run_script(OPEN + WAIT + SCRIPTS[name])
    assert_quiet(done)


def test_exit_hook_can_use_the_store():
    done = run_script(OPEN + SCRIPTS["closed_by_an_exit_hook"])
    assert done.stdout == "0 0\n"


# An exit hook that is older than the package runs after the stores were closed.
LATE = """
import atexit, threading
closed = threading.Event()
def last():
    closed.set()
    thread.join(20)
    print("ended", not thread.is_alive())
atexit.register(last)
import mooncake
store = mooncake.Store()
def work():
    closed.wait()
    {call}
thread = threading.Thread(target=work, daemon=True)
thread.start()
"""


def test_daemon_thread_ends_silently_after_close():
    done = run_script(LATE.format(call='store.put("k", b"v")'))
    assert_quiet(done)
    assert done.stdout == "ended True\n"
    other = run_script(LATE.format(call="1 / 0"))
    assert (other.returncode, other.stdout) == (0, "ended True\n")
    assert "ZeroDivisionError" in other.stderr, "other errors of the thread are shown"


def test_exit_hook_can_join_a_calling_thread():
    source = """
import atexit, threading
is_over, is_under_way = threading.Event(), threading.Event()
def last():
    is_over.set()
    thread.join()
    print("ended")
atexit.register(last)
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 1 << 20, "tcp", "", "embedded") == 0
def work():
    value = bytes(1 << 20)
    while not is_over.is_set():
        store.upsert("k", value)
        is_under_way.set()
thread = threading.Thread(target=work, daemon=True)
thread.start()
is_under_way.wait()
"""
    done = run_script(source)
    assert_quiet(done)
    assert done.stdout == "ended\n"


# A program that a shell starts in the background ignores SIGINT, and Python then raises nothing.
# The tests must not depend on how they were started.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


def interrupted(source: str) -> tuple[int, str, str]:
    """Run a script, interrupt it when it prints "ready", and wait for its end."""
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + OPEN + source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=40)
        except BaseException:
            process.kill()
            raise
        return process.returncode, out, err


def test_interrupt_raises_keyboard_interrupt():
    source = """
store = open_store()
try:
    print("ready", flush=True)
    while True:
        store.upsert("k", b"v" * 100000); store.get("k")
except KeyboardInterrupt:
    print("interrupted", store.put("l", b"v"), flush=True)
"""
    assert interrupted(source) == (0, "interrupted 0\n", "")


def test_uncaught_interrupt_ends_the_program():
    source = """
store = open_store()
print("ready", flush=True)
while True:
    store.upsert("k", b"v" * 100000); store.get("k")
"""
    code, out, err = interrupted(source)
    assert (code, out) == (-signal.SIGINT, "")
    assert err.endswith("KeyboardInterrupt\n")


def test_interrupt_during_setup_ends_after_the_call():
    source = """
import socket
silent = socket.socket()
silent.bind(("127.0.0.1", 0))
silent.listen()
address = "127.0.0.1:%d" % silent.getsockname()[1]
config = mooncake.StoreConfig(rpc_timeout_s=1, connect_timeout_s=1)
threading.Thread(target=lambda: (silent.accept(), print("ready", flush=True))).start()
try:
    mooncake.Store(address, config)
except mooncake.MooncakeError:
    time.sleep(20)
"""
    code, out, err = interrupted(source)
    assert (code, out) == (-signal.SIGINT, "")
    assert err.endswith("KeyboardInterrupt\n")


def test_sigterm_kills_the_program():
    source = "store = open_store()\nprint('ready', flush=True)\ntime.sleep(60)\n"
    with subprocess.Popen(
        [sys.executable, "-c", OPEN + source], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
