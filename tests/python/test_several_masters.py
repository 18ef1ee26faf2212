"""What operators see of two real masters, of which etcd elects one."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import pty
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import MIB, start_master
from metadata_servers import free_ports, running_etcd
from test_commands import read_until
from test_deploy import metrics_of, queries

import mooncake
from mooncake._command.main import main

if TYPE_CHECKING:
    from conftest import MasterProcess

DEADLINE_S = 60


@dataclass
class Cluster:
    """Two masters, and the address by which clients find the leader."""

    place: str
    folder: Path
    ports: tuple[int, int]
    masters: dict[int, MasterProcess] = field(default_factory=dict)

    def start(self, port: int) -> None:
        """Start the master of a port on its state directory."""
        flags = ["--enable_ha=true", "--ha_lease_ttl=2s", f"--advertise_address=127.0.0.1:{port}"]
        flags += [f"--etcd_endpoints={self.place.removeprefix('etcd://')}", f"--rpc_port={port}"]
        self.masters[port] = start_master(*flags, f"--state_dir={self.folder / str(port)}")

    def stop(self) -> None:
        """Stop all masters."""
        for master in self.masters.values():
            master.stop()

    @property
    def admins(self) -> list[str]:
        return [master.admin.removeprefix("http://") for master in self.masters.values()]

    @property
    def words(self) -> list[str]:
        """The admin ports as options: both masters are on one host."""
        return [word for admin in self.admins for word in ("--admin", admin)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two masters with a state directory each, and a process that lends memory."""
    folder = tmp_path_factory.mktemp("masters")
    with ExitStack() as stack:
        etcd = stack.enter_context(running_etcd(folder))
        cluster = Cluster(f"etcd://{etcd}", folder, free_ports())
        stack.callback(cluster.stop)
        for port in cluster.ports:
            cluster.start(port)
        config = mooncake.StoreConfig(segment_bytes=64 * MIB)
        store = stack.enter_context(mooncake.Store(cluster.place, config))
        assert store.put("key", b"value")
        yield cluster


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return its code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def status_in_sync(run: Any, cluster: Cluster) -> dict[str, Any]:
    """Return what `ha status` shows once a standby is in sync."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        code, shown, errors = run("ha", "status", cluster.place, *cluster.words, "--json")
        if code == 0:
            seen: dict[str, Any] = json.loads(shown)
            return seen
        assert time.monotonic() < deadline, shown + errors
        time.sleep(0.1)


def standby_of(cluster: Cluster, seen: dict[str, Any]) -> str:
    """Return the admin port of the master that does not lead."""
    return next(row["admin"] for row in seen["masters"] if row["address"] != seen["leader"])


def test_status_stat_and_check_name_the_leader(run: Any, cluster: Cluster) -> None:
    seen = status_in_sync(run, cluster)
    assert {row["seen"]["role"] for row in seen["masters"]} == {"leader", "standby"}
    assert seen["view_version"] is not None
    code, shown, _ = run("stat", "--master", cluster.place)
    assert code == 0
    assert f"leader    {seen['leader']}, view {seen['view_version']}" in shown
    assert re.search(r"^standby   \S+  in sync", shown, re.MULTILINE)
    settings = {"master_server_address": cluster.place, "metadata_server": "P2PHANDSHAKE"}
    code, shown, _ = run("check", json.dumps(settings))
    assert code == 0
    assert f"{seen['leader']} leads" in shown


def test_alerts_ask_for_metrics_of_elected_masters(run: Any, cluster: Cluster) -> None:
    status_in_sync(run, cluster)
    exported = set()
    for admin in cluster.admins:
        with urllib.request.urlopen(f"http://{admin}/metrics", timeout=20) as answer:
            exported |= set(re.findall(r"^([a-z_]+)(?:\{| )", answer.read().decode(), re.M))
    wanted = {name for query in queries() for name in metrics_of(query) if name.startswith("ha_")}
    assert len(wanted) > 3
    assert wanted <= exported


def test_standby_answers_for_itself_alone(run: Any, cluster: Cluster) -> None:
    standby = standby_of(cluster, status_in_sync(run, cluster))
    with urllib.request.urlopen(f"http://{standby}/role", timeout=20) as answer:
        assert answer.read() == b"standby"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{standby}/get_all_segments", timeout=20)
    assert refused.value.code == 503
    assert json.loads(refused.value.read())["error_code"] == -1011
    code, _, errors = run("top", "--once", "--admin", standby)
    assert code == 1
    assert "does not lead" in errors


def test_standby_names_the_leader(run: Any, cluster: Cluster) -> None:
    leader = status_in_sync(run, cluster)["leader"]
    addresses = [master.address for master in cluster.masters.values()]
    standby = next(address for address in addresses if address != leader)
    code, shown, _ = run("ha", "status", standby)
    assert code == 0
    assert f"leader    {leader}, view" in shown
    code, _, errors = run("stat", "--master", standby)
    assert code == 1
    assert f"hint: {leader} leads now. Name all masters, as in {leader},{standby}." in errors


def test_handover_keeps_the_objects(run: Any, cluster: Cluster) -> None:
    before = status_in_sync(run, cluster)
    code, shown, errors = run("handover", cluster.place, "--json")
    assert code == 0, errors
    told = json.loads(shown)
    assert told["former_leader_address"] == before["leader"] != told["leader_address"]
    assert told["view_version"] > before["view_version"]
    deadline = time.monotonic() + DEADLINE_S
    after = status_in_sync(run, cluster)
    # The next leader serves before it has read its own view back.
    while after["view_version"] is None and time.monotonic() < deadline:
        after = status_in_sync(run, cluster)
    assert (after["leader"], after["view_version"]) == (
        told["leader_address"],
        told["view_version"],
    )
    with mooncake.Store(cluster.place) as store:
        assert store.get("key") == b"value"
    code, shown, _ = run("handover", "--if-leader", "--admin", standby_of(cluster, after))
    assert code == 0
    assert "nothing to hand over" in shown


@pytest.mark.parametrize("has_list", [False, True], ids=["service", "list"])
def test_file_system_goes_on_at_the_next_leader(run: Any, cluster: Cluster, has_list: bool) -> None:
    files = pytest.importorskip("mooncake.files", reason="needs fsspec: pip install fsspec")
    leader = status_in_sync(run, cluster)["leader"]
    listed = ",".join(f"127.0.0.1:{port}" for port in cluster.ports)
    pool = listed if has_list else cluster.place
    with mooncake.Store(pool) as store:
        fs = files.MooncakeFileSystem(store=store)
        fs.pipe_file("file", b"content")
        url = fs.unstrip_protocol("file")
        sent = pickle.dumps(fs)
        assert fs.cat_file(url) == b"content"
        assert fs.cat_file(f"mooncake://{leader}/file") == b"content", "the URL of the leader"
        with pytest.raises(ValueError, match="another pool"):
            fs.cat_file("mooncake://127.0.0.1:1/file")
    code, _, errors = run("handover", cluster.place)
    assert code == 0, errors
    # The former leader is away.
    former = int(leader.rpartition(":")[2])
    cluster.masters.pop(former).stop()
    try:
        assert pickle.loads(sent).cat_file("file") == b"content"
        named = files.MooncakeFileSystem(**files.MooncakeFileSystem._get_kwargs_from_urls(url))
        assert named.cat_file(url) == b"content"
        named.store.delete("file", force=True)
    finally:
        cluster.start(former)


def test_top_goes_on_at_the_next_leader(run: Any, cluster: Cluster) -> None:
    before = status_in_sync(run, cluster)
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "mooncake", "top", "--interval=0.1"]
    shown = subprocess.Popen(
        [*command, f"--master={cluster.place}"], stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    try:
        read_until(terminal, f"leader {before['leader']}, view {before['view_version']}".encode())
        code, told, errors = run("handover", cluster.place, "--json")
        assert code == 0, errors
        after = json.loads(told)
        text = f"leader {after['leader_address']}, view {after['view_version']}"
        read_until(terminal, text.encode())
        os.write(terminal, b"q")
        read_until(terminal, b"\033[?1049l")
        assert shown.wait(20) == 0
    finally:
        shown.kill()
        shown.wait(10)
        os.close(terminal)


def test_no_call_fails_in_a_rolling_restart(run: Any, cluster: Cluster) -> None:
    """The steps of the page about rolling restarts: standbys first, then the former leader."""
    stop, failures, calls = threading.Event(), list[mooncake.MooncakeError](), itertools.count()

    def call() -> None:
        with mooncake.Store(cluster.place) as store:
            while not stop.is_set():
                try:
                    store.put(f"put/{next(calls)}", b"value")
                    store.get("key")
                except mooncake.MooncakeError as failure:
                    failures.append(failure)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        leader = int(status_in_sync(run, cluster)["leader"].rpartition(":")[2])
        standby = next(port for port in cluster.ports if port != leader)
        for port in (standby, leader):
            code, _, errors = run("handover", "--if-leader", "--admin", admin_of(cluster, port))
            assert code == 0, errors
            cluster.masters[port].stop()
            cluster.start(port)
            status_in_sync(run, cluster)
    finally:
        stop.set()
        caller.join()
    assert (failures, status_in_sync(run, cluster)["leader"]) == ([], f"127.0.0.1:{standby}")
    with mooncake.Store(cluster.place) as store:
        assert all(store.exists(f"put/{number}") for number in range(next(calls)))


def admin_of(cluster: Cluster, port: int) -> str:
    """Return the admin port of the master of a port."""
    return cluster.masters[port].admin.removeprefix("http://")


def test_log_is_finalized_at_the_leader(run: Any, cluster: Cluster) -> None:
    status_in_sync(run, cluster)
    code, shown, errors = run("finalize", *cluster.words)
    assert code == 0, errors
    assert "the log may have all records" in shown
    healths = []
    for admin in cluster.admins:
        with urllib.request.urlopen(f"http://{admin}/health", timeout=20) as answer:
            healths.append(json.load(answer))
    assert [health["finalized"] for health in healths if health["role"] == "leader"] == [True]


def test_promotable_masters_are_told_by_exit_code(run: Any, cluster: Cluster) -> None:
    status_in_sync(run, cluster)
    for admin in [*cluster.admins, "127.0.0.1:1"]:
        command = [sys.executable, "-m", "mooncake.cli", "--check_promotable", admin]
        done = subprocess.run(command, capture_output=True, timeout=50, check=False)
        assert done.returncode == int(admin not in cluster.admins), done.stderr
