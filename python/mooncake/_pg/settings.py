"""Settings of process groups: those of the process, and `MooncakeBackendOptions` of one group."""

from __future__ import annotations

import operator
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from mooncake.engine import TransferEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_GROUP_SIZE", "MooncakeBackendOptions", "ProcessSettings", "process_settings"]

MAX_GROUP_SIZE = 64
"""Most slots that a group may have."""

_OPTION_NAMES = (
    "active_ranks",
    "is_extension",
    "max_group_size",
    "auto_deactivate_on_failure",
    "auto_sync_on_failure",
)


@dataclass(frozen=True, slots=True, init=False)
class MooncakeBackendOptions:
    """Options of one process group, passed to torch as `pg_options`.

    The forms of upstream are accepted, by position or by keyword: `(active_ranks)`,
    `(active_ranks, is_extension)`, `(active_ranks, is_extension, max_group_size)`,
    `(max_group_size)`, `(max_group_size, is_extension)` and `(max_group_size, is_extension,
    auto_deactivate_on_failure, auto_sync_on_failure)`.
    """

    _active_ranks: torch.Tensor | None
    _is_extension: bool
    _max_group_size: int | None
    _auto_deactivate: bool | None
    _auto_sync: bool | None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        values = _option_values(arguments, keywords)
        active_ranks = values.get("active_ranks")
        if active_ranks is not None:
            _check_active_ranks(active_ranks)
        max_group_size = values.get("max_group_size")
        if max_group_size is not None:
            max_group_size = _checked_size(max_group_size)
            if active_ranks is not None and active_ranks.numel() < max_group_size:
                raise ValueError(
                    f"active_ranks is shorter than max_group_size: entries={active_ranks.numel()}, "
                    f"max_group_size={max_group_size}"
                )
        deactivate = values.get("auto_deactivate_on_failure")
        sync = values.get("auto_sync_on_failure")
        if sync and deactivate is False:
            raise ValueError("auto_sync_on_failure needs auto_deactivate_on_failure")
        object.__setattr__(self, "_active_ranks", active_ranks)
        object.__setattr__(self, "_is_extension", bool(values.get("is_extension", False)))
        object.__setattr__(self, "_max_group_size", max_group_size)
        object.__setattr__(self, "_auto_deactivate", deactivate)
        object.__setattr__(self, "_auto_sync", sync)


def _option_values(arguments: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Give each argument its name: the first one may be a tensor or a size."""
    unknown = sorted(set(keywords) - set(_OPTION_NAMES))
    if unknown:
        raise TypeError(f"MooncakeBackendOptions has no option {unknown[0]!r}")
    # A tensor of one element must not become a size.
    if arguments and isinstance(arguments[0], torch.Tensor):
        names: tuple[str, ...] = ("active_ranks", "is_extension", "max_group_size")
    elif arguments and isinstance(arguments[0], bool):
        raise TypeError("the first argument is active_ranks, a tensor, or max_group_size, an int")
    else:
        names = ("max_group_size", "is_extension", *_OPTION_NAMES[3:])
    if len(arguments) > len(names):
        raise TypeError(f"MooncakeBackendOptions takes at most {len(names)} arguments here")
    values = dict(zip(names, arguments, strict=False))
    repeated = sorted(set(values) & set(keywords))
    if repeated:
        raise TypeError(f"MooncakeBackendOptions got {repeated[0]!r} twice")
    values.update(keywords)
    if not values:
        raise TypeError("MooncakeBackendOptions needs active_ranks or max_group_size")
    return values


def _check_active_ranks(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"active_ranks must be a tensor, not {type(tensor).__name__}")
    if tensor.dtype != torch.int32 or not tensor.is_contiguous():
        raise ValueError(f"active_ranks must be contiguous and int32: dtype={tensor.dtype}")


def _checked_size(size: Any) -> int:
    number = _as_int(size)
    if number is None:
        raise TypeError(f"max_group_size must be an int, not {type(size).__name__}")
    if not 1 <= number <= MAX_GROUP_SIZE:
        raise ValueError(f"max_group_size must be 1 to {MAX_GROUP_SIZE}: max_group_size={number}")
    return number


def _as_int(value: Any) -> int | None:
    """Return an integer of Python or numpy as int; None for anything else."""
    if isinstance(value, bool | torch.Tensor) or not isinstance(value, SupportsIndex):
        return None
    return operator.index(value)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Options of one group after defaults and checks."""

    active_ranks: torch.Tensor | None
    is_extension: bool
    max_group_size: int
    auto_deactivate: bool
    auto_sync: bool


def group_settings(options: Any, declared_size: int) -> GroupSettings:
    """Return the settings of a group of `declared_size` ranks.

    Raises:
        TypeError: `options` is of another class.
        ValueError: The capacity is smaller than the group, or two options exclude each other.
    """
    if options is None:
        deactivate = _flag("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE")
        sync = _flag("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE")
        if sync and not deactivate:
            raise ValueError(
                "MOONCAKE_PG_AUTO_SYNC_ON_FAILURE needs MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE"
            )
        return GroupSettings(None, False, _capacity(None, None, declared_size), deactivate, sync)
    if not isinstance(options, MooncakeBackendOptions):
        raise TypeError(f"pg_options must be MooncakeBackendOptions, not {type(options).__name__}")
    deactivate = options._auto_deactivate is not False
    sync = deactivate if options._auto_sync is None else bool(options._auto_sync)
    capacity = _capacity(options._max_group_size, options._active_ranks, declared_size)
    return GroupSettings(options._active_ranks, options._is_extension, capacity, deactivate, sync)


def _capacity(wanted: int | None, mirror: torch.Tensor | None, declared_size: int) -> int:
    capacity = declared_size if wanted is None else wanted
    if capacity > MAX_GROUP_SIZE:
        raise ValueError(f"a group has at most {MAX_GROUP_SIZE} ranks: size={capacity}")
    if capacity < declared_size:
        raise ValueError(
            f"max_group_size is smaller than the group: max_group_size={capacity}, "
            f"size={declared_size}"
        )
    if mirror is not None and mirror.numel() < capacity:
        raise ValueError(
            f"active_ranks is shorter than the group: entries={mirror.numel()}, size={capacity}"
        )
    return capacity


def _flag(name: str) -> bool:
    value = os.environ.get(name, "1").strip().lower()
    if value in {"1", "true", "on", "yes", ""}:
        return True
    if value in {"0", "false", "off", "no"}:
        return False
    raise ValueError(f"{name} must be 0 or 1: value={value}")


_SILENCE_US_MIN = 3_000_000


@dataclass(slots=True)
class ProcessSettings:
    """Settings of all groups of the process; some are fixed once the first group exists."""

    host_ip: str | None = None
    device_filter: tuple[str, ...] | None = None
    engine: TransferEngine | None = None
    collective_timeout_us: int = 10_000_000
    p2p_timeout_us: int | None = None
    reconciliation_window_us: int = 30_000_000
    is_fixed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def set_host_ip(self, host: str) -> None:
        """Set the address that other ranks reach this process at."""
        if not isinstance(host, str) or not host:
            raise ValueError("set_host_ip needs a host name or an address")
        with self.lock:
            self._check_change("set_host_ip", self.host_ip, host)
            self.host_ip = host

    def set_device_filter(self, filters: Sequence[str]) -> None:
        """Set which RDMA devices may be used; order and duplicates do not matter."""
        if isinstance(filters, str) or not all(isinstance(name, str) for name in filters):
            raise TypeError("set_device_filter needs a list of device names")
        wanted = tuple(sorted(set(filters)))
        with self.lock:
            self._check_change("set_device_filter", self.device_filter, wanted)
            self.device_filter = wanted

    def set_engine(self, engine: Any) -> None:
        """Set an engine whose host and RDMA devices the groups use; None is the default."""
        if engine is not None and not isinstance(engine, TransferEngine):
            raise TypeError(f"not a TransferEngine: {type(engine).__name__}")
        if engine is not None and not engine.get_engine_ptr():
            raise RuntimeError("the TransferEngine is not initialized: call initialize first")
        with self.lock:
            self._check_change("set_transfer_engine", self.engine, engine)
            self.engine = engine

    @property
    def silence_limit_us(self) -> int:
        """The time after which a silent rank is taken out of the groups.

        A rank is heard of once a second; a shorter limit than a few of these would take out ranks
        that are only late.
        """
        return max(self.collective_timeout_us, _SILENCE_US_MIN)

    @property
    def change_limit_s(self) -> float:
        """The time in which members agree on a change of the view.

        A silent member keeps the others from it until it is taken out.
        """
        return max(self.reconciliation_window_us, 2 * self.silence_limit_us) / 1e6

    @property
    def engine_name(self) -> str:
        """The name that the engine was initialized with; empty without one."""
        return "" if self.engine is None else self.engine._local_name

    def set_duration(self, name: str, duration_us: int) -> None:
        """Set one of the durations."""
        number = _as_int(duration_us)
        if number is None or number <= 0:
            raise ValueError(f"{name} must be a positive number of microseconds: {duration_us!r}")
        with self.lock:
            setattr(self, name, number)

    def _check_change(self, call: str, old: Any, new: Any) -> None:
        if self.is_fixed and old != new:
            raise RuntimeError(f"{call} must be called before the first process group is made")


process_settings = ProcessSettings()
