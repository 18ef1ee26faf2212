"""What the commands print: keys, tables, JSON, failures and questions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from mooncake._runtime import _native
from mooncake.errors import MooncakeError, NotFoundError

__all__ = [
    "FAILURES",
    "CommandError",
    "UsageError",
    "described",
    "has_terminal",
    "is_absent",
    "is_confirmed",
    "missing",
    "print_json",
    "print_json_list",
    "print_table",
    "quoted",
    "reason",
    "report",
    "table",
    "write_line",
]

# Failures that are reported in words. Any other exception is a bug and shows its traceback.
FAILURES = (
    MemoryError,
    MooncakeError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    subprocess.SubprocessError,
)

_MISSING = -704
_WRONG_ARGUMENT = -600
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "'": "\\'", "\\": "\\\\"}


class CommandError(RuntimeError):
    """A failure of a command itself.

    Attributes:
        remedy: What to do.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        """Make an error.

        Args:
            message: What failed.
            remedy: What to do.
        """
        super().__init__(message)
        self.remedy = remedy


def quoted(key: str | bytes) -> str:
    """Return a key as a shell takes it; control characters cannot act on the terminal.

    Args:
        key: Key; bytes that are no text are surrogates.
    """
    text = os.fsdecode(key) if isinstance(key, bytes) else key
    if text.isprintable():
        is_plain = text and not set(text) & set(" '\"\\$`!*?[]{}()<>|&;#~")
        return text if is_plain else "'" + text.replace("'", "'\\''") + "'"
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    raw = character.encode("utf-8", "surrogateescape")
    return "".join(f"\\x{byte:02x}" for byte in raw)


def write_line(before: str, key: str, after: str = "") -> None:
    """Print a line with a key: quoted on a terminal, the bytes themselves elsewhere."""
    if sys.stdout.isatty():
        print(f"{before}{quoted(key)}{after}")
        return
    raw = key.encode("utf-8", "surrogateescape")
    sys.stdout.buffer.write(before.encode() + raw + after.encode() + b"\n")


def print_json(value: Any) -> None:
    """Print a value as indented JSON. Bytes of keys that are no text are lone surrogates."""
    print(json.dumps(value, indent=2))


def print_json_list(values: Iterable[Any]) -> None:
    """Print a list as JSON while it is made, a line for each value."""
    separator = "[\n"
    for value in values:
        sys.stdout.write(f"{separator}  {json.dumps(value)}")
        separator = ",\n"
    print("[]" if separator == "[\n" else "\n]")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    """Print a table; the arguments are those of `table`."""
    print("\n".join(table(head, rows, right)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Return the lines of a table.

    Args:
        head: Titles of the columns.
        rows: Texts of each row.
        right: Columns that are aligned at the right.
    """
    lines = []
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def report(*failures: BaseException) -> None:
    """Print failures to standard error, a line for each, and then each remedy once.

    The line of a `MooncakeError` ends with number and name of its code.
    """
    remedies = []
    for failure in failures:
        print(f"mooncake: {described(failure)}", file=sys.stderr)
        remedy = getattr(failure, "remedy", "")
        if isinstance(failure, NotFoundError) and failure.code == _MISSING and failure.key:
            is_told = not remedy or is_absent(failure)
            remedy += "" if is_told else f" See `mooncake stat {quoted(failure.key)}`."
        # A missing thing, or a wrong argument, is explained by its message.
        explained = {_remedy_of(_WRONG_ARGUMENT)}
        if isinstance(failure, NotFoundError):
            explained.add(_remedy_of(failure.code))
        is_explained = remedy in explained
        if remedy and remedy not in remedies and not is_explained:
            remedies.append(remedy)
    for remedy in remedies:
        print(f"  hint: {remedy}", file=sys.stderr)


def described(failure: BaseException) -> str:
    """Return a failure in words, and number and name of its code."""
    text = reason(failure)
    if not isinstance(failure, MooncakeError):
        return text
    return f"{text} ({failure.code} {failure.code_name})"


def reason(failure: BaseException) -> str:
    """Return a failure in words: without the number of a failed system call, keys quoted."""
    if isinstance(failure, MooncakeError):
        return _no_object(failure.key or "") if is_absent(failure) else str(failure)
    if isinstance(failure, OSError) and failure.strerror:
        name = failure.filename
        return failure.strerror if name is None else f"{quoted(name)}: {failure.strerror}"
    return str(failure) or type(failure).__name__


def is_absent(failure: MooncakeError) -> bool:
    """Return whether no object has the key, rather than one of which no copy can be read."""
    is_missing = failure.code == _MISSING and failure.key is not None
    return is_missing and failure.remedy == _remedy_of(_MISSING)


def missing(key: bytes) -> MooncakeError:
    """Return the error for a key that no object has."""
    return _native.failure(_MISSING, _no_object(key), key=key)


def _no_object(key: str | bytes) -> str:
    name = quoted(key)
    hint = "; * has no meaning in keys: `ls` and `rm --recursive` take the beginning of keys"
    return f"no object has the key {name}{hint if '*' in name else ''}"


def _remedy_of(code: int) -> str:
    return next(remedy for number, _, _, remedy in _native.codes() if number == code)


def has_terminal() -> bool:
    """Return whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def is_confirmed(question: str) -> bool:
    """Ask on the terminal; without one nobody is asked and the answer is yes."""
    if not has_terminal():
        return True
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class UsageError(CommandError):
    """Options that do not fit together."""
