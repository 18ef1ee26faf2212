"""How fast objects are put into a pool that is full, beside one that is empty.

    .venv/bin/python benches/programs/full_pool.py [--segment-mib 256]

Runs a master and two clients: one lends the memory, the other puts into it; then one that does
both. By turns the pool is emptied and filled, and overwritten ten times, so that what else the
machine does meets both alike. Says the rate of either, their ratio and how many puts failed; ends
with 1 if any did, or if the ratio is below 0.7.
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
OVERWRITTEN = 10
"""How often the full pool is written anew in a round."""
RATIO_MIN = 0.7

Times = list[float]


def joined(master: str, segment: int) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 * MIB, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup failed: {code}")
    return store


def lend(master: str, segment: int, told: Connection) -> None:
    """Lends memory until it is told to leave."""
    store = joined(master, segment)
    told.send(None)
    told.recv()
    store.close()


def put(store: MooncakeDistributedStore, at: int, size: int, names: range) -> tuple[Times, int]:
    """Puts objects of these numbers; how long each took, and how many failed."""
    failed = 0
    times = []
    begun = time.perf_counter()
    for name in names:
        failed += store.put_from(f"{size}-{name}", at, size) != 0
        ended = time.perf_counter()
        times.append(ended - begun)
        begun = ended
    return times, failed


def compare(store: MooncakeDistributedStore, what: str, segment: int) -> bool:
    """Fills and overwrites with objects of each size; whether all was well."""
    data = np.ones(max(SIZES), np.uint8)
    at = data.ctypes.data
    store.register_buffer(at, data.nbytes)
    well = True
    for size in SIZES:
        count = segment // size
        put(store, at, size, range(count))
        rounds: list[tuple[Times, Times]] = []
        failures = 0
        for _ in range(ROUNDS):
            store.remove_all(True)
            empty, failed = put(store, at, size, range(count))
            failures += failed
            full, failed = put(store, at, size, range(count, (1 + OVERWRITTEN) * count))
            failures += failed
            rounds.append((empty, full))
        rates = [
            statistics.median(size / statistics.fmean(r[side]) for r in rounds) for side in (0, 1)
        ]
        typical = [statistics.median(statistics.median(r[side]) for r in rounds) for side in (0, 1)]
        ratios = [statistics.fmean(empty) / statistics.fmean(full) for empty, full in rounds]
        ratio = statistics.median(ratios)
        print(
            f"{what} {size // 1024:>5} KiB: {rates[0] / 1e9:5.2f} GB/s empty, "
            f"{rates[1] / 1e9:5.2f} GB/s full, ratio {ratio:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); median put {typical[0] * 1e6:.0f} and "
            f"{typical[1] * 1e6:.0f} us, ratio {typical[0] / typical[1]:.2f}; failed {failures}",
            flush=True,
        )
        well &= failures == 0 and ratio >= RATIO_MIN
    store.remove_all(True)
    store.unregister_buffer(at)
    return well


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
            told, lender_told = multiprocessing.Pipe()
            lender = multiprocessing.get_context("spawn").Process(
                target=lend, args=(ready["rpc"], segment, lender_told)
            )
            lender.start()
            told.recv()
            store = joined(ready["rpc"], 0)
            well = compare(store, "to another process", segment)
            store.close()
            told.send(None)
            lender.join()
            store = joined(ready["rpc"], segment)
            well &= compare(store, "in one process    ", segment)
            store.close()
        finally:
            process.terminate()
            process.wait()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
