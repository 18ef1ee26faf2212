"""Compares checkpoints with puts and gets of the same bytes between two processes.

    python benches/programs/checkpoint.py [--tensors 64] [--mib 32] [--rounds 5]

One process lends memory; this one joins its pool and moves tensors to it and back. In each round
every kind of transfer has its turn, so that other load on the machine affects all. The ratios are
medians over the rounds of the speed relative to that of `put_from` or `get_into` in one batch, in
the same round. Only the ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
HOLDER = """
import sys
import mooncake
with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=int(sys.argv[1]))) as store:
    print(store.master_address, flush=True)
    sys.stdin.read()
"""


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--mib", type=int, default=32, help="length of a tensor")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    total = options.tensors * options.mib * MIB
    command = [sys.executable, "-c", HOLDER, str(total + total // 8)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        measure(holder.stdout.readline().strip(), options.tensors, options.mib, options.rounds)
    finally:
        holder.stdin.close()
        holder.wait(30)


def measure(master: str, count: int, mib: int, rounds: int) -> None:
    """Run the rounds against a pool."""
    import torch
    import torch.distributed.checkpoint as dcp

    import mooncake
    from mooncake import checkpoint
    from mooncake.store import MooncakeDistributedStore

    warnings.filterwarnings("ignore", "torch.distributed is")
    elements = mib * MIB // 4
    state = {f"w{at}": torch.full((elements,), float(at + 1)) for at in range(count)}
    into = {name: torch.zeros(elements) for name in state}
    store = mooncake.Store(master)
    plain = MooncakeDistributedStore()
    assert plain.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master) == 0
    for tensor in (*state.values(), *into.values()):
        plain.register_buffer(tensor.data_ptr(), tensor.nbytes)
    keys, size = [*state], elements * 4

    def addresses(tensors: dict[str, Any]) -> list[int]:
        return [each.data_ptr() for each in tensors.values()]

    def put_from() -> None:
        assert set(plain.batch_put_from(keys, addresses(state), [size] * count)) == {0}

    def get_into() -> None:
        assert set(plain.batch_get_into(keys, addresses(into), [size] * count)) == {size}

    def clear() -> None:
        plain.remove_all(True)

    def dcp_save(checksum: bool) -> None:
        writer = checkpoint.Writer(store, "run", checksum=checksum)
        dcp.save(state, storage_writer=writer, no_dist=True)

    def dcp_load() -> None:
        dcp.load(into, storage_reader=checkpoint.Reader(store, "run"), no_dist=True)

    def load() -> None:
        checkpoint.load(store, "run", into=into)

    def save(checksum: bool) -> None:
        checkpoint.save(state, store, "run", checksum=checksum)

    kinds: list[tuple[str, Callable[[], None], Callable[[], None]]] = [
        ("put_from, get_into", put_from, get_into),
        ("save, load", lambda: save(False), load),
        ("save, load, checksums", lambda: save(True), load),
        ("DCP", lambda: dcp_save(False), dcp_load),
        ("DCP, checksums", lambda: dcp_save(True), dcp_load),
    ]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in kinds}
    for number in range(rounds + 1):
        for name, write, read in kinds:
            for tensor in into.values():
                tensor[-1] = 0
            took = timed(write), timed(read)
            assert all(into[key][-1] == state[key][-1] for key in keys)
            clear()
            # The first round touches memory for the first time.
            if number:
                seconds[name].append(took)
    report(seconds, kinds[0][0], count * size)
    store.close()
    plain.close()


def timed(call: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(seconds: dict[str, list[tuple[float, float]]], base: str, nbytes: int) -> None:
    """Print speeds and ratios."""
    print(f"{'':24}{'write GB/s':>12}{'ratio':>8}{'read GB/s':>12}{'ratio':>8}")
    for name, rows in seconds.items():
        cells = []
        for side in (0, 1):
            speed = statistics.median(nbytes / row[side] / 1e9 for row in rows)
            pairs = zip(rows, seconds[base], strict=True)
            ratio = statistics.median(other[side] / row[side] for row, other in pairs)
            cells.append(f"{speed:12.2f}{ratio:8.2f}")
        print(f"{name:24}{''.join(cells)}")


if __name__ == "__main__":
    main()
