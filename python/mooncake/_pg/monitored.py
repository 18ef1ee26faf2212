"""`monitored_barrier`: one rank collects a message of each, and names those that sent none."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from .context import seconds_left

__all__ = ["monitored_barrier"]

# Far away from what callers choose.
_ARRIVED_TAG = 0x6D62_0001
_RELEASED_TAG = 0x6D62_0002


def monitored_barrier(group: Any, limit_s: float, wait_all_ranks: bool) -> None:
    """Wait for all active ranks of the group. The lowest one collects; lost ranks are left out.

    Raises:
        RuntimeError: A rank has not called it in time; the rank that collects names the ranks.
    """
    deadline = time.monotonic() + limit_s
    lost: set[int] = set()
    while True:
        active = group._native_group().active_ranks()
        ranks = [rank for rank, is_active in enumerate(active) if is_active and rank not in lost]
        if group.rank() == ranks[0]:
            _collect(group, ranks[1:], deadline, limit_s, wait_all_ranks)
            return
        if _is_released(group, ranks[0], deadline):
            return
        # The next one collects: all others find this one lost, too.
        lost.add(ranks[0])


def _is_released(group: Any, collector: int, deadline: float) -> bool:
    """Report to the collector and wait for its answer; return False if it is lost."""
    number = next(group.barrier_numbers)
    work = group.send([torch.tensor([number], device="cpu")], collector, _ARRIVED_TAG)
    work.wait(seconds_left(deadline))
    if work.failed_ranks():
        return False
    answer = torch.zeros(1, dtype=torch.int64, device="cpu")
    # An answer to an earlier call, which was given up, is left behind.
    while answer[0] != number:
        work = group.recv([answer], collector, _RELEASED_TAG)
        work.wait(seconds_left(deadline))
        if work.failed_ranks():
            return False
    return True


def _collect(
    group: Any, others: list[int], deadline: float, limit_s: float, wait_all_ranks: bool
) -> None:
    """Wait for the number of each other rank's call, and then release them."""
    arrivals = []
    for rank in others:
        number = torch.zeros(1, dtype=torch.int64, device="cpu")
        arrivals.append((rank, number, group.recv([number], rank, _ARRIVED_TAG)))
    missing: list[int] = []
    present = []
    try:
        for rank, number, work in arrivals:
            if missing and not wait_all_ranks:
                break
            try:
                work.wait(seconds_left(deadline))
            except dist.DistBackendError:
                missing.append(rank)
            else:
                if not work.failed_ranks():
                    present.append((rank, number))
    finally:
        # What comes later belongs to the next barrier.
        for _, _, work in arrivals:
            work.give_up()
    if not missing:
        # All are told at once: a rank that leaves now must not keep others.
        answers = [(rank, group.send([at], rank, _RELEASED_TAG)) for rank, at in present]
        for rank, work in answers:
            try:
                work.wait(limit_s)
            except dist.DistBackendError:
                # Its time was up before it was released.
                missing.append(rank)
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise RuntimeError(
            f"monitored_barrier: ranks have not called it within {limit_s:g} s: ranks={names}"
        )
