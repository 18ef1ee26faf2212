"""The snippets of the README and of the guides run and print what the text says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_recipes
from forked_programs import run_snippet

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
READY = re.compile(r"mooncake_master ready rpc=(\S+).* metadata=(\S+)")


GUIDES = sorted(
    page
    for folder in ("guide", "tutorials", "how-to")
    for page in (ROOT / "docs" / folder).glob("*.md")
)


def snippets(language: str, text: str = README) -> list[str]:
    """Return the code blocks of the language, in order."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def guide_snippets() -> list[object]:
    """Return every Python block that one process can run, with an id."""
    # Of these, test_pg.py runs the first, and test_recipes.py the others.
    elsewhere = {"guide/process-groups.md", *(f"how-to/{page}" for page in test_recipes.PAGES)}
    return [
        pytest.param(source, id=f"{path.stem}-{number}")
        for path in GUIDES
        if f"{path.parent.name}/{path.name}" not in elsewhere
        for number, source in enumerate(snippets("python", path.read_text(encoding="utf-8")))
    ]


def run(source: str) -> subprocess.CompletedProcess[str]:
    """Run a Python snippet as a user does."""
    return run_snippet(source, ROOT)


def test_embedded_snippet_runs() -> None:
    done = run(snippets("python")[0])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    greeting, address = done.stdout.splitlines()
    assert greeting == "Hello, Mooncake!"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address), address


@pytest.mark.parametrize("metadata", ["http", "P2PHANDSHAKE"])
def test_master_snippet_runs(metadata: str) -> None:
    command = snippets("bash")[2].split()
    assert command[0] == "mooncake_master"
    flags = [*command[1:], "--rpc_port=0", "--metrics_port=0", "--http_metadata_server_port=0"]
    master = subprocess.Popen(
        [sys.executable, "-m", "mooncake.cli", *flags], stdout=subprocess.PIPE, text=True
    )
    try:
        assert master.stdout is not None
        ready = READY.search(master.stdout.readline())
        assert ready is not None
        rpc, http = (address.rpartition(":")[2] for address in ready.groups())
        source = snippets("python")[1].replace("localhost:50051", f"localhost:{rpc}")
        source = source.replace("http://localhost:8080", f"http://localhost:{http}")
        if metadata == "P2PHANDSHAKE":
            source = re.sub(r'"http://[^"]*"', '"P2PHANDSHAKE"', source)
        done = run(source)
        assert done.returncode == 0, done.stderr
        assert (done.stdout, done.stderr) == ("Hello, Mooncake Store!\n", "")
    finally:
        master.terminate()
        assert master.wait(10) == 0
        assert master.stdout is not None
        master.stdout.close()


def test_master_snippet_fails_without_a_master() -> None:
    done = run(re.sub(r"localhost:\d+", "127.0.0.1:1", snippets("python")[1]))
    assert (done.returncode, done.stdout) == (1, "")
    first, *_, last = done.stderr.splitlines()
    assert first.startswith("setup failed: ")
    assert last == "AssertionError: no pool: see the error above"


def test_rust_snippet_is_the_tested_example() -> None:
    example = ROOT / "crates/store-client/examples/hello.rs"
    assert snippets("rust") == [example.read_text(encoding="utf-8")]


def test_readme_names_only_existing_commands() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", "\n".join(snippets("bash")), re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_readme_links_are_valid() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("source", guide_snippets())
def test_guide_snippets_run(source: str) -> None:
    if "import grpc" in source:
        pytest.importorskip("grpc_tools", reason="needs grpcio-tools: scripts/test-tools.txt")
    done = run(source)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_guide_links_are_valid() -> None:
    links = [
        (path, link)
        for path in GUIDES
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8"))
    ]
    assert links
    for path, link in links:
        assert (path.parent / link).exists(), (path.name, link)
