"""Kills ranks of a process group at random moments and replaces them; the others keep running.

`python pg_kills.py --ranks 4 --kills 200 --seed 1`

Each round has one victim. The ranks run operations of several kinds. The parent kills the victim
after a random time and starts its replacement, which joins. Each rank checks each result: it is
that of all ranks or of all but the victim, whole, and never the former after the latter. At the end
of a round, the survivors compare a digest of their results.

The survivors must notice each death, and take each replacement in, within a limit, which is below
the time of silence after which a rank is removed. The threads, files and memory of rank 0, which
lives from the first round to the last, must not grow with the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pg_faults import check_usage, usage

import mooncake.pg as pg

LIMIT_S = 100.0
LARGE, SMALL = 1 << 20, 3
# Rounds after which rank 0 has all the memory that it needs.
WARM_ROUNDS = 5


class Round:
    """One round of one rank: operations until the victim is replaced."""

    def __init__(self, rank: int, size: int, victim: int, active: torch.Tensor) -> None:
        self.rank, self.size, self.victim, self.active = rank, size, victim, active
        self.is_reduced = False
        self.failures = 0
        self.results: list[Any] = []
        self.seen_at = 0.0

    def finish(
        self,
        work: Any,
        results: list[torch.Tensor],
        values: list[float],
        is_of_victim: bool = False,
    ) -> None:
        """Wait for an operation. `values` are what the results may be, with the victim first."""
        work.wait()
        for tensor, value in zip(results, values, strict=True):
            # Nothing of a result may come from another one.
            assert (tensor == tensor[0]).all(), f"a torn result: {tensor.unique()}"
            self.results.append(float(tensor[0]))
            assert float(tensor[0]) in (value, -1.0), (tensor[0], value)
        failed = pg.get_failed_ranks_hint(work).tolist()
        if any(failed):
            assert failed == [int(rank == self.victim) for rank in range(self.size)], failed
            assert self.active.tolist() == [1 - hint for hint in failed], self.active
            # One operation reports the loss, and then each one whose root is the victim.
            if not (self.failures and is_of_victim):
                self.failures += 1
                self.seen_at = time.monotonic()

    def add_up(self, count: int) -> None:
        """Add powers of two, so that the sum names the ranks in it."""
        tensor = torch.full((count,), 2.0**self.rank)
        full = 2.0**self.size - 1
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        reduced = full - 2.0**self.victim
        value = float(tensor[0])
        assert value in (full, reduced), value
        assert value == reduced or not self.is_reduced, "the victim is in a sum after its death"
        self.is_reduced = value == reduced
        self.finish(work, [tensor], [value])

    def gather(self) -> None:
        """Gather a tensor of each rank; the part of a lost rank stays -1."""
        parts = [torch.full((LARGE // 8,), -1.0) for _ in range(self.size)]
        work = dist.all_gather(parts, torch.full((LARGE // 8,), float(self.rank)), async_op=True)
        self.finish(work, parts, [float(rank) for rank in range(self.size)])
        kept = [rank for rank in range(self.size) if rank != self.victim]
        assert all(float(parts[rank][0]) == rank for rank in kept)

    def broadcast(self) -> None:
        """Send a tensor of the victim; it stays -1 if the victim is lost."""
        tensor = torch.full((LARGE,), 7.0 if self.rank == self.victim else -1.0)
        work = dist.broadcast(tensor, self.victim, async_op=True)
        self.finish(work, [tensor], [7.0], is_of_victim=True)

    def exchange(self) -> None:
        """Send a part to each rank."""
        parts = [torch.full((LARGE // 8,), -1.0) for _ in range(self.size)]
        given = [torch.full((LARGE // 8,), 100.0 + 10 * self.rank + to) for to in range(self.size)]
        work = dist.all_to_all(parts, given, async_op=True)
        self.finish(work, parts, [100.0 + 10 * rank + self.rank for rank in range(self.size)])

    def synchronize(self) -> None:
        """Wait for all ranks."""
        self.finish(dist.barrier(async_op=True), [], [])

    def operation(self, number: int) -> None:
        """Carry out one operation; which one depends on its number alone."""
        calls = (
            lambda: self.add_up(LARGE),
            self.gather,
            lambda: self.add_up(SMALL),
            self.broadcast,
            self.exchange,
            self.synchronize,
        )
        calls[number % len(calls)]()

    def decide(self) -> bool:
        """Return whether rank 0 sees that the replacement waits; all ranks get its answer."""
        code = torch.zeros(1)
        if self.rank == 0 and not self.active[self.victim]:
            code[0] = float(pg.get_peer_state(dist.group.WORLD, [self.victim])[0])
        work = dist.broadcast(code, 0, async_op=True)
        work.wait()
        self.finish(work, [code], [float(code[0])])
        return bool(code[0])

    def agree(self) -> None:
        """Check that the survivors have the same results, and that the sum is full again."""
        # Each rank gets other bytes in an exchange: the digest holds what is the same for all.
        text = json.dumps([value for value in self.results if value < 100.0])
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
        is_new = not self.results
        highest = torch.tensor([-1 if is_new else digest])
        lowest = torch.tensor([1 << 40 if is_new else digest])
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        assert int(highest) == int(lowest), "the survivors have different results"
        tensor = torch.full((LARGE,), 2.0**self.rank)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert pg.get_local_success(work)
        assert (tensor == 2.0**self.size - 1).all(), tensor.unique()


def victim_of(seed: int, number: int, size: int) -> int:
    """Return the victim of a round; global rank 0 cannot be replaced."""
    return random.Random(seed * 100_003 + number).randrange(1, size)


def run_rank(
    rank: int, arguments: argparse.Namespace, port: int, first: int, is_new: bool, parent: Any
) -> None:
    """Run one rank from a round on."""
    torch.set_num_threads(1)
    size, limit = arguments.ranks, timedelta(seconds=LIMIT_S)
    active = torch.zeros(size, dtype=torch.int32)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    options = pg.MooncakeBackendOptions(active, is_new)
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=rank, world_size=size, timeout=limit, pg_options=options
    )
    world = dist.group.WORLD
    if is_new:
        begin = time.monotonic()
        pg.join_group(world)
        parent.send(("joined", time.monotonic() - begin))
        victim = victim_of(arguments.seed, first - 1, size)
        Round(rank, size, victim, active).agree()
    for number in range(first, arguments.kills):
        victim = victim_of(arguments.seed, number, size)
        one = Round(rank, size, victim, active)
        if rank == 0:
            parent.send(("round", number, victim))
        for index in range(1 << 30):
            one.operation(index)
            if one.decide():
                break
        assert one.failures == 1, one.failures
        if rank == 0:
            parent.send(("lost", one.seen_at, usage()))
            answer = pg.recover_ranks(world, [victim])
            assert answer.status == pg.ProposalStatus.Applied, answer
        deadline = time.monotonic() + LIMIT_S
        while not active[victim]:
            assert time.monotonic() < deadline, "the replacement was not activated"
            time.sleep(0.0005)
        one.agree()
    parent.send(("done",))
    dist.destroy_process_group()


class Parent:
    """Starts the ranks, kills the victims, and collects the times."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch.distributed", "mooncake.pg"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: dict[int, tuple[Any, Any]] = {}
        self.moments = random.Random(arguments.seed)

    def start(self, rank: int, first: int, is_new: bool) -> None:
        """Start a rank, in a process that has torch already."""
        ours, theirs = self.context.Pipe()
        arguments = (rank, self.arguments, self.store.port, first, is_new, theirs)
        process = self.context.Process(target=run_rank, args=arguments)
        process.start()
        theirs.close()
        self.ranks[rank] = (process, ours)

    def receive(self, rank: int, kind: str) -> Any:
        """Return the next message of a rank."""
        pipe = self.ranks[rank][1]
        assert pipe.poll(LIMIT_S), f"rank {rank} sends nothing: expected={kind}"
        message = pipe.recv()
        assert message[0] == kind, message
        return message[1:]

    def run(self) -> None:
        """Run all rounds and print the times."""
        for rank in range(self.arguments.ranks):
            self.start(rank, 0, is_new=False)
        reactions, joins, used = [], [], []
        for number in range(self.arguments.kills):
            found, victim = self.receive(0, "round")
            assert found == number
            # Not a wait for something: the moment of death is what varies.
            time.sleep(self.moments.random() * self.arguments.delay_s)
            killed_at = time.monotonic()
            self.ranks[victim][0].kill()
            self.ranks[victim][0].join(LIMIT_S)
            self.start(victim, number + 1, is_new=True)
            seen_at, usage_of_0 = self.receive(0, "lost")
            used.append(usage_of_0)
            reactions.append(seen_at - killed_at)
            (seconds,) = self.receive(victim, "joined")
            joins.append(seconds)
        for rank, (process, _) in self.ranks.items():
            self.receive(rank, "done")
            process.join(LIMIT_S)
            assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
        for name, times in (("reaction", reactions), ("join", joins)):
            print(f"{name}: median {statistics.median(times):.4f} s, longest {max(times):.4f} s")
            assert max(times) < self.arguments.limit_s, f"the {name} takes too long"
        if len(used) > WARM_ROUNDS:
            print(f"threads, files and MiB of rank 0: {used[WARM_ROUNDS]}, at the end {used[-1]}")
            check_usage(used[WARM_ROUNDS:])

    def end(self) -> None:
        """End what is left."""
        for process, _ in self.ranks.values():
            process.kill()
            process.join()


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--delay-s", type=float, default=0.1)
    parser.add_argument("--limit-s", type=float, default=5.0, help="for a reaction, and for a join")
    parent = Parent(parser.parse_args())
    try:
        parent.run()
    finally:
        parent.end()


if __name__ == "__main__":
    main()
