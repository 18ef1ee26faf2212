"""Shared fixtures and helpers: master processes, stores, and scripts in new interpreters."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import mooncake
from mooncake.store import MooncakeDistributedStore

# For the stores of the tests and of the scripts that the tests run.
os.environ.setdefault("MOONCAKE_STORE_CHECKSUM", "1")
# The masters of tests write no state into the home directory.
os.environ.setdefault("MOONCAKE_STATE_DIR", "none")

READY = re.compile(r"mooncake_master ready rpc=(\S+)(?:.* metadata=(\S+))?")
MIB = 1 << 20
# A limit for what must not wait for a timeout: far above what it takes on a loaded machine, and
# below the default deadline of a call (30 s).
PROMPT_S = 25


@dataclass
class MasterProcess:
    """A master in its own process, on free ports."""

    process: subprocess.Popen[str]
    address: str
    metadata: str
    ready: str = ""
    log: list[str] = field(default_factory=list)
    host: str = "127.0.0.1"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def admin(self) -> str:
        """The URL of the admin port."""
        found = re.search(r" admin=\S+:(\d+)", self.ready)
        assert found is not None, self.ready
        return f"http://{self.host}:{found[1]}"

    def kill(self) -> None:
        self.process.kill()
        self.stop()

    def stop(self) -> int:
        """Stop the master, if it still runs, and return its exit code."""
        self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(10)


def start_master(*flags: str, host: str = "127.0.0.1", within: Sequence[str] = ()) -> MasterProcess:
    """Start a master and wait for its ready line; `within` begins the command line."""
    command = [
        *within,
        sys.executable,
        "-m",
        "mooncake.cli",
        f"--rpc_address={host}",
        "--rpc_port=0",
        "--metrics_port=0",
        "--enable_http_metadata_server=true",
        f"--http_metadata_server_host={host}",
        "--http_metadata_server_port=0",
        *flags,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if ready := READY.search(line):
            return MasterProcess(process, ready[1], ready[2] or "", line, host=host)
    process.kill()
    raise AssertionError(f"the master did not start: exit code {process.wait(10)}")


@pytest.fixture(scope="module")
def master() -> Iterator[MasterProcess]:
    """A master for the tests of a module, with a lease short enough to wait for."""
    master = start_master("--default_kv_lease_ttl=200ms")
    yield master
    master.stop()


@pytest.fixture(scope="module")
def quick_master() -> Iterator[MasterProcess]:
    """A master whose leases expire at once."""
    master = start_master("--default_kv_lease_ttl=1ms")
    yield master
    master.stop()


@pytest.fixture
def mortal_master() -> Iterator[MasterProcess]:
    """A master that the test may kill."""
    master = start_master()
    yield master
    master.stop()


@pytest.fixture
def store() -> Iterator[mooncake.Store]:
    """A store of our own API, with its own pool."""
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        yield store


@pytest.fixture
def compat_store() -> Iterator[MooncakeDistributedStore]:
    """A store of upstream's API, with its own pool."""
    store = MooncakeDistributedStore()
    assert set_up(store, "embedded") == 0
    yield store
    store.close()


def set_up(
    store: MooncakeDistributedStore,
    master: str,
    *,
    segment: int = 64 * MIB,
    metadata: str = "P2PHANDSHAKE",
    host: str = "localhost",
) -> int:
    """Call `setup` with the usual arguments."""
    return store.setup(host, metadata, segment, 16 * MIB, "tcp", "", master)


def freeze(pid: int) -> None:
    """Stop a process, and wait until all its threads are stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while not all(is_stopped(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


def is_stopped(task: Path) -> bool:
    # The state follows the name, which is in parentheses.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def run_script(
    source: str, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter."""
    # From CPython 3.12 on, every fork of a process with threads warns.
    no_fork_warning = "ignore:This process:DeprecationWarning"
    return subprocess.run(
        [sys.executable, "-W", no_fork_warning, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **(env or {})},
    )


def assert_quiet(done: subprocess.CompletedProcess[str]) -> None:
    """Assert that the script exited with 0 and wrote nothing to standard error."""
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
