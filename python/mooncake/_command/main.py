"""The command `mooncake`: try a pool, inspect one, and find out what works on this machine."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from mooncake._command import completion
from mooncake._command.output import FAILURES, UsageError, report
from mooncake._command.parser import EXISTS_CODES, Parser, add_json, add_master
from mooncake._runtime import __version__, _native
from mooncake.errors import CLASSES, explain, meanings

__all__ = ["main", "parsed", "run"]

_INTERRUPTED = 130
_FAILED, _WRONG_USAGE = 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments of the command; None takes the command line.

    Returns:
        The exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted; of `exists`, 1 if an
        object is missing and 2 for a failure.
    """
    return run(parsed(arguments))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Load the modules of the command that is named, and return its options for `run`.

    Args:
        arguments: Arguments of the command; None takes the command line.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return _parser(words).parse_args(words)


def run(options: argparse.Namespace) -> int:
    """Run the command with what `parsed` returns.

    Returns:
        The exit code, as of `main`.
    """
    call: Callable[[argparse.Namespace], int] = options.run
    try:
        return call(options)
    except BrokenPipeError:
        # A reader that closes the pipe early is no failure.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        return 0
    except KeyboardInterrupt:
        return _INTERRUPTED
    except FAILURES as error:
        report(error)
        code: int = options.exit_code_of_failure
        return _WRONG_USAGE if isinstance(error, UsageError) else code
    except Exception:  # noqa: BLE001 - Python would exit with 1
        # Python's own code of an exception would say that an object is missing.
        traceback.print_exc()
        return int(options.exit_code_of_failure)


class _Function(NamedTuple):
    """A function of a module that is loaded when the function is needed."""

    module: str
    name: str


def _loaded(function: Callable[..., Any] | _Function) -> Callable[..., Any]:
    if not isinstance(function, _Function):
        return function
    found: Callable[..., Any] = getattr(import_module(f"mooncake.{function.module}"), function.name)
    return found


class _Commands:
    """The commands of a parser, with the options of the one that is named, or of all."""

    def __init__(self, parser: argparse.ArgumentParser, named: str | None) -> None:
        self._named = named
        self._commands = parser.add_subparsers(
            required=True, metavar="COMMAND", parser_class=Parser
        )

    def add(
        self,
        name: str,
        run: Callable[[argparse.Namespace], int] | _Function,
        add_options: Callable[[argparse.ArgumentParser], None] | _Function,
        text: str,
        *,
        joins: bool = False,
    ) -> None:
        """Add a command; one that joins a pool has the options for that."""
        command = self._commands.add_parser(name, help=text, description=text)
        if self._named not in (None, name):
            return
        command.set_defaults(run=_loaded(run), exit_code_of_failure=_FAILED)
        if joins:
            add_master(command)
        _loaded(add_options)(command)

    def add_in(self, module: str, name: str, text: str, *, joins: bool = True) -> None:
        """Add a command with the functions `NAME` and `add_NAME_options` of a module."""
        run, add_options = _Function(module, name), _Function(module, f"add_{name}_options")
        self.add(name, run, add_options, text, joins=joins)

    def add_module(self, name: str, text: str, *, joins: bool = False) -> None:
        """Add a command with the functions `run` and `add_options` of its module."""
        module = f"_command.{name}"
        run, add_options = _Function(module, "run"), _Function(module, "add_options")
        self.add(name, run, add_options, text, joins=joins)


def _parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser: with the options of the command that is named first, or of all."""
    parser = Parser(
        prog="mooncake",
        description=__doc__,
        epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. " + EXISTS_CODES,
    )
    parser.add_argument("--version", action="version", version=f"mooncake {__version__}")
    commands = _Commands(parser, words[0] if words and not words[0].startswith("-") else None)
    files, objects, pool, ha = (f"_command.{each}" for each in ("files", "objects", "pool", "ha"))
    commands.add_in(files, "put", "store a file (or standard input) under a key")
    commands.add_in(files, "get", "write an object to a file (or standard output)")
    commands.add_in(files, "cp", "copy an object to another key")
    commands.add_in(objects, "ls", "list objects")
    commands.add_in(objects, "rm", "remove objects")
    commands.add_in(objects, "exists", "tell which objects exist")
    commands.add_in(objects, "expire", "remove objects after a time, or keep them")
    about = "store safetensors files as checkpoints; load, list, verify and remove these"
    commands.add("checkpoint", _help, _Function("_command.checkpoints", "add_options"), about)
    commands.add_in(pool, "stat", "show the status of the pool, or the object of a key")
    commands.add_in(pool, "segments", "list the memory that processes lend to the pool")
    commands.add_in(pool, "clients", "list the processes that have joined the pool")
    commands.add_in(pool, "drain", "move the objects of a process elsewhere, to stop it")
    about = "show a live view of memory, reads, calls, segments and clients"
    commands.add_module("top", about, joins=True)
    about = "show which of several masters leads, and whether another could take over"
    commands.add("ha", _help, _Function(ha, "add_options"), about)
    about = "let the master that leads hand over to a standby, to stop or upgrade it"
    commands.add_in(ha, "handover", about, joins=False)
    about = "let the log have records that earlier versions cannot read, after an upgrade"
    commands.add_in(ha, "finalize", about, joins=False)
    commands.add_module("bench", "measure puts, gets and plain copies")
    about = "start a pool, and put and get from a second process"
    commands.add("demo", _Function("_command.demo", "run"), add_json, about)
    about = "tell what is right and wrong in the settings of vLLM, SGLang, LMCache, TransferQueue"
    commands.add_module("check", about)
    about = "list, check or remove records of objects in a directory that no process uses"
    commands.add("disk", _help, _Function("_command.disks", "add_options"), about)
    about = "try the transports and show what this machine has"
    commands.add("doctor", _diagnose, _add_doctor_options, about)
    about = "show the environment variables and where their values come from"
    commands.add("env", _Function("env", "run"), _Function("env", "add_options"), about)
    commands.add("explain", _explain, _add_explain_options, "explain error codes")
    about = "print a script that completes commands in a shell"
    commands.add("completion", _completion, _add_completion_options, about)
    commands.add("help", _help, _add_help_options, "show the help of a command")
    return parser


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    from mooncake._command import doctor

    doctor.add_options(parser)
    add_json(parser)


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "codes",
        nargs="+",
        type=_code,
        metavar="code",
        help="number, as -704, or name of a code or of an exception",
    )
    add_json(parser)


def _add_completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=completion.SHELLS, help="the shell")


def _add_help_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", nargs="?", help="name of a command; the list without it")


def _help(options: argparse.Namespace) -> int:
    words = [*([options.command] if options.command else []), "--help"]
    _parser(words).parse_args(words)
    return 0


def _completion(options: argparse.Namespace) -> int:
    print(completion.script(_parser(), options.shell), end="")
    return 0


def _code(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _explain(options: argparse.Namespace) -> int:
    found = {code: _meanings(code) for code in options.codes}
    if options.is_json:
        print(json.dumps({str(code): lines for code, lines in found.items()}, indent=2))
    else:
        for code, lines in found.items():
            print("\n".join(lines) or _unknown(code))
    return 0 if all(found.values()) else 1


def _meanings(code: int | str) -> list[str]:
    # A shell takes -704 for an option here and there, so that the sign gets lost.
    return meanings(-code) if isinstance(code, int) and code > 0 else meanings(code)


def _unknown(code: int | str) -> str:
    if isinstance(code, int) and code > 0:
        return f"{code}: unknown code; a call that returns a number above 0 has succeeded"
    names = [name for _, name, *_ in [*_native.codes(), *_native.codes(is_engine=True)]]
    known = {name.upper(): name for name in [*names, *(each.__name__ for each in CLASSES.values())]}
    near = difflib.get_close_matches(str(code).upper(), known, 1)
    return explain(code) + (f"; did you mean {known[near[0]]}?" if near else "")


def _diagnose(options: argparse.Namespace) -> int:
    from mooncake._command import demo, doctor

    return doctor.run(options, demo.probe)


if __name__ == "__main__":
    sys.exit(main())
