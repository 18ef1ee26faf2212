"""Masters and lenders of a pool, each a process of its own that is stopped by its id."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The folders of this package and of upstream's, which test-engines.sh installs.
OURS = ROOT / "python"
UPSTREAM = Path(sys.prefix) / "upstream"


@dataclass
class Master:
    """A running master."""

    process: subprocess.Popen[str]
    address: str
    admin_port: int

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if there is none yet."""
        url = f"http://127.0.0.1:{self.admin_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            text = reply.read().decode()
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        self.process.kill()
        self.process.communicate()


@contextmanager
def running_master(
    *flags: str, address: str = "127.0.0.1:0", state_dir: Path | None = None
) -> Iterator[Master]:
    """Run a master at an address, by default at a free port."""
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-m", "mooncake.cli", f"--rpc_address={host}", f"--rpc_port={port}"]
    command += [
        "--metrics_port=0",
        "--metrics_host=127.0.0.1",
        f"--state_dir={state_dir or 'none'}",
    ]
    command += ["--default_kv_lease_ttl=30s", *flags]
    environment = {**os.environ, "PYTHONPATH": str(OURS)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.search(r"ready rpc=(\S+) admin=\S+:(\d+)", line)
        assert ready is not None, f"the master did not start: {line}"
        yield Master(process, ready[1], int(ready[2]))
    finally:
        stop(process)


@contextmanager
def running_upstream_master(folder: Path) -> Iterator[str]:
    """Run the master of upstream, whose log is in a folder, and give its address."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    command = [str(UPSTREAM / "mooncake/mooncake_master"), "--rpc_address=127.0.0.1"]
    command += [f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"]
    command += ["--default_kv_lease_ttl=30000"]
    log = folder / "upstream-master.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(lambda: is_open(ports[0]), 60, lambda: "upstream's master listens")
        yield f"127.0.0.1:{ports[0]}"
        assert process.poll() is None, f"upstream's master ended:\n{log.read_text()[-2000:]}"
    finally:
        stop(process)


def is_open(port: int) -> bool:
    """Return whether a process listens at a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def running_lender(folder: Path, master: str, size: str, **variables: str) -> Iterator[int]:
    """Run a process that lends memory to the pool, and give its id."""
    ports = folder / f"lender-{time.monotonic_ns()}.json"
    command = [sys.executable, "-m", "mooncake.cli_client", "--host=127.0.0.1", "--port=0"]
    command += [f"--master_server_address={master}", "--metadata_server=P2PHANDSHAKE"]
    command += [f"--global_segment_size={size}", f"--ports_file={ports}"]
    environment = {**os.environ, **variables, "PYTHONPATH": str(OURS)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True, env=environment)
    try:
        until(lambda: ports.exists() or process.poll() is not None, 60, lambda: "a lender starts")
        assert process.poll() is None, "the lender ended"
        yield process.pid
    finally:
        stop(process)


# Lends memory by upstream's API, which both packages have.
HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 24, "tcp", "", sys.argv[1])
print(f"setup={code}", flush=True)
sys.stdin.read()
"""


@contextmanager
def running_holder(package: Path, master: str, size: int) -> Iterator[None]:
    """Run a process that lends memory by means of one of the packages."""
    command = [sys.executable, "-c", HOLDER, master, str(size)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any(line == "setup=0\n" for line in lines), "the process lends no memory"
        yield
    finally:
        stop(process)


def write_settings(folder: Path, master: str, **changes: object) -> Path:
    """Write the file that MOONCAKE_CONFIG_PATH names."""
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": "256MB",
        "local_buffer_size": "64MB",
        "protocol": "tcp",
        "device_name": "",
        **changes,
    }
    file = folder / "mooncake_config.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file


def until(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.2)


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Ask a process to end, and kill it if it does not."""
    process.terminate()
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
