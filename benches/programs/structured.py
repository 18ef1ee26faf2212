"""Measures put and get of a batch of rollouts, about 1 GB, beside a copy of the same bytes.

    python benches/programs/structured.py --ours VENV/bin/python --upstream UPSTREAM_VENV/bin/python

A batch has four large tensors, a column of ragged arrays and a column of texts, of 10000 rows each.
Each side has its own master on a free port, and a process that mounts memory, puts the batch and
gets it, in turns. The copy is a `memmove` by one thread between two arrays of the length of the
batch, both touched before, in the same process and round. The batch is compared with what was put
once. The upstream environment needs numpy, torch and msgpack; `--packages FOLDER` takes them from
another environment. Only the ratios are comparable between machines; the table has their medians.

    python benches/programs/structured.py --small --ours VENV/bin/python

With `--small` a batch of 3 columns of 100 rows is put, read, extended and removed instead. The
table has the smallest processor time of a call in microseconds, of all threads of the process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from put_get import free_port, wait_for_port

ROWS = 10_000
TOKENS = 4096
SMALL_ROWS = 100
SMALL_BATCHES = 60
SEGMENT_BYTES = 3 << 30
LOCAL_BUFFER_BYTES = 2 << 30


def worker(master: str, rounds: int) -> None:
    """Print the seconds of each round as one JSON object per line."""
    from mooncake.store import MooncakeDistributedStore
    from mooncake.structured_object_store import MooncakeBundleTransfer

    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", SEGMENT_BYTES, LOCAL_BUFFER_BYTES, "tcp", "", master
    )
    if code != 0:
        raise SystemExit(f"setup gave {code}")
    transfer = MooncakeBundleTransfer(store, "bench")
    data, length = batch()
    for number in range(rounds):
        seconds = {"copy": copy_seconds(length)}
        start = time.perf_counter()
        ref = transfer.put(data)
        seconds["put"] = time.perf_counter() - start
        start = time.perf_counter()
        result = transfer.get(ref)
        seconds["get"] = time.perf_counter() - start
        if number == 0:
            compare(data, result)
        transfer.release_result(result)
        del result
        transfer.cleanup_dataproto(ref)
        print(json.dumps({"bytes": length, **seconds}), flush=True)
    store.close()


def small_worker(master: str, rounds: int) -> None:
    """Print the processor time of each call in microseconds as one JSON object per line."""
    import numpy as np
    import torch

    from mooncake.store import MooncakeDistributedStore
    from mooncake.structured_object_store import MooncakeBundleTransfer

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 64 << 20, "tcp", "", master)
    if code != 0:
        raise SystemExit(f"setup gave {code}")
    transfer = MooncakeBundleTransfer(store, "bench")
    text = np.empty(SMALL_ROWS, dtype=object)
    text[:] = [f"row {row}" for row in range(SMALL_ROWS)]
    data = {
        "batch": {"tokens": torch.zeros(SMALL_ROWS, 16, dtype=torch.int64)},
        "non_tensor_batch": {"weights": np.zeros(SMALL_ROWS), "text": text},
    }
    later = {"advantages": torch.zeros(SMALL_ROWS, 16)}
    calls = {
        "put": lambda _: transfer.put(data),
        "get": transfer.get,
        "append": lambda ref: transfer.append_dataproto_fields(ref, later, stage="later"),
        "same stage": lambda ref: transfer.append_dataproto_fields(ref, later, stage="default"),
        "cleanup": transfer.cleanup_dataproto,
    }
    for _ in range(rounds):
        spent: dict[str, float] = {}
        refs: list[Any] = [None] * SMALL_BATCHES
        for name, call in calls.items():
            start = time.process_time()
            made = [call(ref) for ref in refs]
            spent[name] = (time.process_time() - start) / SMALL_BATCHES * 1e6
            refs = made if name == "put" else refs
        store.remove_all(True)
        print(json.dumps(spent), flush=True)
    store.close()


def batch() -> tuple[dict[str, Any], int]:
    """Return a batch, and the length of its data in bytes."""
    import numpy as np
    import torch

    chance = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, TOKENS)
    tensors = {
        "tokens": torch.randint(0, 50_000, shape, generator=generator),
        "log_probabilities": torch.randn(shape, generator=generator),
        "values": torch.randn(shape, generator=generator),
        "mask": torch.ones(shape, dtype=torch.int8),
    }
    columns = {"experts": np.empty(ROWS, dtype=object), "text": np.empty(ROWS, dtype=object)}
    for row in range(ROWS):
        columns["experts"][row] = chance.integers(0, 64, size=chance.integers(100, TOKENS))
        columns["text"][row] = "some words " * int(chance.integers(1, 400))
    length = sum(tensor.nbytes for tensor in tensors.values())
    length += sum(row.nbytes for row in columns["experts"]) + sum(map(len, columns["text"]))
    return {"batch": tensors, "non_tensor_batch": columns, "meta_info": {}}, length


def compare(data: dict[str, Any], result: dict[str, Any]) -> None:
    """End the program if the result is not what was put."""
    put, got = data["non_tensor_batch"], result["non_tensor_batch"]
    is_same = all((tensor == result["batch"][name]).all() for name, tensor in data["batch"].items())
    is_same = is_same and list(put["text"]) == list(got["text"])
    pairs = zip(put["experts"], got["experts"], strict=True)
    if not is_same or not all((one == other).all() for one, other in pairs):
        raise SystemExit("the batch came back changed")


COPIED: dict[int, tuple[Any, Any]] = {}


def copy_seconds(length: int) -> float:
    """Return the time of a copy by one thread between two touched mappings."""
    import ctypes

    import numpy as np

    if length not in COPIED:
        COPIED[length] = np.ones(length, dtype=np.uint8), np.ones(length, dtype=np.uint8)
    source, target = COPIED[length]
    start = time.perf_counter()
    ctypes.memmove(target.ctypes.data, source.ctypes.data, length)
    return time.perf_counter() - start


def measure(
    name: str, python: str, rounds: int, packages: str | None, role: str = "--worker"
) -> list[dict[str, float]]:
    """Return the rounds of one side, without the first one."""
    rpc, admin = free_port(), free_port()
    quiet = subprocess.DEVNULL
    program = Path(python).parent / "mooncake_master"
    flags = (f"--rpc_port={rpc}", "--rpc_address=127.0.0.1", f"--metrics_port={admin}")
    env = {**os.environ, **({"PYTHONPATH": packages} if packages else {})}
    master = subprocess.Popen(
        [str(program), *flags], stdout=quiet, stderr=quiet, text=True, env=env
    )
    try:
        wait_for_port(rpc, master)
        command = [python, __file__, role, f"127.0.0.1:{rpc}", str(rounds + 1)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    finally:
        master.terminate()
        master.wait()
    if done.returncode != 0:
        raise SystemExit(f"{name}: {done.stderr.strip().splitlines()[-1:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [json.loads(line) for line in lines][1:]


def print_small(sides: list[tuple[str, str, str | None]], rounds: int) -> None:
    for at, (name, python, packages) in enumerate(sides):
        measured = measure(name, python, rounds, packages, "--small-worker")
        if at == 0:
            print(f"{'us':10} " + " ".join(f"{call:>10}" for call in measured[0]))
        least = {call: min(each[call] for each in measured) for call in measured[0]}
        print(f"{name:10} " + " ".join(f"{each:>10.0f}" for each in least.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ours", default=sys.executable)
    parser.add_argument("--upstream")
    parser.add_argument("--packages", help="folder with the packages that upstream needs")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="processor time of small batches")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--small-worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker[0], int(arguments.worker[1]))
        return
    if arguments.small_worker:
        small_worker(arguments.small_worker[0], int(arguments.small_worker[1]))
        return
    sides: list[tuple[str, str, str | None]] = [("ours", arguments.ours, None)]
    if arguments.upstream:
        sides.append(("upstream", arguments.upstream, arguments.packages))
    if arguments.small:
        print_small(sides, arguments.rounds)
        return
    print(f"{'':10} {'bytes':>12} {'put s':>8} {'put/copy':>9} {'get s':>8} {'get/copy':>9}")
    for name, python, packages in sides:
        rounds = measure(name, python, arguments.rounds, packages)
        cells = [f"{name:10} {rounds[0]['bytes']:>12}"]
        for call in ("put", "get"):
            seconds = statistics.median(each[call] for each in rounds)
            ratio = statistics.median(each[call] / each["copy"] for each in rounds)
            cells.append(f"{seconds:>8.3f} {ratio:>9.2f}")
        print(" ".join(cells), flush=True)


if __name__ == "__main__":
    main()
