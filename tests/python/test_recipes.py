"""The everyday tasks of the documentation run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_programs import run_snippet

import mooncake

FOLDER = Path(__file__).resolve().parents[2] / "docs/how-to"


def blocks(page: str, language: str) -> list[str]:
    text = (FOLDER / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


PAGES = ("recipes.md", "files.md", "checkpoints.md")
PYTHON = [block for page in PAGES for block in blocks(page, "python")]
SHELL = [block for page in PAGES for block in blocks(page, "bash")]
# A safetensors file with one tensor of two bytes.
HEADER = b'{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'


def run(command: list[str], folder: Path, **variables: str) -> None:
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_runs(number: int, tmp_path: Path) -> None:
    done = run_snippet(PYTHON[number], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def pool() -> Iterator[mooncake.Store]:
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes="64MB")) as store:
        store.put_many({"a/large": bytes(1000), "KEY": b"value"})
        yield store


@pytest.mark.parametrize("number", range(len(SHELL)))
def test_commands_run(number: int, pool: mooncake.Store, tmp_path: Path) -> None:
    script = f'set -euo pipefail\nmooncake() {{ "{sys.executable}" -m mooncake "$@"; }}\n'
    model = len(HEADER).to_bytes(8, "little") + HEADER + b"12"
    (tmp_path / "model.safetensors").write_bytes(model)
    run(["bash", "-c", script + SHELL[number]], tmp_path, MOONCAKE_MASTER=pool.master_address)
