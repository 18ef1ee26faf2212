"""The established package in an environment of its own, for tests that run it beside ours."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
# Names the interpreter of an environment that has the package already.
VARIABLE = "MOONCAKE_TEST_UPSTREAM_PYTHON"


def upstream_python() -> str:
    """An interpreter that has the established package; the test is skipped where there is none."""
    given = os.environ.get(VARIABLE)
    python = Path(given) if given else create_environment()
    done = run(str(python), "-I", "-c", "import mooncake.engine")
    if done.returncode != 0:
        pytest.skip(f"the established package cannot be imported: {last_line(done.stderr)}")
    return str(python)


def create_environment() -> Path:
    """An environment in the user's cache, made the first time and kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / "mooncake-tests" / f"{PACKAGE}-{version}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two test runs may want it at once.
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ready = folder / "ready"
        if not ready.exists():
            for command in (
                (sys.executable, "-m", "venv", "--clear", str(folder)),
                (str(python), "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE),
            ):
                done = run(*command)
                if done.returncode != 0:
                    what = last_line(done.stderr)
                    pytest.skip(f"the established package cannot be installed: {what}")
            ready.touch()
    return python


def run(*command: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=clean
    )


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
