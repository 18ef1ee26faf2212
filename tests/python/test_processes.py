"""Stores in several processes, with masters that run, die or never answer."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from conftest import MIB, PROMPT_S, MasterProcess, assert_quiet, run_script, set_up, start_master

import mooncake
from mooncake.store import MooncakeDistributedStore

READ = """
import sys
import mooncake
with mooncake.Store(sys.argv[1]) as store:
    assert store.get("k") == bytes(range(256)) * 4096
    assert store.put("answer", b"seen")
    count = store.stats()["store"]["by_transport"]
    print(*sorted(name for name in count if count[name]["bytes"]))
"""


@pytest.mark.parametrize(("forced", "transport"), [("0", "shm"), ("1", "tcp")])
def test_second_process_joins_an_embedded_pool(monkeypatch, forced, transport):
    monkeypatch.setenv("MC_FORCE_TCP", forced)
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        store.put("k", bytes(range(256)) * 4096)
        done = run_script(READ, store.master_address)
        assert_quiet(done)
        assert done.stdout.split() == [transport]
        assert store.get("answer") == b"seen"


@pytest.mark.parametrize("metadata", ["P2PHANDSHAKE", "http"])
def test_two_stores_share_a_pool(master: MasterProcess, metadata):
    server = f"http://{master.metadata}/metadata" if metadata == "http" else metadata
    lender, reader = MooncakeDistributedStore(), MooncakeDistributedStore()
    try:
        assert set_up(lender, master.address, metadata=server) == 0
        assert set_up(reader, master.address, metadata=server, segment=0) == 0
        assert reader.put("shared", b"v" * 100_000) == 0
        assert lender.get("shared") == b"v" * 100_000
        assert reader.get("shared") == b"v" * 100_000
        assert lender.remove("shared", force=True) == 0
    finally:
        assert (reader.close(), lender.close()) == (0, 0)


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback device: enable it")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_works(host, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    master = start_master("--rpc_address=::1")
    try:
        assert master.address.startswith("[::1]:")
        lender, reader = MooncakeDistributedStore(), MooncakeDistributedStore()
        assert set_up(lender, master.address, host=host) == 0
        assert set_up(reader, f"::1:{master.port}", host=host) < 0, "a port needs brackets"
        assert set_up(reader, master.address, host=host, segment=0) == 0
        assert reader.put("six", b"v" * 100_000) == 0
        assert reader.get("six") == b"v" * 100_000
        reader.close()
        lender.close()
    finally:
        assert master.stop() == 0


def test_master_exits_with_zero_on_signals():
    for signal_name in ("terminate", "interrupt"):
        master = start_master()
        if signal_name == "terminate":
            assert master.stop() == 0
        else:
            import signal

            master.process.send_signal(signal.SIGINT)
            assert master.process.wait(10) == 0
            master.stop()


def test_unreachable_master_raises_within_the_timeout():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    begin = time.monotonic()
    with pytest.raises(mooncake.UnavailableError, match=address) as caught:
        mooncake.Store(address)
    assert time.monotonic() - begin < PROMPT_S
    assert isinstance(caught.value, ConnectionError)


def test_silent_master_times_out():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(mooncake.MooncakeError, match=address):
            mooncake.Store(address, mooncake.StoreConfig(rpc_timeout_s=2, connect_timeout_s=2))
        assert time.monotonic() - begin < PROMPT_S


def test_dead_master_fails_calls_and_close_is_quick(
    mortal_master: MasterProcess,
):
    store = MooncakeDistributedStore()
    assert set_up(store, mortal_master.address) == 0
    assert store.put("k", b"v") == 0
    mortal_master.kill()
    begin = time.monotonic()
    assert store.put("l", b"v") == -900
    assert store.get("k") == b""
    assert store.get_batch(["k", "l"]) == [b"", b""]
    assert store.is_exist("k") == -900
    assert store.batch_is_exist(["k", "l"]) == [-900, -900]
    assert store.get_size("k") == -900
    assert store.remove("k") == -900
    assert store.remove_all() == -900
    assert store.get_buffer("k") is None
    assert store.health_check() == 2
    error = mooncake.last_error()
    assert isinstance(error, mooncake.UnavailableError)
    assert mortal_master.address in str(error)
    assert time.monotonic() - begin < PROMPT_S
    begin = time.monotonic()
    assert store.close() == 0
    assert time.monotonic() - begin < PROMPT_S
    assert store.health_check() == 1


def test_calls_wait_for_a_master_that_restarts(tmp_path):
    state_dir = f"--state_dir={tmp_path}"
    master = start_master(state_dir)
    config = mooncake.StoreConfig(segment_bytes=16 * MIB, retry_s=60.0)
    with mooncake.Store(master.address, config) as store:
        store.put("k", b"v")
        master.kill()
        # Once this one has failed, the connection is known to be lost.
        with pytest.raises(mooncake.DeadlineError):
            store.get("k", timeout_s=0.1)
        got: list[object] = []
        calls = [
            lambda: store.get("k"),
            lambda: store.exists("k"),
            lambda: store.put("other", b"o", overwrite=True),
        ]
        threads = [threading.Thread(target=lambda call=call: got.append(call())) for call in calls]
        for thread in threads:
            thread.start()
        assert all(thread.is_alive() for thread in threads)
        again = start_master(state_dir, f"--rpc_port={master.port}")
        try:
            for thread in threads:
                thread.join(60)
            assert len(got) == len(calls), got
            assert store.get("other") == b"o"
        finally:
            again.stop()


@pytest.mark.parametrize("keeps_log", [True, False])
def test_no_call_fails_while_the_master_restarts(tmp_path, keeps_log):
    """Masters that are killed, and those that stop in order and still answer meanwhile."""

    def flags(number: int) -> str:
        return f"--state_dir={tmp_path / (str(0) if keeps_log else str(number))}"

    master = start_master(flags(0))
    lender = mooncake.StoreConfig(segment_bytes=16 * MIB)
    caller = mooncake.StoreConfig(retry_s=60.0)
    wrong: list[object] = []
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            if store.get("kept", default=None) != b"v" and keeps_log:
                wrong.append("a live object was missed")

    def write() -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            store.put(f"new/{number % 100}", b"n", overwrite=True)

    def watched(call: Callable[[], None]) -> None:
        try:
            call()
        except mooncake.MooncakeError as error:
            wrong.append(error)

    with (
        mooncake.Store(master.address, lender) as holder,
        mooncake.Store(master.address, caller) as store,
    ):
        holder.put("kept", b"v")
        threads = [threading.Thread(target=watched, args=(call,)) for call in (read, write)]
        for thread in threads:
            thread.start()
        try:
            for number in range(1, 5):
                (master.kill if number % 2 else master.stop)()
                master = start_master(flags(number), f"--rpc_port={master.port}")
                # Its client has come back once this is written.
                holder.put(f"round/{number}", b"r")
        finally:
            is_over.set()
            for thread in threads:
                thread.join(90)
            master.stop()
    assert not wrong, wrong[:3]


def test_calls_give_up_a_master_after_retry_s(mortal_master: MasterProcess):
    with (
        mooncake.Store(mortal_master.address, mooncake.StoreConfig(retry_s=0.5)) as patient,
        mooncake.Store(mortal_master.address, mooncake.StoreConfig(retry_s=0.0)) as prompt,
    ):
        mortal_master.kill()
        for store, least, most in ((patient, 0.3, PROMPT_S), (prompt, 0.0, 0.3)):
            for call in (store.get, store.exists, lambda key, store=store: store.put(key, b"v")):
                begin = time.monotonic()
                with pytest.raises(mooncake.UnavailableError):
                    call("k")
                assert least <= time.monotonic() - begin < most


def test_dead_master_is_logged_once(mortal_master: MasterProcess, caplog):
    store = MooncakeDistributedStore()
    assert set_up(store, mortal_master.address) == 0
    mortal_master.kill()
    for _ in range(3):
        assert store.is_exist("k") == -900
    (record,) = caplog.records
    assert mortal_master.address in record.message
    store.close()


def test_objects_vanish_with_their_segment(master: MasterProcess):
    lender, reader = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert set_up(lender, master.address) == 0
    assert set_up(reader, master.address, segment=0) == 0
    assert reader.put("lost", b"v") == 0
    assert lender.close() == 0
    assert reader.get("lost") == b""
    assert reader.is_exist("lost") == 0
    assert reader.close() == 0


LEND = """
import sys
import mooncake
with mooncake.Store(sys.argv[1], mooncake.StoreConfig(segment_bytes=32 << 20)) as store:
    store.put("lost", b"v")
    print("put", flush=True)
    sys.stdin.read()
"""


def test_objects_of_a_killed_process_are_misses(master: MasterProcess):
    command = [sys.executable, "-c", LEND, master.address]
    lender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    upstream = MooncakeDistributedStore()
    assert set_up(upstream, master.address, segment=0) == 0
    try:
        with mooncake.Store(master.address) as store:
            assert lender.stdout is not None
            assert lender.stdout.readline() == b"put\n"
            assert store.get("lost") == b"v"
            lender.kill()
            lender.wait(10)
            deadline = time.monotonic() + PROMPT_S
            while store.exists("lost"):
                assert time.monotonic() < deadline
            assert store.get("lost", None) is None
            assert store.get_many(["lost"]) == [None]
            assert store.info_many(["lost"]) == [None]
            assert list(store.keys("lost")) == []
            (row,) = [row for row in store.segments() if row.capacity_bytes == 32 * MIB]
            assert (row.takes_objects, row.is_connected) == (False, False)
            for call in (store.get, store.get_buffer, lambda key: store.get_range(key, 0, 1)):
                with pytest.raises(mooncake.NotFoundError, match="lost its connection") as missed:
                    call("lost")
                assert missed.value.context["key"] == "lost"
            memory = bytearray(1)
            address = ctypes.addressof((ctypes.c_char * 1).from_buffer(memory))
            assert upstream.get_into("lost", address, 1) == -800
            assert (upstream.get("lost"), upstream.is_exist("lost")) == (b"", 0)
    finally:
        lender.kill()
        lender.communicate()
        upstream.close()


def test_threads_share_one_store():
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        failures: list[object] = []

        def work(number: int) -> None:
            try:
                for turn in range(50):
                    key, value = f"{number}/{turn}", bytes([number]) * (1 + 997 * turn)
                    assert store.put(key, value)
                    assert store.get(key) == value
                    target = bytearray(len(value))
                    assert store.get_into(key, target) == len(value)
                    assert target == value
                    store.delete(key, force=True)
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert list(store.keys()) == []


def test_other_threads_run_while_a_call_waits():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        config = mooncake.StoreConfig(rpc_timeout_s=1, connect_timeout_s=1)

        def join() -> None:
            with contextlib.suppress(mooncake.MooncakeError):
                mooncake.Store(address, config)

        waiting = threading.Thread(target=join)
        waiting.start()
        loops = 0
        while waiting.is_alive():
            loops += 1
        waiting.join()
        assert loops > 100


# Holds the GIL for longer than the master waits for a heartbeat, as a long call of another
# extension may do. The object must still exist afterwards.
BUSY = """
import ctypes, sys
import mooncake
config = mooncake.StoreConfig(segment_bytes=64 << 20)
with mooncake.Store(sys.argv[1], config) as store:
    store.put("kept", b"v" * 100000)
    print("busy", flush=True)
    ctypes.PyDLL(None).sleep(int(sys.argv[2]))
    assert store.get("kept") == b"v" * 100000
    print("free", flush=True)
    sys.stdin.readline()
"""


IS_LONG = "MOONCAKE_LONG_TESTS" in os.environ


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("seconds", "flags"),
    [
        pytest.param(8, ["--client_ttl=2"], id="8 s"),
        pytest.param(
            30,
            [],
            id="30 s with default settings",
            marks=pytest.mark.skipif(
                not IS_LONG, reason="needs the long tier: set MOONCAKE_LONG_TESTS=1"
            ),
        ),
    ],
)
def test_heartbeats_continue_while_the_gil_is_held(seconds, flags):
    master = start_master(*flags)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", BUSY, master.address, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as lender:
            assert lender.stdout is not None
            assert lender.stdout.readline() == "busy\n"
            with mooncake.Store(master.address) as reader:
                reads = 0
                while not select.select([lender.stdout], [], [], 0.05)[0]:
                    assert reader.get("kept") == b"v" * 100_000
                    reads += 1
            assert reads > 0
            assert lender.communicate("\n")[0] == "free\n"
            assert lender.returncode == 0
    finally:
        master.stop()


@pytest.mark.parametrize(
    ("memcpy", "transport"), [("", "memory"), ("maybe", "memory"), ("0", "tcp")]
)
def test_own_memory_is_copied_even_with_forced_tcp(monkeypatch, memcpy, transport):
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    monkeypatch.setenv("MC_STORE_MEMCPY", memcpy)
    value = bytes(range(256)) * 4096
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        store.put("own", value)
        assert store.get("own") == value
        count = store.stats()["store"]["by_transport"]
        assert [name for name in count if count[name]["bytes"]] == [transport]
