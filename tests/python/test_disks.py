"""Copies of objects on the disks of clients, through upstream's API, our own and the daemon."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess, start_master

import mooncake
from mooncake.store import MooncakeDistributedStore

LIMIT_S = 30
WAIT_S = 0.005


@pytest.fixture
def offloading() -> Iterator[MasterProcess]:
    """A master that has objects written to disks."""
    master = start_master("--enable_offload=true", "--default_kv_lease_ttl=1ms")
    yield master
    master.stop()


def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, condition
        time.sleep(WAIT_S)


def joined(
    master: MasterProcess, segment: int = 64 * MIB, **settings: object
) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    setup = ("127.0.0.1", "P2PHANDSHAKE", segment, 16 * MIB, "tcp", "", master.address)
    assert store.setup(*setup, **settings) == 0
    return store


def tiers(store: MooncakeDistributedStore, key: str) -> list[str]:
    """Return where the copies of an object are, in their order."""
    return [
        "memory" if replica.is_memory_replica() else "disk"
        for replica in store.get_replica_desc(key)
    ]


def test_object_is_read_from_disk_once_it_left_memory(offloading, tmp_path):
    lender = joined(offloading)
    owner = joined(offloading, 0, enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    values = {f"k{size}": os.urandom(size) for size in (1, 4096, 70_001, 3 * MIB)}
    for key, value in values.items():
        assert lender.put(key, value) == 0
        until(lambda key=key: tiers(owner, key) == ["memory", "disk"])
    lender.close()
    reader = joined(offloading, 0)
    for key, value in values.items():
        until(lambda key=key: tiers(reader, key) == ["disk"])
        assert reader.get(key) == value
        assert owner.get(key) == value
    (copy,) = reader.get_replica_desc("k4096")
    assert copy.is_local_disk_replica()
    assert not copy.is_disk_replica()
    with pytest.raises(RuntimeError, match="Expected MemoryDescriptor"):
        copy.get_memory_descriptor()
    assert reader.get_offload_rpc_read_count() >= len(values)
    assert owner.get_offload_rpc_read_count() == 0
    owner.close()
    reader.close()


def test_directory_is_named_by_the_environment(offloading, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    names = ",".join(map(str, folders))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS", names)
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(256 * MIB))
    store = joined(offloading, enable_ssd_offload=True)
    assert all((folder / "identity").exists() for folder in folders)
    other = MooncakeDistributedStore()
    setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", offloading.address)
    assert other.setup(*setup, enable_ssd_offload=True) < 0, "the directories are in use"
    store.close()


def test_directory_without_a_master_for_it_is_refused(master, tmp_path):
    store = MooncakeDistributedStore()
    setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master.address)
    assert store.setup(*setup, enable_ssd_offload=True, ssd_offload_path=str(tmp_path)) == -1300


def test_directory_leaves_the_pool(offloading, tmp_path):
    store = joined(offloading, enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    assert store.put("k", b"value") == 0
    until(lambda: tiers(store, "k") == ["memory", "disk"])
    assert store.unmount_local_disk_segment() == 0
    until(lambda: tiers(store, "k") == ["memory"])
    assert store.get("k") == b"value"
    assert store.unmount_local_disk_segment() == 0, "nothing is left to do"
    store.close()


def test_embedded_pool_has_a_disk(tmp_path):
    config = mooncake.StoreConfig(
        segment_bytes="64MB", disk=tmp_path / "records", disk_bytes="256MB"
    )
    with mooncake.Store(config=config) as store:
        store.put("k", b"value")
        written = re.compile(r"^mooncake_ssd_write_ops_total\{.*\} 1$", re.MULTILINE)
        until(lambda: written.search(store.metrics_text()) is not None)
        assert store.get("k") == b"value"
    with pytest.raises(ValueError, match="size of a directory"):
        mooncake.Store(config=mooncake.StoreConfig(disk=tmp_path, disk_bytes="many"))


def test_dictionary_has_each_number_of_the_metrics_page(tmp_path):
    config = mooncake.StoreConfig(segment_bytes="64MB", disk=tmp_path / "one", disk_bytes="256MB")
    with mooncake.Store(config=config) as store:
        store.put("k", b"value")
        until(lambda: store.stats()["store"]["disk"]["written"]["records"] == 1)
        counted, text = store.stats()["store"]["disk"], store.metrics_text()
    sample = re.compile(r'^mooncake_client_disk_(\w+)\{client_mode="real"(?:,(\w+)="([^"]*)")?\} ')
    rows = {
        None: {None: counted},
        "path": counted["directories"],
        "direction": {"read": counted["read"], "write": counted["written"]},
    }
    samples = [found.groups() for line in text.splitlines() if (found := sample.match(line))]
    seen = set()
    for name, label, value in samples:
        if label in rows and not name.startswith("batch_duration_seconds"):
            name = name.removesuffix("_total")
            assert isinstance(rows[label][value][name], int), name
            seen.add(name)
    assert {"promoted", "promoted_bytes", "staging_full", "lost", "moved", "records"} <= seen


@contextmanager
def daemon_with_disk(master: MasterProcess, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that keeps the directory; ended at last."""
    command = [
        *(sys.executable, "-m", "mooncake.cli_client", "--host=127.0.0.1", "--port=0"),
        f"--master_server_address={master.address}",
        *("--metadata_server=P2PHANDSHAKE", "--global_segment_size=0", "--enable_offload=true"),
    ]
    environment = os.environ | {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": "256MB",
    }
    daemon = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    try:
        yield daemon
    finally:
        daemon.terminate()
        daemon.communicate(timeout=LIMIT_S)


def put_until_written(store: MooncakeDistributedStore) -> None:
    """Put objects until one is on disk: the directory is mounted."""
    keys = (f"first{number}" for number in range(1 << 20))

    def is_written() -> bool:
        key = next(keys)
        assert store.put(key, b"value") == 0
        return "disk" in tiers(store, key)

    until(is_written)


def test_daemon_that_is_killed_brings_its_records_back(offloading, tmp_path):
    lender = joined(offloading)
    reader = joined(offloading, 0)
    values = {f"k{number}": os.urandom(1 + 40 * number) for number in range(300)}
    with daemon_with_disk(offloading, tmp_path) as daemon:
        put_until_written(lender)
        for key, value in values.items():
            assert lender.put(key, value) == 0
        for key in values:
            until(lambda key=key: "disk" in tiers(lender, key))
        lender.close()
        assert reader.get("k299") == values["k299"]
        daemon.kill()
        daemon.wait(LIMIT_S)
    with daemon_with_disk(offloading, tmp_path):
        until(lambda: reader.get("k299") == values["k299"])
        assert {key: reader.get(key) for key in values} == values
    reader.close()
