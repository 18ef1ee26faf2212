"""The command `mooncake`: try a pool, inspect one, and find out what works on this machine."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mooncake import _bench, _doctor, _top, env
from mooncake._runtime import __version__
from mooncake._units import format_bytes, format_rate
from mooncake.errors import BusyError, MooncakeError, NotFoundError, explain, meanings
from mooncake.object_store import Store, StoreConfig

if TYPE_CHECKING:
    from mooncake.tensor.info import Info

__all__ = ["main"]

_CHILD_S = 60
_INTERRUPTED = 130

# Failures that are reported as one line. Any other exception is a bug and shows its traceback.
_FAILURES = (
    MemoryError,
    MooncakeError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
    subprocess.SubprocessError,
)
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
    except _FAILURES as error:
        print(f"mooncake: {error or type(error).__name__}", file=sys.stderr)
        remedy = getattr(error, "remedy", "")
        if remedy:
            print(f"mooncake: {remedy}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mooncake", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mooncake {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, *, joins: bool = True
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if joins:
            command.add_argument(
                "--master",
                default=os.environ.get("MOONCAKE_MASTER") or "127.0.0.1:50051",
                help="host:port of the master (MOONCAKE_MASTER, or 127.0.0.1:50051)",
            )
        return command

    add("demo", _demo, "start a pool, and put and get from a second process", joins=False)
    codes = add("explain", _explain, "explain error codes", joins=False)
    codes.add_argument("codes", nargs="+", type=_code, metavar="code")
    doctor = add(
        "doctor", _diagnose, "try the transports and show what this machine has", joins=False
    )
    doctor.add_argument("--json", action="store_true", dest="is_json", help="print JSON")
    env.add_options(
        add(
            "env",
            env.run,
            "show the environment variables and where their values come from",
            joins=False,
        )
    )
    put = add("put", _put, "store a file (or standard input) under a key")
    put.add_argument("key", type=os.fsencode)
    put.add_argument("file", nargs="?", default="-")
    put.add_argument("--overwrite", action="store_true", help="replace an existing object")
    get = add("get", _get, "write an object to a file (or standard output)")
    get.add_argument("key", type=os.fsencode)
    get.add_argument("file", nargs="?", default="-")
    ls = add("ls", _ls, "list objects")
    ls.add_argument("prefix", nargs="?", default=b"", type=os.fsencode)
    rm = add("rm", _rm, "remove objects")
    rm.add_argument("keys", nargs="+", metavar="key", type=os.fsencode)
    rm.add_argument("--force", action="store_true", help="also objects that were read recently")
    stat = add("stat", _stat, "show the status of the pool, or the object of a key")
    stat.add_argument("key", nargs="?", type=os.fsencode, help="an object or a tensor")
    _top.add_options(
        add("top", _top.run, "show a live view of memory, reads, calls, segments and clients")
    )
    bench = add("bench", _bench.run, "measure puts, gets and plain copies", joins=False)
    _bench.add_options(bench)
    return parser


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
    for code in options.codes:
        print(explain(code))
    return 0 if all(map(meanings, options.codes)) else 1


def _diagnose(options: argparse.Namespace) -> int:
    return _doctor.run(options, _probe)


def _put(options: argparse.Namespace) -> int:
    if options.file == "-":
        value = sys.stdin.buffer.read()
    else:
        with open(options.file, "rb") as file:
            value = file.read()
    with Store(options.master) as store:
        if not store.put(options.key, value, overwrite=options.overwrite):
            print(f"mooncake: {os.fsdecode(options.key)!r} exists and was kept", file=sys.stderr)
            return 1
    return 0


def _get(options: argparse.Namespace) -> int:
    with Store(options.master) as store:
        value = store.get_buffer(options.key)
    if options.file == "-":
        sys.stdout.buffer.write(memoryview(value))
        sys.stdout.buffer.flush()
    else:
        with open(options.file, "wb") as file:
            file.write(memoryview(value))
    return 0


def _ls(options: argparse.Namespace) -> int:
    with Store(options.master) as store:
        for found in store.objects(options.prefix):
            state = "" if found.is_complete else "  (being written)"
            # Keys are written as raw bytes, as the shell would pass them.
            key = found.key_bytes
            line = f"{found.size:>14}  {found.replicas:>2}  ".encode() + key + state.encode()
            sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _rm(options: argparse.Namespace) -> int:
    code = 0
    with Store(options.master) as store:
        for key in options.keys:
            try:
                store.delete(key, force=options.force)
            except (BusyError, NotFoundError) as error:
                print(f"mooncake: {error} ({error.remedy})", file=sys.stderr)
                code = 1
    return code


def _print_info(info: Info) -> None:
    print(f"key       {_printable(info.key)}")
    print(f"size      {format_bytes(info.size)}")
    if (tensor := info.tensor) is None:
        return
    print(f"dtype     {tensor.dtype}")
    print(f"shape     {tensor.shape}")
    print(f"layout    {tensor.layout}")
    for part in tensor.parts:
        axes = "".join(f" {axis}" for axis in part.axes)
        print(f"object    {_printable(part.key)} {part.shape}{axes}")


def _printable(key: str | bytes) -> str:
    return key if isinstance(key, str) else repr(key)


def _stat(options: argparse.Namespace) -> int:
    with Store(options.master) as store:
        if options.key is not None:
            _print_info(store.info(options.key))
            return 0
        pool = store.stats()["pool"]
        print(f"master    {store.master_address}, version {pool['version']}")
        print(f"up        {pool['uptime_s']:.0f} s, {pool['clients']} clients")
        print(f"objects   {pool['keys']}")
        used, capacity = format_bytes(pool["used_bytes"]), format_bytes(pool["capacity_bytes"])
        print(f"memory    {used} of {capacity} used")
        for segment in store.segments():
            used, capacity = format_bytes(segment.used_bytes), format_bytes(segment.capacity_bytes)
            state = "" if segment.takes_objects else "  takes no new objects"
            print(f"segment   {segment.name}  {used} of {capacity}  at {segment.endpoint}{state}")
    return 0


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
