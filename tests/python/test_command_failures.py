"""The `mooncake` command on a pool with a metadata server, and after a process has ended."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess, set_up, start_master
from test_command_objects import on
from test_commands import command

import mooncake
from mooncake.store import MooncakeDistributedStore

# The header of a tensor is longer than a short object, which is therefore not read for one.
LONG = bytes(100_000)

LENDER = f"""
import sys, mooncake
lends = mooncake.StoreConfig(segment_bytes={64 * MIB}, name=sys.argv[2])
store = mooncake.Store(sys.argv[1], lends)
here = mooncake.PutOptions(preferred_segments=[sys.argv[2]])
store.put(f"of-{{sys.argv[2]}}", bytes({MIB}), options=here)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def listed(master: MasterProcess) -> Iterator[tuple[MasterProcess, str]]:
    """A pool whose lender is known to a metadata server, and the URL of the server."""
    url = f"http://{master.metadata}/metadata"
    store = MooncakeDistributedStore()
    assert set_up(store, master.address, metadata=url) == 0
    assert (store.put("hello", b"hello"), store.put("long", LONG)) == (0, 0)
    yield master, url
    store.close()


def test_metadata_server_of_a_pool_is_an_option(listed: tuple[MasterProcess, str]):
    pool, url = listed
    done = on(pool, "get", "hello", f"--metadata={url}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello", "")
    for name, *words in [
        ["put", "copied", __file__],
        ["cp", "hello", "copy"],
        ["bench", "--sizes=4kb", "--seconds=0.01"],
        ["stat", "long"],
    ]:
        done = on(pool, name, f"--metadata={url}", *words)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_metadata_server_of_a_pool_is_a_variable(listed: tuple[MasterProcess, str]):
    pool, url = listed
    words = ["get", "hello", f"--master={pool.address}"]
    done = command(*words, MOONCAKE_TE_META_DATA_SERVER=url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello", "")
    # The option comes first.
    done = command(*words, "--metadata=P2PHANDSHAKE", MOONCAKE_TE_META_DATA_SERVER=url)
    assert done.returncode == 1


def test_unreachable_holder_may_use_a_metadata_server(listed: tuple[MasterProcess, str]):
    pool, url = listed
    for words in (["get", "hello"], ["bench", "--sizes=4kb", "--seconds=0.01"]):
        done = on(pool, *words)
        assert done.returncode == 1
        hint = done.stderr.splitlines()[-1]
        assert f"or uses a metadata server: --metadata {url}, in Python StoreConfig(" in hint
    done = on(pool, "stat", "long")
    assert (done.returncode, "97.7 KiB (100000 bytes)" in done.stdout) == (0, True)
    assert f"--metadata {url}" in done.stderr


def test_unlisted_holder_may_use_no_metadata_server(mortal_master: MasterProcess):
    url = f"http://{mortal_master.metadata}/metadata"
    lends = mooncake.StoreConfig(segment_bytes=64 * MIB)
    with mooncake.Store(mortal_master.address, lends) as store:
        store.put("k", b"k")
        done = on(mortal_master, "get", "k", f"--metadata={url}")
    assert done.returncode == 1
    assert "--metadata P2PHANDSHAKE if it uses none" in done.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def bereft() -> Iterator[MasterProcess]:
    """A pool of two lenders, of which one was killed; it held the object `of-localhost:7001`."""
    master = start_master("--client_ttl=600")
    lenders = []
    try:
        for name in ("localhost:7001", "localhost:7002"):
            line = [sys.executable, "-c", LENDER, master.address, name]
            lender = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            lenders.append(lender)
            assert lender.stdout is not None
            assert lender.stdout.readline() == "ready\n"
        lenders[0].kill()
        with mooncake.Store(master.address) as store:
            deadline = time.monotonic() + 30
            while all(segment.is_connected for segment in store.segments()):
                assert time.monotonic() < deadline
        yield master
    finally:
        for lender in lenders:
            lender.kill()
            lender.communicate()
        master.stop()


def test_object_of_a_dead_process_is_no_missing_one(bereft: MasterProcess):
    key = "of-localhost:7001"
    for words in (["get", key], ["cp", key, "copy"]):
        done = on(bereft, *words)
        assert (done.returncode, done.stdout) == (1, "")
        text, hint = done.stderr.splitlines()
        assert "no copy can be read: every process that holds one has lost its connection" in text
        assert f"`mooncake stat {key}`" in hint
    done = on(bereft, "stat", key)
    assert "not readable: its process does not answer" in done.stdout
    assert "size      1 MiB" in done.stdout


def test_exists_tells_unreadable_objects_from_missing_ones(bereft: MasterProcess):
    key = "of-localhost:7001"
    done = on(bereft, "exists", key, "missing")
    assert (done.returncode, done.stdout) == (1, f"no   {key}\nno   missing\n")
    text, hint = done.stderr.splitlines()
    assert (
        f'no copy can be read: every process that holds one has lost its connection key="{key}"'
        in text
    )
    assert f"`mooncake stat {key}`" in hint
    done = on(bereft, "exists", "--quiet", key)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert on(bereft, "exists", "missing").stderr == ""


def test_put_into_a_pool_without_memory_says_how_to_lend(mortal_master: MasterProcess):
    line = "mooncake_client --master_server_address=" + mortal_master.address
    for words in (["put", "k", __file__], ["bench", "--sizes=4kb", "--seconds=0.01"]):
        done = on(mortal_master, *words)
        assert done.returncode == 1
        hint = done.stderr.splitlines()[-1]
        assert hint.startswith(f"  hint: No process lends memory to the pool; start `{line} ")


def test_stat_after_a_restart_waits_for_the_holders(tmp_path: Path):
    master = start_master(f"--state_dir={tmp_path}")
    line = [sys.executable, "-c", LENDER, master.address, "localhost:7003"]
    lender = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert lender.stdout is not None
    assert lender.stdout.readline() == "ready\n"
    lender.kill()
    lender.communicate()
    master.kill()
    again = start_master(f"--state_dir={tmp_path}")
    try:
        shown = on(again, "stat").stdout
        text = "has not heard from the processes that hold its objects since then"
        assert re.search(rf"the master started \d+ s ago, and {text}\n", shown)
    finally:
        again.stop()


def test_memory_of_a_dead_process_is_not_counted(bereft: MasterProcess):
    shown = on(bereft, "stat").stdout
    assert "2 clients beside this command, of which 1 lost the connection" in shown
    assert "memory    1 MiB of 64 MiB used\n" in shown
    assert "  64 MiB  lost, not counted above: localhost:7001\n" in shown
    memory = json.loads(on(bereft, "stat", "--json").stdout)["memory"]
    assert memory["lost_bytes"] == 64 * MIB
    assert sum(memory.values()) == 128 * MIB


def test_dead_process_is_marked(bereft: MasterProcess):
    rows = {line.split()[0]: line for line in on(bereft, "clients").stdout.splitlines()}
    assert "connection lost" in rows["localhost:7001"]
    assert "connection lost" not in rows["localhost:7002"]
    marks = {
        row["name"]: row["is_connection_lost"]
        for row in json.loads(on(bereft, "clients", "--json").stdout)
    }
    assert marks == {"localhost:7001": True, "localhost:7002": False}


def test_top_marks_a_dead_process_and_leaves_out_its_memory(bereft: MasterProcess):
    shown = on(bereft, "top", "--once", "--interval=0.1").stdout
    assert re.search(r"memory +\[\.+\] +1\.6%  1 MiB of 64 MiB", shown)
    assert "64 MiB lost" in shown
    assert re.search(r"localhost:7001 .* LOST ", shown)
    assert re.search(r"localhost:7002 .* OK ", shown)
    assert re.search(r"localhost:7001 .* ago  connection lost\n", shown)
    assert "clients 2 " in shown, "this command is not counted"
