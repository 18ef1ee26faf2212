"""Packages the crates that are meant for reuse, and builds and runs a program against the packages.

Usage: check_packages.py [--metadata-only]

The program, `tests/outside`, is built in a temporary folder from the unpacked packages alone, so
that nothing of this tree is found by accident. `--metadata-only` checks only what a registry asks
for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REUSED = ("mooncake-base", "mooncake-transfer-engine", "mooncake-store-client", "mooncake-master")
OUTPUT = "Hello, Mooncake!\n"


def main() -> None:
    """Check the packages; exit with a message if one cannot be reused."""
    packages = {package["name"]: package for package in metadata()["packages"]}
    names = sorted(with_dependencies(packages, REUSED))
    problems = [problem for name in names for problem in problems_of(packages[name])]
    if problems:
        sys.exit("\n".join(problems))
    if "--metadata-only" not in sys.argv[1:]:
        run_outside(packages, names)
    print(f"{len(names)} crates can be reused: {', '.join(names)}")


def metadata() -> dict[str, Any]:
    """Return what cargo knows of the workspace."""
    words = ["cargo", "metadata", "--format-version=1", "--no-deps", "--locked", "--offline"]
    text = subprocess.run(words, cwd=ROOT, check=True, capture_output=True).stdout
    found: dict[str, Any] = json.loads(text)
    return found


def with_dependencies(packages: dict[str, Any], names: tuple[str, ...]) -> set[str]:
    """Return the names with those of all crates of ours that they need."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        needed = [each for each in packages[name]["dependencies"] if each["kind"] is None]
        waiting += [each["name"] for each in needed if each["name"] in packages]
    return found


def problems_of(package: dict[str, Any]) -> list[str]:
    """Return what a registry or a reader would miss."""
    folder = Path(package["manifest_path"]).parent
    missing = [
        field
        for field in ("description", "license", "keywords", "categories", "rust_version")
        if not package[field]
    ]
    if not (folder / "README.md").is_file() or package["readme"] != "README.md":
        missing.append("README.md")
    if package["publish"] == []:
        missing.append("permission to be published (publish = true)")
    return [f"{package['name']}: has no {each}" for each in missing]


def run_outside(packages: dict[str, Any], names: list[str]) -> None:
    """Package the crates, and build and run the program with them."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        target = folder / "target"
        chosen = [word for name in names for word in ("-p", name)]
        run(["cargo", "package", "--no-verify", "--allow-dirty", f"--target-dir={target}", *chosen])
        patches = ["", "[patch.crates-io]"]
        for name in names:
            stem = f"{name}-{packages[name]['version']}"
            with tarfile.open(target / "package" / f"{stem}.crate") as archive:
                archive.extractall(folder, filter="data")
            patches.append(f'{name} = {{ path = "{folder / stem}" }}')
        program = folder / "outside"
        shutil.copytree(ROOT / "tests/outside", program)
        # The versions that are tested here, so that the network is not needed for others.
        shutil.copy(ROOT / "Cargo.lock", program)
        with (program / "Cargo.toml").open("a", encoding="utf-8") as manifest:
            manifest.write("\n".join(patches) + "\n")
        done = run(["cargo", "run", "--quiet", f"--target-dir={target}"], cwd=program)
        if done.stdout != OUTPUT:
            sys.exit(f"the program printed {done.stdout!r}, not {OUTPUT!r}")


def run(words: list[str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command; exit with its messages if it fails."""
    done = subprocess.run(words, cwd=cwd, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr}")
    return done


if __name__ == "__main__":
    main()
