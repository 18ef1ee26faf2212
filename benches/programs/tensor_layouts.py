"""Measures reads of sharded tensors in another layout, relative to a plain read of the same bytes.

    python benches/programs/tensor_layouts.py [--mib 64] [--rounds 9]

One process lends memory and puts the tensors; this one joins it without memory and reads. Every
read fills the same memory again, so that no row pays for new pages. The rows alternate round by
round. A row has the median of its times, and the median of the plain read of as many bytes divided
by that. The last line is the time to plan 100,000 ranges.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake import Store, StoreConfig
from mooncake.tensor import Layout, Shard
from mooncake.tensor.planner import Source, plan

RANKS = 8
PIECES = (1024, 4096, 65536)
MIB = 1 << 20
WHOLE, HALF = "plain read", "plain read of half of it"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--mib", type=int, default=64, help="size of each tensor")
    arguments.add_argument(
        "--rounds", type=int, default=9, help="rounds, of which medians are taken"
    )
    arguments.add_argument("--holder", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.holder:
        hold(given.mib * MIB)
        return
    command = [sys.executable, __file__, "--holder", f"--mib={given.mib}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        address = holder.stdout.readline().decode().strip()
        with Store(address) as store:
            report(measure(store, given.mib * MIB, given.rounds))
        holder.communicate()
    print(f"plan of 100000 ranges: {plan_seconds() * 1000:.1f} ms")


def hold(nbytes: int) -> None:
    """Lend memory, put the tensors, and wait until the other process has read them."""
    config = StoreConfig(segment_bytes=(len(PIECES) + 4) * (nbytes + MIB))
    with Store(config=config) as store:
        store.put("whole", np.arange(nbytes // 4, dtype=np.float32).data)
        store.put("half", np.arange(nbytes // 8, dtype=np.float32).data)
        for name, shape, dim in tensors(nbytes):
            array = np.arange(nbytes // 4, dtype=np.float32).reshape(shape)
            store.put_array(name, array, layout=Layout(RANKS, dim))
        print(store.master_address, flush=True)
        sys.stdin.read()


def tensors(nbytes: int) -> list[tuple[str, tuple[int, int], int]]:
    """Return name, shape and split dimension of each tensor."""
    columns = RANKS * PIECES[-1] // 4
    rows = [("rows", (nbytes // 4 // columns, columns), 0)]
    for piece in PIECES:
        columns = RANKS * piece // 4
        rows.append((f"pieces of {piece} B", (nbytes // 4 // columns, columns), 1))
    return rows


def measure(store: Store, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round of each row."""
    memory = np.zeros(nbytes // 4, dtype=np.float32)
    expected = np.arange(nbytes // 4, dtype=np.float32)
    whole, half = memory, memory[: nbytes // 8]
    rows: dict[str, tuple[Callable[[], Any], Any, Any]] = {
        WHOLE: (lambda: store.get_into("whole", whole.data), whole, expected),
        HALF: (lambda: store.get_into("half", half.data), half, expected[: nbytes // 8]),
    }
    for name, shape, dim in tensors(nbytes):
        value, full = expected.reshape(shape), whole.reshape(shape)
        shard = Shard.tp(1, 2, dim)
        box = shard.box(shape)
        part = value[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]
        out = half.reshape(part.shape)
        rows[f"TP8 to whole, {name}"] = (get(store, name, None, full), full, value)
        rows[f"TP8 to TP2, {name}"] = (get(store, name, shard, out), out, part)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for at in range(rounds + 1):
        for name, (call, filled, value) in rows.items():
            filled[...] = 0
            begin = time.perf_counter()
            call()
            took = time.perf_counter() - begin
            assert (filled == value).all(), name
            if at > 0:
                seconds[name].append(took)
    return seconds


def get(store: Store, name: str, target: Shard | None, out: Any) -> Callable[[], Any]:
    return lambda: store.get_array(name, target=target, out=out)


def report(seconds: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        plain = medians[HALF if "TP2" in name else WHOLE]
        ratio = f"{plain / median:5.2f}" if name not in (WHOLE, HALF) else ""
        print(f"{name:34} {median * 1000:8.2f} ms  {ratio}")


def plan_seconds() -> float:
    shape = (25_000, RANKS, 256)
    sources = tuple(Source(shard.box(shape)) for shard in Layout(RANKS, 1).shards())
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        grids = plan.__wrapped__(sources, Shard.tp(0, 2, dim=1).box(shape), 4)
        times.append(time.perf_counter() - begin)
    assert sum(grid.count for grid in grids) == 100_000
    return statistics.median(times)


if __name__ == "__main__":
    main()
