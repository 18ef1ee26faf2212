"""The command `mooncake`: try a pool, inspect one, and find out what works on this machine."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Sequence

from mooncake import env
from mooncake._command import (
    bench as _bench,
    check,
    checkpoints,
    completion,
    demo,
    disks,
    doctor as _doctor,
    files,
    ha as _ha,
    objects,
    pool,
    top as _top,
)
from mooncake._command.output import FAILURES, UsageError, report
from mooncake._command.parser import Parser, add_json, add_master
from mooncake._runtime import __version__, _native
from mooncake.errors import CLASSES, explain, meanings

__all__ = ["main"]

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
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mooncake",
        description=__doc__,
        epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. "
        + objects.EXISTS_CODES,
    )
    parser.add_argument("--version", action="version", version=f"mooncake {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, joins: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, exit_code_of_failure=_FAILED)
        if joins:
            add_master(command)
        return command

    files.add_put_options(add("put", files.put, "store a file (or standard input) under a key"))
    files.add_get_options(add("get", files.get, "write an object to a file (or standard output)"))
    files.add_cp_options(add("cp", files.cp, "copy an object to another key"))
    objects.add_ls_options(add("ls", objects.ls, "list objects"))
    objects.add_rm_options(add("rm", objects.rm, "remove objects"))
    objects.add_exists_options(add("exists", objects.exists, "tell which objects exist"))
    objects.add_expire_options(
        add("expire", objects.expire, "remove objects after a time, or keep them")
    )
    about = "store safetensors files as checkpoints; load, list, verify and remove these"
    checkpoints.add_options(add("checkpoint", _help, about, joins=False))
    about = "show the status of the pool, or the object of a key"
    pool.add_stat_options(add("stat", pool.stat, about))
    about = "list the memory that processes lend to the pool"
    pool.add_segments_options(add("segments", pool.segments, about))
    about = "list the processes that have joined the pool"
    pool.add_clients_options(add("clients", pool.clients, about))
    about = "move the objects of a process elsewhere, to stop it"
    pool.add_drain_options(add("drain", pool.drain, about))
    about = "show a live view of memory, reads, calls, segments and clients"
    _top.add_options(add("top", _top.run, about))
    about = "show which of several masters leads, and whether another could take over"
    _ha.add_options(add("ha", _help, about, joins=False))
    about = "let the master that leads hand over to a standby, to stop or upgrade it"
    _ha.add_handover_options(add("handover", _ha.handover, about, joins=False))
    about = "let the log have records that earlier versions cannot read, after an upgrade"
    _ha.add_finalize_options(add("finalize", _ha.finalize, about, joins=False))
    about = "measure puts, gets and plain copies"
    _bench.add_options(add("bench", _bench.run, about, joins=False))
    about = "start a pool, and put and get from a second process"
    add_json(add("demo", demo.run, about, joins=False))
    about = "tell what is right and wrong in the settings of vLLM, SGLang, LMCache, TransferQueue"
    check.add_options(add("check", check.run, about, joins=False))
    about = "list, check or remove records of objects in a directory that no process uses"
    disks.add_options(add("disk", _help, about, joins=False))
    about = "try the transports and show what this machine has"
    doctor = add("doctor", _diagnose, about, joins=False)
    _doctor.add_options(doctor)
    add_json(doctor)
    about = "show the environment variables and where their values come from"
    env.add_options(add("env", env.run, about, joins=False))
    codes = add("explain", _explain, "explain error codes", joins=False)
    codes.add_argument(
        "codes",
        nargs="+",
        type=_code,
        metavar="code",
        help="number, as -704, or name of a code or of an exception",
    )
    add_json(codes)
    about = "print a script that completes commands in a shell"
    shell = add("completion", _completion, about, joins=False)
    shell.add_argument("shell", choices=completion.SHELLS, help="the shell")
    words = add("help", _help, "show the help of a command", joins=False)
    words.add_argument("command", nargs="?", help="name of a command; the list without it")
    return parser


def _help(options: argparse.Namespace) -> int:
    parser = _parser()
    parser.parse_args([*([options.command] if options.command else []), "--help"])
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
    return _doctor.run(options, demo.probe)


if __name__ == "__main__":
    sys.exit(main())
