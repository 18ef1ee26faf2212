"""Fails if a test run skipped or ignored a test that the list of allowed skips does not name.

Usage: check_skips.py LIST LOG...

LIST has one entry a line: `test id or glob | the reason`. In a glob only `*` is special. Each LOG
is the output of a test run. The ids are those of pytest (run with `-rs --no-fold-skipped`), or
`crate::binary test` for cargo nextest (run with `--status-level skip`), or `binary test` for
libtest.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
# Without `--no-fold-skipped` pytest prints the place of a skip instead of the test's id.
PYTEST_FOLDED = re.compile(r"SKIPPED \[(?P<count>\d+)\] (?P<id>\S+?:\d+): (?P<reason>.*)")
PYTEST = re.compile(r"SKIPPED (?P<id>.+?) - Skipped: (?P<reason>.*)")
NEXTEST = re.compile(r"\s*SKIP \[[^\]]*\] (?:\([^)]*\) )?(?P<id>\S+ \S.*)")
# libtest-mimic pads the names, and puts the kind of a trial in brackets before the name.
LIBTEST = re.compile(r"test +(?P<id>\S.*?) +\.\.\. ignored(?:, (?P<reason>.*))?")
LIBTEST_BINARY = re.compile(r"\s*Running .*\((?:\S*/)?(?P<name>\w+)-[0-9a-f]+(?:\.exe)?\)")
LIBTEST_DOCS = re.compile(r"\s*Doc-tests (?P<name>\w+)")
# The lines at the end of a run that count what it skipped.
TOTALS = [
    re.compile(r"=* ?(?:\d+ \w+, )*(?P<count>\d+) skipped(?:, \d+ \w+)* in [\d.]+s.*"),
    re.compile(r" +Summary \[.*\] .* (?P<count>\d+) skipped"),
    re.compile(r"test result: .*; (?P<count>\d+) ignored; .*"),
]


@dataclass(frozen=True)
class Skip:
    """A skipped or ignored test, or `count` tests that pytest folded into one line."""

    id: str
    reason: str
    count: int = 1


@dataclass(frozen=True)
class Allowed:
    """An entry of the list."""

    pattern: str
    reason: str

    def matches(self, skip: Skip) -> bool:
        """Return whether the entry names the test."""
        pattern = ".*".join(re.escape(part) for part in self.pattern.split("*"))
        return re.fullmatch(pattern, skip.id) is not None


def main(arguments: list[str]) -> int:
    """Check the logs against the list; return the exit code."""
    list_path, *logs = map(Path, arguments)
    allowed = read_list(list_path)
    skips: list[Skip] = []
    errors: list[str] = []
    for log in logs:
        lines = ESCAPE.sub("", log.read_text(encoding="utf-8", errors="replace")).splitlines()
        found, total = list(find_skips(lines)), count_skips(lines)
        skips += found
        named = sum(skip.count for skip in found)
        if named != total:
            errors.append(
                f"{log} counts {total} skipped tests and names {named}: run pytest with -rs, "
                "nextest with --status-level skip"
            )
    errors += [
        f"skipped, and not allowed in {list_path}: {skip.id} | {skip.reason}"
        for skip in skips
        if not any(entry.matches(skip) for entry in allowed)
    ]
    for entry in allowed:
        count = sum(skip.count for skip in skips if entry.matches(skip))
        state = f"skipped {count}" if count else "not skipped"
        print(f"check_skips: {state}: {entry.pattern} | {entry.reason}")
    for error in errors:
        print(f"check_skips: {error}", file=sys.stderr)
    return 1 if errors else 0


def read_list(path: Path) -> list[Allowed]:
    """Read the list; empty lines and lines that begin with # are comments."""
    entries = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, reason = (part.strip() for part in line.partition(" | "))
        if not pattern or not reason:
            sys.exit(f"check_skips: {path}:{number}: expected `test id or glob | reason`")
        entries.append(Allowed(pattern, reason))
    return entries


def find_skips(lines: list[str]) -> Iterator[Skip]:
    """Find the lines that name a skipped test. A nextest run names a test once at each attempt."""
    binary = ""
    seen = set()
    for line in lines:
        if found := LIBTEST_BINARY.match(line) or LIBTEST_DOCS.match(line):
            binary = found["name"]
        elif found := PYTEST_FOLDED.fullmatch(line):
            yield Skip(found["id"], found["reason"], int(found["count"]))
        elif found := PYTEST.fullmatch(line):
            yield Skip(found["id"], found["reason"])
        elif found := LIBTEST.fullmatch(line):
            yield Skip(f"{binary} {found['id']}".strip(), found["reason"] or "")
        elif (found := NEXTEST.fullmatch(line)) and found["id"] not in seen:
            seen.add(found["id"])
            yield Skip(found["id"], "")


def count_skips(lines: list[str]) -> int:
    """Add up the skipped tests that the summaries of the runs count."""
    matches = (total.fullmatch(line) for line in lines for total in TOTALS)
    return sum(int(found["count"]) for found in matches if found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
