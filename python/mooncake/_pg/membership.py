"""Membership of groups and outcomes of works: the functions of `mooncake.pg`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from mooncake._runtime import _native
from mooncake.errors import MooncakeError

from .group import MooncakeProcessGroup
from .settings import process_settings
from .work import CombinedWork, MooncakeWork

__all__ = [
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "ViewUpdateResponse",
    "activate_ranks",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_metrics",
    "get_num_synced_ranks",
    "get_peer_state",
    "get_preferred_hca",
    "join_group",
    "metrics_text",
    "recover_ranks",
    "sync_after_failure",
]

_JOIN_TIMEOUT_US = 300_000_000


class ProposalStatus(IntEnum):
    """What became of a change of the view."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


class SyncAfterFailureStatus(IntEnum):
    """What became of a synchronization after a failure."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


@dataclass(frozen=True, slots=True)
class ViewUpdateResponse:
    """Result of `activate_ranks` and `deactivate_ranks`."""

    status: ProposalStatus
    new_epoch: int
    dropped_ranks: list[int] = field(default_factory=list)
    reject_reason: str = ""


# Upstream has both names.
ProposeViewUpdateResponse = ViewUpdateResponse


@dataclass(frozen=True, slots=True)
class SyncAfterFailureResponse:
    """Result of `sync_after_failure`."""

    status: SyncAfterFailureStatus
    reject_reason: str = ""


def get_active_ranks(pg: Any) -> torch.Tensor:
    """Return the tensor that shows which slots are active; it changes with the view.

    It is the tensor of the options if there was one.
    """
    return _group(pg).active_ranks_tensor


def get_num_synced_ranks(pg: Any) -> int:
    """Return the number of slots whose rank is reachable and active, or waits for activation."""
    group = _group(pg)
    return sum(get_peer_state(group, list(range(group.max_group_size))))


def get_peer_state(pg: Any, ranks: Sequence[int]) -> list[bool]:
    """Return for each slot whether its rank is reachable and active, or waits for activation.

    No message is sent.
    """
    group = _group(pg)
    states = group._native_group().peer_state()
    return [states[slot] for slot in _slots(group, ranks)]


def activate_ranks(pg: Any, ranks: Sequence[int]) -> ViewUpdateResponse:
    """Make ranks that wait in `join_group` members, at a point that all members agree on.

    One call of any member is enough; equal calls of others are harmless. A rank that does not wait
    in `join_group` yet is waited for, at most 20 s; one whose process has ended is refused at once.
    """
    group = _group(pg)
    limit_s = process_settings.change_limit_s
    response = _response(group._native_group().activate(_slots(group, ranks), limit_s))
    group.refresh_mirror()
    return response


recover_ranks = activate_ranks


def deactivate_ranks(backend: Any, ranks: Sequence[int]) -> ViewUpdateResponse:
    """Remove ranks from the view."""
    group = _group(backend)
    limit_s = process_settings.change_limit_s
    response = _response(group._native_group().deactivate(_slots(group, ranks), limit_s))
    group.refresh_mirror()
    return response


def join_group(pg: Any) -> None:
    """Wait until a member activates this rank, at most 300 s.

    Raises:
        RuntimeError: This rank is a member already, or nobody has activated it.
    """
    group = _group(pg)
    try:
        has_joined = group._native_group().join(_JOIN_TIMEOUT_US)
    except MooncakeError as error:
        raise dist.DistBackendError(str(error)) from error
    if not has_joined:
        raise TimeoutError(
            "no member has activated this rank: a member must call recover_ranks, "
            f"limit={_JOIN_TIMEOUT_US // 1_000_000} s"
        )
    group.refresh_mirror()


def extend_group_size_to(pg: Any, size: int) -> None:
    """Do nothing: the capacity of a group is its option `max_group_size`."""
    _group(pg)
    warnings.warn(
        "extend_group_size_to does nothing: set max_group_size when the group is made, "
        f"size={size}",
        stacklevel=2,
    )


def get_failed_ranks_hint(work: Any) -> torch.Tensor:
    """Return an int32 tensor with 1 at each slot that this rank saw fail in the operation."""
    work = _work(work)
    hint = torch.zeros(work.max_group_size, dtype=torch.int32, device="cpu")
    for rank in work.failed_ranks():
        hint[rank] = 1
    return hint


def get_local_success(work: Any) -> bool:
    """Return whether this rank saw no other fail in the operation."""
    return not _work(work).failed_ranks()


def get_current_epoch(backend: Any) -> int:
    """Return the number of the view; it grows with each change."""
    return int(_group(backend)._native_group().epoch())


def get_metrics(pg: Any) -> dict[str, Any]:
    """Return what this rank did in the group: the view, bytes sent, and operations by name.

    An operation has `count`, `bytes`, `losses` (a rank was lost), `errors`, `seconds_total`,
    `seconds_max`, `seconds_p50` and `seconds_p99`; the last two are exact to 25 %.
    """
    metrics: dict[str, Any] = _group(pg)._native_group().metrics()
    return metrics


def metrics_text() -> str:
    """Return the metrics of all groups of this process as Prometheus text.

    A process that has a store with an HTTP server serves them there, under `/metrics`.
    """
    text: str = _native.CollectiveContext.metrics_text()
    return text


def sync_after_failure(backend: Any) -> SyncAfterFailureResponse:
    """Agree with the other members on who was lost; for groups that do not do so themselves."""
    group = _group(backend)
    is_reconciled = group._native_group().sync_after_failure(process_settings.change_limit_s)
    group.refresh_mirror()
    if is_reconciled:
        return SyncAfterFailureResponse(SyncAfterFailureStatus.Reconciled)
    return SyncAfterFailureResponse(SyncAfterFailureStatus.NoPending)


def get_preferred_hca(pg: Any, location: str) -> str:  # noqa: ARG001 - upstream's
    """Return an empty name: process groups use no RDMA device of their own."""
    _group(pg)
    return ""


def _group(pg: Any) -> MooncakeProcessGroup:
    if not isinstance(pg, MooncakeProcessGroup):
        from .backend import MooncakeBackend

        if isinstance(pg, MooncakeBackend):
            return _group(pg._target())
        raise TypeError(f"not a process group of mooncake: {type(pg).__name__}")
    return pg


def _slots(group: MooncakeProcessGroup, ranks: Sequence[int]) -> list[int]:
    slots = [int(rank) for rank in ranks]
    for slot in slots:
        if not 0 <= slot < group.max_group_size:
            raise ValueError(
                f"the group has no such rank: rank={slot}, max_group_size={group.max_group_size}"
            )
    return slots


def _response(answer: tuple[int, int, list[int], str]) -> ViewUpdateResponse:
    status, epoch, dropped, reason = answer
    return ViewUpdateResponse(ProposalStatus(status), epoch, list(dropped), reason)


def _work(work: Any) -> MooncakeWork | CombinedWork:
    if not isinstance(work, MooncakeWork | CombinedWork):
        raise TypeError(f"not a work of a process group of mooncake: {type(work).__name__}")
    return work
