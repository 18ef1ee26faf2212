"""Segments mounted after `setup`: files, allocated memory, unmounting and grace periods."""

from __future__ import annotations

import os
import time

import pytest
from conftest import MIB, MasterProcess, set_up, start_master

import mooncake
from mooncake.store import MooncakeDistributedStore as CompatStore

FAILED, INVALID, NO_SPACE = -1, -600, -200


@pytest.fixture
def bare():
    """A store without a segment."""
    store = CompatStore()
    assert set_up(store, "embedded", segment=0) == 0
    yield store
    assert store.close() == 0


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "segment"
    path.write_bytes(bytes(4 * MIB))
    return str(path)


def test_mounted_file_holds_objects(bare: CompatStore, file):
    assert bare.put("k", b"v") == NO_SPACE
    mounted = bare.mount_segment(file, 2 * MIB, offset=MIB)
    assert mounted["ret"] == 0
    (segment,) = mounted["segment_ids"]
    value = os.urandom(MIB)
    assert bare.put("k", value) == 0
    assert bare.get("k") == value
    with open(file, "rb") as opened:
        held = opened.read()
    assert value in held[MIB : 3 * MIB], "the object is in the file"
    assert held[:MIB] + held[3 * MIB :] == bytes(2 * MIB), "and only inside the segment"
    assert bare.unmount_segment([segment]) == 0
    assert bare.get("k") == b""
    assert bare.put("k", b"v") == NO_SPACE
    assert bare.unmount_segment([segment]) == FAILED
    assert bare.unmount_segment([]) == 0


def test_shared_memory_file_can_be_mounted_twice(bare: CompatStore):
    path = f"/dev/shm/mooncake-test-{os.getpid()}"
    with open(path, "wb") as opened:
        opened.truncate(MIB)
    try:
        first, second = (bare.mount_segment(path, 100) for _ in range(2))
        assert (first["ret"], second["ret"]) == (0, 0)
        assert first["segment_ids"] != second["segment_ids"]
    finally:
        os.unlink(path)
    assert bare.unmount_segment(first["segment_ids"] + second["segment_ids"]) == 0


def test_rejects_invalid_mounts(bare: CompatStore, file):
    wrong = [
        ("/nowhere/at/all", MIB, 0),
        (file, MIB, 1),
        (file, 4 * MIB + 1, 0),
        (file, MIB, 4 * MIB),
    ]
    for path, size, offset in wrong:
        assert bare.mount_segment(path, size, offset) == {"ret": FAILED, "segment_ids": []}
        assert path in str(mooncake.last_error())
    assert bare.mount_segment(file, 0) == {"ret": 0, "segment_ids": []}
    assert bare.unmount_segment(["nonsense"]) == FAILED
    assert bare.unmount_segment(["1-2"]) == FAILED
    with pytest.raises(TypeError):
        bare.unmount_segment([], -1)
    for ids in ("1-2", [1], {"1-2"}):
        with pytest.raises(TypeError):
            bare.unmount_segment(ids)  # type: ignore[arg-type]
    for size, offset in ((-1, 0), (MIB, -1), (MIB, 1 << 64), ("1", 0)):
        with pytest.raises(TypeError, match="integer"):
            bare.mount_segment(file, size, offset)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="location"):
        bare.mount_segment(file, MIB, location=None)  # type: ignore[arg-type]


def test_allocated_segments_are_multiples_of_16_mib(bare: CompatStore):
    mounted = bare.allocate_and_mount_segment(16 * MIB + 1)
    assert (mounted["ret"], mounted["allocated_size"]) == (0, 32 * MIB)
    assert bare.put("k", bytes(20 * MIB)) == 0
    assert bare.unmount_segment(mounted["segment_ids"]) == FAILED, "the segment is not a file"
    assert bare.unmount_and_free_segment(mounted["segment_ids"]) == 0
    assert bare.get("k") == b""
    assert bare.unmount_and_free_segment(mounted["segment_ids"]) == FAILED
    refused = {"ret": FAILED, "segment_ids": [], "allocated_size": 0}
    assert bare.allocate_and_mount_segment(0) == refused
    assert bare.allocate_and_mount_segment((1 << 64) - 1) == refused
    with pytest.raises(TypeError, match="size"):
        bare.allocate_and_mount_segment(-1)
    with pytest.raises(TypeError, match="protocol"):
        bare.allocate_and_mount_segment(16 * MIB, 7)  # type: ignore[arg-type]


def test_grace_period_allows_reads_only(bare: CompatStore):
    ids = bare.allocate_and_mount_segment(16 * MIB)["segment_ids"]
    assert bare.put("k", b"v") == 0
    assert bare.unmount_and_free_segment(ids, 2) == 0
    assert bare.get("k") == b"v"
    assert bare.put("l", b"w") == NO_SPACE
    deadline = time.monotonic() + 30
    while bare.get("k") != b"":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # The segment is gone. Its owner may know already, or learn about it by this call.
    assert bare.unmount_and_free_segment(ids) in (0, INVALID)


def test_unmounting_the_absent_disk_tier_succeeds(bare: CompatStore):
    assert bare.unmount_local_disk_segment() == 0
    assert bare.unmount_local_disk_segment(5) == 0
    with pytest.raises(TypeError):
        bare.unmount_local_disk_segment(-1)


@pytest.mark.parametrize("forced", ["0", "1"])
def test_another_process_reaches_a_mounted_file(monkeypatch, file, master: MasterProcess, forced):
    monkeypatch.setenv("MC_FORCE_TCP", forced)
    lender, reader = CompatStore(), CompatStore()
    assert set_up(lender, master.address, segment=0) == 0
    assert lender.mount_segment(file, 4 * MIB)["ret"] == 0
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert set_up(reader, master.address, segment=0) == 0
    value = os.urandom(3 * MIB)
    assert reader.put("in-file", value) == 0
    assert reader.get("in-file") == value
    assert lender.get("in-file") == value
    assert lender.remove("in-file", force=True) == 0
    assert (reader.close(), lender.close()) == (0, 0)


def test_truncated_file_fails_without_a_crash(bare: CompatStore, file):
    assert bare.mount_segment(file, 4 * MIB)["ret"] == 0
    value = os.urandom(3 * MIB)
    assert bare.put("k", value) == 0
    os.truncate(file, 4096)
    assert bare.get("k") == b""
    assert bare.upsert("k", value) < 0
    os.truncate(file, 4 * MIB)


def test_file_is_remounted_after_master_restart(file):
    master = start_master()
    store = CompatStore()
    assert set_up(store, master.address, segment=0) == 0
    assert store.mount_segment(file, 4 * MIB)["ret"] == 0
    port = master.port
    master.kill()
    again = start_master(f"--rpc_port={port}")
    deadline = time.monotonic() + 30
    while store.put("k", b"v") != 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert store.get("k") == b"v"
    store.close()
    again.stop()
