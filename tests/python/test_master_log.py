"""What the master and its clients log at the default level."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import MIB, READY

import mooncake

LENDER = """
import sys, mooncake
metadata = sys.argv[2] if len(sys.argv) > 2 else "P2PHANDSHAKE"
config = mooncake.StoreConfig(segment_bytes=16 << 20, name="localhost:7701", metadata=metadata)
with mooncake.Store(sys.argv[1], config) as store:
    store.put("k", bytes(1 << 20))
    # The answer tells how much of the log is on disk.
    store.put("l", b"v")
    print("ready", flush=True)
    sys.stdin.read()
"""


class Logged:
    """A program whose standard error goes to a file."""

    def __init__(self, path: Path, *command: str, **environment: str) -> None:
        self.path = path
        unset = ("MC_LOG_LEVEL", "MOONCAKE_LOG", "MOONCAKE_MASTER_TOKEN")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        with path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **environment},
            )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()

    def text(self) -> str:
        return self.path.read_text()

    def eventually(self, pattern: str, within_s: float = 20) -> re.Match[str]:
        """Wait for a line of the log."""
        end = time.monotonic() + within_s
        while True:
            if found := re.search(pattern, self.text()):
                return found
            assert time.monotonic() < end, (pattern, self.text())
            time.sleep(0.02)

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def logged_master(path: Path, *flags: str, **environment: str) -> Iterator[tuple[Logged, str]]:
    """A master and its address."""
    own = ("--rpc_address=127.0.0.1", "--metrics_port=0", "--metrics_host=127.0.0.1")
    master = Logged(path, "-m", "mooncake.cli", *own, *flags, **environment)
    found = READY.search(master.ready)
    assert found is not None, master.ready
    try:
        yield master, found[1]
    finally:
        master.end()


def test_expired_client_is_logged_with_what_it_held(tmp_path: Path) -> None:
    with logged_master(tmp_path / "log", "--rpc_port=0", "--client_ttl=1") as (master, address):
        lender = Logged(tmp_path / "lender", "-c", LENDER, address)
        assert lender.ready == "ready\n"
        assert "localhost:7701" not in master.text(), "joins are not logged at the default level"
        lender.end(signal.SIGKILL)
        line = master.eventually(r".*a client expired.*")[0]
        assert " WARN " in line
        assert 'client="localhost:7701"' in line
        assert re.search(rf"segments=1 copies=2 bytes={MIB + 8}\b", line)


def test_wrong_tokens_are_logged_once_a_minute(tmp_path: Path) -> None:
    secret = {"MOONCAKE_MASTER_TOKEN": "the token of this test"}
    with logged_master(tmp_path / "log", "--rpc_port=0", **secret) as (master, address):
        for token in ("another token, wrong", None, "another token, wrong"):
            with pytest.raises(mooncake.MooncakeError):
                mooncake.Store(address, mooncake.StoreConfig(token=token, retry_s=0)).close()
        assert " WARN " in master.eventually(r".*refused a client.*")[0]
        assert master.text().count("refused a client") == 1


def test_loss_of_the_log_is_logged_on_both_sides(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    flags = ("--rpc_port=0", f"--state_dir={first}", "--log_sync=always")
    with logged_master(tmp_path / "a", *flags) as (_, address):
        lender = Logged(tmp_path / "lender", "-c", LENDER, address)
        assert lender.ready == "ready\n"
    port = address.rpartition(":")[2]
    others = (f"--rpc_port={port}", f"--state_dir={second}")
    with logged_master(tmp_path / "b", *others) as (master, _):
        line = master.eventually(r".*clients come with memory of another log.*")[0]
        assert " WARN " in line
        assert 'client="localhost:7701" count=1' in line
        line = lender.eventually(r".*the master did not know this memory.*")[0]
        assert " WARN " in line
        assert "segments=1" in line
        lender.end()


def test_info_shows_who_joins_and_leaves(tmp_path: Path) -> None:
    level = {"MC_LOG_LEVEL": "info"}
    with logged_master(tmp_path / "log", "--rpc_port=0", **level) as (master, address):
        config = mooncake.StoreConfig(segment_bytes=16 * MIB, name="localhost:7702")
        with mooncake.Store(address, config):
            master.eventually(r'a client registered client="localhost:7702" is_new=true')
            master.eventually(rf'mounts memory client="localhost:7702" segments=1 bytes={16 * MIB}')
        master.eventually(r'a client left client="localhost:7702"')


def test_lost_metadata_server_is_a_warning_once(tmp_path: Path) -> None:
    served = [f"--http_metadata_server_{option}" for option in ("host=127.0.0.1", "port=0")]
    served.append("--enable_http_metadata_server=true")
    with logged_master(tmp_path / "a", "--rpc_port=0", *served) as (master, address):
        found = READY.search(master.ready)
        assert found is not None
        where = f"http://{found[2]}/metadata"
        level = {"MOONCAKE_LOG": "warn,mooncake_transfer_engine=debug"}
        lender = Logged(tmp_path / "lender", "-c", LENDER, address, where, **level)
        assert lender.ready == "ready\n"
        master.end(signal.SIGKILL)
    port = address.rpartition(":")[2]
    with logged_master(tmp_path / "b", f"--rpc_port={port}"):
        text = "the metadata server still lists memory"
        lender.eventually(rf"WARN .*{text} that is gone")
        lender.eventually(rf"(?s)(DEBUG .*{text}.*){{2}}")
        seen = lender.text()
        lender.end()
    assert seen.count(f"{text} that is gone") == 1
    assert "while peers still used it" not in seen
