"""The crates that are meant for reuse have what a registry asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_reused_crates_can_be_published() -> None:
    script = ROOT / "scripts/check_packages.py"
    done = subprocess.run(
        [sys.executable, script, "--metadata-only"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mooncake-store-client" in done.stdout
