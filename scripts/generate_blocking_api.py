"""Write the calls of `Store` from those of `AsyncStore`, or check that they are up to date.

The modules in ``python/mooncake/_api/asynchronous`` are the source. Each becomes a module of
the same name in ``python/mooncake/_api/blocking``: the words ``async`` and ``await`` go, and so
does the prefix ``Async`` of names, in code, annotations and docstrings. ``ruff`` formats the
result.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import sysconfig
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "python/mooncake"
SOURCE = PACKAGE / "_api/asynchronous"
TARGET = PACKAGE / "_api/blocking"

HEADER = "# Generated from asynchronous/{name} by scripts/generate_blocking_api.py; do not edit.\n"
# Words of the source that differ by more than a prefix.
WORDS = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "StopAsyncIteration": "StopIteration",
    "aclosing": "closing",
    "async_apart": "apart",
    "async_each": "each",
    "async_pause": "pause",
    "run_async": "run",
}
DROPPED = re.compile(r"\b(?:async|await) ")
AWAITABLE = re.compile(r"\bAwaitable\[(\w+)\]")
PREFIXED = re.compile(r"\bAsync(?=[A-Z])")


def blocking_text(text: str) -> str:
    """Return prose or code in a string without the words of coroutines."""
    text = re.sub(r"\(await (\w+\.\w+\([^()]*(?:\([^()]*\))?[^()]*\))\)", r"\1", text)
    text = DROPPED.sub("", text).replace(", as coroutines", "")
    text = text.replace("whose calls are coroutines", "whose calls block")
    return PREFIXED.sub("", text)


def blocking_source(source: str) -> str:
    """Return the blocking form of a module, not formatted."""
    source = AWAITABLE.sub(r"\1", source)
    source = source.replace("mooncake._api.asynchronous", "mooncake._api.blocking")
    changed: list[tuple[int, int, int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (line, start), (last_line, end) = token.start, token.end
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            changed.append((line, start, end + 1, ""))
        elif token.type == tokenize.NAME:
            word = WORDS.get(token.string, PREFIXED.sub("", token.string))
            if word != token.string:
                changed.append((line, start, end, word))
        elif token.type in (tokenize.STRING, tokenize.COMMENT) and line == last_line:
            changed.append((line, start, end, blocking_text(token.string)))
        elif token.type == tokenize.STRING:
            lines = source.splitlines(keepends=True)[line - 1 : last_line]
            for number, text in enumerate(lines, start=line):
                first = start if number == line else 0
                after = end if number == last_line else len(text)
                changed.append((number, first, after, blocking_text(text[first:after])))
    lines = source.splitlines(keepends=True)
    for line, start, end, text in sorted(changed, reverse=True):
        before = lines[line - 1]
        lines[line - 1] = before[:start] + text + before[end:]
    return "".join(lines)


def formatted(source: str, name: str) -> str:
    """Return a module with sorted imports, in the format of the project."""
    ruff = Path(sysconfig.get_path("scripts")) / "ruff"
    path = ["--stdin-filename", str(TARGET / name)]
    for arguments in (["check", "--select=I,F401", "--fix-only", "--quiet"], ["format", "--quiet"]):
        done = subprocess.run(
            [ruff, *arguments, *path, "-"], input=source, capture_output=True, text=True, check=True
        )
        source = done.stdout
    return source


def generated() -> dict[Path, str]:
    """Return the content of every generated file."""
    files = {}
    for path in sorted(SOURCE.glob("*.py")):
        if path.name == "__init__.py":
            text = (
                '"""The calls of `Store`, generated from those of `AsyncStore`."""\n\n'
                "__all__: list[str] = []\n"
            )
        else:
            source = blocking_source(path.read_text(encoding="utf-8"))
            docstring, rest = source.split("\n", 1)
            text = f"{docstring}\n\n{HEADER.format(name=path.name)}{rest}"
            text = formatted(text, path.name)
        files[TARGET / path.name] = text
    return files


def main() -> int:
    """Write the files; with ``--check`` say which ones are stale."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only fail if a file is stale")
    is_check = parser.parse_args().check
    wanted = generated()
    stale = [
        path
        for path in {*wanted, *TARGET.glob("*.py")}
        if not path.exists() or path.read_text(encoding="utf-8") != wanted.get(path)
    ]
    for path in sorted(stale):
        if is_check:
            print(f"stale: {path.name}; run make generate", file=sys.stderr)
        elif path in wanted:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        else:
            path.unlink()
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
