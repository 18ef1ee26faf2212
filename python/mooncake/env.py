"""`python -m mooncake.env`: the environment variables that are read, what holds, and why so.

Three things may be wrong with a variable: it is set to something else than one thinks, it is one of
the established implementation that changes nothing here, or its name is misspelt. All are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from mooncake._runtime import _native

__all__ = ["Ignored", "Setting", "ignored", "main", "settings"]

_OURS = ("MC_", "MOONCAKE_")
_HIDDEN = "(hidden)"


@dataclass(frozen=True)
class Setting:
    """A variable that is read.

    Attributes:
        name: Its name.
        value: What holds: its value, or what holds without one. Secrets are hidden.
        source: The name under which it is set in the environment; empty if the default holds.
        help: What it does.
    """

    name: str
    value: str
    source: str
    help: str


@dataclass(frozen=True)
class Ignored:
    """A variable that is set and changes nothing.

    Attributes:
        name: Its name.
        reason: Why, and what to do instead.
    """

    name: str
    reason: str


def settings() -> list[Setting]:
    """Return every variable that is read, in the order of the reference page."""
    secrets = frozenset(_native.secret_variables())

    def setting(
        name: str, aliases: list[str], default: str, about: str, set_: str | None
    ) -> Setting:
        if set_ is None:
            return Setting(name, default, "", about)
        source = next((each for each in (name, *aliases) if os.environ.get(each) == set_), name)
        return Setting(name, _HIDDEN if name in secrets else set_, source, about)

    return [setting(*row) for row in _native.environment()]


def ignored() -> list[Ignored]:
    """Return the variables that are set and change nothing, by name."""
    known = {name for row in _native.environment() for name in (row[0], *row[1])}
    reasons = dict(_native.unsupported_variables())
    found = []
    for name in sorted(os.environ):
        if name in reasons:
            found.append(Ignored(name, reasons[name]))
        elif name.startswith(_OURS) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.8)
            found.append(
                Ignored(name, f"Not known here; is {near[0]} meant?" if near else "Not known here.")
            )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the settings.

    Args:
        arguments: What stands behind the command's name; None takes the command line.

    Returns:
        The exit code, 0.
    """
    parser = argparse.ArgumentParser(prog="python -m mooncake.env", description=__doc__)
    add_options(parser)
    return run(parser.parse_args(arguments))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `run` looks at.

    Args:
        parser: Of the command.
    """
    parser.add_argument("--set", action="store_true", dest="is_brief", help="only what is set")
    parser.add_argument("--json", action="store_true", dest="is_json", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the settings.

    Args:
        options: ``is_brief`` and ``is_json``.

    Returns:
        The exit code, 0.
    """
    rows = [row for row in settings() if row.source or not options.is_brief]
    without_effect = ignored()
    if options.is_json:
        print(
            json.dumps(
                {"settings": [*map(asdict, rows)], "vain": [*map(asdict, without_effect)]}, indent=2
            )
        )
        return 0
    for row in rows:
        source = f"from {row.source}" if row.source else "default"
        print(f"{row.name} = {row.value or '(empty)'}  [{source}]")
        print(f"    {row.help}")
    if without_effect:
        print("\nset, and without effect:")
    for each in without_effect:
        print(f"{each.name}\n    {each.reason}")
    if not rows and not without_effect:
        print("no variable of ours is set")
    return 0


if __name__ == "__main__":
    sys.exit(main())
