"""The Python lines of the README and of the guides, and common uses, pass strict type checkers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/guide").glob("*.md")),
    *sorted((ROOT / "docs/tutorials").glob("*.md")),
    ROOT / "docs/how-to/checkpoints.md",
    ROOT / "docs/how-to/recipes.md",
    ROOT / "docs/how-to/files.md",
]

# What the guides do not show: lines that a checker must accept.
USES = """
import numpy as np
import mooncake

def keys_are_text(store: mooncake.Store) -> list[str]:
    return [key for key in store.keys("a/") if key.startswith("a/")]

def keys_can_be_bytes(store: mooncake.Store) -> list[bytes]:
    return list(store.keys(as_bytes=True))

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]

def values_are_any_memory(store: mooncake.Store, array: Floats) -> None:
    by_text: dict[str, bytes] = {"a": b"1"}
    by_bytes: dict[bytes, bytearray] = {b"a": bytearray(b"1")}
    arrays = {"a": array}
    store.put_many(by_text)
    store.put_many(by_bytes)
    store.put_many(arrays)
    store.put_many([("a", b"1"), (b"b", array)])
    store.put("a", array)
    store.get_into("a", array)

async def coroutines_have_the_same_types(store: mooncake.AsyncStore) -> tuple[bytes, list[str]]:
    await store.put_many({"a": b"1"})
    return await store.get("a"), [key async for key in store.keys()]
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write each block of Python as a module of its own."""
    folder = tmp_path_factory.mktemp("snippets")
    count = 0
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        for number, block in enumerate(blocks):
            if "import fsspec" in block:
                continue  # it has no types
            name = f"{page.stem.replace('-', '_').lower()}_{number}.py"
            (folder / name).write_text(block, encoding="utf-8")
            count += 1
    assert count >= len(PAGES), "each page has Python lines"
    (folder / "uses.py").write_text(USES, encoding="utf-8")
    return folder


@pytest.mark.timeout(180)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_mypy_accepts_every_snippet(modules: Path, version: str) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", f"--python-version={version}"]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    files = [str(path) for path in sorted(modules.glob("*.py"))]
    done = subprocess.run(
        [*command, *options, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    # grpc has no types.
    found = [line for line in done.stdout.splitlines() if not re.search(r"grpc|running_mypy", line)]
    assert (found, done.stderr) == ([], "")


def test_mypy_refuses_wrong_types(modules: Path) -> None:
    wrong = modules.parent / "wrong.py"
    wrong.write_text("import mooncake\nmooncake.Store().put(1, b'')\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, str(wrong)], cwd=ROOT, capture_output=True, text=True, timeout=170, check=False
    )
    assert "arg-type" in done.stdout


@pytest.mark.timeout(180)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_pyright_accepts_every_snippet(modules: Path, version: str) -> None:
    # torch exports functions of this module without saying so, with types that are partly unknown.
    untyped = [
        each.name
        for each in modules.glob("*.py")
        if "torch.distributed.checkpoint" in each.read_text(encoding="utf-8")
    ]
    settings = {
        "typeCheckingMode": "strict",
        "pythonVersion": version,
        "extraPaths": [str(ROOT / "python")],
        # grpc has no types.
        "ignore": ["grpc_*.py", *untyped],
    }
    (modules / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", str(modules), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout
