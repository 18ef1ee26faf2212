"""Scenarios that the tests of process groups run, one process per rank.

`python pg_ranks.py SCENARIO RANK SIZE STORE_PORT [extension]`
"""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.request
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mooncake import pg

try:
    import torch.distributed.tensor as tensors
    from torch.distributed.fsdp import fully_shard  # noqa: F401

    OFFERS_FSDP2 = True
except ImportError:
    # Torch 2.4 has other names, and no FSDP2 on the CPU.
    import torch.distributed._tensor as tensors

    OFFERS_FSDP2 = False

SCENARIO = sys.argv[1]
RANK, SIZE, PORT = (int(argument) for argument in sys.argv[2:5])
IS_EXTENSION = sys.argv[5:] == ["extension"]
LIMIT = timedelta(seconds=50)


def start(options=None):
    store = dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=LIMIT)
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=RANK, world_size=SIZE, timeout=LIMIT, pg_options=options
    )
    return store


def await_true(condition):
    end = time.monotonic() + LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)


def values(rank, count, dtype):
    """What a rank contributes: small numbers that every type holds."""
    numbers = [(rank * 7 + i * 3) % 5 + 1 for i in range(count)]
    if dtype == torch.bool:
        return torch.tensor([number > 2 for number in numbers])
    return torch.tensor(numbers, dtype=dtype)


def reductions():
    start()
    integers = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    complexes = [torch.complex64, torch.complex128]
    models = {
        "SUM": (torch.add, [*integers, *floats, *complexes]),
        "PRODUCT": (torch.mul, [*integers, *floats]),
        "MIN": (torch.minimum, [*integers, *floats, torch.bool]),
        "MAX": (torch.maximum, [*integers, *floats, torch.bool]),
        "BAND": (torch.bitwise_and, [*integers, torch.bool]),
        "BOR": (torch.bitwise_or, [*integers, torch.bool]),
        "BXOR": (torch.bitwise_xor, [*integers, torch.bool]),
    }
    for name, (combine, dtypes) in models.items():
        for dtype in dtypes:
            # Below and above the size from which parts are reduced.
            for count in (1, 17) if dtype is not torch.float32 else (1, 17, 30_001):
                expected = values(0, count, dtype)
                for rank in range(1, SIZE):
                    expected = combine(expected, values(rank, count, dtype))
                tensor = values(RANK, count, dtype)
                dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
                assert torch.equal(tensor, expected), (name, dtype, tensor, expected)
    # Torch itself does not add these.
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        tensor = values(RANK, 17, torch.int64).to(dtype)
        dist.all_reduce(tensor)
        expected = sum(values(rank, 17, torch.int64) for rank in range(SIZE))
        assert torch.equal(tensor.to(torch.int64), expected), (dtype, tensor)
    tensor = torch.full((5,), float(RANK))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    assert torch.allclose(tensor, torch.full((5,), (SIZE - 1) / 2))
    for operation, dtype in (("BAND", torch.float32), ("AVG", torch.int32)):
        with pytest.raises(TypeError, match=operation):
            dist.all_reduce(torch.ones(2, dtype=dtype), getattr(dist.ReduceOp, operation))
    tensor = values(RANK, 9, torch.int64)
    dist.reduce(tensor, 1)
    if RANK == 1:
        assert torch.equal(tensor, sum(values(rank, 9, torch.int64) for rank in range(SIZE)))
    metrics = pg.get_metrics(dist.group.WORLD)
    # No rank leaves before all have looked.
    dist.barrier()
    assert metrics["active_ranks"] == [True] * SIZE
    assert metrics["operations"]["allreduce"]["count"] > 50
    one = metrics["operations"]["reduce"]
    assert (one["count"], one["bytes"], one["losses"], one["errors"]) == (1, 72, 0, 0)
    assert 0 < one["seconds_total"] == one["seconds_max"] == one["seconds_p99"]


def gathers():
    start()
    own = torch.full((3, 2), float(RANK))
    parts = [torch.zeros(3, 2) for _ in range(SIZE)]
    dist.all_gather(parts, own)
    whole = torch.zeros(3 * SIZE, 2)
    dist.all_gather_into_tensor(whole, own)
    for rank in range(SIZE):
        assert (parts[rank] == rank).all()
        assert (whole[3 * rank : 3 * rank + 3] == rank).all()
    parts = [torch.zeros(3, 2) for _ in range(SIZE)] if RANK == 1 else None
    dist.gather(own, parts, dst=1)
    assert RANK != 1 or [int(part[0, 0]) for part in parts] == list(range(SIZE))
    got = torch.zeros(4)
    given = [torch.full((4,), float(rank)) for rank in range(SIZE)]
    dist.scatter(got, given if RANK == 1 else None, src=1)
    assert (got == RANK).all()
    got = torch.zeros(4)
    dist.reduce_scatter(got, given)
    assert (got == RANK * SIZE).all()
    got = torch.zeros(2)
    dist.reduce_scatter_tensor(got, torch.arange(2.0 * SIZE))
    assert got.tolist() == [SIZE * 2.0 * RANK, SIZE * (2.0 * RANK + 1)]
    tensor = torch.full((100_000,), float(RANK))
    dist.broadcast(tensor, 1)
    assert (tensor == 1).all()
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(SIZE)]
    objects = [RANK, "text"]
    dist.broadcast_object_list(objects, 1)
    assert objects == [1, "text"]
    with dist._coalescing_manager():
        first, second = torch.ones(2), torch.ones(3)
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert first[0] == second[0] == SIZE
    _gather_together()
    _send_objects()


def _gather_together():
    sizes = (2, 3)
    own = [torch.full((size,), float(RANK)) for size in sizes]
    wholes = [torch.zeros(size * SIZE) for size in sizes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole, tensor in zip(wholes, own, strict=True):
            dist.all_gather_into_tensor(whole, tensor)
    manager.wait()
    for size, whole in zip(sizes, wholes, strict=True):
        assert whole.tolist() == [float(rank) for rank in range(SIZE) for _ in range(size)]
    got = [torch.zeros(size) for size in sizes]
    with dist._coalescing_manager(async_ops=True) as manager:
        for part, size in zip(got, sizes, strict=True):
            dist.reduce_scatter_tensor(part, torch.arange(float(size * SIZE)))
    manager.wait()
    for part, size in zip(got, sizes, strict=True):
        assert part.tolist() == [SIZE * (size * RANK + i) for i in range(size)]
    lists = [[torch.zeros(size) for size in sizes] for _ in range(SIZE)]
    dist.group.WORLD.allgather_coalesced(lists, own).wait()
    assert all((tensor == rank).all() for rank in range(SIZE) for tensor in lists[rank])


def _send_objects():
    objects = [None] * SIZE if RANK == 0 else None
    dist.gather_object({"rank": RANK}, objects, dst=0)
    assert RANK != 0 or objects == [{"rank": rank} for rank in range(SIZE)]
    objects = [None]
    given = [("for", rank) for rank in range(SIZE)] if RANK == 1 else None
    dist.scatter_object_list(objects, given, src=1)
    assert objects == [("for", RANK)]
    if RANK == 0:
        dist.send_object_list([1, {"a": 2}], 1)
    if RANK == 1:
        objects = [None, None]
        assert dist.recv_object_list(objects, 0) == 0
        assert objects == [1, {"a": 2}]
    dist.barrier()


def exchanges():
    start()
    outputs = [torch.zeros(2) for _ in range(SIZE)]
    dist.all_to_all(outputs, [torch.full((2,), 10.0 * RANK + rank) for rank in range(SIZE)])
    assert [int(output[0]) for output in outputs] == [10 * rank + RANK for rank in range(SIZE)]
    # Rank r sends s + 1 rows to rank s, and thus gets r + 1 rows of each.
    rows = torch.arange(SIZE * (SIZE + 1) // 2).reshape(-1, 1) + 100 * RANK
    output = torch.zeros((RANK + 1) * SIZE, 1, dtype=torch.int64)
    dist.all_to_all_single(output, rows, [RANK + 1] * SIZE, list(range(1, SIZE + 1)))
    first = RANK * (RANK + 1) // 2
    expected = [100 * rank + first + i for rank in range(SIZE) for i in range(RANK + 1)]
    assert output.flatten().tolist() == expected
    following, previous = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    got = torch.zeros(2)
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((2,), float(RANK)), following),
            dist.P2POp(dist.irecv, got, previous),
        ]
    )
    for one in work:
        one.wait()
    assert (got == previous).all()
    if RANK == 0:
        for tag in (1, 2):
            dist.isend(torch.tensor([tag]), 1, tag=tag)
    if RANK == 1:
        first, second = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        dist.recv(second, 0, tag=2)
        assert dist.recv(first, tag=1) == 0
        assert (int(first), int(second)) == (1, 2)
    # A send is done when the receiver has taken the bytes, not before.
    if RANK == 0:
        work = dist.isend(torch.ones(1), 1, tag=7)
        assert not work.is_completed()
    dist.barrier()
    if RANK == 1:
        dist.recv(torch.zeros(1), 0, tag=7)
    if RANK == 0:
        work.wait()
        assert work.is_completed()
    try:
        dist.monitored_barrier(timeout=LIMIT)
    except ValueError:
        # Old versions of torch call it for groups of gloo only.
        dist.group.WORLD.monitored_barrier(timeout=LIMIT)
    metrics = pg.get_metrics(dist.group.WORLD)["operations"]
    for name in ("send", "recv"):
        assert metrics[name]["count"] > 0 == metrics[name]["errors"]
    # A store of this process serves the metrics of its groups.
    from mooncake import Store, StoreConfig

    line = f'mooncake_group_operations_total{{group="0",rank="{RANK}",operation="all_to_all"}} 2'
    assert line in pg.metrics_text().splitlines(), pg.metrics_text()
    with Store(config=StoreConfig(segment_bytes=0, http_port=0)) as served:
        port = served.http_address.rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=50) as page:
            assert line in page.read().decode().splitlines()
        assert line in served.metrics_text().splitlines()
    dist.barrier()


def tensors_of_all_kinds():
    start()
    whole = torch.zeros(4, 6)
    columns = whole[:, ::2]
    columns += RANK + 1
    dist.all_reduce(columns)
    total = SIZE * (SIZE + 1) / 2
    assert (whole[:, ::2] == total).all()
    assert (whole[:, 1::2] == 0).all()
    parameter = torch.nn.Parameter(torch.full((3,), float(RANK)))
    dist.broadcast(parameter, 1)
    assert (parameter == 1).all()
    assert parameter.requires_grad
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    dist.all_gather([torch.zeros(0) for _ in range(SIZE)], empty)
    parts = [torch.zeros(2, 3).t() for _ in range(SIZE)]
    dist.all_gather(parts, torch.full((3, 2), float(RANK)))
    assert [int(part[2, 1]) for part in parts] == list(range(SIZE))
    future = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    assert future.wait()[0].tolist() == [SIZE, SIZE]
    with pytest.raises(dist.DistBackendError, match=r"differ in size|another rank"):
        dist.all_reduce(torch.ones(2 + RANK))
    pair = dist.new_group([0, 1])
    if RANK < 2:
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=pair)
        assert tensor == 2
        assert dist.get_backend(pair) == "mooncake-cpu"
        assert pg.get_active_ranks(pair._get_backend(torch.device("cpu"))).tolist() == [1, 1]
        # A rank that leaves is taken out of the view.
        dist.barrier()


def frameworks():
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    start()
    world = dist.group.WORLD
    assert (functional.all_reduce(torch.ones(3), "sum", world) == SIZE).all()
    doubled = torch.compile(
        lambda x: functional.all_reduce(x * 2, "sum", world) + 1, backend="aot_eager"
    )
    assert (doubled(torch.ones(2)) == 2 * SIZE + 1).all()
    torch.manual_seed(0)
    inputs = torch.randn(SIZE, 4)
    plain = torch.nn.Linear(4, 2)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.module.load_state_dict(plain.state_dict())
    models = [plain, model]
    mesh = init_device_mesh("cpu", (SIZE,))
    if OFFERS_FSDP2:
        sharded = torch.nn.Linear(4, 2)
        sharded.load_state_dict(plain.state_dict())
        torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
        models.append(sharded)
    steps = [torch.optim.SGD(one.parameters(), 0.1) for one in models]
    for _ in range(3):
        plain(inputs).square().mean().backward()
        for one in models[1:]:
            one(inputs[RANK : RANK + 1]).square().mean().backward()
        for step in steps:
            step.step()
            step.zero_grad()
    wanted = plain.weight.detach()
    assert torch.allclose(model.module.weight, wanted, atol=1e-5)
    if OFFERS_FSDP2:
        assert torch.allclose(sharded.weight.full_tensor(), wanted, atol=1e-5)
    table = torch.arange(8.0).reshape(4, 2)
    split = tensors.distribute_tensor(table, mesh, [tensors.Shard(0)])
    assert torch.equal(split.redistribute(mesh, [tensors.Replicate()]).to_local(), table)


def compiled_by_inductor():
    import torch.distributed._functional_collectives as functional

    start()
    world = dist.group.WORLD

    @torch.compile(backend="inductor")
    def step(x):
        total = functional.all_reduce(x * 2, "sum", world) + 1
        return functional.all_gather_tensor(total + RANK, 0, world)

    assert step(torch.ones(2)).tolist() == [2.0 * SIZE + 1 + r for r in range(SIZE) for _ in "ab"]


def lose_and_replace():
    victim = SIZE - 2
    active = torch.zeros(SIZE, dtype=torch.int32)
    start(pg.MooncakeBackendOptions(active, IS_EXTENSION))
    world = dist.group.WORLD
    full = 2.0**SIZE - 1

    def add_up():
        tensor = torch.full((1 << 20,), 2.0**RANK)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert (tensor == tensor[0]).all(), "a torn sum"
        return float(tensor[0]), work

    if IS_EXTENSION:
        assert add_up()[0] == 2.0**RANK, "a rank outside of the group is alone"
        pg.join_group(world)
    else:
        outcomes = []
        for number in range(20):
            if victim == RANK and number == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            result, work = add_up()
            outcomes.append((result, pg.get_local_success(work)))
            if not outcomes[-1][1]:
                hint = pg.get_failed_ranks_hint(work)
                assert hint.tolist() == [int(rank == victim) for rank in range(SIZE)]
                assert active.tolist() == [int(rank != victim) for rank in range(SIZE)]
        assert [success for _, success in outcomes].count(False) == 1, outcomes
        changed = [result for result, _ in outcomes].index(full - 2.0**victim)
        assert [result for result, _ in outcomes[:changed]] == [full] * changed
        assert [result for result, _ in outcomes[changed:]] == [full - 2.0**victim] * (20 - changed)
        assert pg.get_active_ranks(world) is active
        assert dist.get_world_size() == SIZE
        epoch = pg.get_current_epoch(world)
        print("lost", flush=True)
        await_true(lambda: pg.get_peer_state(world, [victim]) == [True])
        assert pg.recover_ranks(world, [victim]).status == pg.ProposalStatus.Applied
        assert pg.get_current_epoch(world) == epoch + 1
    for _ in range(10):
        result, work = add_up()
        assert (result, pg.get_local_success(work)) == (full, True)
    assert active.tolist() == [1] * SIZE
    dist.barrier()


def grow():
    founders = SIZE - 1

    store = dist.TCPStore("127.0.0.1", PORT, is_master=False, timeout=LIMIT)
    size = SIZE if IS_EXTENSION else founders
    options = pg.MooncakeBackendOptions(SIZE, IS_EXTENSION)
    dist.init_process_group(
        "mooncake-cpu", store=store, rank=RANK, world_size=size, timeout=LIMIT, pg_options=options
    )
    world = dist.group.WORLD
    if IS_EXTENSION:
        pg.join_group(world)
    else:
        assert dist.get_world_size() == founders
        assert pg.get_num_synced_ranks(world) == founders
        print("lost", flush=True)
        await_true(lambda: pg.get_peer_state(world, [SIZE - 1]) == [True])
        assert pg.activate_ranks(world, [SIZE - 1]).status == pg.ProposalStatus.Applied
    assert dist.get_world_size() == SIZE
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == SIZE
    # A live rank is removed, learns of it, and comes back in place.
    dist.barrier()
    if RANK == 0:
        assert pg.deactivate_ranks(backend=world, ranks=[SIZE - 1]).reject_reason == ""
    if RANK == SIZE - 1:
        await_true(lambda: pg.get_active_ranks(world).tolist()[RANK] == 0)
        with pytest.raises(dist.DistBackendError, match="not active in this group"):
            dist.all_reduce(torch.ones(1))
        pg.join_group(world)
    else:
        await_true(lambda: dist.get_world_size() == founders)
        await_true(lambda: pg.get_peer_state(world, [SIZE - 1]) == [True])
        pg.recover_ranks(world, [SIZE - 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == SIZE
    dist.barrier()


def coordinator_dies():
    start()
    dist.barrier()
    if RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    gone = (dist.DistBackendError, ConnectionError, ValueError)
    with pytest.raises(gone, match="rank 0"):
        _add_up_for_long()


def _add_up_for_long():
    for _ in range(1000):
        dist.all_reduce(torch.ones(1 << 18))


def end_without_destroy():
    start()
    dist.all_reduce(torch.ones(3))


def hosts_by_name():
    from mooncake.engine import TransferEngine

    if RANK == 2:
        pg.set_host_ip("localhost")
    else:
        engine = TransferEngine()
        name = ("127.0.0.2:0", "localhost:0")[RANK]
        assert engine.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
        pg.set_transfer_engine(engine)
    start()
    if RANK == 0:
        assert dist.group.WORLD._context.native.address.startswith("127.0.0.2:")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor == SIZE
    dist.barrier()


def again_on_the_same_store():
    for _ in range(3):
        start()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor[0] == SIZE
        dist.destroy_process_group()


def _routing(rank, tokens, experts):
    """Tokens of a rank, their experts (some masked) and weights, from the rank alone."""
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(tokens, 256, generator=draw).to(torch.bfloat16)
    choice = torch.rand(tokens, experts, generator=draw).argsort(dim=1)[:, :3].contiguous()
    choice[torch.rand(choice.shape, generator=draw) < 0.2] = -1
    return x, choice, torch.rand(choice.shape, generator=draw)


def _exchange_experts(buffer, mask):
    """Send tokens to experts that return them, and check what comes back."""
    count = 2 * SIZE
    x, choice, weights = _routing(RANK, 8, count)
    rows, _, handle, _, _ = buffer.dispatch(x, choice, mask, 16, count, 30_000_000, use_fp8=False)
    combined, _, _ = buffer.combine(rows, choice, weights, mask, 30_000_000, handle)
    factors = torch.where(choice >= 0, weights, 0.0).sum(dim=1, keepdim=True)
    assert torch.allclose(combined.float(), x.float() * factors, rtol=5e-2, atol=1e-2)


def _take_back(group, slot):
    """Let the members of a group take a replaced rank back."""
    await_true(lambda: pg.get_peer_state(group, [slot]) == [True])
    assert pg.recover_ranks(group, [slot]).status == pg.ProposalStatus.Applied


def replace_in_subgroups():
    """A rank dies; its replacement joins the world and its sub-groups, and experts meet again."""
    from mooncake.ep import Buffer

    victim = SIZE - 1
    start(pg.MooncakeBackendOptions(SIZE, IS_EXTENSION))
    world = dist.group.WORLD
    options = [pg.MooncakeBackendOptions(size, IS_EXTENSION) for size in (2, 2, SIZE)]
    members = ([0, 1], [1, victim], list(range(SIZE)))
    groups = [
        dist.new_group(ranks, pg_options=option)
        for ranks, option in zip(members, options, strict=True)
    ]
    buffer = Buffer(world)
    if IS_EXTENSION:
        for group in (world, groups[1], groups[2]):
            pg.join_group(group)
    else:
        _exchange_experts(buffer, torch.ones(SIZE, dtype=torch.int32))
        dist.barrier()
        if victim == RANK:
            os.kill(os.getpid(), signal.SIGKILL)
        while pg.get_active_ranks(world)[victim]:
            dist.all_reduce(torch.ones(1 << 18))
        if RANK == 0:
            print("lost", flush=True)
        for group, slot in ((world, victim), (groups[1], 1), (groups[2], victim)):
            if RANK in dist.get_process_group_ranks(group):
                _take_back(group, slot)
    for number in range(20):
        for ranks, group in ((list(range(SIZE)), world), *zip(members, groups, strict=True)):
            if RANK not in ranks:
                continue
            tensor = torch.full((1 + 40_000 * (number % 2),), 2.0**RANK)
            dist.all_reduce(tensor, group=group)
            assert (tensor == sum(2.0**rank for rank in ranks)).all(), (ranks, tensor)
        got = torch.zeros(2)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((2,), float(RANK)), (RANK + 1) % SIZE),
                dist.P2POp(dist.irecv, got, (RANK - 1) % SIZE),
            ]
        )
        for work in works:
            work.wait()
        assert (got == (RANK - 1) % SIZE).all()
    buffer.update_ep_member()
    mask = torch.ones(SIZE, dtype=torch.int32)
    _exchange_experts(buffer, mask)
    assert mask.tolist() == [1] * SIZE
    dist.barrier()


def vanished_host():
    """The last rank is on a host of its own, which the test cuts off: no connection is closed."""
    store = dist.TCPStore("10.77.0.1", PORT, is_master=RANK == 0, timeout=LIMIT)
    dist.init_process_group("mooncake-cpu", store=store, rank=RANK, world_size=SIZE, timeout=LIMIT)
    dist.all_reduce(torch.ones(1))
    print("lost", flush=True)
    victim = SIZE - 1
    begin = time.monotonic()
    while True:
        # More than the buffers of a connection hold.
        tensor = torch.full((1 << 22,), 2.0**RANK)
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert (tensor == tensor[0]).all(), "a torn sum"
        if not pg.get_local_success(work):
            break
        assert tensor[0] == 2.0**SIZE - 1
    assert tensor[0] == 2.0**SIZE - 1 - 2.0**victim
    assert pg.get_failed_ranks_hint(work).tolist() == [0] * victim + [1]
    assert 5 < time.monotonic() - begin < 40, "silence is what removes a host"
    dist.barrier()


globals()[SCENARIO]()
if SCENARIO != "end_without_destroy" and dist.is_initialized():
    dist.destroy_process_group()
