"""Measures puts and gets of tensors beside those of the same bytes, and compares with upstream.

    python benches/programs/tensors.py --upstream UPSTREAM_VENV/bin/python --ours VENV/bin/python

Processes and sides are those of `put_get.py`. In each round a call for a tensor and the call for
bytes that transfers as much take turns, so that other load affects both. The column "of bytes" is
the median of the ratio of their times in each round: 1.00 is as fast as the bytes alone. Results
are compared with the tensor before the timed calls. torch is taken from the environment of `--ours`
for both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from put_get import LOCAL_BUFFER_BYTES, MIB, Side, ratio

SIZES = (MIB, 16 * MIB, 64 * MIB)
METADATA_BYTES = 304
# Each call for a tensor, and the call for bytes that it is compared with.
PAIRS = {"put_tensor": "put_from", "get_tensor": "get", "get_tensor_into": "get_into"}
CALLS_PER_ROUND = {MIB: 40, 16 * MIB: 8, 64 * MIB: 4}
# Names the folder of torch for the workers.
TORCH = "BENCHMARK_TORCH_FOLDER"


def worker(master: str, segment_bytes: int) -> None:
    """Serve commands on stdin: one JSON object per line, with one JSON reply per line."""
    from mooncake.store import MooncakeDistributedStore

    # Behind the package's own folder: the folder of torch may have the other package.
    sys.path.append(os.environ[TORCH])
    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master
    )
    print(json.dumps({"setup": code}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run_round(store, command["size"], command["count"])), flush=True)
    store.close()


def run_round(store: Any, size: int, count: int) -> dict[str, list[float]]:
    """Make each call `count` times, in turns. Return the seconds of each call."""
    import torch

    tensor = torch.arange(size // 4, dtype=torch.int32)
    into = torch.zeros(size + METADATA_BYTES, dtype=torch.uint8)
    source, target, room = tensor.data_ptr(), into.data_ptr(), size + METADATA_BYTES
    for address, length in ((source, size), (target, room)):
        must(store.register_buffer(address, length) == 0)
    must(store.put_tensor("tensor", tensor) == 0 and store.put_from("bytes", source, size) == 0)
    must(torch.equal(store.get_tensor("tensor"), tensor))
    must(torch.equal(store.get_tensor_into("tensor", target, room), tensor))
    calls: dict[str, Callable[[], bool]] = {
        "put_tensor": lambda: bool(store.put_tensor("new tensor", tensor) == 0),
        "put_from": lambda: bool(store.put_from("new bytes", source, size) == 0),
        "get_tensor": lambda: len(store.get_tensor("tensor")) == len(tensor),
        "get": lambda: len(store.get("bytes")) == size,
        "get_tensor_into": lambda: len(store.get_tensor_into("tensor", target, room)) > 0,
        "get_into": lambda: bool(store.get_into("bytes", target, room) == size),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(count):
        for pair in PAIRS.items():
            for name in pair if turn % 2 == 0 else reversed(pair):
                start = time.perf_counter()
                is_done = calls[name]()
                seconds[name].append(time.perf_counter() - start)
                must(is_done)
            store.remove_by_regex("^new ", True)
    store.remove_all(True)
    for address in (source, target):
        store.unregister_buffer(address)
    return seconds


def must(is_true: bool) -> None:
    if not is_true:
        raise SystemExit("a call failed, or a tensor was not read as it was put")


@dataclass
class Medians:
    """Medians of one side: the seconds of each call, and the ratios of each pair, by round."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)

    def add(self, size: int, round_seconds: dict[str, list[float]]) -> None:
        for name, times in round_seconds.items():
            self.seconds.setdefault((name, size), []).append(statistics.median(times))

    def of_bytes(self, call: str, size: int) -> float:
        """Return the speed of a call relative to that of the call for bytes."""
        return ratio(self.seconds[PAIRS[call], size], self.seconds[call, size])


def measure(sides: list[Side], rounds: int) -> list[Medians]:
    """Run all rounds, alternating between the sides."""
    results = [Medians() for _ in sides]
    for size in SIZES:
        for turn in range(rounds):
            order = list(zip(sides, results, strict=True))
            for side, medians in order if turn % 2 == 0 else reversed(order):
                reply = side.ask("round", size=size, count=CALLS_PER_ROUND[size])
                medians.add(size, reply)
    return results


def table(sides: list[Side], results: list[Medians]) -> str:
    """Return the results as a Markdown table."""
    head = ["call", "size"] + [f"{side.name} ms" for side in sides]
    head += ["speed ratio"] * (len(sides) == 2) + ["of bytes"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    ours = results[-1]
    for size in SIZES:
        for call in PAIRS:
            times = [result.seconds[call, size] for result in results]
            row = [call, f"{size // MIB} MiB"]
            row += [f"{statistics.median(each) * 1e3:.2f}" for each in times]
            if len(sides) == 2:
                row.append(f"{ratio(*times):.2f}")
            row.append(f"{ours.of_bytes(call, size):.2f}")
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def torch_folder(python: str) -> str:
    """Return the folder that an interpreter imports torch from."""
    source = "import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])"
    done = subprocess.run([python, "-c", source], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> None:
    """Read the command line and print the table."""
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]))
        return
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(
        "--ours",
        default=sys.executable,
        help="Python interpreter with this package and torch (default: the running one)",
    )
    parser.add_argument(
        "--upstream", metavar="PYTHON", help="interpreter with the upstream package"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds per row (default 7)")
    options = parser.parse_args()
    env = {TORCH: torch_folder(options.ours)}
    sides = [Side("ours", options.ours, env, program=__file__)]
    if options.upstream:
        sides.insert(0, Side("upstream", options.upstream, env, program=__file__))
    try:
        for side in sides:
            side.start()
        print(table(sides, measure(sides, options.rounds)))
    finally:
        for side in sides:
            side.stop()


if __name__ == "__main__":
    main()
