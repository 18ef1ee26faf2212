"""A Python `Backend`, which torch asks for from 2.14 on; it passes calls to the group."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MooncakeBackend", "register_backends"]

_Backend: Any = torch._C._distributed_c10d.Backend

_PASSED_ON = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
    "monitored_barrier",
    "set_timeout",
    "_set_default_timeout",
)


class MooncakeBackend(_Backend):  # type: ignore[misc]
    """Passes what C++ calls on to the group, which it does not keep alive."""

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = weakref.ref(group)

    def _target(self) -> Any:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group is destroyed")
        return group

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return "mooncake"."""
        return "mooncake"

    def name(self) -> str:
        """Return "mooncake"."""
        return "mooncake"


def _passing(name: str) -> Any:
    def call(self: MooncakeBackend, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self._target(), name)(*arguments, **keywords)

    call.__name__ = name
    call.__doc__ = f"Calls `{name}` of the group."
    return call


for _name in _PASSED_ON:
    setattr(MooncakeBackend, _name, _passing(_name))


def register_backends(group: Any, rank: int, size: int, devices: list[torch.device]) -> None:
    """Give the group a backend for each device."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    backend = MooncakeBackend(group, rank, size)
    # C++ keeps only its own half of the object.
    group._backend = backend
    # The group's class hides the method of its base under the same name.
    for device in devices:
        dist.ProcessGroup._register_backend(group, device, kind, backend)
    dist.ProcessGroup._set_default_backend(group, kind)
