"""Dummy clients: `setup_dummy` with a real daemon (`mooncake_client`)."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from conftest import MIB, PROMPT_S, MasterProcess, assert_quiet, run_script, set_up, start_master

import mooncake
from mooncake.store import BufferPool, MooncakeDistributedStore, ReadTarget, ReplicateConfig

READY = re.compile(r"mooncake_client ready rpc=(\S+)(?: http=(\S+))? name=(\S+)")
WAIT_S = 30.0


@dataclass
class DaemonProcess:
    """A daemon in its own process."""

    process: subprocess.Popen[str]
    address: str
    http: str
    name: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(WAIT_S)


def start_daemon(master: str, *flags: str, port: int = 0) -> DaemonProcess:
    """Start a daemon and wait for its ready line."""
    command = [
        sys.executable,
        "-m",
        "mooncake.cli_client",
        "--host=127.0.0.1",
        f"--port={port}",
        "--global_segment_size=64MB",
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if ready := READY.search(line):
            process.stdout.close()
            return DaemonProcess(process, ready[1], ready[2] or "", ready[3])
    process.stdout.close()
    raise AssertionError(f"the daemon did not start: exit code {process.wait(WAIT_S)}")


@pytest.fixture
def daemon(master: MasterProcess) -> Iterator[DaemonProcess]:
    """A daemon that the test may kill."""
    daemon = start_daemon(master.address)
    yield daemon
    if daemon.process.poll() is None:
        daemon.stop()


@pytest.fixture
def dummy(daemon: DaemonProcess) -> Iterator[MooncakeDistributedStore]:
    """A dummy client of the daemon with a memory pool of 16 MiB."""
    store = MooncakeDistributedStore()
    assert store.setup_dummy(16 * MIB, MIB, daemon.address) == 0
    yield store
    assert store.close() == 0


@pytest.fixture
def member(master: MasterProcess) -> Iterator[MooncakeDistributedStore]:
    """A store without a daemon and without a segment."""
    store = MooncakeDistributedStore()
    assert set_up(store, master.address, segment=0) == 0
    yield store
    store.close()


def wait_for(event: str, has_happened: Callable[[], bool]) -> None:
    """Poll until the event has happened."""
    deadline = time.monotonic() + WAIT_S
    while not has_happened():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for: {event}"
        time.sleep(0.01)


def clients_of(store: MooncakeDistributedStore) -> int:
    assert store._native is not None
    return store._native.status()["clients"]


def test_dummy_client_puts_and_others_read(dummy, member):
    value = bytes(range(256)) * 4096
    assert dummy.put("dummy/a", value) == 0
    assert dummy.get("dummy/a") == value
    assert member.get("dummy/a") == value
    assert member.upsert("dummy/a", b"new") == 0
    assert dummy.get("dummy/a") == b"new"
    assert (dummy.is_exist("dummy/a"), dummy.get_size("dummy/a")) == (1, 3)
    assert dummy.remove("dummy/a", force=True) == 0
    assert dummy.is_exist("dummy/a") == 0
    assert (dummy.health_check(), dummy.get_hostname()) == (0, "")


def test_pool_memory_is_used_in_place(dummy, member):
    address = dummy.alloc_from_mem_pool(2 * MIB)
    assert address % 4096 == 0
    other = dummy.alloc_from_mem_pool(MIB)
    assert abs(other - address) >= MIB
    assert dummy.register_buffer(address, 2 * MIB) == 0
    assert dummy.register_buffer(address + MIB, MIB) == -600, "the ranges overlap"
    payload = os.urandom(MIB)
    ctypes.memmove(address, payload, MIB)
    assert dummy.put_from("dummy/pool", address, MIB) == 0
    assert member.get("dummy/pool") == payload
    assert dummy.get_into("dummy/pool", address + MIB, MIB) == MIB
    assert ctypes.string_at(address + MIB, MIB) == payload
    assert dummy.unregister_buffer(address) == 0
    assert dummy.unregister_buffer(address) == -600
    assert dummy.alloc_from_mem_pool(64 * MIB) == 0
    assert dummy.alloc_from_mem_pool(0) == 0
    assert dummy.alloc_from_mem_pool(13 * MIB) != 0, "the rest of the pool"
    assert dummy.alloc_from_mem_pool(1) == 0
    assert dummy.put_from("dummy/null", 0, 10) < 0


def test_ranges_stay_within_their_registered_buffer(dummy):
    pool = dummy.alloc_from_mem_pool(4 * MIB)
    buffer, after = pool + MIB, pool + 2 * MIB
    ctypes.memset(pool, 0, 4 * MIB)
    assert dummy.register_buffer(buffer, MIB) == 0
    assert dummy.put("dummy/ranges", b"x" * 1000) == 0

    def read(base, offset, length=1000):
        rows = [[[offset, 0]]], [[[0, 0]]], [[[length, 1]]]
        return dummy.get_into_ranges([base], [["dummy/ranges"]], *rows)[0][0]

    assert read(buffer, MIB - 1000) == [1000, 1]
    assert read(buffer, MIB - 999) == [-600, 1], "one byte past the end"
    assert read(buffer + 100, MIB - 1000) == [-600, 1]
    assert read(buffer, 2 * MIB) == [-600, 1], "beyond the buffer, within the pool"
    assert read(buffer, 2**64 - 1000) == [-600, 1], "before the buffer"
    assert ctypes.string_at(after, MIB) == bytes(MIB)
    assert ctypes.string_at(pool, MIB) == bytes(MIB)
    assert read(after, 0) == [1000, 1], "pool memory needs no registration"
    assert dummy.unregister_buffer(buffer) == 0
    assert read(buffer, MIB - 999) == [1000, 1]


def test_heap_memory_can_be_registered(dummy, member):
    buffer = ctypes.create_string_buffer(b"from the heap" * 1000)
    at, size = ctypes.addressof(buffer), len(buffer)
    assert dummy.register_buffer(at, size) == 0
    assert dummy.put_from("dummy/heap", at, size) == 0
    assert member.get("dummy/heap") == buffer.raw
    assert dummy.unregister_buffer(at) == 0


def test_batches_parts_and_scattered_buffers_work(dummy, member):
    keys = [f"dummy/batch/{i}" for i in range(2000)]
    values = [f"value {i}".encode() for i in range(2000)]
    assert dummy.put_batch(keys, values) == 0
    assert member.get_batch(keys) == values
    assert dummy.get_batch(keys) == values
    assert dummy.batch_is_exist(keys) == [1] * 2000
    base = dummy.alloc_from_mem_pool(MIB)
    assert dummy.put_parts("dummy/parts", b"one", b"", b"two") == 0
    assert dummy.batch_get_into_multi_buffers(["dummy/parts"], [[base, base + 100]], [[3, 3]]) == [
        6
    ]
    assert ctypes.string_at(base + 100, 3) == b"two"
    lists = ([[base, base + 100]], [[3, 3]])
    assert dummy.batch_put_from_multi_buffers(["dummy/multi"], *lists) == [0]
    assert member.get("dummy/multi") == b"onetwo"
    with_two = ReplicateConfig()
    with_two.with_hard_pin = True
    assert dummy.upsert_from("dummy/multi", base, 3, with_two) == 0
    handle = dummy.get_buffer("dummy/multi")
    assert handle is not None
    assert bytes(memoryview(handle)) == b"one"
    assert dummy.batch_get_buffer(["dummy/none"]) == [None]
    assert dummy.remove_by_regex("^dummy/batch/", force=True) == 2000


def test_sessions_descriptors_and_pools_work(dummy, daemon):
    assert dummy.put("dummy/s", b"0123456789") == 0
    base = dummy.alloc_from_mem_pool(4096)
    assert dummy.batch_get_session_start(["dummy/s"]) == [0]
    read = dummy.batch_get_into_multi_buffer_ranges(["dummy/s"], [[base]], [[4]], [[3]])
    assert read == [4]
    assert ctypes.string_at(base, 4) == b"3456"
    dummy.batch_get_session_end(["dummy/s"])
    (replica,) = dummy.get_replica_desc("dummy/s")
    place = replica.get_memory_descriptor().buffer_descriptor
    assert place.transport_endpoint == daemon.name, "the replica is in the daemon's memory"
    with BufferPool(dummy).buffer(4096) as lease:
        assert dummy.get_into("dummy/s", lease.ptr, 4096) == 10


def test_dummy_client_cannot_mount_or_init_twice(dummy):
    assert dummy.allocate_and_mount_segment(16 * MIB)["ret"] == -1
    assert dummy.mount_segment("/dev/shm/nothing", MIB)["ret"] == -1
    assert dummy.unmount_segment(["1-2"]) == -1
    assert dummy.unmount_local_disk_segment() == -1
    assert dummy.init_all("tcp", "") == -1
    assert dummy.put("dummy/still", b"there") == 0


def test_objects_outlive_their_dummy_client(daemon, member):
    script = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup_dummy(1 << 20, 0, sys.argv[1]) == 0
assert store.put("dummy/left", b"behind") == 0
"""
    assert_quiet(run_script(script, daemon.address))
    assert member.get("dummy/left") == b"behind"


KILLED_CLIENT = """
import os, sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup_dummy(1 << 20, 0, sys.argv[1]) == 0
assert store.batch_put_session_start(["dummy/dies"], [1 << 20]) == [0]
child = os.fork() if sys.argv[2] == "fork" else -1
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_killed_dummy_client_is_released_at_once(kind):
    """Also while a forked child keeps the sockets of the killed client open."""
    no_fork_warning = "ignore:This process:DeprecationWarning"
    # The master must not learn of the death by a missing heartbeat.
    master = start_master("--client_ttl=600")
    daemon = start_daemon(master.address)
    member = MooncakeDistributedStore()
    assert set_up(member, master.address, segment=0) == 0
    before = clients_of(member)
    command = [sys.executable, "-W", no_fork_warning, "-c", KILLED_CLIENT, daemon.address, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        child = int(dying.stdout.readline())
        try:
            assert clients_of(member) == before + 1
            dying.kill()
            wait_for("the master forgets the client", lambda: clients_of(member) == before)
            assert member.put("dummy/dies", b"mine") == 0
            assert member.get("dummy/dies") == b"mine"
        finally:
            if child > 0:
                os.kill(child, signal.SIGKILL)
            member.close()
            daemon.stop()
            master.stop()


def test_calls_resume_after_daemon_restart(master, daemon, dummy):
    address = dummy.alloc_from_mem_pool(MIB)
    assert dummy.register_buffer(address, MIB) == 0
    ctypes.memset(address, 5, MIB)
    assert dummy.put_from("dummy/first", address, MIB) == 0
    daemon.kill()
    began = time.monotonic()
    assert dummy.put("dummy/away", b"x") == -900
    assert dummy.is_exist("dummy/first") == -900
    assert dummy.batch_put_from(["dummy/away"], [address], [MIB]) == [-900]
    assert dummy.get("dummy/first") == b""
    assert dummy.health_check() == 2
    assert time.monotonic() - began < WAIT_S
    again = start_daemon(master.address, port=daemon.port)
    try:
        wait_for("calls succeed", lambda: dummy.put_from("dummy/again", address, MIB) == 0)
        ctypes.memset(address, 0, MIB)
        assert dummy.get_into("dummy/again", address, MIB) == MIB
        assert ctypes.string_at(address, MIB) == b"\5" * MIB
        assert dummy.health_check() == 0
    finally:
        again.stop()


def test_close_is_quick_without_a_daemon(daemon):
    store = MooncakeDistributedStore()
    assert store.setup_dummy(MIB, 0, daemon.address) == 0
    daemon.kill()
    began = time.monotonic()
    assert store.close() == 0
    assert time.monotonic() - began < PROMPT_S


def test_forked_child_cannot_use_parents_store(daemon):
    script = """
import os, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup_dummy(1 << 20, 0, sys.argv[1]) == 0
assert store.put("dummy/fork", b"v") == 0
child = os.fork()
if child == 0:
    bad = store.put("dummy/child", b"v")
    own = MooncakeDistributedStore()
    ready = own.setup_dummy(1 << 20, 0, sys.argv[1])
    got = own.get("dummy/fork")
    own.close()
    os._exit(0 if (bad, ready, got) == (-600, 0, b"v") else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert store.get("dummy/fork") == b"v"
assert store.close() == 0
"""
    assert_quiet(run_script(script, daemon.address))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the client runs as another user")
def test_unix_only_daemon_serves_its_own_user_alone(master):
    daemon = start_daemon(master.address, "--unix_only")
    script = """
import os, sys
from mooncake.store import MooncakeDistributedStore
user = int(sys.argv[2])
# Modules that are imported later may lie where only root reads them.
own = MooncakeDistributedStore()
assert own.setup_dummy(1 << 20, 0, sys.argv[1]) == 0
assert own.put("dummy/own", b"v") == 0 and own.close() == 0
os.setgid(user)
os.setuid(user)
other = MooncakeDistributedStore()
print(other.setup_dummy(1 << 20, 0, sys.argv[1]), other.put("dummy/other", b"v"))
"""
    try:
        done = run_script(script, daemon.address, "65534")
        assert done.returncode == 0, done.stdout + done.stderr
        assert all(int(code) != 0 for code in done.stdout.split()), done.stdout + done.stderr
        assert "--unix_only" in done.stderr
    finally:
        daemon.stop()


def test_two_daemons_serve_their_own_clients(master, daemon, dummy):
    with_other = start_daemon(master.address)
    other = MooncakeDistributedStore()
    try:
        assert with_other.port != daemon.port
        assert other.setup_dummy(MIB, 0, with_other.address) == 0
        assert other.put("dummy/other", b"o") == 0
        assert dummy.get("dummy/other") == b"o"
        with_other.kill()
        assert other.put("dummy/other2", b"o") == -900
        assert dummy.put("dummy/mine", b"m") == 0
    finally:
        other.close()
        if with_other.process.poll() is None:
            with_other.stop()


def test_setup_waits_for_a_starting_daemon(master):
    first = start_daemon(master.address)
    port = first.port
    assert first.stop() == 0
    script = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
print("begun", flush=True)
assert store.setup_dummy(1 << 20, 0, sys.argv[1]) == 0
assert store.put("dummy/early", b"v") == 0
assert store.close() == 0
"""
    env = {**os.environ, "MC_RPC_CONNECT_TIMEOUT_MS": "30000"}
    command = [sys.executable, "-c", script, f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as early:
        assert early.stdout is not None
        assert early.stdout.readline() == "begun\n"
        daemon = start_daemon(master.address, port=port)
        try:
            assert early.wait(WAIT_S) == 0
        finally:
            daemon.stop()


def test_setup_rejects_addresses_without_a_daemon(master, monkeypatch):
    monkeypatch.setenv("MC_RPC_CONNECT_TIMEOUT_MS", "300")
    store = MooncakeDistributedStore()
    assert store.setup_dummy(MIB, 0, "127.0.0.1:1") == -1
    assert store.setup_dummy(MIB, 0, master.address) == -1
    assert store.setup_dummy(MIB, 0, "no address: at all") == -1
    assert store.put("k", b"v") == -600
    assert store.alloc_from_mem_pool(8) == 0
    for wrong in ((-1, 0, "h"), (0, "1", "h"), (0, 0, 5)):
        with pytest.raises(TypeError):
            store.setup_dummy(*wrong)


def test_daemon_reports_an_unreachable_master(mortal_master):
    daemon = start_daemon(mortal_master.address)
    store = MooncakeDistributedStore()
    try:
        assert store.setup_dummy(MIB, 0, daemon.address) == 0
        mortal_master.kill()
        assert store.put("k", b"v") == -900
        assert store.health_check() == 2
    finally:
        store.close()
        daemon.stop()


def test_dummy_clients_share_their_daemons_tenant(tmp_path):
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n  - name: a\n    quota: 1GB\n")
    flags = ("--enable_multi_tenants", f"--tenant_quota_connector_uri=file://{quotas}")
    master = start_master(*flags)
    daemons = [start_daemon(master.address, f"--tenant_id={name}") for name in "ab"]
    inside, outside = MooncakeDistributedStore(), MooncakeDistributedStore()
    try:
        assert inside.setup_dummy(MIB, 0, daemons[0].address) == 0
        assert outside.setup_dummy(MIB, 0, daemons[1].address) == 0
        assert inside.put("k", b"v") == 0
        assert inside.get("k") == b"v"
        assert outside.is_exist("k") == 0
        assert outside.put("k", b"v") < 0, "tenant b has no quota"
    finally:
        assert (inside.close(), outside.close()) == (0, 0)
        assert [daemon.stop() for daemon in daemons] == [0, 0]
        master.stop()


def test_daemon_works_with_http_metadata(master):
    server = f"--metadata_server=http://{master.metadata}/metadata"
    daemon = start_daemon(master.address, server)
    clients = [MooncakeDistributedStore(), MooncakeDistributedStore()]
    try:
        for dummy in clients:
            assert dummy.setup_dummy(MIB, 0, daemon.address) == 0
        assert clients[0].put("dummy/http", b"v" * 1000) == 0
        assert clients[1].get("dummy/http") == b"v" * 1000
    finally:
        for dummy in clients:
            assert dummy.close() == 0
        assert daemon.stop() == 0


CHECKER = """
import ctypes, os, random, sys, time
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
assert store.setup_dummy(4 << 20, 0, sys.argv[1]) == 0
at = store.alloc_from_mem_pool(1 << 20)
chance = random.Random(int(sys.argv[2]))
print("begun", flush=True)
done, is_over = 0, False
end = time.monotonic() + 45
while time.monotonic() < end and not (is_over and done > 0):
    if not is_over and os.path.exists(sys.argv[3]):
        is_over, done = True, 0
    key = f"dummy/checked/{chance.randrange(20)}"
    if chance.random() < 0.4:
        unit = f"{key}|{chance.randrange(1 << 32):08x}|".encode()
        value = unit * chance.randrange(1, 10_000)
        ctypes.memmove(at, value, len(value))
        done += store.upsert_from(key, at, len(value)) == 0
    elif (size := store.get_into(key, at, 1 << 20)) > 0:
        value = ctypes.string_at(at, size)
        unit = value[: value.index(b"|", len(key) + 1) + 1]
        assert unit.startswith(key.encode()), (key, unit)
        assert value == unit * (size // len(unit)), key
        done += 1
assert is_over and done > 0, "no call succeeded after the last restart"
"""


def test_reads_stay_intact_while_processes_are_killed(master, tmp_path):
    """Every value repeats its key, so that wrong bytes show."""
    daemon = start_daemon(master.address)
    stop_file = tmp_path / "stop"

    def begin(number: int) -> subprocess.Popen[str]:
        arguments = [daemon.address, str(number), str(stop_file)]
        environment = {**os.environ, "MC_LOG_LEVEL": "FATAL"}
        command = [sys.executable, "-c", CHECKER, *arguments]
        dummy = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert dummy.stdout is not None
        assert dummy.stdout.readline() == "begun\n"
        return dummy

    clients = [begin(number) for number in range(3)]
    try:
        for number in range(3):
            daemon.kill()
            daemon = start_daemon(master.address, port=daemon.port)
            killed = clients[number]
            killed.kill()
            killed.communicate()
            clients[number] = begin(number)
        stop_file.touch()
        for dummy in clients:
            errors = dummy.communicate(timeout=WAIT_S)[1]
            assert dummy.returncode == 0, errors[-2000:]
    finally:
        for dummy in clients:
            if dummy.poll() is None:
                dummy.kill()
                dummy.communicate()
        daemon.stop()


@pytest.mark.parametrize(("forced", "transport"), [("0", "shm"), ("1", "tcp")])
def test_dummy_client_transfers_bypass_the_daemon(daemon, forced, transport):
    """Over shared memory on one host, and over TCP to another host."""
    script = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup_dummy(4 << 20, 0, sys.argv[1]) == 0
at = store.alloc_from_mem_pool(1 << 20)
assert store.put("dummy/path" + sys.argv[2], b"0123456789" * 100_000) == 0
assert store.get_into("dummy/path" + sys.argv[2], at, 1 << 20) == 1_000_000
count = store._native.metrics()["by_transport"]
print(*sorted(name for name in count if count[name]["bytes"]))
store.close()
"""
    done = run_script(script, daemon.address, forced, env={"MC_FORCE_TCP": forced})
    assert_quiet(done)
    assert done.stdout.split() == [transport]


def test_daemon_serves_health_and_metrics(master):
    daemon = start_daemon(master.address, "--enable_http_server", "--http_port=0")
    try:
        port = daemon.http.rpartition(":")[2]
        dummy = MooncakeDistributedStore()
        assert dummy.setup_dummy(MIB, 0, daemon.address) == 0
        assert dummy.put("seen", b"v") == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
            metrics = answer.read().decode()
        assert "\nmooncake_daemon_guests 1\n" in metrics
        calls = re.search(r"^mooncake_daemon_calls_total (\d+)$", metrics, re.MULTILINE)
        assert calls is not None
        assert int(calls[1]) >= 2, "the client registered, and put"
        assert dummy.close() == 0
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=WAIT_S) as answer:
            assert json.load(answer)["code"] == 0
    finally:
        assert daemon.stop() == 0


def test_store_can_join_through_a_daemon(master, daemon, member):
    with mooncake.Store(daemon=daemon.address) as store:
        assert store.put("own/a", b"value")
        assert member.get("own/a") == b"value"
        names = {segment.name for segment in store.segments()}
        assert daemon.name in names
        assert store.copies("own/a")[0].segment in names
        assert repr(store) == f"<mooncake.Store {store.name} daemon={store.master_address} dummy>"
        assert store.master_address.endswith(f":{daemon.port}")
        async_store = mooncake.AsyncStore.of(store)
        assert asyncio.run(async_store.get("own/a")) == b"value"
    assert member.get("own/a") == b"value", "the daemon holds the object"


def test_async_store_can_join_through_a_daemon(daemon, member):
    async def work() -> bytes:
        async with mooncake.AsyncStore(daemon=daemon.address) as store:
            assert f"daemon={daemon.address}" in repr(store)
            await store.put("own/async", b"value")
            return await store.get("own/async")

    assert asyncio.run(work()) == b"value"
    assert member.get("own/async") == b"value"


def test_daemon_settings_are_rejected_for_clients(daemon):
    for name, value in {
        "segment_bytes": 16 * MIB,
        "name": "a:1",
        "metadata": "http://127.0.0.1:1/metadata",
        "tenant": "t",
        "listen": "127.0.0.1",
    }.items():
        config = mooncake.StoreConfig(**{name: value})
        with pytest.raises(mooncake.InvalidArgumentError, match=name):
            mooncake.Store(config=config, daemon=daemon.address)
    with pytest.raises(mooncake.InvalidArgumentError, match="master"):
        mooncake.Store("127.0.0.1:50051", daemon=daemon.address)
    config = mooncake.StoreConfig(has_checksums=True, rpc_timeout_s=20, http_port=0)
    with mooncake.Store(config=config, daemon=daemon.address) as store:
        assert store.put("own/checked", b"value")
        assert store.http_address is not None
    quick = mooncake.StoreConfig(connect_timeout_s=0.1)
    with pytest.raises(mooncake.UnavailableError, match="mooncake_client"):
        mooncake.Store(config=quick, daemon="127.0.0.1:1")


def test_tensor_is_read_in_another_layout(dummy: MooncakeDistributedStore) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    tensor = torch.arange(48, dtype=torch.float32).reshape(8, 6)
    assert dummy.put_tensor_with_tp("tensor", tensor, tp_size=4) == 0
    target = ReadTarget()
    target.mode = "full"
    found = dummy.get_tensor_with_parallelism("tensor", target)
    assert found is not None
    assert torch.equal(found, tensor)
    memory = dummy.alloc_from_mem_pool(4096)
    assert dummy.register_buffer(memory, 4096) == 0
    found = dummy.get_tensor_with_parallelism_into("tensor", memory, 4096, target)
    assert found is not None
    assert torch.equal(found, tensor)
    assert found.data_ptr() == memory + 304
    assert dummy.get_tensor_with_parallelism_into("tensor", memory, 400, target) is None
