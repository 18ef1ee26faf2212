"""Copies, moves and drains through our own API, in real pools."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from conftest import MIB, MasterProcess

import mooncake
from mooncake import DrainInfo, Store, StoreConfig, TaskInfo
from mooncake._api.blocking.jobs import poll_until_over
from mooncake._api.tasks import PollSchedule

LIMIT_S = 60.0
NOW = datetime.now(UTC)


@pytest.fixture
def pair(quick_master: MasterProcess) -> Iterator[tuple[Store, Store]]:
    """Two stores that give memory to one pool."""
    config = StoreConfig(segment_bytes=32 * MIB)
    with Store(quick_master.address, config) as first, Store(quick_master.address, config) as other:
        yield first, other


def put_on(store: Store, key: str, value: bytes) -> None:
    store.put(key, value, options=mooncake.PutOptions(preferred_segments=[store.name]))


def names(store: Store, key: str) -> set[str]:
    return {copy.segment for copy in store.copies(key)}


def test_copy_outlives_its_source(pair: tuple[Store, Store]) -> None:
    first, other = pair
    put_on(first, "copied", b"value" * 1000)
    [copy] = first.copies("copied")
    assert (copy.segment, copy.size) == (first.name, 5000)
    task = first.copy("copied", to=other.name)
    info = task.wait(LIMIT_S)
    assert (info.id, info.kind, info.state) == (task.id, "copy", "success")
    assert info.is_over
    assert info.created <= info.updated
    assert info.created.tzinfo is not None
    assert other.task(task.id) == task
    assert other.task(task.id).info() == info
    assert names(other, "copied") == {first.name, other.name}
    first.close()
    assert other.get("copied") == b"value" * 1000


def test_move_leaves_only_the_target(pair: tuple[Store, Store]) -> None:
    first, other = pair
    put_on(first, "moved", b"value")
    assert first.move("moved", first.name, other.name).wait(LIMIT_S).kind == "move"
    assert names(first, "moved") == {other.name}


def test_invalid_tasks_are_rejected(pair: tuple[Store, Store]) -> None:
    first, other = pair
    put_on(first, "k", b"value")
    with pytest.raises(mooncake.NotFoundError, match="none"):
        first.copy("none", to=other.name)
    with pytest.raises(mooncake.NotFoundError):
        first.copies("none")
    with pytest.raises(mooncake.InvalidArgumentError):
        first.copy("k", to=[])
    for call in (
        lambda: first.copy("k", to="nowhere:1"),
        lambda: first.move("k", first.name, "nowhere:1"),
    ):
        with pytest.raises(mooncake.NotFoundError, match=r"no segment .* segment=nowhere:1"):
            call()
    with pytest.raises(mooncake.InvalidArgumentError):
        first.move("k", other.name, first.name)
    unknown = first.task((1, 2))
    assert repr(unknown) == "<mooncake.Task 1-2>"
    for call in (unknown.info, lambda: unknown.wait(LIMIT_S)):
        with pytest.raises(mooncake.NotFoundError):
            call()


def test_short_wait_reports_the_task_state() -> None:
    info = TaskInfo((1, 2), "copy", "processing", NOW, NOW, "")
    polls = []

    def poll() -> TaskInfo:
        polls.append(info)
        return info

    seen: list[TaskInfo] = []
    with pytest.raises(mooncake.DeadlineError, match=r"still processing after timeout_s=0\.02"):
        poll_until_over(poll, PollSchedule(0.02, seen.append))
    assert seen == [info], "reported once, because it does not change"
    assert len(polls) >= 2


def test_drain_empties_segment_and_reports_progress(pair: tuple[Store, Store]) -> None:
    first, other = pair
    for at in range(20):
        put_on(first, f"d{at}", bytes([at]) * 10_000)
    seen: list[DrainInfo] = []
    drain = other.drain(first.name)
    info = drain.wait(LIMIT_S, progress=seen.append)
    assert (info.state, info.segments) == ("succeeded", [first.name])
    assert (info.succeeded, info.failed, info.active) == (20, 0, 0)
    assert info.moved_bytes >= 200_000
    assert seen[-1] == info
    assert other.drain_of(drain.id) == drain
    for at in range(20):
        assert names(other, f"d{at}") == {other.name}
        assert other.get(f"d{at}") == bytes([at]) * 10_000


def test_drain_block_waits_and_cancels_on_error(
    pair: tuple[Store, Store],
) -> None:
    first, other = pair
    put_on(first, "k", b"value")
    with other.drain([first.name], to=[other.name]) as drain:
        pass
    assert drain.info().state == "succeeded"
    with pytest.raises(ZeroDivisionError), first.drain(other.name) as broken:
        1 / 0  # noqa: B018
    assert broken.info().is_over
    with pytest.raises(mooncake.NotFoundError, match=r"no segment .* segment=nowhere:1"):
        first.drain("nowhere:1")
    with pytest.raises(mooncake.InvalidArgumentError):
        first.drain([])
    with pytest.raises(mooncake.NotFoundError):
        first.drain_of((1, 2)).info()
