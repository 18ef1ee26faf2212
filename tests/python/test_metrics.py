"""The metrics of a master: our names pass the linter of Prometheus, upstream's can be left out."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request

import pytest
from conftest import MIB, MasterProcess, start_master

import mooncake

PROMTOOL = shutil.which("promtool")


def metrics(master: MasterProcess) -> str:
    with urllib.request.urlopen(f"{master.admin}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def value(text: str, sample: str) -> float:
    [line] = [line for line in text.splitlines() if line.startswith(f"{sample} ")]
    return float(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def ours():
    """The metrics of a master that leaves out upstream's names, after a put, a hit and a miss."""
    master = start_master("--upstream_metrics=false")
    lends = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7021")
    try:
        with mooncake.Store(master.address, lends) as store:
            store.put("k", bytes(MIB))
            store.get("k")
            assert store.get("none", None) is None
            yield metrics(master)
    finally:
        master.stop()


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: install the package prometheus")
def test_our_names_pass_the_linter(ours: str):
    assert PROMTOOL is not None
    words = [PROMTOOL, "check", "metrics"]
    done = subprocess.run(words, input=ours, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_upstream_names_can_be_left_out(ours: str, master: MasterProcess):
    names = set(re.findall(r"^# TYPE (\S+)", ours, re.MULTILINE))
    assert len(names) > 50
    assert all(name.startswith(("mooncake_master_", "process_")) for name in names)
    both = set(re.findall(r"^# TYPE (\S+)", metrics(master), re.MULTILINE))
    assert names - {"mooncake_master_log_records_total"} <= both
    assert {"master_key_count", "valid_get_nums_", "master_allocated_bytes"} <= both


def test_misses_are_not_failures(ours: str):
    call = '{call="get_replica_list"}'
    assert value(ours, f"mooncake_master_call_misses_total{call}") == 1
    assert value(ours, f"mooncake_master_call_failures_total{call}") == 0
    assert value(ours, "mooncake_master_lookups_total") == 2
    assert value(ours, "mooncake_master_lookup_hits_total") == 1


def test_normal_outcomes_are_not_failures(master: MasterProcess):
    """Upstream's names count them as failures, as upstream does."""
    with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes=16 * MIB)) as store:
        store.put("k", b"v")
        for _ in range(3):
            store.put("k", b"v")
            for call in (
                lambda: store.expire("none", 60),
                lambda: store.copy("none", to="nowhere"),
            ):
                with pytest.raises(mooncake.NotFoundError):
                    call()
    text = metrics(master)
    counts = {
        kind: [
            value(text, f'mooncake_master_call_{kind}_total{{call="{call}"}}')
            for call in ("put_start", "set_expiry", "create_copy_task")
        ]
        for kind in ("kept", "misses", "failures")
    }
    assert counts == {"kept": [3, 0, 0], "misses": [0, 3, 3], "failures": [0, 0, 0]}
    assert value(text, "master_put_start_failures_total") == 3


def test_memory_is_shown_by_segment_and_client(ours: str):
    labels = '{segment="localhost:7021",client="localhost:7021"}'
    assert value(ours, f"mooncake_master_segment_used_bytes{labels}") == MIB
    assert value(ours, f"mooncake_master_segment_capacity_bytes{labels}") == 16 * MIB


def test_process_and_durations_are_in_seconds(ours: str):
    assert value(ours, "process_resident_memory_bytes") > MIB
    assert value(ours, "process_open_fds") < value(ours, "process_max_fds")
    name = "mooncake_master_call_duration_seconds"
    assert value(ours, f'{name}_count{{call="put_start"}}') == 1
    assert 0 < value(ours, f'{name}_sum{{call="put_start"}}') < 20
