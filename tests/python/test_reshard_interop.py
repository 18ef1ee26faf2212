"""Placements, manifests and plans are the same as those of upstream's package, bit for bit."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import reshard_words
from upstream_package import run, upstream_python

CASES = Path(__file__).parent / "reshard_cases.py"
SEEDS = 400


@pytest.fixture(scope="module")
def pairs() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Outcomes of upstream's package and of ours for each seed."""
    theirs = run(upstream_python(), str(CASES), "0", str(SEEDS))
    command = [sys.executable, str(CASES), "0", str(SEEDS)]
    ours = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert theirs.returncode == 0, theirs.stderr
    assert ours.returncode == 0, ours.stderr
    lines = zip(theirs.stdout.splitlines(), ours.stdout.splitlines(), strict=True)
    found = [(json.loads(left), json.loads(right)) for left, right in lines]
    assert len(found) == SEEDS
    return found


@pytest.mark.parametrize("part", ["source", "target", "manifest"])
def test_ids_digests_and_json_are_upstreams(pairs, part):
    compared = [(left[part], right[part]) for left, right in pairs if part in left]
    accepted = [left for left, _ in compared if left is not None]
    assert len(accepted) > SEEDS // 8
    assert [right for _, right in compared] == [left for left, _ in compared]


@pytest.mark.parametrize("plan", ["all", "local", "stored"])
def test_plans_are_upstreams(pairs, plan):
    compared = 0
    for theirs, ours in pairs:
        if plan not in theirs:
            continue
        # Upstream refuses some targets whose replicas are cut differently; we plan for them.
        if "target tensor is not fully covered" in theirs.get(f"{plan} error", ""):
            assert ours[plan] is not None
            continue
        assert ours[plan] == theirs[plan], theirs["seed"]
        compared += theirs[plan] is not None
    assert compared > SEEDS // 20


# Words of upstream's messages that a caller may match; ours may say more.
WORDS = [
    "aliases", "axis kind", "boxes overlap", "byte size", "canonical logical content", "differs",
    "does not belong", "duplicate", "explicit axis", "fully covered", "individually allocated",
    "missing topology participant", "must be a JSON object", "must be a sequence",
    "must be an integer", "must contain tensors", "must split", "non-empty string", "object ranges",
    "out of bounds", "out of range", "out-of-range", "schema", "share a dimension", "sorted",
    "split semantics", "undeclared", "unknown tensor", "unreferenced tensor", "unsupported",
    "WeightManifest fragments", "64-bit",
]  # fmt: skip


def test_spoiled_json_is_refused_in_upstreams_words(pairs):
    compared = [
        (left, right)
        for theirs, ours in pairs
        for left, right in zip(theirs["spoiled"], ours["spoiled"], strict=True)
    ]
    assert [right[0] for _, right in compared] == [left[0] for left, _ in compared]
    refused = [(left, right) for (kind, left), (_, right) in compared if kind]
    assert len(refused) > SEEDS // 2
    other = [
        (left, right)
        for left, right in refused
        if any(word in left and word not in right for word in WORDS)
    ]
    # Of two wrong values, each package may name another one.
    assert len(other) <= len(refused) // 100, other


def test_words_that_callers_match_are_upstreams():
    done = run(upstream_python(), str(CASES.with_name("reshard_words.py")))
    assert done.returncode == 0, done.stderr
    theirs, ours = json.loads(done.stdout), reshard_words.refusals()
    for name, (words, _) in reshard_words.of_cases().items():
        for kind, text in (theirs[name], ours[name]):
            assert kind == "ValueError", name
            assert words in text, name


# Prints the public names of each public module below `mooncake.reshard` that the package defines.
NAMES = """
import importlib, json, pkgutil
import mooncake.reshard as top

found = {}
for info in pkgutil.walk_packages(top.__path__, "mooncake.reshard."):
    if "._" not in info.name:
        module = importlib.import_module(info.name)
        found[info.name] = [
            name for name in dir(module)
            if not name.startswith("_")
            and str(getattr(getattr(module, name), "__module__", "")).startswith("mooncake.")
        ]
print(json.dumps(found))
"""


def test_absent_names_stand_in_the_migration_page():
    done = run(upstream_python(), "-c", NAMES)
    assert done.returncode == 0, done.stderr
    page = (Path(__file__).parents[2] / "docs/migration.md").read_text()
    row = next(line for line in page.splitlines() if "`require_manifest_items`" in line)
    types = importlib.import_module("mooncake.reshard.weight.types")
    absent = {
        name
        for module, names in json.loads(done.stdout).items()
        for name in names
        if not hasattr(importlib.import_module(module), name)
    }
    assert absent == {name for name in vars(types) if f"`{name}`" in row}
