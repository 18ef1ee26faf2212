"""One rank of a process group that saves and loads checkpoints together, for a test."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import mooncake
from mooncake import checkpoint

WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


def main(rank: int, size: int, master: str, meeting: str) -> None:
    """Run every case in turn; each rank prints its name when it has ended."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    with mooncake.Store(master) as store:
        for case in (
            shards_are_put_once_and_sharded_again,
            ranks_have_keys_of_their_own,
            contradictions_are_refused_at_all_ranks,
            failure_of_one_rank_reaches_the_others,
            failed_load_of_one_rank_reaches_the_others,
            ranks_begin_again_together,
        ):
            case(store, rank)
            dist.barrier()
            if rank == 0:
                print(case.__name__, flush=True)
    dist.destroy_process_group()


def shards_are_put_once_and_sharded_again(store: mooncake.Store, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {
        "rows": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "copies": distribute_tensor(WHOLE, mesh, [Replicate()]),
        "plain": torch.ones(5),
        "step": 3,
    }
    saved = checkpoint.save(state, store, "run")
    assert saved.nbytes == 2 * WHOLE.nbytes + 20
    columns = distribute_tensor(torch.zeros(7, 6), mesh, [Shard(1)])
    rows = distribute_tensor(torch.zeros(7, 6), mesh, [Shard(0)])
    into = {"rows": columns, "copies": rows, "plain": torch.zeros(5), "step": 0}
    assert checkpoint.load(store, "run", into=into) is into
    for each in (columns, rows):
        assert isinstance(each, DTensor)
        assert torch.equal(each.full_tensor(), WHOLE)
    assert into["plain"].sum() == 5
    assert into["step"] == 3
    # One rank alone gets all of it.
    if rank == 1:
        whole = checkpoint.load(store, "run", no_dist=True)
        assert torch.equal(whole["rows"], WHOLE)
        assert torch.equal(whole["copies"], WHOLE)


def ranks_have_keys_of_their_own(store: mooncake.Store, rank: int) -> None:
    checkpoint.save({"stage": {rank: torch.full((3,), float(rank))}}, store, "stages")
    loaded = checkpoint.load(store, "stages")
    assert {key: each[0].item() for key, each in loaded["stage"].items()} == {0: 0.0, 1: 1.0}


def contradictions_are_refused_at_all_ranks(store: mooncake.Store, rank: int) -> None:
    with pytest.raises(mooncake.InvalidArgumentError, match="tensor=w"):
        checkpoint.save({"w": torch.ones(3 + rank)}, store, "bad")
    assert not store.exists("bad/@checkpoint")


def failure_of_one_rank_reaches_the_others(store: mooncake.Store, rank: int) -> None:
    state = {"w": object() if rank == 1 else torch.ones(3)}
    error, text = mooncake.MooncakeError, "rank 1 failed: TypeError: w is of type"
    with pytest.raises(TypeError if rank == 1 else error, match="w is of type" if rank else text):
        checkpoint.save(state, store, "bad")
    dist.barrier()
    assert not list(store.keys("bad/"))


def failed_load_of_one_rank_reaches_the_others(store: mooncake.Store, rank: int) -> None:
    checkpoint.save({"w": torch.ones(3)}, store, "whole")

    def fail(done: int, total: int) -> None:
        if rank == 1:
            raise RuntimeError("out of memory")

    error, text = (RuntimeError, "^out of") if rank == 1 else (mooncake.MooncakeError, "rank 1")
    with pytest.raises(error, match=text):
        checkpoint.load(store, "whole", progress=fail)


def ranks_begin_again_together(store: mooncake.Store, rank: int) -> None:
    old, new = ({f"w{at}": torch.full((9,), at) for at in range(n, n + 600)} for n in (0, 1000))
    checkpoint.save(old, store, "replaced")
    replaced: list[int] = []

    def replace(done: int, total: int) -> None:
        if rank == 0 and not replaced:
            replaced.append(done)
            checkpoint.save(new, store, "replaced", no_dist=True)

    loaded = checkpoint.load(store, "replaced", progress=replace)
    assert [*loaded] == [*new]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
