"""Scenarios in which ranks die, stop or leave; `test_pg_faults.py` runs them in forked processes.

`pg_forked.py` says what a scenario gets.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import pytest
import torch
import torch.distributed as dist

from mooncake import _native, pg

LIMIT = timedelta(seconds=60)
LARGE = 1 << 20


def start(rank, size, port, options=None):
    """Make the default group."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=rank, world_size=size, timeout=LIMIT, pg_options=options
    )
    return dist.group.WORLD


def await_true(condition, about=""):
    """Wait until the condition is true."""
    end = time.monotonic() + LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < end, f"the condition did not come true: {about}"
        time.sleep(0.005)


def add_up(rank, count=3):
    """Return the sum of 2^rank over the members, and the ranks that were lost."""
    tensor = torch.full((count,), 2.0**rank)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert (tensor == tensor[0]).all(), "a torn sum"
    return float(tensor[0]), pg.get_failed_ranks_hint(work).nonzero().flatten().tolist()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def two_die_at_once(rank, size, port, parent):
    world = start(rank, size, port)
    assert add_up(rank)[0] == 2.0**size - 1
    if rank in (1, 2):
        die()
    lost = set()
    while len(lost) < 2:
        result, failed = add_up(rank, LARGE)
        lost |= set(failed)
        assert result == 2.0**size - 1 - sum(2.0**one for one in lost)
    assert pg.get_active_ranks(world).tolist()[1:3] == [0, 0]


def all_but_one_die(rank, size, port, parent):
    world = start(rank, size, port)
    add_up(rank)
    if rank:
        die()
    while add_up(rank, LARGE)[0] != 1:
        pass
    await_true(lambda: dist.get_world_size() == 1)
    assert pg.get_num_synced_ranks(world) == 1
    dist.barrier()


def highest_slot_dies(rank, size, port, parent):
    world, victim = start(rank, size, port), size - 1
    # A fixed number of operations: one rank may see the death one operation later.
    for number in range(10):
        if (rank, number) == (victim, 5):
            die()
        dist.all_reduce(torch.ones(LARGE))
    # Buffers for the smaller group work at once.
    assert dist.get_world_size() == victim == pg.get_num_synced_ranks(world)
    whole = torch.zeros(4 * victim)
    dist.all_gather_into_tensor(whole, torch.full((4,), float(rank)))
    assert whole.tolist() == [float(one) for one in range(victim) for _ in range(4)]
    own = torch.zeros(4)
    dist.reduce_scatter_tensor(own, torch.ones(4 * victim))
    assert (own == victim).all()
    parts = [torch.zeros(1) for _ in range(victim)]
    dist.all_gather(parts, torch.full((1,), float(rank)))
    assert [int(part) for part in parts] == list(range(victim))
    whole = torch.zeros(victim)
    dist.all_to_all_single(whole, torch.full((victim,), float(rank)))
    assert whole.tolist() == list(range(victim))
    objects = [None] * victim
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": one} for one in range(victim)]


def _operation(kind, rank, size):
    """Begin an operation; the last rank dies in it.

    Returns:
        The work, and for each result its value with and without the last rank.
    """
    victim = size - 1
    ranks, count = range(size), LARGE // 4
    full, reduced = 2.0**size - 1, 2.0**victim - 1
    tensor = torch.full((count,), 2.0**rank)
    got = torch.full((count,), -1.0)
    parts = [torch.full((count,), -1.0) for _ in ranks]
    given = [torch.full((count,), 100.0 + one) for one in ranks]
    in_parts = [(parts[one], 2.0**one, 2.0**one if one < victim else -1.0) for one in ranks]
    name, _, root = kind.partition(" of ")
    root = victim if root == "victim" else 0
    at_root = rank == root
    if name == "reduce":
        results = [(tensor, full, reduced)] if at_root else []
        return dist.reduce(tensor, root, async_op=True), results
    if name == "gather":
        work = dist.gather(tensor, parts if at_root else None, root, async_op=True)
        return work, in_parts if at_root else []
    if name == "scatter":
        work = dist.scatter(got, given if at_root else None, root, async_op=True)
        return work, [(got, 100.0 + rank, 100.0 + rank if root == 0 else -1.0)]
    if name == "broadcast":
        tensor = torch.full((count,), 7.0 if at_root else -1.0)
        return dist.broadcast(tensor, root, async_op=True), [(tensor, 7.0, 7.0 if not root else -1)]
    if name == "reduce_scatter":
        given = [tensor.clone() for _ in ranks]
        return dist.reduce_scatter(got, given, async_op=True), [(got, full, reduced)]
    if name == "all_gather_into_tensor":
        whole = torch.full((count * size,), -1.0)
        results = [(whole[count * one : count * (one + 1)], *in_parts[one][1:]) for one in ranks]
        return dist.all_gather_into_tensor(whole, tensor, async_op=True), results
    assert name == "all_to_all_single"
    whole, splits = torch.full((count * size,), -1.0), [count] * size
    results = [(whole[count * one : count * (one + 1)], *in_parts[one][1:]) for one in ranks]
    work = dist.all_to_all_single(whole, tensor.repeat(size), splits, splits, async_op=True)
    return work, results


def dies_in_an_operation(rank, size, port, parent, kind):
    world, victim = start(rank, size, port), size - 1
    dist.barrier()
    outcomes, failures = [], []
    count = 15
    for number in range(count):
        work, results = _operation(kind, rank, size)
        if (rank, number) == (victim, 5):
            die()
        work.wait()
        for tensor, full, reduced in results:
            assert (tensor == tensor[0]).all(), "a torn result"
            assert float(tensor[0]) in (full, reduced)
            if full != reduced:
                outcomes.append(float(tensor[0]) == full)
        if not pg.get_local_success(work):
            failures.append((number, pg.get_failed_ranks_hint(work).tolist()))
    assert outcomes == sorted(outcomes, reverse=True), "a part of the dead came after its death"
    # One operation reports the loss; where the victim is the root, each one from then on.
    reports = count if kind.endswith("of victim") else 1
    first = failures[0][0]
    numbers = range(first, min(first + reports, count))
    assert first in (5, 6), failures
    assert failures == [(at, [0] * victim + [1]) for at in numbers], failures
    assert pg.get_active_ranks(world).tolist() == [1] * victim + [0]
    dist.barrier()


def monitored_barrier_names_the_late(rank, size, port, parent):
    world = start(rank, size, port)
    late = 1
    if rank == late:
        parent.recv()
    else:
        limit = timedelta(seconds=1)
        with pytest.raises(RuntimeError, match=f"ranks={late}$" if rank == 0 else None):
            world.monitored_barrier(timeout=limit, wait_all_ranks=True)
        parent.send("late")
    dist.barrier()


def monitored_barrier_after_a_late_one(rank, size, port, parent):
    world = start(rank, size, port)
    limit = timedelta(seconds=1)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"ranks=1$"):
            world.monitored_barrier(limit)
        parent.send("late")
    parent.recv()
    if rank == 1:
        # Nobody collects.
        with pytest.raises(RuntimeError, match="not done after"):
            world.monitored_barrier(limit)
    dist.barrier()
    for _ in range(3):
        world.monitored_barrier(LIMIT)
        dist.barrier()


def messages_that_are_given_up(rank, size, port, parent):
    world = start(rank, size, port)
    short = timedelta(milliseconds=200)
    got = [torch.zeros(4), torch.zeros(4)]
    sent = torch.full((LARGE,), 1.0)
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match="not done after"):
            dist.irecv(got[0], 1).wait(short)
        with pytest.raises(dist.DistBackendError, match="not done after"):
            dist.batch_isend_irecv([dist.P2POp(dist.irecv, got[0], 1)])[0].wait(short)
        # As Ctrl-C.
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            dist.recv(got[0], 1)
        for tensor in (sent, sent[:10]):
            with pytest.raises(dist.DistBackendError, match="not done after"):
                dist.isend(tensor, 1, tag=3).wait(short)
        sent.fill_(2.0)
    dist.barrier()
    if rank == 0:
        dist.recv(got[1], 1)
        assert [tensor.tolist() for tensor in got] == [[0.0] * 4, [7.0] * 4]
        dist.send(sent, 1, tag=3)
        dist.send(sent[:10], 1, tag=3)
    else:
        dist.isend(torch.full((4,), 7.0), 0).wait()
        for length in (LARGE, 10):
            large = torch.zeros(length)
            dist.recv(large, 0, tag=3)
            assert (large == 2).all()
    assert world.size() == size


def roots_that_are_lost(rank, size, port, parent):
    start(rank, size, port)
    victim = 1
    add_up(rank)
    if rank == victim:
        die()
    while victim not in add_up(rank)[1]:
        pass
    tensor = torch.full((3,), float(rank))
    calls = [
        lambda: dist.broadcast(tensor, victim, async_op=True),
        lambda: dist.scatter(tensor, None, victim, async_op=True),
        lambda: dist.reduce(tensor.clone(), victim, async_op=True),
        lambda: dist.gather(tensor, None, victim, async_op=True),
        lambda: dist.irecv(tensor, victim),
    ]
    for call in calls:
        work = call()
        work.wait()
        assert pg.get_failed_ranks_hint(work).tolist() == [0, 1, 0]
    assert tensor.tolist() == [float(rank)] * 3
    for receive in (dist.broadcast_object_list, dist.recv_object_list):
        with pytest.raises(dist.DistBackendError, match=r"has sent no objects: ranks=\[1\]"):
            receive([None], victim)
    assert add_up(rank) == (2.0**size - 1 - 2.0**victim, [])


def closes_while_a_peer_is_stopped(rank, size, port, parent, way):
    # Addresses of different hosts: the ranks do not read each other's memory.
    pg.set_host_ip("127.0.0.2" if rank == 0 else "127.0.0.1")
    world = start(rank, size, port)
    large = torch.ones(64 << 20, dtype=torch.uint8)
    dist.barrier()
    parent.send("ready")
    if rank == 2:
        got = torch.zeros(3)
        dist.recv(got, 0)
        assert got.tolist() == [1.0] * 3
    parent.recv()
    if rank:
        return
    short = timedelta(seconds=1)
    if way == "message":
        for _ in range(4):
            work = dist.isend(large[: 7 << 20], 1)
        with pytest.raises(dist.DistBackendError, match="not done after"):
            work.wait(short)
    elif way == "collective":
        with pytest.raises(dist.DistBackendError, match="not done after"):
            dist.broadcast(large, 0, async_op=True).wait(short)
    else:
        dist.isend(large[: 7 << 20], 1)
        small = dist.isend(torch.ones(3), 2)
        # The rank that takes bytes gets its message though the other does not.
        small.wait(short * 5)
        with pytest.raises(dist.DistBackendError, match="not done after"):
            # The thread that waits for a small operation carries it out.
            dist.broadcast(large[: 128 << 10], 0, async_op=True).wait(short)
    begin = time.monotonic()
    # The end of the process waits for the coordinator, too.
    world._native.close()
    # The silence after which a stopped rank is removed is ten seconds.
    assert time.monotonic() - begin < 5
    parent.send("closed")


def messages_to_the_dead_end(rank, size, port, parent):
    start(rank, size, port)
    dist.barrier()
    victim = size - 1
    if rank == victim:
        parent.send("ready")
        parent.recv()
        die()
    tensors = [torch.ones(5), torch.ones(LARGE)]
    works = [dist.isend(tensor, victim, tag=i) for i, tensor in enumerate(tensors)]
    works += [dist.irecv(torch.ones(7), victim, tag=9), dist.irecv(torch.ones(LARGE), victim)]
    assert not any(work.is_completed() for work in works)
    parent.send("ready")
    for work in works:
        work.wait()
        assert not pg.get_local_success(work)
        assert pg.get_failed_ranks_hint(work).tolist() == [0] * victim + [1]


def dies_while_the_group_is_made(rank, size, port, parent):
    # A rank dies before the group is made. Others that ask for it after the death wait for their
    # time limit, and those that are slower than rank 0 find no coordinator any more.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    coordinator = None if rank == 0 else store.get("coordinator").decode()
    context = _native.CollectiveContext(
        global_rank=rank,
        host="127.0.0.1",
        coordinator=coordinator,
        bootstrap_timeout_us=10_000_000,
    )
    if rank == 0:
        store.set("coordinator", context.address)
    parent.send("ready")
    with pytest.raises(Exception, match=r"left while|in time|rank 0 is gone"):
        context.group(
            "0",
            rank,
            declared_size=size + 1,
            max_group_size=size + 1,
            is_extension=False,
            auto_deactivate=True,
            first_rank=0,
            timeout_s=10.0,
        )
    context.close()


def _makes_in_time(make):
    """Check that a group which rank 2 never makes is an error in time."""
    begin = time.monotonic()
    with pytest.raises(Exception, match=r"absent_ranks=.*2"):
        make()
    assert time.monotonic() - begin < 6


def group_without_a_rank(rank, size, port, parent):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)
    limit = timedelta(seconds=3)
    _makes_in_time(
        lambda: dist.init_process_group(
            "mooncake-cpu", store=store, rank=rank, world_size=size, timeout=limit
        )
    )


def subgroup_without_a_rank(rank, size, port, parent):
    start(rank, size, port)
    dist.barrier()
    if rank != size - 1:
        ranks, limit = list(range(size)), timedelta(seconds=3)
        _makes_in_time(lambda: dist.new_group(ranks, timeout=limit))
    # The world goes on.
    assert add_up(rank) == (2.0**size - 1, [])


def monitored_barrier_without_its_lowest_rank(rank, size, port, parent):
    start(rank, size, port)
    group = dist.new_group([1, 2, 3])
    dist.barrier()
    if rank == 1:
        die()
    if rank == 0:
        # It coordinates.
        parent.recv()
        return
    parent.send("ready")
    if rank == 3:
        parent.recv()
    group.monitored_barrier(LIMIT)
    parent.send("passed")
    # A rank that is late is named by the lowest one that is left.
    if rank == 2:
        with pytest.raises(RuntimeError, match=r"not called it within 1 s: ranks=2$"):
            group.monitored_barrier(timedelta(seconds=1))
        parent.send("named")
    parent.recv()


def _show_apart(world):
    """Let the view be written to other memory than the mirror, as it is for one of a GPU."""
    host = torch.zeros(world.max_group_size, dtype=torch.int32)
    world._host_mirror = host
    world._native.set_mirror(host.data_ptr())


def activated_before_it_joins(rank, size, port, parent):
    is_new = rank == size - 1
    mirror = torch.zeros(size, dtype=torch.int32)
    options = pg.MooncakeBackendOptions(mirror, is_new, size)
    world = start(rank, size if is_new else size - 1, port, options)
    _show_apart(world)
    everyone = [1] * size
    if is_new:
        pg.join_group(world)
    else:
        parent.send("ready")
        assert pg.recover_ranks(world, [size - 1]).status == pg.ProposalStatus.Applied
    assert mirror.tolist() == everyone
    assert add_up(rank) == (2.0**size - 1, [])
    parent.send("added")
    parent.recv()
    if rank == 0:
        pg.deactivate_ranks(world, [size - 1])
        assert mirror.tolist() == [1] * (size - 1) + [0]
        parent.send("removed")
    parent.recv()


def groups_of_one_name(rank, size, port, parent):
    start(rank, size, port)
    pair = None
    if rank < 2:
        pair = dist.new_group([0, 1], use_local_synchronization=True)
    own, _ = dist.new_subgroups(1)
    for group, members in ((pair, 2), (own, 1)):
        if group is not None:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor == members
    dist.barrier()


def manual_mode(rank, size, port, parent):
    active = torch.zeros(size, dtype=torch.int32)
    world = start(rank, size, port, pg.MooncakeBackendOptions(size, False, False, False))
    active = pg.get_active_ranks(world)
    epoch = pg.get_current_epoch(world)
    assert pg.sync_after_failure(world).status == pg.SyncAfterFailureStatus.NoPending
    dist.barrier()
    victim = 1
    if rank == victim:
        die()
    failed = []
    while not failed:
        result, failed = add_up(rank, LARGE)
    assert failed == [victim]
    assert result == 2.0**size - 1 - 2.0**victim, "bytes of the dead were added"
    # The hint does not change who is a member.
    assert active.tolist() == [1] * size
    assert pg.get_current_epoch(world) == epoch
    assert pg.get_peer_state(world, [victim]) == [False]
    dist.barrier()
    if rank == 0:
        answer = pg.sync_after_failure(world)
        assert answer.status == pg.SyncAfterFailureStatus.Reconciled
        answer = pg.deactivate_ranks(world, [victim])
        assert answer.status == pg.ProposalStatus.Applied
        assert answer.new_epoch == epoch + 1, (answer, epoch)
    await_true(lambda: active.tolist() == [1, 0, 1])
    assert add_up(rank)[0] == 2.0**size - 1 - 2.0**victim


def removal_without_sync(rank, size, port, parent):
    # Lost ranks are removed; the application alone asks for agreement.
    world = start(rank, size, port, pg.MooncakeBackendOptions(size, False, True, False))
    active = pg.get_active_ranks(world)
    epoch = pg.get_current_epoch(world)
    dist.barrier()
    if rank == 1:
        die()
    failed = []
    while not failed:
        result, failed = add_up(rank, LARGE)
    assert (result, failed) == (2.0**size - 3, [1])
    assert active.tolist() == [1, 0, 1]
    assert pg.get_current_epoch(world) == epoch + 1
    dist.barrier()
    if rank == 0:
        for status in ("Reconciled", "NoPending"):
            answer = pg.sync_after_failure(world)
            assert answer.status == pg.SyncAfterFailureStatus[status]
        answer = pg.deactivate_ranks(world, [1])
        assert (answer.status, answer.new_epoch) == (pg.ProposalStatus.Applied, epoch + 1)
    dist.barrier()


def stopped_rank(rank, size, port, parent):
    # The parent stops rank 1, and lets it run again.
    world = start(rank, size, port)
    add_up(rank)
    parent.send("ready")
    expelled = parent.recv()
    if not expelled:
        result, failed = add_up(rank, LARGE)
        assert (result, failed) == (2.0**size - 1, [])
        assert pg.get_active_ranks(world).tolist() == [1] * size
        dist.barrier()
        return
    if rank == 1:
        await_true(lambda: pg.get_active_ranks(world).tolist()[1] == 0)
        with pytest.raises(dist.DistBackendError, match="not active in this group"):
            add_up(rank)
        pg.join_group(world)
    else:
        result, failed = add_up(rank, LARGE)
        assert (result, failed) == (2.0**size - 1 - 2, [1])
        parent.send("lost")
        await_true(lambda: pg.get_peer_state(world, [1]) == [True])
        assert pg.recover_ranks(world, [1]).status == pg.ProposalStatus.Applied
    assert add_up(rank, LARGE) == (2.0**size - 1, [])


def dies_between_join_and_activation(rank, size, port, parent):
    is_new = rank == size - 1
    options = pg.MooncakeBackendOptions(size, is_new)
    world = start(rank, size if is_new else size - 1, port, options)
    if is_new:
        parent.send("ready")
        pg.join_group(world)
        return
    parent.send("ready")
    await_true(lambda: pg.get_peer_state(world, [size - 1]) == [True])
    parent.send("waits")
    parent.recv()
    await_true(lambda: pg.get_peer_state(world, [size - 1]) == [False])
    begin = time.monotonic()
    answer = pg.recover_ranks(world, [size - 1])
    assert answer.status == pg.ProposalStatus.Rejected
    assert "join_group" in answer.reject_reason
    assert "has ended" in answer.reject_reason
    assert time.monotonic() - begin < 15, "a rank that has ended was waited for"
    assert add_up(rank, LARGE) == (2.0 ** (size - 1) - 1, [])


def ddp_step_continues(rank, size, port, parent):
    from torch.nn.parallel import DistributedDataParallel

    start(rank, size, port)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(512, 512)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(12):
        if (rank, step) == (1, 5):
            die()
        loss = model(torch.ones(2, 512) * (rank + 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isfinite(loss)
    weights = model.module[0].weight.detach()
    parts = [torch.zeros_like(weights) for _ in range(size)]
    dist.all_gather(parts, weights)
    assert torch.equal(parts[0], parts[2]), "the survivors have different weights"


def made_and_destroyed_often(rank, size, port, parent, times):
    start(rank, size, port)
    used = []
    for _ in range(int(times)):
        group = dist.new_group(list(range(size)))
        dist.all_reduce(torch.ones(1 << 16), group=group)
        dist.destroy_process_group(group)
        used.append(usage())
    check_usage(used[20:])


def default_group_made_and_destroyed_often(rank, size, port, parent, times):
    used = []
    for _ in range(int(times)):
        start(rank, size, port)
        dist.all_reduce(torch.ones(1 << 16))
        dist.barrier()
        dist.destroy_process_group()
        used.append(usage())
    check_usage(used[5:])


def usage():
    """Return the number of threads, that of open files, and resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return threads, files, pages * resource.getpagesize() >> 20


def check_usage(used):
    """Check that nothing grows, given the use after the end of each of many groups."""
    half = len(used) // 2
    first, last = used[:half], used[half:]
    # A thread or a connection of the last groups may take a moment to end; a leaked one never does.
    threads, files = (min(one[kind] for one in first) for kind in (0, 1))
    await_true(lambda: usage()[0] <= threads + 2 and usage()[1] <= files + 2, used)
    before, after = (median(one[2] for one in part) for part in (first, last))
    assert after <= before + 8, used


def run(scenario, rank, size, port, parent):
    """Run a scenario, with what follows a colon in its name, and end the group."""
    name, *arguments = scenario.split(":")
    globals()[name](rank, size, port, parent, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()
