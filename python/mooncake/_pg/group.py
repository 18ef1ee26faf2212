"""`MooncakeProcessGroup`: the process group that torch uses, with every name that torch calls."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .collectives import Collectives
from .context import ProcessContext
from .settings import GroupSettings
from .work import PendingWorks

__all__ = ["MooncakeProcessGroup"]

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
# From 2.14 on, torch lets Python define a Backend, and asks groups for one.
_NEEDS_BACKEND = _TORCH >= (2, 14)


class MooncakeProcessGroup(Collectives, dist.ProcessGroup):  # type: ignore[misc]
    """A process group that continues after a member dies.

    A group is a table of slots. A slot belongs to one global rank and never moves; the view says
    which slots are active. `size()` is the highest active slot + 1 and changes with the view.
    """

    def __init__(
        self,
        context: ProcessContext,
        native: Any,
        settings: GroupSettings,
        rank: int,
        size: int,
        timeout: timedelta,
        devices: tuple[str, ...],
    ) -> None:
        # `Collectives` comes first for its methods; only torch's class has an initializer.
        dist.ProcessGroup.__init__(self, rank, size)
        self._context = context
        self._native = native
        self._rank = rank
        self._devices = [torch.device(name) for name in devices]
        self._timeout_s = timeout.total_seconds()
        self._pending = PendingWorks(settings.max_group_size)
        self._coalesced = None
        self._process = os.getpid()
        self._name = ""
        self._desc = ""
        self._settings = settings
        # Numbers of calls of monitored_barrier.
        self.barrier_numbers = itertools.count(1)
        self._close_lock = threading.Lock()
        self._is_closed = False
        self._mirror = settings.active_ranks
        self._host_mirror: torch.Tensor | None = None
        self._attach_mirror()
        if self._host_mirror is not self._mirror:
            self._pending.on_loss = weakref.WeakMethod(self.refresh_mirror)
        context.add(self)
        if _NEEDS_BACKEND:
            from .backend import register_backends

            register_backends(self, rank, size, self._devices)

    def _native_group(self) -> Any:
        if self._is_closed:
            raise RuntimeError("the process group is destroyed")
        if self._process != os.getpid():
            raise RuntimeError(
                "the process group belongs to the parent process: call init_process_group in the "
                "child"
            )
        return self._native

    def rank(self) -> int:
        """Return this process's slot."""
        return self._rank

    def size(self) -> int:
        """Return the highest active slot + 1."""
        return int(self._native.size())

    # The names by which C++ asks.
    getRank = rank  # noqa: N815
    getSize = size  # noqa: N815

    def getBackendName(self) -> str:  # noqa: N802
        """Return "mooncake", for CPU groups too."""
        return "mooncake"

    def name(self) -> str:
        """Return "mooncake", for CPU groups too."""
        return "mooncake"

    def _get_backend_name(self) -> str:
        return "mooncake"

    if not _NEEDS_BACKEND:

        @property
        def _device_types(self) -> list[torch.device]:
            return list(self._devices)

    def _get_backend(self, device: Any = None) -> MooncakeProcessGroup:  # noqa: ARG002 - torch's
        return self

    get_backend = _get_backend

    # What FSDP2, splitting and initialization ask a backend for.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def supports_tensor_alloc(self, device: Any) -> bool:  # noqa: ARG002 - torch's
        """Return False: tensors come from torch's own allocators."""
        return False

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that torch gave the group."""
        return self._desc

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name that torch gave the group."""
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that torch gave the group."""
        return self._desc

    # Names until torch 2.12.
    _allgather_base = Collectives.all_gather_single
    _reduce_scatter_base = Collectives.reduce_scatter_single
    alltoall_base = Collectives.all_to_all_single
    allgather_into_tensor_coalesced = Collectives.all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = Collectives.reduce_scatter_single_coalesced

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; the error names the ranks that have not called it.

        Args:
            timeout: Time limit; that of the group if none is given.
            wait_all_ranks: Whether the error names all of them, not the first only.

        Raises:
            RuntimeError: A rank has not called it in time.
        """
        from .monitored import monitored_barrier

        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        monitored_barrier(self, limit_s if limit_s > 0 else self._timeout_s, wait_all_ranks)

    def shutdown(self) -> None:
        """End the group: operations that are not done fail. Harmless if repeated."""
        with self._close_lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self._process != os.getpid():
            return
        self._native.close()
        self._pending.close()
        self._context.remove(self)

    abort = shutdown

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that are called from now on."""
        limit_s = timeout.total_seconds()
        if limit_s <= 0:
            raise ValueError(f"the time limit of a group must be positive: timeout={timeout}")
        self._timeout_s = limit_s

    _set_default_timeout = set_timeout

    def __del__(self) -> None:
        # Before 2.9, destroy_process_group calls nothing.
        if not getattr(self, "_is_closed", True):
            self.shutdown()

    def _attach_mirror(self) -> None:
        """Let the native side write each new view into the tensor of active ranks."""
        capacity = self._settings.max_group_size
        if self._mirror is None:
            self._mirror = torch.zeros(capacity, dtype=torch.int32, device=self._devices[0])
        if self._mirror.is_cpu:
            self._host_mirror = self._mirror
            self._native.set_mirror(self._mirror.data_ptr())
            return
        # The native side cannot write into memory of a GPU: it writes into a copy in host memory.
        self._host_mirror = torch.zeros(capacity, dtype=torch.int32, device="cpu")
        self._native.set_mirror(self._host_mirror.data_ptr())
        self.refresh_mirror()

    def refresh_mirror(self) -> None:
        """Bring a mirror in the memory of a GPU up to date; works do so when they end."""
        host, mirror = self._host_mirror, self._mirror
        if host is not None and mirror is not None and mirror is not host:
            mirror[: host.numel()].copy_(host)

    @property
    def active_ranks_tensor(self) -> torch.Tensor:
        """The tensor that shows the active ranks."""
        self.refresh_mirror()
        assert self._mirror is not None
        return self._mirror

    @property
    def max_group_size(self) -> int:
        """The number of slots."""
        return self._settings.max_group_size


def create_process_group(options: Any, pg_options: Any, devices: tuple[str, ...]) -> Any:
    """Make a group from what torch passes to the creator of a backend."""
    from .context import context_for, seconds_left
    from .settings import group_settings

    deadline = time.monotonic() + options.timeout.total_seconds()
    settings = group_settings(pg_options, options.group_size)
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        # The default group: slot and global rank are the same.
        ranks = list(range(settings.max_group_size))
    context = context_for(
        options.store,
        ranks[options.group_rank],
        joins=settings.is_extension,
        deadline=deadline,
    )
    native = context.native.group(
        str(options.group_id),
        options.group_rank,
        declared_size=options.group_size,
        max_group_size=settings.max_group_size,
        is_extension=settings.is_extension,
        auto_deactivate=settings.auto_deactivate,
        first_rank=ranks[0],
        timeout_s=seconds_left(deadline),
    )
    return MooncakeProcessGroup(
        context,
        native,
        settings,
        options.group_rank,
        options.group_size,
        options.timeout,
        devices,
    )
