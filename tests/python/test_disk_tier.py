"""The disk tier as people and other programs meet it: commands, metrics, settings, calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import MIB, READY, MasterProcess, start_master
from test_admin_page import BROWSER, DEADLINE, browse
from test_disks import LIMIT_S, joined, tiers, until

import mooncake
from mooncake import env
from mooncake._command import doctor, top
from mooncake.store import MooncakeDistributedStore

_PREFIX = "MOONCAKE_OFFLOAD_"
# Upstream's variables of its disk tier, those of shared directories aside.
_VARIABLES = [
    *(
        _PREFIX + name
        for name in (
            "BUCKET_DISK_SCAN_CACHE_MS",
            "BUCKET_EVICTION_POLICY",
            "BUCKET_KEYS_LIMIT",
            "BUCKET_MAX_PHYSICAL_BYTES",
            "BUCKET_MAX_TOTAL_SIZE",
            "BUCKET_SIZE_LIMIT_BYTES",
            "CLIENT_BUFFER_GC_INTERVAL_SECONDS",
            "CLIENT_BUFFER_GC_TTL_MS",
            "DISK_EVICTION_HIGH_WATERMARK_RATIO",
            "DISK_EVICTION_LOW_WATERMARK_RATIO",
            "ENABLE_DISK_WATERMARK_EVICTION",
            "ENABLE_EVICTION",
            "FILE_STORAGE_PATH",
            "FILE_STORAGE_PATHS",
            "FSDIR",
            "HEARTBEAT_INTERVAL_SECONDS",
            "LOCAL_BUFFER_SIZE_BYTES",
            "SCANMETA_ITERATOR_KEYS_LIMIT",
            "STORAGE_BACKEND_DESCRIPTOR",
            "TOTAL_KEYS_LIMIT",
            "TOTAL_SIZE_LIMIT_BYTES",
            "USE_URING",
        )
    ),
    *(
        f"MOONCAKE_OFFSET_{name}"
        for name in (
            "EVICTION_POLICY",
            "HIGH_RATIO",
            "LOW_RATIO",
            "MAX_CAPACITY_NODES",
            "MAX_EVICT_PER_OFFLOAD",
            "PERSIST_INTERVAL_SECONDS",
            "PERSIST_MODE",
            "RECORD_CRC",
        )
    ),
    *(
        "ENABLE_EVICTION",
        "MC_FILEREAD_WORKERS",
        "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES",
        "MOONCAKE_BUCKET_EVICTION_POLICY",
        "MOONCAKE_BUCKET_MAX_TOTAL_SIZE",
        "MOONCAKE_DISK_EVICTION_HIGH_WATERMARK_RATIO",
        "MOONCAKE_DISK_EVICTION_LOW_WATERMARK_RATIO",
        "MOONCAKE_SCANMETA_ITERATOR_KEYS_LIMIT",
        "MOONCAKE_USE_URING",
    ),
]


@pytest.fixture
def offloading() -> Iterator[MasterProcess]:
    """A master that has objects written to disks."""
    master = start_master("--enable_offload=true", "--default_kv_lease_ttl=1ms")
    yield master
    master.stop()


def owner_of(
    master: MasterProcess, folder: Path, segment: int = 64 * MIB
) -> MooncakeDistributedStore:
    return joined(master, segment, enable_ssd_offload=True, ssd_offload_path=str(folder))


def command(*arguments: str, code: int = 0) -> str:
    """Run `mooncake` and return what it prints."""
    line = [sys.executable, "-m", "mooncake", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def sample_of(text: str, name: str) -> float:
    """Return the sum of the samples of a metric."""
    found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def test_commands_show_the_tiers(offloading: MasterProcess, tmp_path: Path):
    lender, owner = joined(offloading), owner_of(offloading, tmp_path, 0)
    at = f"--master={offloading.address}"
    assert lender.put("tiers/a", b"x" * 1000) == 0
    until(lambda: tiers(owner, "tiers/a") == ["memory", "disk"])
    assert "tiers/a  (also on disk)" in command("ls", at, "tiers/")
    lender.close()
    until(lambda: tiers(owner, "tiers/a") == ["disk"])
    assert owner.get("tiers/a") == b"x" * 1000
    assert "tiers/a  (on disk only)" in command("ls", at, "tiers/")
    [listed] = json.loads(command("ls", at, "tiers/", "--json"))
    assert (listed["copies"], listed["copies_on_disk"]) == (1, 1)
    assert (listed["memory_bytes"], listed["disk_bytes"]) == (0, 1000)
    assert "on disk, served at 127.0.0.1:" in command("stat", at, "tiers/a")
    shown = command("stat", at)
    assert re.search(r"^disks     .* used, 1 object$", shown, re.MULTILINE), shown
    assert "written for 1 object" in shown
    assert re.search(r"read: [1-9]\d* of \d+ hits were on a disk only", shown), shown
    assert "DISK OF" in shown
    told = json.loads(command("stat", at, "--json"))
    assert told["disks"][0]["objects"] == 1
    assert told["reads"]["hits"] >= told["reads"]["disk_hits"] > 0
    assert told["offloads"]["done"] == 1
    assert "DISK OF" in command("segments", at)
    live = command("top", at, "--once", "--interval=0.05")
    assert re.search(r"^disks +\[.* of .*,?\s+1 object, 0 waiting$", live, re.MULTILINE), live
    assert "DISK OF" in live
    assert "readable" in live
    owner.close()


def test_top_with_disks_fits_eighty_columns():
    disk = {
        "name": "192.168.100.123:16537",
        "address": "192.168.100.123:65535",
        "used_bytes": 999 << 40,
        "capacity_bytes": 1000 << 40,
        "objects": 10**9,
        "waiting_objects": 50_000,
        "is_readable": False,
    }
    zero = {"used": 0, "capacity": 0, "writing": 0, "fenced": 0, "keys": 0}
    overview: dict[str, Any] = {
        "version": "1",
        "addresses": {"rpc": "a:1"},
        "uptime_ms": 1000,
        "pool": {**zero, "soft_pinned_keys": 0, "clients": 0, "segments": 0},
        "reads": {"gets": 9, "hits": 8, "hit_bytes": 7, "disk_hits": 3, "disk_hit_bytes": 1},
        "offloads": {"bytes": 1 << 40, "refused": 10**9, "failed": 10**9, "missed": 10**9},
        "evictions": {"keys": 0, "bytes": 0},
        "puts": {"without_room": 0},
        "slow": {"total": 0},
        "calls": [],
        "segments": [],
        "clients": [],
        "disks": [disk],
    }
    before = {**overview, "offloads": {**overview["offloads"], "bytes": 0}}
    lines = top.render(top.Sample(2.0, overview), top.Sample(1.0, before), "a:2", 80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "1 TiB/s written" in text
    assert "33.3% of all reads" in text
    assert "NOT OPEN" in text


def test_metrics_name_what_reads_a_directory_and_why(
    offloading: MasterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(_PREFIX + "USE_URING", "0")
    config = mooncake.StoreConfig(disk=tmp_path, disk_bytes="256MB", segment_bytes="64MB")
    with mooncake.Store(offloading.address, config) as store:
        store.put("read-method", b"x" * 100_000)
        name = "mooncake_client_disk_file_written_bytes_total"
        until(lambda: sample_of(store.metrics_text(), name) >= 100_000)
        text = store.metrics_text()
        assert re.search(
            rf'^mooncake_client_disk_info{{.*path="{tmp_path}",read_method="threads",'
            r'why="as the options say"} 1$',
            text,
            re.MULTILINE,
        ), text
        until(lambda: sample_of(store.metrics_text(), "mooncake_ssd_write_ops_total") == 1)
        text = store.metrics_text()
        assert sample_of(text, "mooncake_client_disk_records") == 1
        assert sample_of(text, "mooncake_ssd_write_latency_summary_us_count") == 1
        for way in ("read", "write", "total"):
            for end in ("bytes_total", "ops_total", "latency_us_count"):
                sample_of(text, f"mooncake_ssd_{way}_{end}")
        found = store.stats()["store"]["disk"]["directories"][str(tmp_path)]
        assert (found["read_method"], found["records"]) == ("threads", 1)


def test_path_that_is_no_directory_is_a_value_error(offloading: MasterProcess, tmp_path: Path):
    absent = str(tmp_path / "absent")
    with pytest.raises(ValueError, match="Invalid FileStorage configuration"):
        joined(offloading, enable_ssd_offload=True, ssd_offload_path=absent)


def test_admin_port_names_copies_on_disk(offloading: MasterProcess, tmp_path: Path):
    store = owner_of(offloading, tmp_path)
    assert store.put("queried", b"x" * 5000) == 0
    until(lambda: tiers(store, "queried") == ["memory", "disk"])
    url = f"{offloading.admin}/batch_query_keys?keys=queried"
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        found = json.load(answer)["data"]["queried"]
    [copy] = found["local_disk_values"]
    assert copy.keys() == {"client_id", "object_size", "transport_endpoint"}
    assert copy["object_size"] == 5000
    assert (len(found["values"]), found["disk_values"]) == (1, None)
    store.close()


@pytest.mark.skipif(BROWSER is None, reason="needs chromium: install the package chromium")
@pytest.mark.timeout(2 * DEADLINE)
def test_page_shows_disks_where_there_are_some(offloading: MasterProcess, tmp_path: Path):
    assert 'id="disks-section" hidden' in browse(offloading.admin, tmp_path / "a", "--dump-dom")
    folder = tmp_path / "records"
    folder.mkdir()
    store = owner_of(offloading, folder)
    assert store.put("page/key", b"x" * MIB) == 0
    until(lambda: tiers(store, "page/key") == ["memory", "disk"])
    dom = browse(offloading.admin, tmp_path / "b", "--dump-dom")
    assert 'id="disks-section">' in dom
    assert "1 object on 1 disk, " in dom
    assert ">readable</span>" in dom
    assert "<dt>Bytes written</dt><dd>1.00 MiB</dd>" in dom
    assert "2, also on disk</td>" in dom
    store.close()


@pytest.mark.parametrize("uses_ring", ["", "0"])
def test_doctor_measures_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses_ring: str
):
    monkeypatch.setenv(_PREFIX + "USE_URING", uses_ring)
    monkeypatch.setattr(doctor, "_MEASURED_MAX", 64 << 20)
    folder = tmp_path / "records"
    monkeypatch.setenv(_PREFIX + "FILE_STORAGE_PATH", str(folder))
    shown = doctor.diagnose(lambda _: "works")["disks"][str(folder)]
    assert re.search(r"^writes \S+ \w+/s, reads \S+ \w+/s through .*outrun", shown), shown
    if uses_ring:
        assert "through 32 threads (as the options say)" in shown
    assert list(tmp_path.iterdir()) == [], "nothing stays"
    absent = doctor.diagnose(lambda _: "works", ["/proc/records"])["disks"]
    assert "/proc/records" in absent


@pytest.mark.parametrize("name", _VARIABLES)
def test_variables_of_upstreams_tier_are_known(monkeypatch: pytest.MonkeyPatch, name: str):
    value = {"ENABLE": "1", "RATIO": "0.9", "URING": "1"}
    monkeypatch.setenv(name, next((value[part] for part in value if part in name), "4096"))
    reasons = {each.name: each.reason for each in env.ignored()}
    acting = [each for each in env.settings() if each.source == name]
    assert bool(acting) != (name in reasons)
    assert not reasons.get(name, "").startswith("Unknown")
    assert all(not each.invalid for each in acting)


def test_high_watermark_keeps_a_full_file_system_free(
    offloading: MasterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(_PREFIX + "DISK_EVICTION_HIGH_WATERMARK_RATIO", "0.000001")
    config = mooncake.StoreConfig(disk=tmp_path, disk_bytes="256MB", segment_bytes="64MB")
    with mooncake.Store(offloading.address, config) as store:
        store.put("above", b"x")
        full = re.compile(
            r'^mooncake_client_disk_refused_total{.*reason="full"} [1-9]', re.MULTILINE
        )
        until(lambda: full.search(store.metrics_text()) is not None)
    monkeypatch.setenv(_PREFIX + "ENABLE_DISK_WATERMARK_EVICTION", "false")
    with mooncake.Store(offloading.address, config) as store:
        store.put("below", b"x")
        until(lambda: sample_of(store.metrics_text(), "mooncake_client_disk_records") == 1)


def test_limit_of_records_drops_the_oldest(
    offloading: MasterProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(_PREFIX + "TOTAL_KEYS_LIMIT", "5")
    config = mooncake.StoreConfig(disk=tmp_path, disk_bytes="256MB", segment_bytes="64MB")
    with mooncake.Store(offloading.address, config) as store:
        for number in range(20):
            store.put(f"limited{number}", b"x")
        written = "mooncake_ssd_write_ops_total"
        until(lambda: sample_of(store.metrics_text(), written) == 20)
        assert 0 < sample_of(store.metrics_text(), "mooncake_client_disk_records") <= 5
        on_disk = [each.key for each in store.objects() if each.disk_replicas]
        assert "limited0" not in on_disk
        until(lambda: "limited19" in [each.key for each in store.objects() if each.disk_replicas])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DISK_EVICTION_HIGH_WATERMARK_RATIO", "90"),
        ("DISK_EVICTION_LOW_WATERMARK_RATIO", "0.95"),
        ("TOTAL_KEYS_LIMIT", "-1"),
    ],
)
def test_invalid_limits_are_refused(
    offloading: MasterProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
):
    monkeypatch.setenv(_PREFIX + name, value)
    with pytest.raises(ValueError, match=r"high|variable"):
        mooncake.Store(offloading.address, mooncake.StoreConfig(disk=tmp_path))


def test_shared_directories_are_refused(offloading: MasterProcess, monkeypatch: pytest.MonkeyPatch):
    done = subprocess.run(
        [sys.executable, "-m", "mooncake.cli", "--rpc_port=0", "--root_fs_dir=/mnt/shared"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode != 0
    assert "root_fs_dir" in done.stderr
    assert "--enable_offload" in done.stderr
    for name in ("MOONCAKE_ENABLE_DFS", "MOONCAKE_DFS_ENABLED"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(ValueError, match="several hosts share"):
                mooncake.Store(offloading.address)
    monkeypatch.setenv("MOONCAKE_DFS_ROOT_DIR", "/mnt/3fs")
    [ignored] = [each for each in env.ignored() if each.name == "MOONCAKE_DFS_ROOT_DIR"]
    assert "FILE_STORAGE_PATH" in ignored.reason
    mooncake.Store(offloading.address).close()


def test_ranks_of_sglang_have_directories_of_their_own(offloading: MasterProcess, tmp_path: Path):
    ranks = [tmp_path / f"rank_0_{rank}_0_0" for rank in range(2)]
    for folder in ranks:
        folder.mkdir(parents=True)
    stores = [owner_of(offloading, folder) for folder in ranks]
    for rank, store in enumerate(stores):
        assert store.put(f"sglang{rank}", os.urandom(5000)) == 0
    for rank, store in enumerate(stores):
        until(lambda rank=rank, store=store: "disk" in tiers(store, f"sglang{rank}"))
    again = MooncakeDistributedStore()
    setup = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", offloading.address)
    taken = {"enable_ssd_offload": True, "ssd_offload_path": str(ranks[0])}
    assert again.setup(*setup, **taken) < 0, "the directory of another rank"
    for store in stores:
        store.close()


def test_tier_log_of_vllm_sees_memory_first(offloading: MasterProcess, tmp_path: Path):
    def tier(keys: list[str]) -> list[str]:
        """Return the tier of each object, from its first descriptor only."""
        found = owner.batch_get_replica_desc(keys)
        names = []
        for key in keys:
            first = found[key][0]
            is_disk = first.is_disk_replica() or first.is_local_disk_replica()
            names.append("memory" if first.is_memory_replica() else "disk" if is_disk else "none")
        return names

    lender, owner = joined(offloading), owner_of(offloading, tmp_path, 0)
    keys = [f"vllm{number}" for number in range(4)]
    assert lender.put_batch(keys, [b"block"] * 4) == 0
    for key in keys:
        until(lambda key=key: tiers(owner, key) == ["memory", "disk"])
    assert tier(keys) == ["memory"] * 4
    lender.close()
    for key in keys:
        until(lambda key=key: tiers(owner, key) == ["disk"])
    assert tier(keys) == ["disk"] * 4
    owner.close()


@contextmanager
def started(line: list[str], **variables: str) -> Iterator[str]:
    """Run a server; yield its first line."""
    environment = os.environ | variables
    server = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    try:
        yield server.stdout.readline()
    finally:
        server.terminate()
        server.communicate(timeout=LIMIT_S)


def test_servers_that_transfer_queue_starts_make_a_pool(tmp_path: Path):
    folder = tmp_path / "offload"
    folder.mkdir()
    master = [
        *(sys.executable, "-m", "mooncake.cli"),
        "-client_ttl=30",
        "-default_kv_lease_ttl=999999",
        "-default_kv_soft_pin_ttl=999999",
        "--allow_evict_soft_pinned_objects=false",
        "--rpc_address=127.0.0.1",
        "--rpc_port=0",
        "--enable_offload=true",
        "--eviction_high_watermark_ratio=0.9",
        "--eviction_ratio=0.1",
        "--offload_on_evict=true",
        "--offload_force_evict=false",
        "--offloading_queue_limit=10000",
        # Not of TransferQueue: ports that are free.
        "--metrics_port=0",
    ]
    variables = {
        _PREFIX + "FILE_STORAGE_PATH": str(folder),
        _PREFIX + "LOCAL_BUFFER_SIZE_BYTES": "2147483648",
        _PREFIX + "USE_URING": "0",
        _PREFIX + "HEARTBEAT_INTERVAL_SECONDS": "2",
        _PREFIX + "TOTAL_SIZE_LIMIT_BYTES": "256MB",
    }
    with started(master) as line:
        ready = READY.search(line)
        assert ready is not None, line
        client = [
            *(sys.executable, "-m", "mooncake.cli_client"),
            "-host=127.0.0.1",
            f"-global_segment_size={64 * MIB}",
            f"-master_server_address={ready[1]}",
            "-metadata_server=P2PHANDSHAKE",
            "-protocol=tcp",
            "-enable_offload=true",
            "-port=0",
        ]
        with started(client, **variables) as line:
            assert line, "the daemon has ended"
            store = MooncakeDistributedStore()
            setup = ("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 16 * MIB, "tcp", "", ready[1])
            assert store.setup(*setup) == 0
            values = {f"sample{number}": os.urandom(100_000) for number in range(20)}
            for key, value in values.items():
                assert store.put(key, value) == 0
            assert {key: store.get(key) for key in values} == values
            shown = json.loads(command("stat", f"--master={ready[1]}", "--json"))
            assert [disk["is_readable"] for disk in shown["disks"]] == [True]
            for key in values:
                assert store.remove(key, force=True) == 0
            store.close()
