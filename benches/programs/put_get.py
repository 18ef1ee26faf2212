"""Measures put and get between two processes, and compares the speed with upstream Mooncake.

    python benches/programs/put_get.py --upstream UPSTREAM_VENV/bin/python --ours VENV/bin/python

Each side has its own master on free ports, a process that mounts memory, and a process without
memory that puts into the memory of the other and gets from there. The rows "own memory" are puts of
the process that mounts the memory. The sides alternate round by round, so that other load on the
machine affects both. Values are compared with what was put before the timed calls. The last column
is the speed relative to `memmove` of the same size, measured in the same run.

The second table is for batches of many small objects in one call: time per object that succeeded,
and the number of failures. A batch in which most objects fail has no time and is not repeated.

Without `--upstream` there are no ratios. `--plot FILE` draws the ratios as an SVG. Only the ratios
are comparable between machines.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bars

Reply = dict[str, Any]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
BATCHES = (3_000, 20_000)
BATCH_VALUE_BYTES = KIB
SEGMENT_BYTES = 768 * MIB
LOCAL_BUFFER_BYTES = 128 * MIB
ROUND_BYTES_MAX = 128 * MIB
START_SECONDS = 30.0
# Suffix of calls made by the process that mounts the memory.
OWN = ", own memory"


def worker(master: str, segment_bytes: int) -> None:
    """Serve commands on stdin: one JSON object per line, with one JSON reply per line."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup(
        "127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master
    )
    print(json.dumps({"setup": code}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(run_round(store, **command)), flush=True)
    store.close()


def run_round(store: Any, op: str, prefix: str, size: int, count: int) -> Reply:
    """Run one round and return the seconds of each call and the number of failed calls."""
    import ctypes

    if op == "clear":
        store.remove_all(True)
        return {"failed": 0, "seconds": []}
    if op.startswith("batch_"):
        return run_batch(store, op, prefix, size, count)
    value = bytes(range(256)) * (size // 256)
    calls: dict[str, Callable[[str, int], bool]] = {
        "put": lambda key, _: bool(store.put(key, value) == 0),
        "get": lambda key, _: len(store.get(key)) == size,
        "put_from": lambda key, at: bool(store.put_from(key, at, size) == 0),
        "get_into": lambda key, at: bool(store.get_into(key, at, size) == size),
        "is_exist": lambda key, _: bool(store.is_exist(key) == 1),
    }
    call = calls[op]
    memory = ctypes.create_string_buffer(value, size)
    address = ctypes.addressof(memory)
    store.register_buffer(address, size)
    if op == "get" and store.get(f"{prefix}0") != value:
        return {"failed": count, "seconds": []}
    if op == "get_into":
        ctypes.memset(address, 0, size)
        if store.get_into(f"{prefix}0", address, size) != size or memory.raw != value:
            return {"failed": count, "seconds": []}
    seconds, failed = [], 0
    for i in range(count):
        start = time.perf_counter()
        is_done = call(f"{prefix}{i}", address)
        seconds.append(time.perf_counter() - start)
        failed += not is_done
    store.unregister_buffer(address)
    return {"failed": failed, "seconds": seconds}


def run_batch(store: Any, op: str, prefix: str, size: int, count: int) -> Reply:
    """Put or get `count` objects in one call. Return its seconds and the number of failures."""
    import ctypes

    memory = ctypes.create_string_buffer(size * count)
    address = ctypes.addressof(memory)
    store.register_buffer(address, size * count)
    numbers = range(count)
    keys = [f"{prefix}{i}" for i in numbers]
    addresses, sizes = [address + i * size for i in numbers], [size] * count
    # The value of each object is its number, repeated.
    values = [i.to_bytes(8, "little") * (size // 8) for i in numbers]
    if op == "batch_put_from":
        memory.raw = b"".join(values)
        start = time.perf_counter()
        codes = store.batch_put_from(keys, addresses, sizes)
        seconds = time.perf_counter() - start
        good = sum(code == 0 for code in codes)
    else:
        start = time.perf_counter()
        codes = store.batch_get_into(keys, addresses, sizes)
        seconds = time.perf_counter() - start
        came = memory.raw
        good = sum(
            code == size and came[i * size : i * size + size] == value
            for i, code, value in zip(numbers, codes, values, strict=True)
        )
    store.unregister_buffer(address)
    return {"failed": count - good, "seconds": [seconds]}


@dataclass
class Side:
    """One implementation: its interpreter, its master, and two workers that run a program."""

    name: str
    python: str
    env: dict[str, str]
    program: str = __file__
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    medians: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    batches: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    failed: dict[tuple[str, int], int] = field(default_factory=dict)

    def start(self) -> None:
        """Start the master and both workers, and wait for their setup."""
        rpc, admin = free_port(), free_port()
        program = Path(self.python).parent / "mooncake_master"
        flags = (f"--rpc_port={rpc}", "--rpc_address=127.0.0.1", f"--metrics_port={admin}")
        quiet = subprocess.DEVNULL
        self.processes.append(
            subprocess.Popen([str(program), *flags], stdout=quiet, stderr=quiet, text=True)
        )
        wait_for_port(rpc, self.processes[0])
        for segment_bytes in (SEGMENT_BYTES, 0):
            process = subprocess.Popen(
                [self.python, self.program, "--worker", f"127.0.0.1:{rpc}", str(segment_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=quiet,
                text=True,
                env={**os.environ, **self.env},
            )
            self.processes.append(process)
            if (reply := self.read(process))["setup"] != 0:
                raise SystemExit(f"{self.name}: setup gave {reply['setup']}")

    def ask(self, call: str, **command: object) -> Reply:
        """Run a round: calls that end with OWN in the process that mounts memory."""
        process = self.processes[1 if call.endswith(OWN) else 2]
        command["op"] = call.removesuffix(OWN)
        assert process.stdin
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        return self.read(process)

    def move_batch(self, call: str, prefix: str, count: int) -> None:
        """Put or get `count` small objects in one call, unless most failed before."""
        times = self.batches.setdefault((call, count), [])
        if times and min(times) == math.inf:
            times.append(math.inf)
            return
        reply = self.ask(call, prefix=prefix, size=BATCH_VALUE_BYTES, count=count)
        # Time per object that succeeded, if most did.
        good = count - reply["failed"]
        is_usable = 2 * good > count
        times.extend(seconds / good if is_usable else math.inf for seconds in reply["seconds"])
        self.failed[call, count] = self.failed.get((call, count), 0) + reply["failed"]

    def read(self, process: subprocess.Popen[str]) -> Reply:
        """Read one line of JSON and skip log lines of the implementation."""
        assert process.stdout
        for line in process.stdout:
            if line.startswith("{"):
                reply: Reply = json.loads(line)
                return reply
        raise SystemExit(f"{self.name}: the worker ended with {process.wait()}")

    def stop(self) -> None:
        """End the workers, then the master."""
        for process in reversed(self.processes):
            if process.stdin:
                process.stdin.close()
            else:
                process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port() -> int:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[str]) -> None:
    """Wait until a process listens on the port."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 0.5).close()
            return
        except OSError:
            time.sleep(0.02)
    raise SystemExit(f"the master does not listen on port {port}")


def copy_seconds(size: int) -> float:
    """Return the median time of `memmove` of this size."""
    import ctypes

    source = ctypes.create_string_buffer(os.urandom(min(size, MIB)) * max(1, size // MIB), size)
    target = ctypes.create_string_buffer(size)
    times = []
    for _ in range(max(5, 64 * MIB // size // 8)):
        start = time.perf_counter()
        ctypes.memmove(target, source, size)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(sides: list[Side], rounds: int) -> dict[int, float]:
    """Run all rounds, alternating between the sides. Return the copy times by size."""
    copies: dict[int, float] = {}
    for size in SIZES:
        count = max(4, min(400, ROUND_BYTES_MAX // size))
        copies[size] = copy_seconds(size)
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                for calls in (("put", "get", "is_exist"), ("put_from", "get_into")):
                    for plan in (calls, (calls[0] + OWN,)):
                        prefix = f"{calls[0]}-{size}-{turn}-"
                        for call in plan:
                            reply = side.ask(call, prefix=prefix, size=size, count=count)
                            if reply["failed"]:
                                raise SystemExit(f"{side.name}: {reply['failed']} of {call} failed")
                            median = statistics.median(reply["seconds"])
                            side.medians.setdefault((call, size), []).append(median)
                        side.ask("clear", prefix="", size=256, count=0)
    return copies


def measure_batches(sides: list[Side], rounds: int) -> None:
    """Run the rounds of many small objects in one call, alternating between the sides."""
    for count in BATCHES:
        for turn in range(rounds):
            for side in sides if turn % 2 == 0 else reversed(sides):
                put = "batch_put_from"
                for calls in ((put + OWN, "batch_get_into"), (put,)):
                    for call in calls:
                        side.move_batch(call, f"b{turn}-", count)
                    side.ask("clear", prefix="", size=256, count=0)


def ratio(upstream: list[float], ours: list[float]) -> float:
    """Return the speed relative to upstream: the median over the rounds in which both succeeded.
    Infinite if one side failed in most rounds.
    """
    if math.inf in (statistics.median(upstream), statistics.median(ours)):
        return math.inf
    pairs = [pair for pair in zip(upstream, ours, strict=True) if math.inf not in pair]
    return (
        statistics.median(upstream_s / our_s for upstream_s, our_s in pairs) if pairs else math.inf
    )


def plot(upstream: Side, ours: Side) -> str:
    """Draw all ratios as an SVG."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for (op, size), times in ours.medians.items():
        rows = groups.setdefault(op, [])
        rows.append((f"{size // KIB} KiB", ratio(upstream.medians[op, size], times)))
    for (op, count), times in ours.batches.items():
        rows = groups.setdefault(f"{op}, {BATCH_VALUE_BYTES // KIB} KiB each", [])
        if (speed_ratio := ratio(upstream.batches[op, count], times)) < math.inf:
            rows.append((f"{count} in one call", speed_ratio))
    groups = {op: rows for op, rows in groups.items() if rows}
    return bars.draw("Speed relative to upstream, two processes", groups)


def batch_table(sides: list[Side]) -> str:
    """Return the results of the batches as a Markdown table."""
    head = ["call", "items"]
    for side in sides:
        head += [f"{side.name} µs per good item", "failed"]
    head += ["speed ratio"] * (len(sides) == 2)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for op, count in sides[-1].batches:
        row = [op, str(count)]
        for side in sides:
            median = statistics.median(side.batches[op, count])
            row += [f"{median * 1e6:.2f}" if median < math.inf else "", str(side.failed[op, count])]
        if len(sides) == 2:
            speed_ratio = ratio(sides[0].batches[op, count], sides[1].batches[op, count])
            row.append(f"{speed_ratio:.2f}" if speed_ratio < math.inf else "")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def table(sides: list[Side], copies: dict[int, float]) -> str:
    """Return the results as a Markdown table."""
    head = ["call", "size"] + [f"{side.name} µs" for side in sides]
    head += ["speed ratio"] * (len(sides) == 2) + ["share of a copy"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for op, size in sides[-1].medians:
        times = [statistics.median(side.medians[op, size]) for side in sides]
        row = [op, f"{size // KIB} KiB"] + [f"{seconds * 1e6:.1f}" for seconds in times]
        if len(sides) == 2:
            row.append(f"{ratio(sides[0].medians[op, size], sides[1].medians[op, size]):.2f}")
        row.append("" if op == "is_exist" else f"{copies[size] / times[-1]:.2f}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


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
        help="Python interpreter with this package (default: the running one)",
    )
    parser.add_argument(
        "--upstream", metavar="PYTHON", help="interpreter with the upstream package"
    )
    # The former name of --upstream.
    parser.add_argument("--theirs", dest="upstream", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5, help="rounds per row (default 5)")
    parser.add_argument("--tcp", action="store_true", help="force both sides to use TCP")
    parser.add_argument("--batches-only", action="store_true", help="measure only the batches")
    parser.add_argument("--plot", type=Path, help="draw the ratios to this SVG file")
    options = parser.parse_args()
    if options.plot and not options.upstream:
        parser.error("--plot needs ratios: add --upstream")
    env = {"MC_FORCE_TCP": "1", "MC_STORE_MEMCPY": "0"} if options.tcp else {}
    sides = [Side("upstream", options.upstream, env)] if options.upstream else []
    sides.append(Side("ours", options.ours, env))
    try:
        for side in sides:
            side.start()
        if not options.batches_only:
            print(table(sides, measure(sides, options.rounds)), end="\n\n")
        measure_batches(sides, options.rounds)
        print(batch_table(sides))
        if options.plot:
            options.plot.write_text(plot(*sides), encoding="utf-8")
    finally:
        for side in sides:
            side.stop()


if __name__ == "__main__":
    main()
