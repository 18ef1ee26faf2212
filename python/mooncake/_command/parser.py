"""The command line: arguments that several commands share, and errors that name what was meant."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from mooncake._units import parse_duration, parse_size

__all__ = [
    "EXISTS_CODES",
    "Parser",
    "add_json",
    "add_master",
    "add_metadata",
    "count",
    "duration",
    "host_port",
    "master_address",
    "seconds",
    "sizes",
]

EXISTS_CODES = "Of exists: 0 all exist, 1 one is missing, 2 no answer."
"""The exit codes of `exists`."""

_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)'")
_UNRECOGNIZED = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest command or option."""

    def __init__(self, **options: Any) -> None:
        """Make a parser that takes no abbreviated options, as scripts outlive them.

        Args:
            options: Options of `argparse.ArgumentParser`.
        """
        super().__init__(**{**options, "allow_abbrev": False})
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and remember the words for errors."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._options_first(self._words), namespace)

    def _options_first(self, words: list[str]) -> list[str]:
        """Return words with the options before the keys and files, which may stand anywhere.

        `argparse` gives an argument that may be absent no word after an option that follows it, as
        in `put KEY --overwrite FILE`.
        """
        known = self._option_string_actions
        if commands_of(self) or any(each.nargs not in (None, 0) for each in known.values()):
            return words
        options, others = list[str](), list[str]()
        rest = iter(words)
        for word in rest:
            if word == "--":
                others += [word, *rest]
            elif self._parse_optional(word) is None:
                others.append(word)
            else:
                options.append(word)
                if word in known and known[word].nargs is None:
                    value = next(rest, "--")
                    if self._parse_optional(value) is not None:
                        return words  # the option has no value, which is an error
                    options.append(value)
        return options + others

    def error(self, message: str) -> NoReturn:
        """Print the usage of the command that is given and the error, and exit with code 2."""
        self._given().print_usage(sys.stderr)
        if misplaced := self._misplaced_option():
            self.exit(2, f"mooncake: {misplaced}\n")
        words, known = self._unknown_words(message)
        near = [match for word in words for match in get_close_matches(word, known, 1)]
        hint = f"; did you mean {' '.join(near)}?" if near else ""
        if not near and known and _INVALID_CHOICE.search(message):
            hint = "; `mooncake help` tells what each does"
        elif not near and (key := self._dashed_key()):
            hint = f"; a key that begins with - follows --, as in `-- {key}`"
        self.exit(2, f"mooncake: {message}{hint}\n")

    def _misplaced_option(self) -> str:
        """Return what is wrong with an option that stands before the command; "" without one."""
        commands = commands_of(self)
        option = self._words[0].partition("=")[0] if self._words else ""
        if not commands or not option.startswith("-") or option in self._option_string_actions:
            return ""
        known = {text for each in commands.values() for text in each._option_string_actions}
        near = option if option in known else next(iter(get_close_matches(option, known, 1)), "")
        shown = f", as in `mooncake COMMAND {near}`" if near else ""
        meant = "" if near in ("", option) else f"; did you mean {near}?"
        return f"{option} stands before the command: options follow it{shown}{meant}"

    def _dashed_key(self) -> str:
        """Return the first word that may be a key, but was taken for an option; "" for none."""
        actions = self._given()._actions
        if not any(action.dest in ("key", "keys", "source") for action in actions):
            return ""
        known = {text for action in actions for text in action.option_strings}
        before = itertools.takewhile(lambda word: word != "--", map(os.fsdecode, self._words))
        words = (word for word in before if word.startswith("-") and word != "-")
        return next((word for word in words if word.partition("=")[0] not in known), "")

    def _given(self) -> argparse.ArgumentParser:
        """Return the parser of the command that is given, or this one."""
        first = next((word for word in self._words if not word.startswith("-")), "")
        return commands_of(self).get(first, self)

    def _unknown_words(self, message: str) -> tuple[list[str], list[str]]:
        """Return the words that an error calls unknown, and the words that are known."""
        if found := _INVALID_CHOICE.search(message):
            return [found[1]], list(commands_of(self))
        if message.startswith(_UNRECOGNIZED):
            words = [word for word in message.split() if word.startswith("-")]
            known = [text for action in self._given()._actions for text in action.option_strings]
            return [word.partition("=")[0] for word in words], known
        return [], []


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def add_master(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name the pool."""
    parser.add_argument(
        "--master",
        metavar="ADDRESS",
        default=master_address(),
        help="address of the master: HOST:PORT, a list A:1,B:2, etcd://…, redis://… or k8s://… "
        "(MOONCAKE_MASTER, or 127.0.0.1:50051)",
    )
    parser.add_argument(
        "--tenant", metavar="NAME", default="default", help="tenant whose keys are meant"
    )


def master_address() -> str:
    """Return the address of the master that is meant if none is given."""
    return os.environ.get("MOONCAKE_MASTER") or "127.0.0.1:50051"


def add_metadata(parser: argparse.ArgumentParser) -> None:
    """Declare `--metadata`, for commands that read or write the bytes of objects."""
    parser.add_argument(
        "--metadata",
        metavar="URL",
        default=os.environ.get("MOONCAKE_TE_META_DATA_SERVER") or "P2PHANDSHAKE",
        help="metadata server of the processes that lend memory, as http://HOST:8080/metadata, or "
        "P2PHANDSHAKE for none (MOONCAKE_TE_META_DATA_SERVER, or P2PHANDSHAKE)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", dest="is_json", help="print JSON")


def host_port(text: str) -> str:
    """Return an address that has a host and a port."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"not an address HOST:PORT: {text!r}")
    return text


def seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"not a number of seconds above 0: {text!r}")
    return value


def count(text: str) -> int:
    """Parse a number from 1 on."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"not a number from 1 on: {text!r}")
    return int(text)


def duration(text: str) -> float:
    """Return the seconds of a positive duration, as ``30s`` or ``2h``."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def sizes(text: str) -> list[int]:
    """Parse sizes above 0 that are separated by commas."""
    try:
        found = [parse_size(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if min(found) == 0:
        raise argparse.ArgumentTypeError(f"sizes must be above 0: {text!r}")
    return found
