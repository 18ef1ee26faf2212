"""Write the page about versions of engines from what their tests ran, or check that it is fresh.

``scripts/test-engines.sh tests/engines --record`` writes ``tests/engines/results.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests/engines/results.json"
PAGE = ROOT / "docs/reference/engine-versions.md"

HEAD = """# Versions of engines

<!-- Written by `make generate` from tests/engines/results.json, which the tests write. -->

`make test-engines` ran these with this package on CPUs of one host, over TCP:

| What | Versions | Last run |
|---|---|---|
"""
FIGURES = """
Times to the first token in one run: above 1, the second is shorter. The model is small, with 16 KiB
of KV cache a token, and the memory of the pool is that of another process of the host:

| What | Figure |
|---|---|
"""
TAIL = """
Never run: a GPU, a network card with RDMA, several hosts, more than one worker, SGLang. The
tutorials of [SGLang](../tutorials/sglang.md) and [TransferQueue](../tutorials/transfer-queue.md)
say of which release their settings are.
"""


def page(runs: dict[str, dict[str, Any]]) -> str:
    """Return the page for what was run."""
    lines, figures = [], []
    for what, run in sorted(runs.items()):
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        lines.append(f"| {what} | {versions} | {run['date']} |\n")
        figures += [f"| {what}: {name} | {value} |\n" for name, value in run["figures"].items()]
    return HEAD + "".join(lines) + FIGURES + "".join(figures) + TAIL


def main() -> None:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the page is not fresh")
    text = page(json.loads(RESULTS.read_text(encoding="utf-8")))
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.relative_to(ROOT)} is not up to date: run `make generate`")


if __name__ == "__main__":
    main()
