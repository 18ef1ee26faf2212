"""Scenarios of expert parallelism; `test_ep.py` runs them in forked processes.

`pg_forked.py` says what a scenario gets. Each result is compared with the model of `ep_model.py`.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import ep_model as model
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pg_faults import await_true, start

from mooncake import mooncake_ep_buffer, pg
from mooncake.ep import Buffer

PER_RANK, TOP, MOST, HIDDEN = 4, 3, 32, 256
LIMIT_US = 60_000_000


class Member:
    """One rank: its buffer, its mask, and rounds that are compared with the model."""

    def __init__(self, rank, buffer, most=MOST, hidden=HIDDEN):
        self.rank, self.buffer, self.size = rank, buffer, buffer.group_size
        self.most, self.hidden, self.experts = most, hidden, PER_RANK * buffer.group_size
        self.mask = torch.ones(self.size, dtype=torch.int32)

    def tokens(self, seed, rank=None):
        """Tokens of a rank; the first rank has none with seed 0."""
        rank = self.rank if rank is None else rank
        count = (20 * rank + 7 * seed) % (self.most + 1)
        return model.tokens_of(rank, seed, count, self.experts, TOP, self.hidden)

    def dispatch(self, tokens, limit_us=LIMIT_US, use_fp8=False, **options):
        x = torch.from_numpy(tokens.x).to(torch.bfloat16)
        choice = torch.from_numpy(tokens.choice)
        return self.buffer.dispatch(
            x, choice, self.mask, self.most, self.experts, limit_us, use_fp8=use_fp8, **options
        )

    def combine(self, tokens, rows, handle, limit_us=LIMIT_US, **options):
        choice, weights = torch.from_numpy(tokens.choice), torch.from_numpy(tokens.weights)
        return self.buffer.combine(rows, choice, weights, self.mask, limit_us, handle, **options)

    def check_received(self, rows, counts, handle, seed, use_fp8=False, sources=None):
        """Compare the rows of each expert with the tokens of each source, in any order."""
        for expert, source in itertools.product(range(PER_RANK), range(self.size)):
            begin, count = divmod(int(handle[1][expert, source]), 1 << 32)
            found = handle[0][expert, begin : begin + count].numpy()
            sent = self.tokens(seed, source)
            wanted = sent.of_expert(self.rank * PER_RANK + expert)
            if sources is not None and source not in sources:
                wanted = wanted[:0]
            assert sorted(found) == wanted.tolist()
            got = rows[expert, begin : begin + count].float().numpy()
            assert np.array_equal(got, model.received(sent, use_fp8)[found])
        assert counts.tolist() == (handle[1] & 0xFFFF_FFFF).sum(dim=1).tolist()

    def outputs(self, rows):
        """Return what the experts of this rank compute."""
        given = rows.float().numpy()
        first = self.rank * PER_RANK
        parts = [model.output(given[i], first + i) for i in range(PER_RANK)]
        return torch.from_numpy(np.stack(parts)).to(torch.bfloat16)

    def is_full(self, tokens, result, victim):
        """Return whether the sum has the victim's experts; it has all of them or none."""
        for lost in ([], [victim]):
            try:
                self.check_combined(tokens, result, lost)
            except AssertionError:
                if lost:
                    raise
            else:
                return not lost
        return False

    @staticmethod
    def check_combined(tokens, result, lost=(), use_fp8=False):
        assert result.dtype == torch.bfloat16
        values = result.float().numpy()
        model.check_combined(values, tokens, use_fp8, lambda e: e // PER_RANK not in lost)

    def exchange(self, seed, lost=(), limit_us=LIMIT_US):
        """Run and check one round."""
        tokens = self.tokens(seed)
        rows, counts, handle, _, _ = self.dispatch(tokens, limit_us)
        present = [rank for rank in range(self.size) if rank not in lost]
        self.check_received(rows, counts, handle, seed, sources=present)
        result, _, _ = self.combine(tokens, self.outputs(rows), handle, limit_us)
        self.check_combined(tokens, result, lost)


def rows_in_bf16(received):
    """Return rows; those of fp8 are multiplied by their scales."""
    if isinstance(received, torch.Tensor):
        return received
    values, scales = received
    assert values.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    assert scales.shape == (*values.shape[:2], values.shape[2] // 128)
    assert scales.stride(1) == 1, "scales are column-major"
    blocks = values.float().reshape(*scales.shape, 128) * scales.unsqueeze(3)
    return blocks.reshape(values.shape).to(torch.bfloat16)


def all_modes_match(rank, size, port, parent, lost=()):
    member = Member(rank, Buffer(start(rank, size, port)), hidden=512)
    dist.barrier()
    if rank in lost:
        parent.send("ready")
        parent.recv()
    elif lost:
        parent.recv()
    modes = ({}, {"async_finish": True}, {"return_recv_hook": True})
    dtypes = (torch.float32, torch.bfloat16)
    for seed, (use_fp8, mode, dtype) in enumerate(itertools.product((None, False), modes, dtypes)):
        is_fp8 = use_fp8 is None
        # Engines that serve a model set the default type.
        torch.set_default_dtype(dtype)
        tokens = member.tokens(seed)
        received, counts, handle, event, hook = member.dispatch(tokens, use_fp8=use_fp8, **mode)
        assert (hook is not None) == ("return_recv_hook" in mode)
        if hook is not None:
            hook()
        with event:
            rows = rows_in_bf16(received)
        present = [one for one in range(size) if one not in lost]
        member.check_received(rows, counts, handle, seed, is_fp8, present)
        out = torch.empty(tokens.x.shape, dtype=torch.bfloat16) if seed % 2 else None
        result, event, hook = member.combine(tokens, member.outputs(rows), handle, out=out, **mode)
        if hook is not None:
            hook()
        event.current_stream_wait()
        assert out is None or result is out
        member.check_combined(tokens, result, lost, is_fp8)
        assert member.mask.tolist() == [int(one not in lost) for one in range(size)]
    torch.set_default_dtype(torch.float32)


def all_modes_match_without_a_dead_rank(rank, size, port, parent):
    all_modes_match(rank, size, port, parent, lost=(size - 1,))


def upstream_wheel_check(rank, size, port, parent, most=32, hidden=1024, experts=24):
    # The check of upstream's wheel: a token holds the number of its rank, and its own at the end.
    start(rank, size, port)
    top, local = 8, experts // size
    hint = Buffer.get_ep_buffer_size_hint(most, hidden, size, experts)
    buffer = Buffer(dist.group.WORLD, num_ep_buffer_bytes=hint)
    # Other ranks update when one makes its buffer anew.
    if rank == 1:
        buffer = Buffer(dist.group.WORLD)
    else:
        buffer.update_ep_member()
    torch.manual_seed(rank)
    x = torch.full((most, hidden), rank - 128.0, dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(most).to(torch.bfloat16).view(-1, 1)
    choice = torch.topk(torch.randn(most, experts), top, dim=1)[1]
    choice.view(-1)[torch.randint(0, most * top, (10,))] = -1
    weights = torch.randn(most, top).abs()
    everywhere = torch.empty(size, most, top, dtype=torch.int64)
    dist.all_gather_into_tensor(everywhere, choice)
    # A mask of another length than the group stands for all ranks.
    mask = torch.zeros(most, dtype=torch.int32)
    for with_hook, use_fp8 in itertools.product((False, True), repeat=2):
        mode = {"async_finish": not with_hook, "return_recv_hook": with_hook}
        received, counts, handle, event, hook = buffer.dispatch(
            x, choice, mask, most, experts, -1, use_fp8=use_fp8, **mode
        )
        hook() if with_hook else event.current_stream_wait()
        rows = rows_in_bf16(received)
        for expert in range(local):
            number, count = rank * local + expert, int(counts[expert])
            assert count == int((everywhere == number).sum())
            got = rows[expert, :count]
            owner, last = got[:, 0], got[:, -128:]
            assert (got[:, :-128] == owner.view(-1, 1)).all()
            assert (last == handle[0][expert, :count].view(-1, 1)).all()
            for one in range(size):
                assert (owner == one - 128).sum() == (everywhere[one] == number).sum()
        for zero_copy in (False, True):
            given = rows
            if zero_copy:
                given = buffer.get_next_combine_buffer(handle)
                given[:] = rows
            result, event, hook = buffer.combine(
                given, choice, weights, mask, -1, handle, zero_copy=zero_copy, **mode
            )
            hook() if with_hook else event.current_stream_wait()
            sums = weights.masked_fill(choice == -1, 0).sum(dim=1, keepdim=True)
            wanted, found = (part.double() + 1 for part in (x * sums, result))
            likeness = 2 * (wanted * found).sum() / (wanted.square() + found.square()).sum()
            assert 1 - likeness < 1e-5
    assert mask.sum() == 0


def upstream_wheel_check_of_full_size(rank, size, port, parent):
    upstream_wheel_check(rank, size, port, parent, most=128, hidden=7168, experts=288)


def old_rows_are_not_summed(rank, size, port, parent):
    # The second round takes the memory of the first, in which the rows of all ranks were.
    member = Member(rank, Buffer(start(rank, size, port)))
    member.exchange(3)
    tokens = member.tokens(4)
    rows, _, handle, _, _ = member.dispatch(tokens)
    parent.send("ready")
    parent.recv()
    result, _, _ = member.combine(tokens, member.outputs(rows), handle, 3_000_000)
    member.check_combined(tokens, result, [size - 1])
    assert member.mask.tolist() == [1] * (size - 1) + [0]


def tags_of_a_round_left_out_come_again(rank, size, port, parent):
    # Rank 1 takes the messages of a round, and sends none. Soon its tags are used again.
    rounds = 8
    mooncake_ep_buffer._ROUNDS_MAX = rounds
    member = Member(rank, Buffer(start(rank, size, port)))
    tokens = member.tokens(3)
    tokens.choice[tokens.choice >= 0] %= PER_RANK
    if rank == 0:
        member.dispatch(tokens, 1000)
        assert member.mask.tolist() == [1, 0]
        member.mask.fill_(1)
    else:
        tag = member.buffer._next_round() | mooncake_ep_buffer._COUNTS
        head = torch.zeros(PER_RANK + MOST * TOP, dtype=torch.int32)
        member.buffer.group.recv([head], 0, tag).wait()
    for seed in range(rounds + 1):
        rows, counts, handle, _, _ = member.dispatch(member.tokens(seed))
        assert member.mask.tolist() == [1, 1], seed
        member.check_received(rows, counts, handle, seed)
    dist.barrier()


def dies_while_others_combine(rank, size, port, parent):
    # The victim sends no rows back, and the others wait for them without a limit.
    member = Member(rank, Buffer(start(rank, size, port)))
    tokens = member.tokens(5)
    rows, _, handle, _, _ = member.dispatch(tokens, -1)
    if rank != size - 1:
        result, _, hook = member.combine(
            tokens, member.outputs(rows), handle, -1, return_recv_hook=True
        )
    parent.send("ready")
    if rank == size - 1:
        parent.recv()
    hook()
    member.check_combined(tokens, result, [size - 1])
    assert member.mask.tolist() == [1] * (size - 1) + [0]


def rounds_across_a_kill(rank, size, port, parent):
    victim = size - 1
    member = Member(rank, Buffer(start(rank, size, port)), most=64, hidden=2048)
    tokens = member.tokens(6)
    dist.barrier()
    parent.send("ready")
    is_reduced = False
    # All ranks run the same number of rounds.
    for number in itertools.count():
        rows, _, handle, _, _ = member.dispatch(tokens, -1)
        result, _, _ = member.combine(tokens, member.outputs(rows), handle, -1)
        is_full = member.is_full(tokens, result, victim)
        assert not (is_full and is_reduced), "the rows of a dead rank are in a sum"
        is_reduced = not is_full
        assert member.mask.tolist() == [1] * victim + [int(is_full)]
        votes = torch.tensor([int(is_reduced)])
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        assert number < 10_000, "the victim is not lost"
        if votes[0]:
            break


def stopped_rank_is_masked_and_comes_back(rank, size, port, parent):
    world = start(rank, size, port)
    member, victim = Member(rank, Buffer(world)), size - 1
    dist.barrier()
    parent.send("ready")
    parent.recv()
    if rank == victim:
        # The others have finished these rounds without it: it gets their rows, and none back.
        others = list(range(victim))
        for seed in (1, 2, 3):
            tokens = member.tokens(seed)
            rows, counts, handle, _, _ = member.dispatch(tokens)
            member.check_received(rows, counts, handle, seed)
            result, _, _ = member.combine(tokens, member.outputs(rows), handle, 0)
            member.check_combined(tokens, result, others)
            assert member.mask.tolist() == [0] * victim + [1]
            member.mask.fill_(1)
    else:
        for seed in (1, 2, 3):
            member.exchange(seed, [victim], 500_000)
            assert member.mask.tolist() == [1] * victim + [0]
        # The mask is that of the caller: the process group keeps the rank.
        assert pg.get_active_ranks(world).tolist() == [1] * size
        parent.send("masked")
    dist.barrier()
    member.mask.fill_(1)
    for seed in (4, 5):
        member.exchange(seed)
    assert member.mask.tolist() == [1] * size


def rounds_of_two_buffers_overlap(rank, size, port, parent):
    world = start(rank, size, port)
    members = [Member(rank, Buffer(world)) for _ in range(2)]
    first = members[0].tokens(2)
    # Messages of other lengths, and messages of the same lengths with other rows.
    for second in (members[1].tokens(3), replace(first, x=-first.x)):
        received = [
            member.dispatch(tokens, return_recv_hook=True)
            for member, tokens in zip(members, (first, second), strict=True)
        ]
        for rows in reversed(received):
            rows[4]()
        combined = [
            member.combine(tokens, member.outputs(rows), handle, return_recv_hook=True)
            for member, tokens, (rows, _, handle, _, _) in zip(
                members, (first, second), received, strict=True
            )
        ]
        for result in reversed(combined):
            result[2]()
        for tokens, (result, _, _) in zip((first, second), combined, strict=True):
            Member.check_combined(tokens, result)
    assert all(member.mask.tolist() == [1] * size for member in members)


def buffer_is_made_across_a_death(rank, size, port, parent):
    # One rank begins to make its buffer before a death, the other after it.
    world, victim = start(rank, size, port), size - 1
    parent.send("ready")
    if rank == victim:
        parent.recv()
    if rank == 1:
        await_true(lambda: pg.get_active_ranks(world)[victim] == 0)
    buffer = Buffer(world)
    # The former size: it is what the first rank saw.
    assert buffer.group_size == size
    member = Member(rank, buffer)
    member.mask[victim] = 0
    member.exchange(1, [victim])
    assert member.mask.tolist() == [1] * victim + [0]
    buffer.update_ep_member()
    assert buffer.group_size == victim
    Member(rank, buffer).exchange(2)


def combine_takes_the_buffer_of_its_handle(rank, size, port, parent):
    buffer = Buffer(start(rank, size, port))
    member = Member(rank, buffer)
    tokens = [member.tokens(seed) for seed in (1, 2)]
    received = [member.dispatch(one) for one in tokens]
    handles = [one[2] for one in received]
    zeros = torch.zeros_like(received[0][0])
    with pytest.raises(ValueError, match="get_next_combine_buffer"):
        member.combine(tokens[0], zeros, handles[0], zero_copy=True)
    kept = [buffer.get_next_combine_buffer(handle) for handle in handles]
    for rows, one, handle in zip(kept, received, handles, strict=True):
        assert (rows.shape, rows.dtype) == (zeros.shape, torch.bfloat16)
        assert buffer.get_next_combine_buffer(handle).data_ptr() == rows.data_ptr()
        rows.copy_(member.outputs(one[0]))
    # A buffer serves each combine of its handle, and none without zero_copy.
    for one, handle in (*zip(tokens, handles, strict=True), (tokens[0], handles[0])):
        result, _, _ = member.combine(one, zeros, handle, zero_copy=True)
        member.check_combined(one, result)
        result, _, _ = member.combine(one, zeros, handle)
        assert (result == 0).all()
    alive = weakref.ref(kept[0])
    del kept, rows, handle, handles, received, one
    gc.collect()
    assert alive() is None, "the buffer of a handle outlives it"


def wrong_arguments_are_refused(rank, size, port, parent):
    member = Member(rank, Buffer(start(rank, size, port)))
    tokens = member.tokens(4)
    both = {"async_finish": True, "return_recv_hook": True}
    with pytest.raises(ValueError, match="exclude each other"):
        member.dispatch(tokens, **both)
    rows, _, handle, _, _ = member.dispatch(tokens)
    with pytest.raises(ValueError, match="exclude each other"):
        member.combine(tokens, rows, handle, **both)
    x, choice = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64)
    for wrong, text in (
        ((x.float(), choice, None, 4, 4, -1), "x must be bf16"),
        ((x[:, :64], choice, None, 4, 4, -1), "multiple of 128"),
        ((x, choice.int(), None, 4, 4, -1), "topk_idx must be int64"),
        ((x, choice[:3], None, 4, 4, -1), "topk_idx must be int64"),
        ((x, choice, None, 3, 4, -1), "too many tokens: tokens=4, limit=3"),
    ):
        with pytest.raises(ValueError, match=text):
            member.buffer.dispatch(*wrong)
    with pytest.raises(TypeError, match=r"process group of mooncake\.pg"):
        Buffer(object())


def run(scenario, rank, size, port, parent):
    """Run a scenario and end the group."""
    globals()[scenario](rank, size, port, parent)
    dist.destroy_process_group()
