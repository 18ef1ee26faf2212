"""Measures files of 1 GiB beside puts and gets of the same bytes, between two processes.

    python benches/programs/files.py

One process lends the memory, this one reads and writes. The calls of a round follow each other, so
that other load on the machine affects all of them. A ratio is the median speed of a file over that
of the plain call in the same run. Bytes are compared with what was written before the timed rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import fsspec

import mooncake

GIB, MIB = 1 << 30, 1 << 20
PIECE_BYTES = 8 * MIB
SEGMENT_BYTES = 6 * GIB


def lend(segment_bytes: int) -> None:
    """Start a pool and keep it until the input ends."""
    config = mooncake.StoreConfig(segment_bytes=segment_bytes)
    with mooncake.Store(config=config) as store:
        print(store.master_address, flush=True)
        sys.stdin.read()


class Calls:
    """The calls that are compared, on one object."""

    def __init__(self, store: mooncake.Store, size: int) -> None:
        self.store = store
        self.files = fsspec.filesystem("mooncake", store=store)
        pattern = bytes(range(256)) * (MIB // 256)
        self.data = pattern * (size // MIB)
        self.memory = bytearray(self.data)
        self.target = bytearray(size)

    def pieces(self, data: bytes | bytearray) -> Iterator[memoryview]:
        view = memoryview(data)
        return (view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES))

    def put(self) -> None:
        self.store.put("plain", self.data, overwrite=True)

    def write_bytes(self) -> None:
        with self.files.open("file", "wb") as file:
            file.write(self.data)

    def write_pieces(self) -> None:
        with self.files.open("file", "wb") as file:
            for piece in self.pieces(self.data):
                file.write(piece)

    def write_memory(self) -> None:
        with self.files.open("file", "wb") as file:
            for piece in self.pieces(self.memory):
                file.write(piece)

    def write_memory_sized(self) -> None:
        with self.files.open("file", "wb", size=len(self.memory)) as file:
            for piece in self.pieces(self.memory):
                file.write(piece)

    def get(self) -> None:
        assert len(self.store.get("plain")) == len(self.data)

    def read(self) -> None:
        with self.files.open("file") as file:
            assert len(file.read()) == len(self.data)

    def cat(self) -> None:
        assert len(self.files.cat_file("file")) == len(self.data)

    def get_into(self) -> None:
        assert self.store.get_into("plain", self.target) == len(self.data)

    def readinto(self) -> None:
        with self.files.open("file") as file:
            assert file.readinto(self.target) == len(self.data)


# Each call, the plain call beside it, and the smallest ratio that is wanted.
COMPARED = [
    ("write of bytes", "write_bytes", "put", 0.6),
    ("write of bytes, 8 MiB at a time", "write_pieces", "put", 0.6),
    ("write of other memory, size known", "write_memory_sized", "put", 0.6),
    ("write of other memory", "write_memory", "put", None),
    ("read()", "read", "get", 0.6),
    ("cat_file()", "cat", "get", None),
    ("readinto()", "readinto", "get_into", 0.6),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=GIB, help="bytes, a multiple of 1 MiB")
    parser.add_argument("--lend", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lend:
        lend(options.lend)
        return 0
    command = [sys.executable, __file__, f"--lend={6 * options.size}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        try:
            with mooncake.Store(lender.stdout.readline().strip()) as store:
                return report(measure(Calls(store, options.size), options.rounds), options.size)
        finally:
            lender.stdin.close()


def measure(calls: Calls, rounds: int) -> dict[str, float]:
    """Return the median seconds of each call."""
    names = dict.fromkeys(name for _, one, other, _ in COMPARED for name in (other, one))
    functions: dict[str, Callable[[], None]] = {name: getattr(calls, name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):
        for name, call in functions.items():
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            if number >= 0:
                seconds[name].append(took)
            elif "write" in name and calls.store.get("file") != calls.data:
                raise SystemExit(f"{name} wrote other bytes")
            elif name.endswith("into") and calls.target != calls.data:
                raise SystemExit(f"{name} read other bytes")
    return {name: statistics.median(each) for name, each in seconds.items()}


def report(seconds: dict[str, float], size: int) -> int:
    """Print a table; return 1 if a ratio is smaller than wanted."""
    print(f"| {size / MIB:.0f} MiB | GB/s | plain call | GB/s | ratio |\n|---|---|---|---|---|")
    missed = 0
    for title, one, other, wanted in COMPARED:
        ratio = seconds[other] / seconds[one]
        speeds = [size / seconds[name] / 1e9 for name in (one, other)]
        print(f"| {title} | {speeds[0]:.1f} | {other} | {speeds[1]:.1f} | {ratio:.2f} |")
        missed += wanted is not None and ratio < wanted
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
