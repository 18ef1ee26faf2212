"""Scenarios of calls that overlap, differ between ranks, or have wrong arguments.

`test_pg_calls.py` runs them in forked processes, beside gloo where gloo has an answer.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pg_faults import LIMIT, start

from mooncake import pg

SHORT = timedelta(seconds=3)


def overlapping_operations(rank, size, port, parent):
    start(rank, size, port)
    total = float(sum(range(1, size + 1)))
    # A view that is copied: its reduction, and then what is gathered from it.
    whole = torch.full((4, 2), rank + 1.0)
    column = whole[:, 0]
    gathered = torch.zeros(4 * size)
    reduced = dist.all_reduce(column, async_op=True)
    works = [reduced, dist.all_gather_into_tensor(gathered, column, async_op=True)]
    for work in reversed(works):
        work.wait()
    assert (column == total).all()
    assert (whole[:, 1] == rank + 1).all()
    assert (gathered == total).all(), gathered
    # The same memory, once as it is and once as a view that is copied, in both orders.
    plain = torch.full((3, 2), rank + 1.0)
    first = dist.all_reduce(plain, async_op=True)
    second = dist.all_reduce(plain.t(), async_op=True)
    second.wait()
    first.wait()
    assert (plain == total * size).all(), plain
    plain = torch.full((3, 2), rank + 1.0)
    first = dist.all_reduce(plain.t(), async_op=True)
    second = dist.all_reduce(plain, async_op=True)
    second.wait()
    first.wait()
    assert (plain == total * size).all(), plain
    # Each reduction is waited for out of order, or not at all.
    chain = torch.full((2, 3), 1.0)
    works = [dist.all_reduce(chain.t(), async_op=True) for _ in range(4)]
    works[-1].wait()
    del works
    assert (chain == float(size) ** 4).all(), chain
    # Parts that share no element do not wait for each other.
    apart = torch.full((2, 3, 2), rank + 1.0)
    works = [dist.all_reduce(part.t(), async_op=True) for part in apart]
    for work in works:
        work.wait()
    assert (apart == total).all()
    dist.barrier()


def results_that_cannot_be_stored(rank, size, port, parent):
    start(rank, size, port)

    def begin_and_reshape():
        # The result does not fit any more.
        tensor = torch.ones(2, 3).t()
        work = dist.all_reduce(tensor, async_op=True)
        tensor.set_(torch.zeros(7))
        return work

    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("mooncake.pg").addHandler(handler)
    work = begin_and_reshape()
    with pytest.raises(dist.DistBackendError, match="cannot be put into its tensor"):
        work.wait()
    del work
    assert not messages
    begin_and_reshape()
    dist.barrier()
    for value in range(3):
        tensor = torch.full((3,), float(value))
        dist.all_reduce(tensor)
        assert (tensor == value * size).all()
    gc.collect()
    assert len(messages) == 1, messages
    with pytest.raises(ValueError, match="share memory"):
        dist.all_reduce(torch.ones(1).expand(3))
    dist.barrier()


def works_dropped_by_threads(rank, size, port, parent):
    # Messages that nobody waits for, sent by several threads.
    world = start(rank, size, port)
    failures = []
    peer = 1 - rank

    def run(number):
        try:
            for at in range(200):
                tensor = torch.full((2, 2), float(at)).t()
                world.recv([torch.zeros(2, 2).t()], peer, number)
                world.send([tensor], peer, number)
        except RuntimeError as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    dist.barrier()


def outputs_of_wrong_size(rank, size, port, parent):
    # A group with room for one more rank than it has.
    start(rank, size, port, pg.MooncakeBackendOptions(size + 1))
    gloo = dist.new_group(backend="gloo")
    own = torch.ones(2)
    calls = {
        "too few places": lambda to: dist.all_gather_into_tensor(torch.zeros(2), own, group=to),
        "a part of a place": lambda to: dist.all_gather_into_tensor(
            torch.zeros(2 * size + 1), own, group=to
        ),
        "too many places": lambda to: dist.all_gather_into_tensor(
            torch.zeros(2 * size + 4), own, group=to
        ),
        "places for nothing": lambda to: dist.all_gather_into_tensor(
            torch.zeros(4), torch.zeros(0), group=to
        ),
        "too few parts": lambda to: dist.reduce_scatter_tensor(
            torch.zeros(2), torch.ones(2), group=to
        ),
        "too many parts": lambda to: dist.reduce_scatter_tensor(
            torch.zeros(2), torch.ones(2 * size + 4), group=to
        ),
        "a short list": lambda to: dist.all_gather([torch.zeros(2)], own, group=to),
        "a long list": lambda to: dist.all_gather([torch.zeros(2)] * (size + 2), own, group=to),
        "short split sizes": lambda to: dist.all_to_all_single(
            torch.zeros(2), torch.ones(2), [1], [1], group=to
        ),
        "split sizes of other rows": lambda to: dist.all_to_all_single(
            torch.zeros(2), torch.ones(2), [1] * size, [2] + [1] * (size - 1), group=to
        ),
    }
    for name, call in calls.items():
        for group in (gloo, None):
            try:
                call(group)
            except (RuntimeError, ValueError):
                continue
            raise AssertionError(f"{name}: accepted by {'gloo' if group else 'mooncake'}")
    if rank == 0:
        with pytest.raises(ValueError, match="root=9"):
            dist.group.WORLD.broadcast([own], 9)
    # A place for the rank that may still come.
    whole = torch.zeros(2 * size + 2)
    dist.all_gather_into_tensor(whole, own)
    assert whole.tolist() == [1.0] * 2 * size + [0.0] * 2
    dist.barrier()


def different_calls(rank, size, port, parent):
    world = start(rank, size, port)
    odd = size - 1
    tensor = torch.ones(4)
    whole = torch.ones(4 * size)
    pairs = [
        (lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)),
        (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX)),
        (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(tensor.int())),
        (lambda: dist.all_reduce(tensor), lambda: dist.all_reduce(torch.ones(5))),
        (
            lambda: dist.all_gather_into_tensor(whole, tensor),
            lambda: dist.reduce_scatter_tensor(tensor, whole),
        ),
        (lambda: dist.broadcast(tensor, 0), lambda: dist.broadcast(tensor.to(torch.int32), 0)),
        (lambda: dist.broadcast(tensor, 0), lambda: dist.broadcast(tensor, odd)),
        (lambda: dist.barrier(), lambda: dist.all_reduce(tensor)),
    ]
    for usual, other in pairs:
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match=r"call=\w+\(.*other_call=\w+\(") as raised:
            other() if rank == odd else usual()
        assert f"rank={odd} " in str(raised.value)
        assert time.monotonic() - begin < LIMIT.total_seconds() / 3
        tensor = torch.ones(4)
        dist.all_reduce(tensor)
        assert (tensor == size).all()
    active = pg.get_active_ranks(world).tolist()
    dist.barrier()
    assert active == [1] * size


def operation_that_one_rank_never_calls(rank, size, port, parent):
    world = start(rank, size, port)
    dist.set_timeout(SHORT)
    if rank == 0:
        tensor = torch.ones(1)
        late = dist.all_reduce(tensor, async_op=True)
        begin = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="not done after 3 s"):
            late.wait()
        # What is called behind it is not waited for as long.
        dist.set_timeout(timedelta(seconds=600))
        for _ in range(3):
            with pytest.raises(dist.DistBackendError, match="an earlier operation"):
                dist.all_reduce(torch.ones(1))
        assert 3 <= time.monotonic() - begin < 3 + LIMIT.total_seconds() / 2
        parent.send("late")
        # The other one comes after all.
        late.wait(LIMIT)
        assert tensor == size
    else:
        assert parent.recv() == "go on"
        dist.set_timeout(LIMIT)
        for _ in range(4):
            dist.all_reduce(torch.ones(1))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == size
    assert pg.get_local_success(world.barrier())


def message_limits(rank, size, port, parent):
    start(rank, size, port)
    if rank == 0:
        pg.set_p2p_timeout_us(200_000)
        begin = time.monotonic()
        with pytest.raises(dist.DistBackendError, match=r"not done after 0\.2 s"):
            dist.recv(torch.zeros(1), 1)
        assert time.monotonic() - begin < 20
        with pytest.raises(ValueError, match="positive"):
            pg.set_p2p_timeout_us(0)
    dist.barrier()


def removed_rank_gets_torchs_error(rank, size, port, parent):
    world = start(rank, size, port)
    dist.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError, match="member of the group already"):
            pg.join_group(world)
        # Rank 1 may still be in the barrier that has ended here.
        assert parent.recv() == "remove"
        answer = pg.deactivate_ranks(world, [1])
        assert answer.status == pg.ProposalStatus.Applied
        parent.send("removed")
        assert parent.recv() == "end"
        return
    parent.send("member")
    assert parent.recv() == "removed"
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_gather_object([None] * size, 1),
        lambda: dist.send(torch.ones(1), 0),
        lambda: dist.recv(torch.ones(1), 0),
        lambda: dist.barrier(),
    ):
        with pytest.raises(dist.DistBackendError, match="not active in this group"):
            call()
    parent.send("done")


def scaled_reductions(rank, size, port, parent):
    start(rank, size, port)
    half = dist.ReduceOp.PREMUL_SUM(0.5)
    total = sum(range(1, size + 1)) / 2
    for tensor in (torch.full((3,), rank + 1.0), torch.full((3, 2), rank + 1.0).t()):
        dist.all_reduce(tensor, half)
        assert (tensor == total).all()
    tensor = torch.full((3,), rank + 1.0, dtype=torch.bfloat16)
    dist.reduce(tensor, 1, dist.ReduceOp.PREMUL_SUM(torch.tensor([0.5])))
    assert (tensor == (total if rank == 1 else rank + 1)).all()
    whole = torch.full((2 * size,), rank + 1.0)
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, whole, half)
    assert (part == total).all()
    assert (whole == rank + 1).all()
    dist.reduce_scatter(part, list(whole.chunk(size)), half)
    assert (part == total).all()
    with pytest.raises(TypeError, match="PREMUL_SUM"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), half)
    with pytest.raises(TypeError, match="factor"):
        dist.group.WORLD.allreduce([torch.ones(2)], dist.ReduceOp.PREMUL_SUM)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gradients = []
    for factor in (None, 2.0 * size):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        if factor:
            model.set_gradient_divide_factor(factor)
        model(torch.full((1, 4), rank + 1.0)).sum().backward()
        gradients.append(model.weight.grad.full_tensor())
    # Without a factor, gradients are divided by the number of ranks.
    assert torch.allclose(gradients[0], gradients[1] * 2)
    dist.barrier()


def run(scenario, rank, size, port, parent):
    """Run a scenario and end the group."""
    globals()[scenario](rank, size, port, parent)
    if dist.is_initialized():
        dist.destroy_process_group()
