"""Measures batch gets of objects that are only on disk, beside `fio` in the same directory.

    python benches/programs/disk_tier.py DIR

The process that reads has the directory; the memory of the objects was lent by another process,
which leaves before they are read. Each get is `batch_get_into` of 256 random objects into memory
that is registered and aligned to pages. `fio` (direct, random reads, 32 in flight, blocks of the
size of the objects) runs before and after each round, and the share is that of their mean; medians
of the rounds. The last line has the time from the end of a put of 4 KiB until a disk has a copy.
`--plot FILE` draws the shares.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import draw

KIB, MIB = 1 << 10, 1 << 20
# The share of fio's reads that is the goal, by the size of the objects.
GOALS = {4 * KIB: 0.70, 64 * KIB: 0.90, MIB: 0.90}
BATCH = 256
OBJECTS_MAX = 65_536
START_SECONDS = 60.0
ROUND_SECONDS = 1.0


def lender(master: str, segment_bytes: int) -> None:
    """Lend memory until its input ends."""
    store = joined(master, segment_bytes)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def joined(master: str, segment_bytes: int, **options: Any) -> Any:
    """Return a store that has joined the pool."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 * MIB, "tcp", "", master, **options
    )
    must(code == 0, f"setup failed with {code}")
    return store


class Pool:
    """A master, a process that lends memory, and a store, with a directory if one is named."""

    def __init__(self, directory: Path | None, segment_bytes: int, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        ports = Path(self._folder.name) / "ports.json"
        program = Path(sys.executable).with_name("mooncake_master")
        flags = ["--enable_offload", "--rpc_port=0", "--metrics_port=0", f"--ports_file={ports}"]
        self._master = subprocess.Popen(
            [program, *flags, "--offloading_queue_limit=1000000", *options],
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_SECONDS
        while not ports.exists():
            must(self._master.poll() is None and time.monotonic() < deadline, "no master")
            time.sleep(0.01)
        self.address = json.loads(ports.read_text())["rpc"]
        command = [sys.executable, __file__, "--lender", self.address, str(segment_bytes)]
        self._lender = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._lender.stdout is not None
        must(self._lender.stdout.readline() == "ready\n", "no memory")
        tier = {"enable_ssd_offload": True, "ssd_offload_path": str(directory)}
        self.store = joined(self.address, 0, **(tier if directory else {}))

    def end_lender(self) -> None:
        """End the process that lends memory: what it held is on disk only."""
        self._lender.communicate(timeout=START_SECONDS)

    def close(self) -> None:
        """End all processes."""
        self.store.close()
        self._lender.kill()
        self._master.terminate()
        self._master.wait(timeout=START_SECONDS)
        self._folder.cleanup()


def is_on_disk(store: Any, key: str) -> bool:
    """Return whether the object has a copy on disk."""
    copies = store.batch_get_replica_desc([key]).get(key, [])
    return any(copy.is_local_disk_replica() for copy in copies)


def must(condition: bool, text: str) -> None:
    """End the program unless the condition holds."""
    if not condition:
        raise SystemExit(f"disk_tier: {text}")


def await_copy(store: Any, key: str) -> float:
    """Return the seconds until the object has a copy on disk."""
    begin = time.perf_counter()
    while not is_on_disk(store, key):
        must(time.perf_counter() < begin + START_SECONDS, f"{key} is not on disk")
        time.sleep(0.0005)
    return time.perf_counter() - begin


def fio(directory: Path, direction: str, *options: str) -> float:
    """Return the blocks a second that fio reads or writes: `direction` is "read" or "write"."""
    command = [
        "fio", "--name=blocks", "--direct=1", "--ioengine=libaio", "--time_based", *options,
        f"--filename={directory / 'fio'}", "--output-format=json",
    ]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(output)["jobs"][0][direction]["iops"])


def random_reads(directory: Path, size: int, total: int) -> float:
    """Return the reads a second of fio."""
    options = "--rw=randread", "--iodepth=32", f"--runtime={ROUND_SECONDS:.0f}"
    return fio(directory, "read", *options, f"--bs={size}", f"--size={total}")


def reads_a_second(store: Any, keys: list[str], size: int, memory: mmap.mmap) -> float:
    """Read batches of random objects for a second."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    spent, count = 0.0, 0
    while spent < ROUND_SECONDS:
        batch = random.sample(keys, BATCH)
        addresses = [address + at * size for at in range(BATCH)]
        begin = time.perf_counter()
        read = store.batch_get_into(batch, addresses, [size] * BATCH)
        spent += time.perf_counter() - begin
        must(all(length == size for length in read), f"a read failed: {min(read)}")
        first = int.from_bytes(memory[:8], "little")
        must(batch[0] == f"k{first}", "a read returned another object")
        count += BATCH
    return count / spent


def measure(directory: Path, size: int, total: int, rounds: int) -> float:
    """Print the row of a size; return the share."""
    count = min(total // size, OBJECTS_MAX)
    records = directory / "records"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir(parents=True)
    pool = Pool(records, count * (size + 4 * KIB) + 64 * MIB)
    try:
        keys = [f"k{number}" for number in range(count)]
        rest = bytes(range(256)) * (size // 256)
        for start in range(0, count, BATCH):
            values = [
                number.to_bytes(8, "little") + rest[8:]
                for number in range(start, min(start + BATCH, count))
            ]
            codes = pool.store.put_batch(keys[start : start + BATCH], values)
            must(codes == 0, f"a put failed with {codes}")
        for key in keys[-BATCH:]:
            await_copy(pool.store, key)
        pool.end_lender()
        subprocess.run(["sync"], check=True)
        memory = mmap.mmap(-1, BATCH * size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        must(pool.store.register_buffer(address, BATCH * size) == 0, "no registered memory")
        reads_a_second(pool.store, keys, size, memory)
        rows = []
        before = random_reads(directory, size, total)
        for _ in range(rounds):
            own = reads_a_second(pool.store, keys, size, memory)
            after = random_reads(directory, size, total)
            rows.append((own, after, own / ((before + after) / 2)))
            before = after
        own, limit, share = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"| {size // KIB} KiB | {limit:,.0f} | {own:,.0f} | {share:.2f} | {GOALS[size]:.2f} |"
        )
        return float(share)
    finally:
        pool.close()
        shutil.rmtree(records, ignore_errors=True)


def measure_delay(directory: Path) -> None:
    """Print how soon a put is on disk."""
    records = directory / "records"
    records.mkdir(parents=True, exist_ok=True)
    pool = Pool(records, 256 * MIB)
    try:
        pool.store.put("first", bytes(4 * KIB))
        await_copy(pool.store, "first")
        waits = []
        for number in range(200):
            key = f"delay{number}"
            must(pool.store.put(key, os.urandom(4 * KIB)) == 0, "a put failed")
            waits.append(await_copy(pool.store, key) * 1e3)
        waits.sort()
        print(f"\na put of 4 KiB is on disk after {waits[100]:.1f} ms, {waits[198]:.1f} ms (p99)")
    finally:
        pool.close()
        shutil.rmtree(records, ignore_errors=True)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directory", nargs="?", type=Path, help="where the records go; on the disk to be measured"
    )
    parser.add_argument("--total", type=int, default=2048, help="MiB of objects of each size")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares as SVG")
    parser.add_argument("--lender", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lender:
        lender(options.lender[0], int(options.lender[1]))
        return
    if options.directory is None:
        parser.error("which directory?")
    must(shutil.which("fio") is not None, "install fio")
    options.directory.mkdir(parents=True, exist_ok=True)
    print("| Object | fio, reads/s | batch gets, reads/s | share | goal |\n|---|---|---|---|---|")
    try:
        shares = [
            (
                f"{size // KIB} KiB",
                measure(options.directory, size, options.total * MIB, options.rounds),
            )
            for size in GOALS
        ]
        measure_delay(options.directory)
    finally:
        (options.directory / "fio").unlink(missing_ok=True)
    if options.plot:
        options.plot.write_text(draw("Batch gets from disk relative to fio", {"size": shares}))


if __name__ == "__main__":
    main()
