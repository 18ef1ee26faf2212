"""The metrics of a client, and the HTTP server that exposes them."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from conftest import MIB

from mooncake import Store, StoreConfig
from mooncake.store import MooncakeDistributedStore

PROMTOOL = shutil.which("promtool")


def fetch(address: str, path: str) -> tuple[int, str]:
    """Return the status and the body of a response."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def here(store: Store) -> str:
    assert store.http_address is not None
    return "127.0.0.1:" + store.http_address.rpartition(":")[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def store():
    config = StoreConfig(segment_bytes=64 * MIB, http_port=0)
    with Store(config=config) as store:
        yield store


def test_operations_count_bytes_and_latency(store: Store):
    store.put("one", b"x" * 100)
    store.put_many([("a", b"y" * 10), ("b", b"z" * 20)])
    assert store.get("one") == b"x" * 100
    store.get_many(["a", "b"])
    assert store.get("none", default=None) is None
    counted = store.stats()["store"]
    operations = counted["operations"]
    for name, done, size in [
        ("put", 1, 100),
        ("put_batch", 2, 30),
        ("get", 1, 100),
        ("get_batch", 2, 30),
    ]:
        row = operations[name]
        assert (row["done"], row["bytes"], row["failed"]) == (done, size, 0), name
        assert row["is_read"] == name.startswith("get")
        latency = row["latency"]
        assert latency["calls"] == 1
        assert 0 < latency["mean_us"] <= latency["p50_us"] <= latency["p999_us"]
    assert (counted["hits"], counted["misses"]) == (3, 1)
    assert counted["by_transport"]["memory"]["read_bytes"] == 130
    assert counted["by_transport"]["memory"]["written_bytes"] == 130
    assert counted["rpcs"]["PutStart"]["latency"]["calls"] == 2
    assert counted["transfers"]["batch_get"]["calls"] == 1
    assert counted["peer_errors"] == {}


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: install the package prometheus")
def test_our_names_pass_the_linter(monkeypatch):
    assert PROMTOOL is not None
    monkeypatch.setenv("MC_STORE_CLIENT_UPSTREAM_METRICS", "off")
    with Store(config=StoreConfig(segment_bytes=16 * MIB, http_port=0)) as store:
        store.put("k", b"x" * 64)
        store.get_many(["k", "k"])
        _, text = fetch(here(store), "/metrics")
    names = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {"mooncake_client_call_duration_seconds", "process_open_fds"} <= names
    assert all(name.startswith(("mooncake_client_", "process_")) for name in names)
    words = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_store_serves_only_health_and_metrics(store: Store):
    store.put("k", b"x" * 64)
    store.get("k")
    address = here(store)
    assert fetch(address, "/health") == (200, '{"status":"healthy","code":0}')
    status, text = fetch(address, "/metrics")
    assert status == 200
    assert 'mooncake_transfer_read_bytes{client_mode="real"} 64' in text.splitlines()
    assert 'op_name="get"' in text
    status, text = fetch(address, "/metrics/summary")
    assert status == 200
    assert "read: 1 objects, 64 B" in text
    assert fetch(address, "/")[0] == 404
    assert fetch(address, "/metrics/x")[0] == 404


def test_closed_store_serves_nothing():
    config = StoreConfig(segment_bytes=16 * MIB, http_port=0)
    with Store(config=config) as store:
        address = here(store)
        assert fetch(address, "/health")[0] == 200
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            fetch(address, "/health")
        except OSError:
            return
        time.sleep(0.01)
    pytest.fail("a closed store still serves HTTP")


def test_store_without_http_port_serves_nothing():
    with Store(config=StoreConfig(segment_bytes=0)) as store:
        assert store.http_address is None


def test_environment_sets_cluster_and_disables_metrics(monkeypatch):
    monkeypatch.setenv("MC_STORE_CLUSTER_ID", "blue")
    with Store(config=StoreConfig(segment_bytes=0, http_port=0)) as store:
        assert 'client_mode="real",cluster_id="blue"' in fetch(here(store), "/metrics")[1]
    monkeypatch.setenv("MC_STORE_CLIENT_METRIC", "0")
    with Store(config=StoreConfig(segment_bytes=0, http_port=0)) as store:
        silent = (503, "metrics not available")
        assert fetch(here(store), "/metrics") == silent
        assert fetch(here(store), "/metrics/summary") == silent
        assert fetch(here(store), "/health")[0] == 200


def test_health_reports_an_unreachable_master(mortal_master):
    store, other = MooncakeDistributedStore(), MooncakeDistributedStore()
    port = free_port()
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_addr": mortal_master.address,
        "enable_client_http_server": "true",
        "client_http_port": port,
    }
    assert store.setup(settings) == 0
    address = f"127.0.0.1:{port}"
    assert fetch(address, "/health") == (200, '{"status":"healthy","code":0}')
    assert other.setup(settings) == -600, "the port is taken"
    for wrong in (0, -1, 65536):
        assert other.setup({**settings, "client_http_port": wrong}) == -600
    assert other.close() == 0
    mortal_master.kill()
    assert fetch(address, "/health") == (503, '{"status":"master_unreachable","code":2}')
    assert store.close() == 0


def test_summary_is_logged_at_the_set_interval():
    script = (
        "import mooncake, sys\n"
        "with mooncake.Store() as store:\n"
        "    store.put('k', b'v' * 3000)\n"
        "    store.get('k')\n"
        "    sys.stdin.read()\n"
    )
    environment = {**os.environ, "MC_STORE_CLIENT_METRIC_INTERVAL": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stderr is not None
        line = next(line for line in program.stderr if "read: 1 objects" in line)
        assert "2.93 KiB" in line
        assert "/s" in line
        program.communicate()
        assert program.returncode == 0
