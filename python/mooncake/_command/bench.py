"""`mooncake bench`: measures puts and gets of several sizes, and plain copies for comparison."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from mooncake._api.store import Store, StoreConfig
from mooncake._command.files import hinting
from mooncake._command.output import CommandError
from mooncake._command.parser import add_metadata, seconds, sizes
from mooncake._units import format_bytes

__all__ = ["Measurement", "add_options", "run"]

_CALLS_MAX = 20_000
_LENDER_BYTES = 1 << 30

# Runs in a process that lends memory until its standard input closes.
_LENDER = """
import sys
from mooncake import Store, StoreConfig
with Store(config=StoreConfig(segment_bytes=int(sys.argv[1]))) as store:
    print(store.master_address, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of one operation at one size.

    Attributes:
        operation: ``copy``, ``put``, ``get_into`` or ``get``.
        size: Bytes of a value.
        calls: Number of calls.
        bytes_per_second: Throughput over all calls.
        p50_us: Median latency in microseconds.
        p99_us: 99th percentile of the latency in microseconds.
    """

    operation: str
    size: int
    calls: int
    bytes_per_second: float
    p50_us: float
    p99_us: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--master",
        default="",
        help="host:port of the master to measure; by default a second process lends memory, and "
        "'embedded' uses the memory of this process",
    )
    add_metadata(parser)
    parser.add_argument(
        "--sizes", type=sizes, default="4KB,64KB,1MB,16MB", help="sizes of values, with commas"
    )
    parser.add_argument(
        "--seconds", type=seconds, default=0.5, metavar="S", help="time for each operation"
    )
    parser.add_argument("--json", action="store_true", dest="is_json", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Measure, and print a table or JSON.

    Args:
        options: Options that `add_options` declares.

    Returns:
        0.
    """
    with _connected(options.master, options.metadata) as store:
        rows = [row for size in options.sizes for row in _measure(store, size, options.seconds)]
        moved = store.stats()["store"]["by_transport"]
        served = [name for name in moved if moved[name]["bytes"]]
    if options.is_json:
        print(json.dumps({"transports": served, "rows": [asdict(row) for row in rows]}, indent=2))
        return 0
    print(f"bytes went over: {', '.join(served)}; one thread, values of one size at a time")
    print(f"{'size':>9} {'operation':<9} {'calls':>7} {'GB/s':>8} {'p50':>11} {'p99':>11}  of copy")
    copies = {row.size: row for row in rows if row.operation == "copy"}
    for row in rows:
        share = row.bytes_per_second / copies[row.size].bytes_per_second
        print(
            f"{format_bytes(row.size):>9} {row.operation:<9} {row.calls:>7} "
            f"{row.bytes_per_second / 1e9:>8.2f} {row.p50_us:>8.1f} us {row.p99_us:>8.1f} us"
            f"  {share:>6.0%}"
        )
    return 0


@contextlib.contextmanager
def _connected(master: str, metadata: str) -> Iterator[Store]:
    if master:
        lent = _LENDER_BYTES if master == "embedded" else 0
        config = StoreConfig(segment_bytes=lent, metadata=metadata)
        with Store(master, config) as store, hinting(store, metadata):
            yield store
        return
    command = [sys.executable, "-c", _LENDER, str(_LENDER_BYTES)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        try:
            address = lender.stdout.readline().strip()
            if not address:
                raise ValueError("the second process did not start")
            with Store(address) as store:
                yield store
        finally:
            lender.stdin.close()


def _measure(store: Store, size: int, seconds: float) -> Iterator[Measurement]:
    value, target = _memory(size)
    prefix = f"mooncake-bench/{os.getpid()}/"
    # Few enough keys that the pool holds them all, including old values that wait to be freed.
    keys = [f"{prefix}{number}" for number in range(max(2, min(64, (64 << 20) // size)))]
    try:
        yield _timed("copy", size, seconds, lambda _: _copy(value, target))
        yield _timed("put", size, seconds, lambda number: _put(store, keys, number, value))
        for key in keys:
            store.put(key, value)
        yield _timed(
            "get_into",
            size,
            seconds,
            lambda number: store.get_into(keys[number % len(keys)], target),
        )
        if target != value:
            raise ValueError("the bytes read differ from the bytes put")
        yield _timed("get", size, seconds, lambda number: store.get(keys[number % len(keys)]))
    finally:
        store.clear(prefix, force=True)


def _memory(size: int) -> tuple[bytearray, bytearray]:
    """Return a value and the memory that it is read into.

    Raises:
        CommandError: There is no memory for them.
    """
    try:
        value, target = bytearray(os.urandom(min(size, 1 << 20))), bytearray(size)
        value *= -(-size // len(value))
    except (MemoryError, OverflowError) as error:
        text = f"no memory for two values of {format_bytes(size)}"
        raise CommandError(text, "Give smaller --sizes.") from error
    del value[size:]
    return value, target


def _copy(value: bytearray, target: bytearray) -> None:
    memoryview(target)[:] = value


def _put(store: Store, keys: list[str], number: int, value: bytearray) -> None:
    store.put(keys[number % len(keys)], value, overwrite=True)


def _timed(operation: str, size: int, seconds: float, call: Callable[[int], object]) -> Measurement:
    for number in range(3):
        call(number)
    took: list[float] = []
    begin = last = time.perf_counter()
    while last - begin < seconds and len(took) < _CALLS_MAX:
        call(len(took))
        now = time.perf_counter()
        took.append(now - last)
        last = now
    took.sort()
    return Measurement(
        operation=operation,
        size=size,
        calls=len(took),
        bytes_per_second=size * len(took) / (last - begin),
        p50_us=took[len(took) // 2] * 1e6,
        p99_us=took[min(len(took) - 1, len(took) * 99 // 100)] * 1e6,
    )
