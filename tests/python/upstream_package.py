"""The upstream package (Mooncake in C++) in its own environment, for interoperability tests."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
# Packages of Debian with the libraries that the upstream package links.
LIBRARIES = "libibverbs1 librdmacm1 libnuma1 libcurl4"
# Names the interpreter of an environment that has the package already.
VARIABLE = "MOONCAKE_TEST_UPSTREAM_PYTHON"


def upstream_python() -> str:
    """Return an interpreter that has the upstream package, or skip the test."""
    given = os.environ.get(VARIABLE)
    python = Path(given) if given else create_environment()
    done = run(str(python), "-I", "-c", "import mooncake.engine")
    if done.returncode != 0:
        reason = last_line(done.stderr)
        if given:
            pytest.fail(f"{VARIABLE} names an interpreter without the upstream package: {reason}")
        pytest.skip(f"needs the libraries of the upstream package: install {LIBRARIES} ({reason})")
    return str(python)


def create_environment() -> Path:
    """Create an environment in the user's cache on first use, and return its interpreter."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / "mooncake-tests" / f"{PACKAGE}-{version}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Two test runs may create the environment at once.
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
                    reason = last_line(done.stderr)
                    pytest.skip(
                        f"needs the upstream package: pip install {PACKAGE} into an environment, "
                        f"and name its interpreter in {VARIABLE} ({reason})"
                    )
            ready.touch()
    return python


def run(*command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command without the caller's `PYTHONPATH`, which may name our package."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=200, check=False, env=clean
    )


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]
