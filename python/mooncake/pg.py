"""`mooncake.pg`: process groups for torch that continue after a member dies.

Importing it registers the backends "mooncake" (CPU and CUDA tensors) and "mooncake-cpu".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._pg import torch_version, version_suffix
from ._pg.group import MooncakeProcessGroup, create_process_group
from ._pg.membership import (
    ProposalStatus,
    ProposeViewUpdateResponse,
    SyncAfterFailureResponse,
    SyncAfterFailureStatus,
    ViewUpdateResponse,
    activate_ranks,
    deactivate_ranks,
    extend_group_size_to,
    get_active_ranks,
    get_current_epoch,
    get_failed_ranks_hint,
    get_local_success,
    get_metrics,
    get_num_synced_ranks,
    get_peer_state,
    get_preferred_hca,
    join_group,
    metrics_text,
    recover_ranks,
    sync_after_failure,
)
from ._pg.settings import MooncakeBackendOptions, process_settings
from ._pg.work import MooncakeWork

__all__ = [
    "MooncakeBackendOptions",
    "MooncakeProcessGroup",
    "MooncakeWork",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "ViewUpdateResponse",
    "ViewUpdateStatus",
    "activate_ranks",
    "createMooncakeBackend",
    "createMooncakeCpuBackend",
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
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
    "torch_version",
    "version_suffix",
]

ViewUpdateStatus = ProposalStatus


def set_host_ip(host: str) -> None:
    """Set the address or host by which other ranks reach this process, before the first group."""
    process_settings.set_host_ip(host)


def set_device_filter(filters: Sequence[str]) -> None:
    """Set which RDMA devices groups use between hosts, before the first group."""
    process_settings.set_device_filter(filters)


def set_transfer_engine(engine: Any) -> None:
    """Set a `TransferEngine` whose host and RDMA devices the groups use, before the first group.

    It is initialized, and stays so until the last group has ended.
    """
    process_settings.set_engine(engine)


def set_collective_timeout_us(us: int) -> None:
    """Set after which silence a rank is taken out (10 s, at least 3 s), before the first group.

    A process that has ended is noticed at once.
    """
    process_settings.set_duration("collective_timeout_us", us)


def set_p2p_timeout_us(us: int) -> None:
    """Set how long a work of `send` or `recv` is waited for; without it, the group's time limit.

    A message fails as soon as its peer is taken out, in any case.
    """
    process_settings.set_duration("p2p_timeout_us", us)


def set_fault_reconciliation_window_us(us: int) -> None:
    """Set how long members may take to agree on a change that a rank asks for (30 s).

    `activate_ranks`, `deactivate_ranks` and `sync_after_failure` fail after it. It is at least
    twice the silence after which a rank is taken out, since a silent member keeps the others from
    an agreement until then.
    """
    process_settings.set_duration("reconciliation_window_us", us)


def createMooncakeBackend(options: Any, pg_options: Any = None) -> Any:  # noqa: N802 - upstream's
    """Make a group for tensors of CPU and CUDA; torch calls it."""
    return create_process_group(options, pg_options, _devices())


def createMooncakeCpuBackend(options: Any, pg_options: Any = None) -> Any:  # noqa: N802
    """Make a group for tensors of the CPU; torch calls it."""
    return create_process_group(options, pg_options, ("cpu",))


def _devices() -> tuple[str, ...]:
    import torch

    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


def _register() -> None:
    import torch.distributed as dist

    for name, creator, devices in (
        ("mooncake", createMooncakeBackend, ["cpu", "cuda"]),
        ("mooncake-cpu", createMooncakeCpuBackend, ["cpu"]),
    ):
        # Old versions of torch refuse a second registration.
        if name.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(name, creator, extended_api=True, devices=devices)


_register()
