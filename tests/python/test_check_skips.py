"""`scripts/check_skips.py` fails on skipped tests that the list of allowed skips does not name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = """
# A comment.
mooncake-engine::suite rdma_* | needs an RDMA device
tests/test_it.py::test_allowed* | needs etcd
lib tests::child | not a test
lib [needs root] * | needs root
tests/test_it.py::test_ran | needs torch
"""
PYTEST = """
=========================== short test summary info ============================
SKIPPED tests/test_it.py::test_allowed[a - b] - Skipped: needs etcd: install it
\x1b[33mSKIPPED\x1b[0m tests/test_it.py::test_allowed[c] - Skipped: needs etcd: install it
========================= 1 passed, 2 skipped in 0.12s =========================
"""
NEXTEST = """
        SKIP [         ] (───) mooncake-engine::suite rdma_write
        PASS [   0.276s] (1/1) mooncake-engine::suite tcp_write
     Summary [   0.279s] 1 test run: 1 passed, 1 skipped
"""
LIBTEST = """
     Running unittests src/lib.rs (target/debug/deps/lib-0123456789abcdef)
test tests::child ... ignored, not a test: other tests start it
test [needs root] users::other   ... ignored
test              tests::present ... ok
test result: ok. 3 passed; 0 failed; 2 ignored; 0 measured; 0 filtered out; finished in 0.01s
"""


def check(folder: Path, *logs: str, entries: str = LIST) -> subprocess.CompletedProcess[str]:
    """Run the program on logs of this content."""
    (folder / "list").write_text(entries)
    paths = [folder / f"log-{number}" for number in range(len(logs))]
    for path, log in zip(paths, logs, strict=True):
        path.write_text(log, encoding="utf-8")
    command = [sys.executable, ROOT / "scripts/check_skips.py", folder / "list", *paths]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_accepts_listed_skips_and_reports_them(tmp_path):
    done = check(tmp_path, PYTEST, NEXTEST + LIBTEST)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "check_skips: skipped 1: mooncake-engine::suite rdma_* | needs an RDMA device",
        "check_skips: skipped 2: tests/test_it.py::test_allowed* | needs etcd",
        "check_skips: skipped 1: lib tests::child | not a test",
        "check_skips: skipped 1: lib [needs root] * | needs root",
        "check_skips: not skipped: tests/test_it.py::test_ran | needs torch",
    ]


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        (PYTEST, "tests/test_it.py::test_allowed[c] | needs etcd: install it"),
        (NEXTEST, "mooncake-engine::suite rdma_write | "),
        (LIBTEST, "lib tests::child | not a test: other tests start it"),
    ],
)
def test_rejects_skips_that_are_not_listed(tmp_path, log, wanted):
    done = check(tmp_path, log, entries="another test | needs etcd\n")
    assert done.returncode == 1
    assert f"skipped, and not allowed in {tmp_path}/list: {wanted}" in done.stderr


@pytest.mark.parametrize("log", [PYTEST, NEXTEST, LIBTEST])
def test_rejects_logs_that_do_not_name_their_skips(tmp_path, log):
    only_total = "\n".join(line for line in log.splitlines() if "needs" not in line)
    only_total = only_total.replace("SKIP [", "STOP [").replace("ignored,", "ok,")
    done = check(tmp_path, only_total)
    assert done.returncode == 1
    assert "and names 0: run pytest with -rs" in done.stderr


def test_brackets_of_parameters_are_not_wildcards(tmp_path):
    entries = "tests/test_it.py::test_allowed[abc] | needs etcd\n"
    assert check(tmp_path, PYTEST, entries=entries).returncode == 1
    entries = "tests/test_it.py::test_allowed[a - b] | one\ntests/test_it.py::*[c] | two\n"
    assert check(tmp_path, PYTEST, entries=entries).returncode == 0


@pytest.mark.parametrize("line", ["tests/test_it.py", "tests/test_it.py | ", " | a reason"])
def test_rejects_entries_without_a_reason(tmp_path, line):
    done = check(tmp_path, PYTEST, entries=f"{line}\n")
    assert done.returncode == 1
    assert "expected `test id or glob | reason`" in done.stderr


SKIPPING = """
import pytest

@pytest.mark.parametrize("value", ["a b", "c"])
def test_skips(value):
    pytest.skip("needs etcd: install it")

@pytest.mark.skipif(True, reason="needs torch - install it")
def test_marked():
    pass

def test_passes():
    pass
"""


@pytest.mark.parametrize("fold", [[], ["--no-fold-skipped"]])
def test_reads_what_pytest_prints(tmp_path, fold):
    (tmp_path / "test_it.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-rs", *fold, "-p", "no:cacheprovider", "test_it.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=True, cwd=tmp_path
    )
    entries = "test_it.py:* | any\ntest_it.py::test_skips[*] | any\ntest_it.py::test_marked | any\n"
    assert check(tmp_path, done.stdout, entries=entries).returncode == 0
    refused = check(tmp_path, done.stdout, entries="other | any\n")
    assert refused.returncode == 1
    assert refused.stderr.count("not allowed") == (3 if fold else 2)
    assert "| needs etcd: install it" in refused.stderr
    assert "| needs torch - install it" in refused.stderr


def test_allowed_skips_of_the_project_are_readable(tmp_path):
    entries = (ROOT / "tests/allowed-skips.txt").read_text(encoding="utf-8")
    done = check(tmp_path, "", entries=entries)
    assert done.returncode == 0, done.stderr
