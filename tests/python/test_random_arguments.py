"""Random arguments lead to results or to `TypeError`s, and never to a crash or a panic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MIB, MasterProcess

import mooncake

PROGRAM = Path(__file__).with_name("random_arguments.py")
ROUNDS = "20"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("path", ["embedded", "shm", "tcp"])
def test_random_arguments_never_crash(master: MasterProcess, path: str, seed: int) -> None:
    environment = {**os.environ, "MC_FORCE_TCP": "1" if path == "tcp" else "0"}
    address = "embedded" if path == "embedded" else master.address
    with mooncake.Store(master.address, mooncake.StoreConfig(segment_bytes=64 * MIB)):
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(seed), ROUNDS, address],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "panicked" not in done.stderr
    assert int(done.stdout) >= 40 * int(ROUNDS)
