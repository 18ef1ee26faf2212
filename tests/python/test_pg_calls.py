"""Calls of process groups that overlap, differ between ranks, or have wrong arguments."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pg_calls
import pytest
import torch
import torch.distributed as dist
from pg_forked import LIMIT_S, Forked

from mooncake import ep, pg
from mooncake._pg import context, memory, settings
from mooncake._pg.work import MooncakeWork, PendingWorks

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.mark.parametrize(
    ("scenario", "size"),
    [
        ("overlapping_operations", 2),
        ("results_that_cannot_be_stored", 2),
        ("works_dropped_by_threads", 2),
        ("outputs_of_wrong_size", 3),
        ("different_calls", 3),
        ("message_limits", 2),
        ("scaled_reductions", 2),
    ],
)
def test_ranks_call(scenario: str, size: int) -> None:
    with Forked(pg_calls, scenario, size) as ranks:
        ranks.start().check()


def test_operation_behind_a_late_one_fails_soon() -> None:
    with Forked(pg_calls, "operation_that_one_rank_never_calls", 2) as ranks:
        ranks.start().expect("late", 0)
        ranks.send("go on", 1)
        ranks.check()


def test_removed_rank_gets_an_error_of_torch() -> None:
    with Forked(pg_calls, "removed_rank_gets_torchs_error", 2) as ranks:
        ranks.start().expect("member", 1)
        ranks.send("remove", 0)
        ranks.expect("removed", 0)
        ranks.send("removed", 1)
        ranks.expect("done", 1)
        ranks.send("end", 0)
        ranks.check()


class FakeCompletion:
    """An operation that ends when the test says so."""

    def __init__(self) -> None:
        self.has_ended = False

    def done(self) -> bool:
        return self.has_ended

    def wait(self, _: float) -> bool:
        return self.has_ended

    def error(self) -> None:
        return None

    def failed_ranks(self) -> list[int]:
        return []


class FakeStream:
    """A stream of a device, which notes what it waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, []  # type: ignore[var-annotated]

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other.name)

    def wait_event(self, event: str) -> None:
        self.waits.append(event)

    def record_event(self) -> str:
        return "copied back"

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class DeviceTensor:
    """A tensor in memory of a device: enough for a copy back."""

    shape, is_cuda = (2,), False

    def detach(self) -> DeviceTensor:
        return self

    def copy_(self, host: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.content = host.tolist()

    def record_stream(self, stream: FakeStream) -> None:
        pass


def test_each_stream_that_waits_for_a_work_waits_for_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = threading.local()
    streams.current = FakeStream("main")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **_: FakeStream("side"))
    monkeypatch.setattr(memory.Staging, "_streams", {})
    tensor: Any = DeviceTensor()
    staging = memory.Staging(torch.device("cuda:0"))
    held = memory.HostMemory(tensor, torch.tensor([1.0, 2.0]), staging)
    completion = FakeCompletion()
    work = MooncakeWork(completion, [held], [], [tensor], 1.0, PendingWorks(2))
    completion.has_ended = True
    assert work.is_completed()
    first = streams.current
    assert first.waits == ["copied back"]
    assert tensor.content == [1.0, 2.0]
    second = streams.current = FakeStream("second")
    assert work.wait()
    assert second.waits == ["copied back"]
    seen = []

    def wait_elsewhere() -> None:
        streams.current = FakeStream("of a thread")
        work.wait()
        seen.extend(streams.current.waits)

    thread = threading.Thread(target=wait_elsewhere)
    thread.start()
    thread.join()
    assert seen == ["copied back"]


class FailingMemory:
    """Memory whose tensor cannot be written."""

    def store(self) -> bool:
        raise RuntimeError("read-only")

    def overlaps(self, _: object) -> bool:
        return False


def test_failure_of_a_dropped_work_is_logged_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for is_ordered in (True, False):
        caplog.clear()
        pending = PendingWorks(2)
        completion = FakeCompletion()
        failing: Any = FailingMemory()
        dropped = MooncakeWork(completion, [failing], [], [], 1.0, pending, is_ordered)
        del dropped
        gc.collect()
        completion.has_ended = True
        with caplog.at_level(logging.WARNING, "mooncake.pg"):
            later = MooncakeWork(FakeCompletion(), [], [], [], 1.0, pending)
            gc.collect()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "read-only" in caplog.text
        later._completion.has_ended = True
        assert later.wait()


def test_failure_of_a_work_is_raised_where_it_is_waited_for() -> None:
    completion = FakeCompletion()
    failing: Any = FailingMemory()
    work = MooncakeWork(completion, [failing], [], [], 1.0, PendingWorks(2))
    completion.has_ended = True
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="read-only"):
            work.wait()
    assert not work.is_success()
    assert isinstance(work.exception(), RuntimeError)
    later = MooncakeWork(completion, [failing], [], [], 1.0, PendingWorks(2))
    completion.add_done_callback = lambda call: call()  # type: ignore[attr-defined]
    future = later.get_future()
    with pytest.raises(RuntimeError, match="read-only"):
        future.wait()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> settings.ProcessSettings:
    """Settings of a process without a group."""
    process = settings.ProcessSettings()
    monkeypatch.setattr(context, "process_settings", process)
    monkeypatch.setattr(context, "_current", None)
    monkeypatch.setattr(context, "_made", 0)
    return process


class FakeNative:
    """The native side: notes how it is opened."""

    address = "127.0.0.1:7"

    def __init__(self, opened: list[Any], **options: Any) -> None:
        opened.append(options)

    def close(self) -> None:
        pass


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    native = SimpleNamespace(CollectiveContext=lambda **options: FakeNative(calls, **options))
    monkeypatch.setattr(context, "_native", native)
    monkeypatch.setattr(context, "engine_with_devices", lambda _: None)
    return calls


def make(store: Any, rank: int) -> Any:
    return context.context_for(store, rank, joins=False, deadline=0.0)


def test_loopback_address_for_another_host_is_refused(
    fresh: settings.ProcessSettings,
    opened: list[Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    make(store, 0)
    # Another rank of this host.
    monkeypatch.setattr(context, "_current", None)
    monkeypatch.setattr(context, "_made", 0)
    make(store, 1)
    assert [options["host"] for options in opened] == ["127.0.0.1", "127.0.0.1"]
    # One of another host.
    monkeypatch.setattr(context, "_current", None)
    monkeypatch.setattr(context, "_made", 0)
    monkeypatch.setattr(context, "_own_network", lambda: "elsewhere")
    with pytest.raises(RuntimeError, match=r"global rank 0 has the address 127.*set_host_ip"):
        make(store, 1)
    assert len(opened) == 2


def test_rank_without_a_server_listens_towards_the_coordinator() -> None:
    store = dist.HashStore()
    assert context._host(store, None) == "127.0.0.1"
    assert context._host(store, "[::1]:80") in {"::1", "127.0.0.1"}
    with pytest.raises(RuntimeError, match=r"this rank has the address 127\.0\.0\.1"):
        context._check_reachable("10.0.0.1:5", "127.0.0.1", is_same_network=False)
    context._check_reachable("10.0.0.1:5", "10.0.0.2", is_same_network=False)


def test_second_world_of_a_process_is_an_error_at_each_rank(
    fresh: settings.ProcessSettings, opened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, other = dist.HashStore(), dist.HashStore()
    first = make(dist.PrefixStore("default", world), 0)
    assert make(dist.PrefixStore("sub", world), 0) is first
    with pytest.raises(RuntimeError, match="one world per process"):
        make(other, 1)
    # It has the same rank in both: a further group of one world, if all ranks are in it already.
    assert make(other, 0) is first
    monkeypatch.setattr(context, "_current", None)
    monkeypatch.setattr(context, "_made", 0)
    with pytest.raises(RuntimeError, match="rank of another one already"):
        make(other, 1)
    assert len(opened) == 1


def test_wait_for_a_world_says_that_there_is_one_per_process(
    fresh: settings.ProcessSettings, opened: list[Any]
) -> None:
    with pytest.raises(TimeoutError, match="one per process"):
        make(dist.HashStore(), 1)


def test_window_of_agreement_is_never_shorter_than_silence() -> None:
    process = settings.ProcessSettings()
    assert process.change_limit_s == 30
    process.set_duration("reconciliation_window_us", 45_000_000)
    assert process.change_limit_s == 45
    process.set_duration("collective_timeout_us", 60_000_000)
    assert process.change_limit_s == 120


def test_names_of_upstream_are_there() -> None:
    assert pg.ProposeViewUpdateResponse is pg.ViewUpdateResponse
    for module in (pg, ep):
        assert torch.__version__.startswith(module.torch_version)
        assert module.version_suffix == "_" + module.torch_version.replace(".", "_")
    for name in ("calculate_buffer_size", "get_gid", "is_roce", "use_fast_path"):
        with pytest.raises(Exception, match="GPU"):
            getattr(ep.ElasticBuffer, name)()


def test_time_limit_of_a_group_must_be_positive() -> None:
    from mooncake._pg.group import MooncakeProcessGroup

    with pytest.raises(ValueError, match="positive"):
        MooncakeProcessGroup.set_timeout(SimpleNamespace(), timedelta(0))  # type: ignore[arg-type]


def test_lost_rank_0_is_named_where_a_group_is_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(dist.DistBackendError, match=r"global rank 0 cannot be reached: address="):
        context._open(1, "127.0.0.1", address, time.monotonic() + 2)
