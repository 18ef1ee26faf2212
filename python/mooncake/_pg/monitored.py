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
    message = torch.zeros(1, dtype=torch.uint8, device="cpu")
    for begin, tag in ((group.send, _ARRIVED_TAG), (group.recv, _RELEASED_TAG)):
        work = begin([message], collector, tag)
        work.wait(seconds_left(deadline))
        if work.failed_ranks():
            return False
    return True


def _collect(
    group: Any, others: list[int], deadline: float, limit_s: float, wait_all_ranks: bool
) -> None:
    """Wait for a message of each other rank, and then release them."""
    message = torch.zeros(1, dtype=torch.uint8, device="cpu")
    arrivals = [
        (rank, group.recv([torch.zeros_like(message)], rank, _ARRIVED_TAG)) for rank in others
    ]
    missing, present = [], []
    for rank, work in arrivals:
        try:
            work.wait(seconds_left(deadline))
        except dist.DistBackendError:
            missing.append(rank)
            if not wait_all_ranks:
                break
        else:
            if not work.failed_ranks():
                present.append(rank)
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise RuntimeError(
            f"monitored_barrier: ranks have not called it within {limit_s:g} s: ranks={names}"
        )
    # All are told at once: a rank that leaves now must not keep others.
    for work in [group.send([message], rank, _RELEASED_TAG) for rank in present]:
        work.wait(limit_s)
