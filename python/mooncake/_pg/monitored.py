"""`monitored_barrier`: rank 0 collects a message of each rank, and names those that sent none."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["monitored_barrier"]

# Far away from what callers choose.
_ARRIVED_TAG = 0x6D62_0001
_RELEASED_TAG = 0x6D62_0002


def monitored_barrier(group: Any, limit_s: float, wait_all_ranks: bool) -> None:
    """Waits for all active ranks of the group.

    Raises:
        RuntimeError: A rank has not called it in time; rank 0 names the ranks.
    """
    message = torch.zeros(1, dtype=torch.uint8, device="cpu")
    if group.rank() != 0:
        group.send([message], 0, _ARRIVED_TAG).wait(limit_s)
        group.recv([message], 0, _RELEASED_TAG).wait(limit_s)
        return
    deadline = time.monotonic() + limit_s
    others = [rank for rank, active in enumerate(group.active_ranks_tensor.tolist()) if active][1:]
    arrivals = [
        (rank, group.recv([torch.zeros_like(message)], rank, _ARRIVED_TAG)) for rank in others
    ]
    missing = []
    for rank, work in arrivals:
        try:
            work.wait(max(deadline - time.monotonic(), 0.001))
        except dist.DistBackendError:
            missing.append(rank)
            if not wait_all_ranks:
                break
    if missing:
        names = ", ".join(str(rank) for rank in missing)
        raise RuntimeError(
            f"monitored_barrier: ranks have not called it within {limit_s:g} s: ranks={names}"
        )
    for work in [group.send([message], rank, _RELEASED_TAG) for rank in others]:
        work.wait(limit_s)
