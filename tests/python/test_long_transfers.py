"""Transfers that take longer than a write window, and the progress that they show."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess, start_master
from test_command_objects import shown_by

import mooncake
from mooncake._command.progress import Progress

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"
# Six rounds of a transfer.
SIZE = 384 * MIB
ROUND = 64 * MIB
# A holder that is silent for longer is left for another one.
PAUSE_S = 0.8
WINDOW_S = 10 / 3
LENDER = """
import sys
import mooncake
config = mooncake.StoreConfig(segment_bytes="450MB")
with mooncake.Store(sys.argv[1], config):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hasty() -> Iterator[MasterProcess]:
    """A master whose write window is `WINDOW_S`: puts that took 8 s may be displaced."""
    master = start_master("--put_start_discard_timeout_sec=8")
    yield master
    master.stop()


@pytest.fixture
def lender(hasty: MasterProcess) -> Iterator[subprocess.Popen[str]]:
    """A process that lends memory to the pool."""
    command = [sys.executable, "-c", LENDER, hasty.address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.send_signal(signal.SIGCONT)
        process.terminate()


def moved(store: mooncake.Store, direction: str) -> int:
    counts = store._native.metrics()["by_transport"].values()
    return sum(count[direction] for count in counts)


class Brake:
    """Stops a process for a while after each round of a transfer that a store makes."""

    def __init__(self, store: mooncake.Store, direction: str, pid: int) -> None:
        self.store, self.direction, self.pid = store, direction, pid
        self.begun = moved(store, direction)
        self.pauses = 0
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        seen = self.begun
        while not self.is_over.wait(0.001):
            now = moved(self.store, self.direction)
            if now == seen:
                continue
            seen = now
            os.kill(self.pid, signal.SIGSTOP)
            self.is_over.wait(PAUSE_S)
            os.kill(self.pid, signal.SIGCONT)
            self.pauses += 1

    def __enter__(self) -> Brake:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        self.thread.join()


@pytest.mark.timeout(180)
@pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
def test_slow_put_that_makes_progress_succeeds(hasty: MasterProcess, lender: subprocess.Popen[str]):
    # Over TCP the holder moves the bytes, so that stopping it makes the transfer slow. The whole
    # transfer has less time than it takes; each of its rounds has enough.
    config = mooncake.StoreConfig(is_tcp_forced=True, transfer_timeout_s=3)
    with mooncake.Store(hasty.address, config) as store:
        value = bytes(SIZE)
        with Brake(store, "written_bytes", lender.pid) as brake:
            begun = time.monotonic()
            assert store.put("k", value)
            took = time.monotonic() - begun
        assert brake.pauses >= 4
        assert took > WINDOW_S
        assert store.size("k") == SIZE


@pytest.mark.timeout(180)
@pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
def test_slow_read_that_makes_progress_succeeds(
    hasty: MasterProcess, lender: subprocess.Popen[str]
):
    config = mooncake.StoreConfig(is_tcp_forced=True, transfer_timeout_s=2)
    with mooncake.Store(hasty.address, config) as store:
        assert store.put("k", bytes(4 * ROUND))
        with Brake(store, "read_bytes", lender.pid) as brake:
            begun = time.monotonic()
            assert len(memoryview(store.get_buffer("k"))) == 4 * ROUND
            took = time.monotonic() - begun
        assert brake.pauses >= 3
        assert took > 2


@pytest.mark.parametrize("is_tcp", [False, True])
def test_counters_move_during_one_put(is_tcp: bool):
    master = start_master()
    command = [sys.executable, "-c", LENDER, master.address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        with subprocess.Popen(command, text=True, **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            config = mooncake.StoreConfig(is_tcp_forced=is_tcp)
            with mooncake.Store(master.address, config) as store:
                seen, is_over = set[int](), threading.Event()

                def watch() -> None:
                    while not is_over.wait(0.002):
                        seen.add(moved(store, "written_bytes"))

                watcher = threading.Thread(target=watch)
                watcher.start()
                assert store.put("k", bytes(3 * ROUND))
                is_over.set()
                watcher.join()
                transports = store._native.metrics()["by_transport"]
                assert list(transports) == ["tcp" if is_tcp else "shm"]
                assert [row["done"] for row in transports.values()] == [1], "one copy"
            assert {ROUND, 2 * ROUND} <= seen
            process.terminate()
    finally:
        master.stop()


class Clock:
    """Time that the test moves, and a terminal or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)


def test_progress_has_rate_time_left_and_an_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    clock = Clock(monkeypatch, is_terminal=True)
    progress = Progress("put", "k", 400 * MIB, None)
    progress.advance(1)
    assert capsys.readouterr().err == "", "short transfers show no progress"
    clock.now += 2
    progress.advance(100 * MIB)
    assert capsys.readouterr().err == (
        "\rput k: 100 MiB of 400 MiB (25%), 50 MiB/s, 6.0 s left\033[K"
    )
    clock.now += 18
    progress.advance(100 * MIB)
    assert capsys.readouterr().err.endswith("(25%), 0 B/s, waiting\033[K"), "the last seconds"
    progress.close(400 * MIB)
    assert capsys.readouterr().err == "\r\033[Kput k: 400 MiB in 20 s, 20 MiB/s\n"


@pytest.mark.parametrize(
    ("is_terminal", "wanted", "lines"), [(False, None, 0), (False, True, 2), (True, False, 0)]
)
def test_progress_is_quiet_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_terminal: bool,
    wanted: bool | None,
    lines: int,
):
    clock = Clock(monkeypatch, is_terminal=is_terminal)
    progress = Progress("get", "k", 100, wanted)
    clock.now += 3
    progress.advance(50)
    progress.close(100)
    shown = capsys.readouterr().err
    assert (len(shown.splitlines()), "\r" in shown) == (lines, False)


def test_commands_end_with_a_line(master: MasterProcess, tmp_path: Path):
    lends = mooncake.StoreConfig(segment_bytes=64 * MIB)
    file = tmp_path / "file"
    file.write_bytes(bytes(3 * MIB))
    with mooncake.Store(master.address, lends):

        def line(*words: str) -> list[str]:
            command = [sys.executable, "-m", "mooncake", *words, f"--master={master.address}"]
            return shown_by(command).decode().splitlines()

        rate = r"3 MiB in [\d.]+ s, [\d.]+ [KMG]iB/s"
        assert re.fullmatch(f"put k: {rate}", *line("put", "k", str(file)))
        assert re.fullmatch(f"get k: {rate}", *line("get", "k", str(tmp_path / "copy")))
        assert re.fullmatch(f"cp k: {rate}", *line("cp", "k", "k2"))
        assert line("put", "k3", str(file), "--no-progress") == []
