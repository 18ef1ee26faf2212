"""Measures how many gets find an object in memory that a probe has asked for.

    python benches/programs/disk_prefetch.py DIR

The pool has memory for 20 % of the objects; all are on disk. Each round probes a batch of objects,
drawn by Zipf's law, with `ExistOptions.prefetch_to_memory`, waits as long as one read of an object
from disk takes, and gets each. A get that made another process load a record was not served from
memory. The store asks again for an object after a second (`ssd_prefetch_dedup_ttl_sec=1`,
`ssd_prefetch_cooldown_sec=0`). The goal is 95 %; it is measured with and without the short wait of
gets (`ssd_get_wait_ms`), and without the option.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from disk_tier import KIB, MIB, Pool, await_copy, joined, must

from mooncake.store import ExistOptions

MEMORY_SHARE = 0.2
BATCH = 32
GOAL = 0.95


def fill(store: Any, count: int, size: int) -> list[str]:
    """Put the objects, none faster than the disk takes them; return their keys."""
    keys = [f"k{number}" for number in range(count)]
    rest = bytes(range(256)) * (size // 256)
    for number, key in enumerate(keys):
        must(store.put(key, number.to_bytes(8, "little") + rest[8:]) == 0, "a put failed")
        if number % BATCH == BATCH - 1:
            await_copy(store, key)
    await_copy(store, keys[-1])
    return keys


def is_in_memory(store: Any, key: str) -> bool:
    """Return whether the object has a copy in memory."""
    copies = store.batch_get_replica_desc([key]).get(key, [])
    return any(copy.is_memory_replica() for copy in copies)


def disk_read_seconds(store: Any, keys: list[str]) -> float:
    """Return the time of a read of an object that is only on disk."""
    took = []
    for key in keys:
        if not is_in_memory(store, key):
            begin = time.perf_counter()
            must(len(store.get(key)) > 0, f"{key} cannot be read")
            took.append(time.perf_counter() - begin)
        if len(took) == 50:
            break
    must(len(took) > 0, "nothing is only on disk")
    return statistics.median(took)


def served_from_memory(
    store: Any, keys: list[str], options: ExistOptions, pause: float, seconds: float
) -> tuple[float, int]:
    """Probe and get; return the share of gets that memory served, and their number."""
    weights = list(itertools.accumulate(1 / rank for rank in range(1, len(keys) + 1)))
    hits, gets = 0, 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        batch = random.choices(keys, cum_weights=weights, k=BATCH)
        must(all(found == 1 for found in store.batch_is_exist(batch, options)), "an object is gone")
        time.sleep(pause)
        for key in batch:
            loads = store.get_offload_rpc_read_count()
            value = store.get(key)
            must(key == f"k{int.from_bytes(value[:8], 'little')}", f"{key} is another object")
            hits += store.get_offload_rpc_read_count() == loads
            gets += 1
    return hits / gets, gets


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="where the records go")
    parser.add_argument("--total", type=int, default=512, help="MiB of all objects")
    parser.add_argument("--size", type=int, default=256, help="KiB of an object")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--lease-ms", type=int, default=10_000, help="of a read or a prefetch")
    options = parser.parse_args()
    size, total = options.size * KIB, options.total * MIB
    records = options.directory / "records"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    lease = f"--default_kv_lease_ttl={options.lease_ms}ms"
    pool = Pool(records, int(total * MEMORY_SHARE), lease)
    try:
        keys = fill(pool.store, total // size, size)
        random.shuffle(keys)
        print("| probe | ssd_get_wait_ms | gets | from memory | goal |\n|---|---|---|---|---|")
        for prefetches, wait_ms in ((True, 0), (True, 10), (False, 0)):
            store = joined(
                pool.address,
                0,
                ssd_prefetch_dedup_ttl_sec=1,
                ssd_prefetch_cooldown_sec=0,
                ssd_get_wait_ms=wait_ms,
            )
            pause = disk_read_seconds(store, keys)
            exist = ExistOptions(prefetch_to_memory=prefetches)
            share, gets = served_from_memory(store, keys, exist, pause, options.seconds)
            kind, goal = ("prefetches", f"{GOAL:.2f}") if prefetches else ("plain", "")
            print(f"| {kind} | {wait_ms} | {gets:,} | {share:.3f} | {goal} |", flush=True)
            store.close()
    finally:
        pool.close()
        shutil.rmtree(records, ignore_errors=True)


if __name__ == "__main__":
    main()
