"""Compares the speed of puts into a full pool with puts into an empty pool.

    .venv/bin/python benches/programs/full_pool.py [--segment-mib 256]

Runs a master and two clients, of which one mounts the memory and the other puts into it; then one
client that does both. Each round empties the pool, fills it, and overwrites it ten times; the
alternation makes other load on the machine affect both equally. Prints the rates, their ratio and
the number of failed puts. Exits with 1 if a put failed or if the ratio is below 0.7.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
SIZES = (64 * 1024, MIB, 4 * MIB)
ROUNDS = 3
OVERWRITES = 10
"""Number of times that a round overwrites the full pool."""
RATIO_MIN = 0.7

Times = list[float]


def connected(master: str, segment: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 * MIB, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup failed: {code}")
    return store


def hold_segment(master: str, segment: int, pipe: Connection) -> None:
    """Mount memory until a message arrives."""
    store = connected(master, segment)
    pipe.send(None)
    pipe.recv()
    store.close()


def put(store: MooncakeDistributedStore, at: int, size: int, names: range) -> tuple[Times, int]:
    """Put objects with these numbers. Return the time of each put and the number of failures."""
    failed = 0
    times = []
    begun = time.perf_counter()
    for name in names:
        failed += store.put_from(f"{size}-{name}", at, size) != 0
        ended = time.perf_counter()
        times.append(ended - begun)
        begun = ended
    return times, failed


def compare(store: MooncakeDistributedStore, label: str, segment: int) -> bool:
    """Fill and overwrite with objects of each size. Return whether all checks passed."""
    data = np.ones(max(SIZES), np.uint8)
    at = data.ctypes.data
    store.register_buffer(at, data.nbytes)
    is_good = True
    for size in SIZES:
        count = segment // size
        put(store, at, size, range(count))
        rounds: list[tuple[Times, Times]] = []
        failures = 0
        for _ in range(ROUNDS):
            store.remove_all(True)
            empty, failed = put(store, at, size, range(count))
            failures += failed
            full, failed = put(store, at, size, range(count, (1 + OVERWRITES) * count))
            failures += failed
            rounds.append((empty, full))
        rates = [
            statistics.median(size / statistics.fmean(r[side]) for r in rounds) for side in (0, 1)
        ]
        typical = [statistics.median(statistics.median(r[side]) for r in rounds) for side in (0, 1)]
        ratios = [statistics.fmean(empty) / statistics.fmean(full) for empty, full in rounds]
        ratio = statistics.median(ratios)
        print(
            f"{label} {size // 1024:>5} KiB: {rates[0] / 1e9:5.2f} GB/s empty, "
            f"{rates[1] / 1e9:5.2f} GB/s full, ratio {ratio:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); median put {typical[0] * 1e6:.0f} and "
            f"{typical[1] * 1e6:.0f} us, ratio {typical[0] / typical[1]:.2f}; failed {failures}",
            flush=True,
        )
        is_good &= failures == 0 and ratio >= RATIO_MIN
    store.remove_all(True)
    store.unregister_buffer(at)
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--segment-mib", type=int, default=256)
    segment = parser.parse_args().segment_mib * MIB
    program = Path(sys.executable).parent / "mooncake_master"
    with tempfile.TemporaryDirectory() as folder:
        ports = ("--rpc_address=127.0.0.1", "--rpc_port=0", "--metrics_port=0")
        command = [str(program), *ports, f"--state_dir={folder}/log"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ready = dict(word.split("=", 1) for word in process.stdout.readline().split()[2:])
            pipe, holder_pipe = multiprocessing.Pipe()
            holder = multiprocessing.get_context("spawn").Process(
                target=hold_segment, args=(ready["rpc"], segment, holder_pipe)
            )
            holder.start()
            pipe.recv()
            store = connected(ready["rpc"], 0)
            is_good = compare(store, "to another process", segment)
            store.close()
            pipe.send(None)
            holder.join()
            store = connected(ready["rpc"], segment)
            is_good &= compare(store, "in one process    ", segment)
            store.close()
        finally:
            process.terminate()
            process.wait()
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
