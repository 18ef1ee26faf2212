"""Upstream's calls for copies, moves and replica descriptors, in real pools."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from conftest import MIB, MasterProcess, set_up

from mooncake.store import (
    Descriptor,
    MooncakeDistributedStore,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    TaskStatus,
    TaskType,
)

MISSING, INVALID, UNKNOWN = -704, -600, -1400
Pair = tuple[MooncakeDistributedStore, MooncakeDistributedStore]


@pytest.fixture
def pair(quick_master: MasterProcess) -> Iterator[Pair]:
    """Two stores that give memory to one pool."""
    stores = MooncakeDistributedStore(), MooncakeDistributedStore()
    for store in stores:
        assert set_up(store, quick_master.address, segment=16 * MIB) == 0
    yield stores
    for store in stores:
        store.remove_all(force=True)
        store.close()


def prefer(store: MooncakeDistributedStore) -> ReplicateConfig:
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    return config


def places(store: MooncakeDistributedStore, key: str) -> set[str]:
    """Return the stores that have a replica."""
    replicas = store.get_replica_desc(key)
    return {
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint for replica in replicas
    }


def wait_for_end(store: MooncakeDistributedStore, task: tuple[int, int]) -> QueryTaskResponse:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        response, code = store.query_task(task)
        assert code == 0
        assert response is not None
        if response.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
            return response
        time.sleep(0.01)
    raise AssertionError("the task did not end")


def test_copy_outlives_its_source(pair: Pair) -> None:
    first, second = pair
    value = bytes(range(256)) * 4096
    assert first.put("copied", value, prefer(first)) == 0
    origin = places(first, "copied")
    task, code = second.create_copy_task("copied", [second.get_hostname()])
    assert code == 0
    response = wait_for_end(second, task)
    assert (response.id, response.type) == (task, TaskType.REPLICA_COPY)
    assert (response.status, response.message) == (
        TaskStatus.SUCCESS,
        "Task completed successfully",
    )
    assert 0 < response.created_at_ms_epoch <= response.last_updated_at_ms_epoch
    assert repr(response).startswith(f"QueryTaskResponse(id={task[0]}-{task[1]}, type=0, status=3,")
    copies = places(second, "copied")
    assert len(copies) == 2, f"{origin=} {copies=} {first.get_hostname()=} {second.get_hostname()=}"
    first.close()
    assert second.get("copied") == value


def test_move_leaves_only_the_target(pair: Pair) -> None:
    first, second = pair
    assert first.put("moved", b"value", prefer(first)) == 0
    task, code = first.create_move_task("moved", first.get_hostname(), second.get_hostname())
    assert code == 0
    assert wait_for_end(first, task).type is TaskType.REPLICA_MOVE
    assert first.put("there", b"value", prefer(second)) == 0
    described = first.batch_get_replica_desc(["moved", "there"])
    [moved], [there] = described["moved"], described["there"]
    endpoints = [
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for replica in (moved, there)
    ]
    assert endpoints[0] == endpoints[1]
    assert first.get("moved") == b"value"


def test_invalid_tasks_have_their_code(pair: Pair) -> None:
    first, second = pair
    here, there = first.get_hostname(), second.get_hostname()
    assert first.put("k", b"value", prefer(first)) == 0
    assert first.create_copy_task("none", [there]) == ((0, 0), MISSING)
    assert first.create_copy_task("k", []) == ((0, 0), INVALID)
    assert first.create_copy_task("k", ["nowhere:1"]) == ((0, 0), INVALID)
    assert first.create_move_task("none", here, there) == ((0, 0), MISSING)
    assert first.create_move_task("k", here, here) == ((0, 0), INVALID)
    assert first.create_move_task("k", there, here) == ((0, 0), INVALID)
    assert first.query_task((1, 2)) == (None, UNKNOWN)
    for wrong in ([1, 2], "1-2", (1,), (1, "2"), (-1, 2)):
        with pytest.raises(TypeError):
            first.query_task(wrong)  # type: ignore[arg-type]


def test_replica_descriptors_are_complete(pair: Pair) -> None:
    first, _ = pair
    assert first.put("k", b"abc", prefer(first)) == 0
    [replica] = first.get_replica_desc("k")
    assert replica.status is ReplicaStatus.COMPLETE
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    assert not replica.is_local_disk_replica()
    buffer = replica.get_memory_descriptor().buffer_descriptor
    assert buffer.size == 3
    assert buffer.transport_endpoint.startswith("localhost:")
    assert buffer.buffer_address > 0
    assert repr(buffer).startswith("<Descriptor size=3 buffer_address=")
    with pytest.raises(RuntimeError, match="Expected DiskDescriptor"):
        replica.get_disk_descriptor()
    assert first.get_replica_desc("none") == []
    assert list(first.batch_get_replica_desc(["k", "none"])) == ["k"]
    assert first.batch_get_replica_desc([]) == {}
    assert Descriptor().size == 0
    with pytest.raises(TypeError):
        ReplicaDescriptor()


def test_replicas_are_cleared(pair: Pair) -> None:
    first, second = pair
    config = ReplicateConfig()
    config.replica_num = 2
    assert first.put("k", b"value", config) == 0
    assert first.batch_replica_clear(["k", "none"], second.get_hostname()) == ["k"]
    deadline = time.monotonic() + 60
    while first.batch_replica_clear(["k"]) != ["k"]:
        assert time.monotonic() < deadline
    assert first.is_exist("k") == 0
