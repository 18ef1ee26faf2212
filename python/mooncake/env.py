"""`python -m mooncake.env`: shows the environment variables and where their values come from.

Four mistakes are shown: a variable has another value than intended, a value is invalid, a variable
of upstream has no effect here, or a name is misspelled. The exit code is 1 if a value is invalid.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches

from mooncake._runtime import _native

__all__ = ["Ignored", "Setting", "ignored", "main", "misspelled", "settings"]

_OURS = ("MC_", "MOONCAKE_")
# Builds of upstream read these, whose names are near to that of another variable.
_OF_BUILDS = frozenset({"MOONCAKE_STORE_LIB_DIR", "MOONCAKE_TE_LIB_DIR"})
_HIDDEN = "(hidden)"
_SERVICE = re.compile("(tcp|udp|sctp)://")


@dataclass(frozen=True)
class Setting:
    """A variable that is read.

    Attributes:
        name: Preferred name.
        value: Value in effect: of the environment, or the default. Secrets are hidden.
        source: Name under which it is set in the environment; empty if the default is in effect.
        help: Meaning of the variable.
        invalid: What is wrong with the value, and what it does; empty if it is valid.
    """

    name: str
    value: str
    source: str
    help: str
    invalid: str = ""

    @property
    def is_alias_used(self) -> bool:
        """True if the variable is set under an older name only."""
        return self.source not in ("", self.name)

    @property
    def origin(self) -> str:
        """Where the value comes from, the preferred name of an older one, and what is wrong."""
        if not self.source:
            return "default"
        remedy = f"; prefer the name {self.name}" if self.is_alias_used else ""
        invalid = f"; invalid: {self.invalid}" if self.invalid else ""
        return f"from {self.source}{remedy}{invalid}"


@dataclass(frozen=True)
class Ignored:
    """A variable that is set but has no effect.

    Attributes:
        name: Name of the variable.
        reason: Reason, and what to do instead.
    """

    name: str
    reason: str


def settings() -> list[Setting]:
    """Return every variable that is read, in the order of the reference page."""
    secrets = frozenset(_native.secret_variables())
    invalid = dict(_native.invalid_variables())

    def setting(
        name: str, aliases: list[str], default: str, about: str, set_: str | None
    ) -> Setting:
        if set_ is None:
            return Setting(name, default, "", about)
        source = next((each for each in (name, *aliases) if os.environ.get(each) == set_), name)
        shown = _HIDDEN if name in secrets else set_
        return Setting(name, shown, source, about, invalid.get(name, ""))

    return [setting(*row) for row in _native.environment()]


def ignored() -> list[Ignored]:
    """Return the variables that are set but have no effect, sorted by name."""
    known = {name for row in _native.environment() for name in (row[0], *row[1])}
    reasons = dict(_native.unsupported_variables())
    found = []
    for name in sorted(os.environ):
        if name in reasons:
            found.append(Ignored(name, reasons[name]))
        elif name.startswith(_OURS) and name not in known:
            near = "" if name in _OF_BUILDS else _nearest(name, known)
            text = f"Unknown variable; did you mean {near}?" if near else "Unknown variable."
            found.append(Ignored(name, text))
    return found


def misspelled() -> list[str]:
    """Return a sentence for each variable that is not read and whose name is nearly one that is."""
    known = {name for row in _native.environment() for name in (row[0], *row[1])}
    unread = os.environ.keys() - known - dict(_native.unsupported_variables()).keys()
    found = []
    for name in sorted(unread - _OF_BUILDS):
        # Kubernetes sets addresses under the names of services.
        is_service = _SERVICE.match(os.environ[name]) is not None
        if name.startswith(_OURS) and not is_service and (near := _nearest(name, known)):
            found.append(f"{name} is not read; did you mean {near}?")
    return found


def warn_of_misspelled() -> None:
    """Print a warning for each misspelled variable.

    A server starts without the setting, for instance without its token.
    """
    for sentence in misspelled():
        print(f"WARN: {sentence}", file=sys.stderr)


def _nearest(name: str, known: set[str]) -> str:
    """Return the known name that is nearest to another one; "" if none is near."""
    return next(iter(get_close_matches(name, known, n=1, cutoff=0.8)), "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the settings.

    Args:
        arguments: Arguments of the command; None takes the command line.

    Returns:
        The exit code: 1 if a value is invalid, otherwise 0.
    """
    parser = argparse.ArgumentParser(prog="python -m mooncake.env", description=__doc__)
    add_options(parser)
    return run(parser.parse_args(arguments))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `run` reads.

    Args:
        parser: Parser of the command.
    """
    parser.add_argument(
        "--set", action="store_true", dest="is_brief", help="show only variables that are set"
    )
    parser.add_argument("--json", action="store_true", dest="is_json", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the settings.

    Args:
        options: ``is_brief`` and ``is_json``.

    Returns:
        The exit code: 1 if a value is invalid, otherwise 0.
    """
    rows = [row for row in settings() if row.source or not options.is_brief]
    without_effect = ignored()
    code = 1 if any(row.invalid for row in rows) else 0
    if options.is_json:
        print(
            json.dumps(
                {
                    "settings": [*map(asdict, rows)],
                    "without_effect": [*map(asdict, without_effect)],
                },
                indent=2,
            )
        )
        return code
    for row in rows:
        if not row.source and _is_of_tests(row):
            continue
        print(f"{row.name} = {row.value or '(empty)'}  [{row.origin}]")
        print(f"    {row.help}")
    if without_effect:
        print("\nset, but without effect:")
    for each in without_effect:
        print(f"{each.name}\n    {each.reason}")
    if not rows and not without_effect:
        print("no Mooncake variable is set")
    return code


def _is_of_tests(setting: Setting) -> bool:
    return setting.help.startswith("For the tests of this project")


if __name__ == "__main__":
    sys.exit(main())
