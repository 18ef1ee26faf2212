"""Measures the collectives of `mooncake.pg` beside gloo, in one run.

    python benches/programs/collectives.py [--ranks 2 4] [--sizes 4 65536] [--operations all_reduce]

Each rank is a process with two groups, one of gloo and one of mooncake. The groups alternate round
by round, so that other load on the machine affects both. A round is several calls; its time is that
of rank 0, divided by the number of calls. Printed are medians over the rounds, and the ratios of
the medians: above 1, mooncake is faster. The column "copies" is the time in which each rank copies
the bytes that it sends in such an operation into one segment of shared memory, and as many bytes,
which its neighbour writes there, out of it, without any agreement.

`reaction` is the time from the kill of a rank to the end of the first operation without it at rank
0. `replacement` is the time from the call of `join_group` in another process to the end of its
first operation with the others; its start and its imports are not part of that. Gloo has neither.

`--experts` adds a round of dispatch and combine of `mooncake.ep` beside the same exchange by gloo's
`all_to_all_single`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB)
OPERATIONS = (
    "all_reduce",
    "all_reduce_sum",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
    "barrier",
)
ROUNDS = 7
ROUND_SECONDS = 0.1
LIMIT_SECONDS = 1200.0
SEGMENT_PART = 16 * MIB
TOKENS, HIDDEN, EXPERTS, TOP = 128, 7168, 288, 8

Call = Callable[[], Any]


def call_of(operation: str, size: int, group: Any) -> Call:
    """Return a call of the operation; `size` is the larger of a rank's input and output."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = max(size // 4, 1)
    part = max(count // ranks, 1)
    whole, own = torch.ones(part * ranks), torch.ones(part)
    tensor = torch.ones(count)
    other = torch.ones(part * ranks)
    # The sum of zeros stays finite.
    zeros = torch.zeros(count)

    def send_recv() -> None:
        if rank > 1:
            return
        if rank == 0:
            dist.send(tensor, 1, group=group)
            dist.recv(tensor, 1, group=group)
        else:
            dist.recv(tensor, 0, group=group)
            dist.send(tensor, 0, group=group)

    calls: dict[str, Call] = {
        "all_reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group),
        "all_reduce_sum": lambda: dist.all_reduce(zeros, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
        "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": send_recv,
        "barrier": lambda: dist.barrier(group=group),
    }
    return calls[operation]


def moved_bytes(operation: str, size: int, ranks: int) -> int:
    """Return how many bytes a rank sends to others."""
    if operation in ("all_reduce", "all_reduce_sum"):
        return 2 * size * (ranks - 1) // ranks
    if operation == "broadcast":
        return size * (ranks - 1) // ranks
    if operation in ("barrier", "send_recv"):
        return size
    return size * (ranks - 1) // ranks


def timed(call: Call, count: int, group: Any) -> float:
    """Return the seconds of one call, of `count` in a row."""
    dist.barrier(group=group)
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def calls_per_round(call: Call, group: Any) -> int:
    """Return how many calls fill a round; rank 0 decides."""
    call()
    once = timed(call, 3, group)
    count = torch.tensor([max(1, min(2000, round(ROUND_SECONDS / once)))])
    dist.broadcast(count, 0, group=group)
    return int(count)


class Segment:
    """Memory that all ranks map, with a part for each of them."""

    def __init__(self, group: Any) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        path: list[Any] = [None]
        if rank == 0:
            descriptor = os.memfd_create("collectives")
            os.truncate(descriptor, ranks * SEGMENT_PART)
            path = [f"/proc/{os.getpid()}/fd/{descriptor}"]
        dist.broadcast_object_list(path, 0, group=group)
        self.group = group
        with open(path[0], "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), ranks * SEGMENT_PART)
        parts = torch.frombuffer(self.memory, dtype=torch.uint8).reshape(ranks, SEGMENT_PART)
        self.own, self.neighbour = parts[rank], parts[(rank + 1) % ranks]
        dist.barrier(group=group)
        if rank == 0:
            os.close(descriptor)

    def copies(self, size: int) -> float:
        """Return the seconds in which a rank copies `size` bytes in, and its neighbour's out."""
        given, got = (torch.ones(min(size, 64 * MIB), dtype=torch.uint8) for _ in range(2))

        def copy() -> None:
            for at in range(0, size, MIB):
                length, place = min(MIB, size - at), at % SEGMENT_PART
                here = slice(at % len(given), at % len(given) + length)
                self.own[place : place + length].copy_(given[here])
                got[here].copy_(self.neighbour[place : place + length])

        return statistics.median(timed(copy, 3, self.group) for _ in range(ROUNDS))


def measure(name: str, calls: dict[str, Call], groups: dict[str, Any]) -> dict[str, Any]:
    """Alternate the calls and return the medians."""
    counts = {side: calls_per_round(call, groups[side]) for side, call in calls.items()}
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range(ROUNDS):
        for side, call in calls.items():
            seconds[side].append(timed(call, counts[side], groups[side]))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    return {"operation": name, **medians}


def gloo_experts(group: Any) -> Call:
    """Return dispatch and combine of bf16 rows by `all_to_all_single`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, chosen, weights = routing(rank)
    local = EXPERTS // ranks

    def exchange() -> torch.Tensor:
        tokens = torch.arange(TOKENS).repeat_interleave(TOP)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        owners = flat[order] // local
        sent = torch.bincount(owners, minlength=ranks)
        got = torch.zeros_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        rows = x[tokens[order]].view(torch.int32)
        incoming = torch.empty(int(got.sum()), HIDDEN // 2, dtype=torch.int32)
        ids = torch.empty(int(got.sum()), dtype=torch.int64)
        splits = (got.tolist(), sent.tolist())
        # Gloo has no bf16 exchange: the bits travel as integers.
        dist.all_to_all_single(incoming, rows, *splits, group=group)
        dist.all_to_all_single(ids, flat[order], *splits, group=group)
        # Rows are grouped by expert for its computation, and sent back in the order of arrival.
        place = ids.argsort(stable=True)
        grouped = incoming[place]
        incoming[place] = grouped
        returned = torch.empty_like(rows)
        dist.all_to_all_single(returned, incoming, splits[1], splits[0], group=group)
        result = torch.zeros(TOKENS, HIDDEN)
        values = returned.view(torch.bfloat16).float()
        result.index_add_(0, tokens[order], values * weights.flatten()[order].unsqueeze(1))
        return result.to(torch.bfloat16)

    return exchange


def routing(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, experts and weights of a rank."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=draw).to(torch.bfloat16)
    chosen = torch.rand(TOKENS, EXPERTS, generator=draw).argsort(dim=1)[:, :TOP].contiguous()
    return x, chosen, torch.rand(TOKENS, TOP, generator=draw)


def our_experts(group: Any) -> Call:
    """Return dispatch and combine of bf16 rows by `mooncake.ep`."""
    from mooncake.ep import Buffer

    buffer = Buffer(group)
    x, chosen, weights = routing(dist.get_rank())
    mask = torch.ones(dist.get_world_size(), dtype=torch.int32)

    def exchange() -> torch.Tensor:
        rows, _, handle, _, _ = buffer.dispatch(x, chosen, mask, TOKENS, EXPERTS, -1, use_fp8=False)
        combined, _, _ = buffer.combine(rows, chosen, weights, mask, -1, handle)
        return combined

    return exchange


def lose_and_replace(
    rank: int, ranks: int, port: int, kills: int, is_new: bool, parent: Any
) -> None:
    """Run one rank: operations until the last rank, which dies, is replaced, `kills` times."""
    import mooncake.pg

    torch.set_num_threads(1)
    active = torch.zeros(ranks, dtype=torch.int32)
    dist.init_process_group(
        "mooncake-cpu",
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        rank=rank,
        world_size=ranks,
        pg_options=mooncake.pg.MooncakeBackendOptions(active, is_new),
    )
    world, victim = dist.group.WORLD, ranks - 1
    tensor = torch.ones(MIB // 4)
    if is_new:
        begin = time.monotonic()
        mooncake.pg.join_group(world)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        parent.send(time.monotonic() - begin)
    for number in range(kills):
        if rank == 0:
            parent.send(number)
        seen_at = 0.0
        is_waiting = torch.zeros(1)
        while not is_waiting[0]:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            if rank == 0 and not active[victim]:
                seen_at = seen_at or time.monotonic()
                is_waiting[0] = float(mooncake.pg.get_peer_state(world, [victim])[0])
            # Rank 0 decides for all how many operations there are.
            dist.broadcast(is_waiting, 0)
        if rank == 0:
            parent.send(seen_at)
            mooncake.pg.recover_ranks(world, [victim])
        deadline = time.monotonic() + LIMIT_SECONDS
        while not active[victim]:
            assert time.monotonic() < deadline, "the replacement was not activated"
            time.sleep(0.0005)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    dist.destroy_process_group()


def measure_kills(ranks: int, kills: int) -> list[dict[str, Any]]:
    """Kill and replace the last rank; return the medians of both times."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "mooncake.pg"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members: dict[int, tuple[Any, Any]] = {}

    def start(rank: int, left: int, is_new: bool = False) -> None:
        ours, theirs = context.Pipe()
        arguments = (rank, ranks, store.port, left, is_new, theirs)
        process = context.Process(target=lose_and_replace, args=arguments)
        process.start()
        theirs.close()
        members[rank] = (process, ours)

    def receive(rank: int) -> float:
        if not members[rank][1].poll(LIMIT_SECONDS):
            sys.exit(f"rank {rank} sends nothing")
        return float(members[rank][1].recv())

    seconds: dict[str, list[float]] = {"reaction": [], "replacement": []}
    try:
        for rank in range(ranks):
            start(rank, kills)
        for number in range(kills):
            receive(0)
            process = members[ranks - 1][0]
            killed_at = time.monotonic()
            process.kill()
            process.join()
            start(ranks - 1, kills - number - 1, is_new=True)
            seconds["reaction"].append(receive(0) - killed_at)
            seconds["replacement"].append(receive(ranks - 1))
        for process, _ in members.values():
            process.join(LIMIT_SECONDS)
            if process.exitcode != 0:
                sys.exit("a rank has failed")
    finally:
        for process, _ in members.values():
            process.kill()
    return [
        {"operation": name, "bytes": MIB, "mooncake": statistics.median(times)}
        for name, times in seconds.items()
    ]


def run_rank(rank: int, ranks: int, port: int, arguments: argparse.Namespace) -> None:
    """Run the measurements as one of the ranks; rank 0 prints them."""
    import mooncake.pg  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=ranks)
    groups = {"gloo": dist.group.WORLD, "mooncake": dist.new_group(backend="mooncake-cpu")}
    segment = Segment(groups["gloo"])
    for operation in arguments.operations:
        sizes = [4] if operation == "barrier" else arguments.sizes
        for size in sizes:
            calls = {side: call_of(operation, size, group) for side, group in groups.items()}
            row = measure(operation, calls, groups)
            row["bytes"] = size
            row["copies"] = segment.copies(moved_bytes(operation, size, ranks))
            if rank == 0:
                print(json.dumps(row), flush=True)
    if arguments.experts:
        calls = {
            "gloo": gloo_experts(groups["gloo"]),
            "mooncake": our_experts(groups["mooncake"]),
        }
        assert torch.allclose(calls["gloo"]().float(), calls["mooncake"]().float(), 0.05, 0.05)
        row = measure("experts", calls, groups)
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def table_line(row: dict[str, Any], ranks: int) -> str:
    """Return one measurement as a line."""
    line = (
        f"{row['operation']:15} {ranks:>5} {row.get('bytes', 0):>9} {row['mooncake'] * 1e6:10.0f}"
    )
    for side in ("gloo", "copies"):
        if side in row:
            line += f" {row[side] * 1e6:10.0f} {row[side] / row['mooncake']:11.2f}"
        else:
            line += " " * 23
    return line.rstrip()


def main() -> None:
    """Start the ranks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of processes")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--operations", nargs="+", default=OPERATIONS, choices=OPERATIONS)
    parser.add_argument("--kills", type=int, default=5, help="ranks to kill and to replace")
    parser.add_argument("--experts", action="store_true", help="measure mooncake.ep too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        run_rank(arguments.rank, arguments.size, arguments.port, arguments)
        return
    print(
        f"{'operation':15} {'ranks':>5} {'bytes':>9} {'ours us':>10} {'gloo us':>10} "
        f"{'gloo/ours':>11} {'copies us':>10} {'copies/ours':>11}"
    )
    for ranks in arguments.ranks:
        compare(ranks)
        if arguments.kills:
            for row in measure_kills(ranks, arguments.kills):
                print(table_line(row, ranks), flush=True)


def compare(ranks: int) -> None:
    """Run the measurements with a number of ranks, and print them."""
    words = ["--port", str(free_port()), "--size", str(ranks), "--rank"]
    command = [sys.executable, *sys.argv, *words]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    output = processes[0].stdout
    for line in output or ():
        print(table_line(json.loads(line), ranks), flush=True)
    codes = [process.wait(LIMIT_SECONDS) for process in processes]
    if any(codes):
        sys.exit("a rank has failed")


def free_port() -> int:
    """Return a port that is free at present, for the store of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
