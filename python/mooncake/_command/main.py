"""The command `mooncake`: try a pool, inspect one, and find out what works on this machine."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from mooncake import env
from mooncake._api.store import Store, StoreConfig
from mooncake._command import (
    bench as _bench,
    completion,
    doctor as _doctor,
    files,
    objects,
    pool,
    top as _top,
)
from mooncake._command.output import FAILURES, UsageError, report
from mooncake._command.parser import Parser, add_json, add_master
from mooncake._runtime import __version__, _native
from mooncake._units import format_bytes, format_rate
from mooncake.errors import explain, meanings

__all__ = ["main"]

_CHILD_S = 60
_INTERRUPTED = 130
_WRONG_USAGE = 2

_DEMO_BYTES = 64 << 20
_PROBE_BYTES = 4 << 20

# Runs in the second process of `demo` and `doctor`: gets one object, reports how, puts another.
_CHILD = """
import sys, time, zlib
from mooncake import Store
with Store(sys.argv[1]) as store:
    buffer = bytearray(store.size("from-parent"))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        store.get_into("from-parent", buffer)
        best = min(best, time.perf_counter() - begin)
    store.put("from-child", zlib.crc32(buffer).to_bytes(4, "big"))
    served = [name for name, count in store.stats()["store"]["by_transport"].items()
              if count["bytes"]]
    print(len(buffer), best, *served)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments of the command; None takes the command line.

    Returns:
        The exit code: 0 success, 1 failure, 2 wrong usage, 130 interrupted.
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
        return _WRONG_USAGE if isinstance(error, UsageError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mooncake",
        description=__doc__,
        epilog="Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"mooncake {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, joins: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
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
    about = "measure puts, gets and plain copies"
    _bench.add_options(add("bench", _bench.run, about, joins=False))
    about = "start a pool, and put and get from a second process"
    add("demo", _demo, about, joins=False)
    about = "try the transports and show what this machine has"
    add_json(add("doctor", _diagnose, about, joins=False))
    about = "show the environment variables and where their values come from"
    env.add_options(add("env", env.run, about, joins=False))
    codes = add("explain", _explain, "explain error codes", joins=False)
    codes.add_argument(
        "codes", nargs="+", type=_code, metavar="code", help="number, as -704, or name of a code"
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


def _demo(_: argparse.Namespace) -> int:
    value = os.urandom(1 << 20) * (_DEMO_BYTES >> 20)
    config = StoreConfig(segment_bytes=4 * _DEMO_BYTES)
    with Store(config=config) as store:
        print(f"this process {os.getpid()} is master, node and client")
        print(f"  master at {store.master_address}, lends {format_bytes(4 * _DEMO_BYTES)}")
        begin = time.perf_counter()
        store.put("from-parent", value)
        taken = time.perf_counter() - begin
        speed = format_rate(len(value), taken)
        print(f"  put {format_bytes(len(value))} in {taken * 1e3:.1f} ms ({speed})")
        length, seconds, served = _run_child(store, {})
        print("a second process joined at that address")
        speed = format_rate(length, seconds)
        print(f"  get {format_bytes(length)} in {seconds * 1e3:.1f} ms ({speed})")
        print(f"  the bytes went over: {', '.join(served)}")
        _check_child_bytes(store, value)
        print("  it read the bytes that were put, and this process read its answer")
        keys = ", ".join(str(found.key) for found in store.objects())
        print(f"objects in the pool: {keys}")
    print("closed; no process is left running")
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
            print("\n".join(lines) or f"{explain(code)}{_nearest(code)}")
    return 0 if all(found.values()) else 1


def _meanings(code: int | str) -> list[str]:
    lines = meanings(code)
    if isinstance(code, int) and code > 0:
        # A shell takes -704 for an option here and there, so that the sign gets lost.
        lines += meanings(-code)
    return lines


def _nearest(code: int | str) -> str:
    names = [name for _, name, *_ in [*_native.codes(), *_native.codes(is_engine=True)]]
    near = difflib.get_close_matches(str(code).upper(), names, 1)
    return f"; did you mean {near[0]}?" if near else ""


def _diagnose(options: argparse.Namespace) -> int:
    return _doctor.run(options, _probe)


def _probe(name: str) -> str:
    """Transfer bytes to a second process; raise if another transport served."""
    value = os.urandom(_PROBE_BYTES)
    forced = name == "tcp"
    environment = {"MC_FORCE_TCP": "1" if forced else "0"}
    config = StoreConfig(segment_bytes=4 * _PROBE_BYTES, is_tcp_forced=forced)
    with Store(config=config) as store:
        store.put("from-parent", value)
        length, seconds, served = _run_child(store, environment)
        _check_child_bytes(store, value)
    if name not in served:
        raise RuntimeError(f"{', '.join(served) or 'no transport'} served instead")
    return (
        f"works: {format_bytes(length)} in {seconds * 1e3:.2f} ms ({format_rate(length, seconds)})"
    )


def _run_child(store: Store, environment: dict[str, str]) -> tuple[int, float, list[str]]:
    """Run a second process that gets an object and puts an answer.

    Returns:
        Bytes, seconds, transports.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, store.master_address],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the second process failed: {done.stderr.strip()}")
    length, seconds, *served = done.stdout.split()
    return int(length), float(seconds), served


def _check_child_bytes(store: Store, value: bytes) -> None:
    import zlib

    if store.get("from-child") != zlib.crc32(value).to_bytes(4, "big"):
        raise RuntimeError("the second process read other bytes than were put")


if __name__ == "__main__":
    sys.exit(main())
