"""The programs of `examples/` run and print what they promise."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
OUTPUT = {
    "asyncio_server.py": r"stored, value-7\n20 clients were served\n",
    "checkpoint_broadcast.py": r"3 processes loaded weights/7: 6 tensors\n",
    "kv_blocks_numpy.py": r"4 of 6 blocks were cached: 64 tokens\n",
    "kv_blocks_torch.py": r"3 blocks of 131072 bytes moved into blocks \[20, 21, 30\]\n",
    "metrics_scraping.py": r"8 objects, 12\.5% of 64 MiB, hit rate 100%\n",
    "multiprocessing_pool.py": r"12 arrays squared, the last sums to 121000\n",
    "pipeline_two_processes.py": (
        r"(batch/\d: \(4, 256\) int32, sum \d+\n){5}left in the store: \[\]\n"
    ),
    "prefill_decode_engine.py": r"4 blocks of 32768 bytes were written by SpawnProcess-1\n",
    "rl_rollout_exchange.py": r"(prompt \d: 2 rows of reward \d\.0\n){3}",
}
NODE = "grpc_list_objects.mjs"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program with no variable of ours but those of the tests."""
    environment = {**os.environ, "MOONCAKE_STATE_DIR": "none"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, env=environment
    )


def test_every_example_is_listed_and_run() -> None:
    programs = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    assert programs == {*OUTPUT, NODE}
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w.]+)`", page, re.MULTILINE)) == programs


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", sorted(OUTPUT))
def test_example_prints_what_it_promises(name: str) -> None:
    ended = run(sys.executable, str(EXAMPLES / name))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(OUTPUT[name], ended.stdout), ended.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_objects_are_listed_from_javascript() -> None:
    with mooncake.Store() as store:
        store.put_many({f"list/{number:04}": b"v" * (number + 1) for number in range(200)})
        store.put("other", b"v")
        ended = run("node", str(EXAMPLES / NODE), store.master_address, "list/")
        assert (ended.returncode, ended.stderr) == (0, "")
        lines = ended.stdout.splitlines()
        assert lines == [f"list/{number:04} {number + 1}" for number in range(200)]
        ended = run("node", str(EXAMPLES / NODE), store.master_address, "none/")
        assert (ended.returncode, ended.stdout) == (0, "0 objects\n")
        address = store.master_address
    ended = run("node", str(EXAMPLES / NODE), address)
    assert ended.returncode == 1
    assert address in ended.stderr
