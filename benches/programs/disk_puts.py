"""Measures what writing objects to disk costs the puts.

    python benches/programs/disk_puts.py DIR

Two pools run at the same time, one with a directory of records, one without. Rounds of puts of
1 MiB alternate between them, at 200 a second or half of what `fio` writes to the directory,
whichever is less. All memory has been written before, and puts evict older objects. The share is
the median time of a put with the directory over that without, of each round; the goal is at most
1.1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from disk_tier import MIB, Pool, await_copy, fio, joined, must

GOAL = 1.1
PUTS_A_SECOND = 200
PUTS_A_ROUND = 100
ROUNDS_IN_MEMORY = 3


def written_a_second(directory: Path) -> float:
    """Return how many MiB fio writes to the directory in a second."""
    options = "--rw=write", "--iodepth=4", "--runtime=3", "--bs=1m", "--size=1g"
    written = fio(directory, "write", *options)
    (directory / "fio").unlink(missing_ok=True)
    return written


def put_all(store: Any, prefix: str, interval: float) -> list[float]:
    """Put objects at a steady rate; return the times of the puts in milliseconds."""
    value = os.urandom(MIB)
    times = []
    due = time.perf_counter()
    for number in range(PUTS_A_ROUND):
        time.sleep(max(0.0, due - time.perf_counter()))
        begin = time.perf_counter()
        must(store.put(f"{prefix}/{number}", value) == 0, "a put failed")
        times.append((time.perf_counter() - begin) * 1e3)
        due = max(due + interval, time.perf_counter())
    return times


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the records go")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    must(shutil.which("fio") is not None, "install fio")
    records = options.directory / "records"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    rate = min(PUTS_A_SECOND, written_a_second(options.directory) / 2)
    memory = ROUNDS_IN_MEMORY * PUTS_A_ROUND * MIB
    pools = Pool(records, memory), Pool(None, memory)
    writer = joined(pools[0].address, 0)
    try:
        stores = writer, pools[1].store
        for store in stores:
            # Memory that nobody has written yet is slower.
            for number in range(2 * ROUNDS_IN_MEMORY):
                put_all(store, f"first{number}", 1 / rate)
        rows = []
        for number in range(options.rounds):
            with_disk, without = (
                statistics.median(put_all(store, f"round{number}", 1 / rate)) for store in stores
            )
            await_copy(pools[0].store, f"round{number}/{PUTS_A_ROUND - 1}")
            rows.append((with_disk, without, with_disk / without))
        with_disk, without, share = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        print(f"puts of 1 MiB, {rate:.0f} a second: median {with_disk:.2f} ms with a directory,")
        print(f"{without:.2f} ms without one; share {share:.2f}, goal {GOAL:.2f}")
        print(f"shares of the rounds: {', '.join(f'{row[2]:.2f}' for row in rows)}")
    finally:
        writer.close()
        for pool in pools:
            pool.close()
        shutil.rmtree(records, ignore_errors=True)


if __name__ == "__main__":
    main()
