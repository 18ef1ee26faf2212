"""Real metadata servers for tests, each in its own process on free ports."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


@contextlib.contextmanager
def running_etcd(folder: Path) -> Iterator[str]:
    """Run etcd and yield its address."""
    with etcd_process(folder) as (address, _):
        yield address


@contextlib.contextmanager
def etcd_process(
    folder: Path, *, host: str = "127.0.0.1", within: Sequence[str] = ()
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run etcd and yield its address and process; `within` begins the command line."""
    port, peer_port = free_ports()
    own, peer = f"http://{host}:{port}", f"http://{host}:{peer_port}"
    flags = {
        "data-dir": folder / "data",
        "listen-client-urls": own,
        "advertise-client-urls": own,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    with running(folder, port, "etcd", *words, host=host, within=within) as process:
        yield f"{host}:{port}", process


@contextlib.contextmanager
def running_redis(folder: Path, password: str) -> Iterator[str]:
    """Run Redis and yield its address."""
    port, _ = free_ports()
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--requirepass", password]
    with running(folder, port, "redis-server", *flags):
        yield f"127.0.0.1:{port}"


PACKAGES = {"etcd": "etcd-server", "redis-server": "redis-server"}


@contextlib.contextmanager
def running(
    folder: Path,
    port: int,
    program: str,
    *flags: str,
    host: str = "127.0.0.1",
    within: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program until the block ends; skip the test where it is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}: install the package {PACKAGES[program]}")
    with (
        open(folder / "log", "w") as log,
        subprocess.Popen([*within, program, *flags], stdout=log, stderr=log, cwd=folder) as process,
    ):
        try:
            deadline = time.monotonic() + 30
            while not is_listening(port, host):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


def free_ports() -> tuple[int, int]:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0
