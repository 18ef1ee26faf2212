"""What the settings of the process make of a process group: its engine, its limit of silence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake import _native
from mooncake._pg import devices, settings
from mooncake.engine import TransferEngine


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> settings.ProcessSettings:
    """Fresh settings of the process."""
    fresh = settings.ProcessSettings()
    monkeypatch.setattr(devices, "process_settings", fresh)
    return fresh


def found(monkeypatch: pytest.MonkeyPatch, *chosen: int | None) -> list[dict[str, Any]]:
    """Let the machine have these devices; return the engines that are started."""
    started: list[dict[str, Any]] = []

    def start(**arguments: Any) -> SimpleNamespace:
        started.append(arguments)
        return SimpleNamespace(segment="here:1")

    native = SimpleNamespace(
        rdma_devices=lambda: ([SimpleNamespace(chosen=index) for index in chosen], None),
        Engine=SimpleNamespace(start=start),
    )
    monkeypatch.setattr(devices, "_native", native)
    return started


@pytest.mark.parametrize("chosen", [(), (None,)])
def test_machine_without_devices_needs_no_engine(
    process: settings.ProcessSettings, monkeypatch: pytest.MonkeyPatch, chosen: tuple[None, ...]
) -> None:
    started = found(monkeypatch, *chosen)
    assert devices.engine_with_devices("10.0.0.1") is None
    assert started == []


def test_devices_are_those_of_the_filter(
    process: settings.ProcessSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = found(monkeypatch, None, 1)
    assert devices.engine_with_devices("10.0.0.1") is not None
    process.set_device_filter(["mlx5_1", "mlx5_0"])
    assert devices.engine_with_devices("10.0.0.1") is not None
    assert [arguments["rdma_devices"] for arguments in started] == ["", "mlx5_0,mlx5_1"]
    assert {arguments["name"] for arguments in started} == {"10.0.0.1"}


def test_given_engine_is_used(process: settings.ProcessSettings) -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") == 0
    process.set_engine(engine)
    used = devices.engine_with_devices("127.0.0.1")
    assert isinstance(used, _native.Engine)
    assert used.segment.startswith("127.0.0.1:")


def test_silence_limit_is_the_time_out_of_collectives(process: settings.ProcessSettings) -> None:
    assert process.silence_limit_us == 10_000_000
    process.set_duration("collective_timeout_us", 30_000_000)
    assert process.silence_limit_us == 30_000_000
    process.set_duration("collective_timeout_us", 50_000)
    assert process.silence_limit_us == 3_000_000
