"""The DataProto catalog answers like upstream's, error texts included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from upstream_package import upstream_python

pytestmark = pytest.mark.timeout(300)

CALLS = Path(__file__).parent / "catalog_calls.py"
# Upstream's module needs numpy.
PACKAGES = Path(np.__file__).parents[1]
SEEDS = 300


def answers(python: str, path: str | None) -> list[list[Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    path = path or os.environ.get("PYTHONPATH")
    done = subprocess.run(
        [python, str(CALLS), str(SEEDS)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**environment, **({"PYTHONPATH": path} if path else {})},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_catalog_answers_like_upstreams():
    theirs = answers(upstream_python(), str(PACKAGES))
    ours = answers(sys.executable, None)
    assert len(theirs) == SEEDS
    kinds: Counter[str] = Counter()
    for seed, (left, right) in enumerate(zip(theirs, ours, strict=True)):
        if left[-1] == ["KeyError"]:
            left = left[:-1]
            right = right[: len(left)]
        assert right == left, seed
        kinds.update(answer[0] for answer in left if len(answer) == 2)
        kinds["rejected"] += sum("append_rejected" in str(answer) for answer in left)
    assert all(kinds[call] > 20 for call in ("publish", "append", "resolve", "delete", "rejected"))
