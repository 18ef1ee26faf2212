"""Runs the tests of process groups against other versions of torch than the one that CI has.

Usage: check_torch_versions.py [VERSION ...]

Each version is installed into an environment of its own in a temporary folder, which takes about
5 GB of disk and of downloads, and is deleted afterwards. The extension must be built (`make dev`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("2.4.1", "2.9.1", "2.13.0")
TESTS = ("tests/python/test_pg.py", "tests/python/test_pg_faults.py")
TOOLS = ("numpy", "pytest", "pytest-timeout")


def main() -> None:
    """Run the tests of each version; exit with a message if one fails."""
    versions = tuple(sys.argv[1:]) or VERSIONS
    failed = [version for version in versions if not passes(version)]
    if failed:
        sys.exit(f"tests of process groups fail: torch={', '.join(failed)}")
    print(f"tests of process groups pass: torch={', '.join(versions)}")


def passes(version: str) -> bool:
    """Return whether the tests pass in a new environment with this version."""
    with tempfile.TemporaryDirectory(prefix="mooncake-torch-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin/python")
        install = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir"]
        subprocess.run([*install, f"torch=={version}", *TOOLS], check=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
        print(f"torch {version}", flush=True)
        command = [python, "-m", "pytest", "-q", *TESTS]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    main()
