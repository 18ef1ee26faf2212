"""The process's part in collectives: one native context for all of its groups."""

from __future__ import annotations

import atexit
import ipaddress
import os
import socket
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mooncake._runtime import _native
from mooncake.errors import TransferFailedError

from .devices import engine_with_devices
from .settings import process_settings

__all__ = ["ProcessContext", "context_for", "seconds_left"]

_LATEST = "mooncake_pg/latest"
# In place of an address: global rank 0 is in another world already.
_OCCUPIED = "occupied"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"
_LOOPBACK = "127.0.0.1"


class ProcessContext:
    """The native context, and the groups that use it; closed with the last of them."""

    def __init__(self, native: Any, global_rank: int, store: Any) -> None:
        self.native = native
        self.global_rank = global_rank
        # Kept, so that the same store is the same object.
        self.store = _base_of(store)
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._process = os.getpid()

    def add(self, group: Any) -> None:
        """Count a group as a user."""
        self._groups.add(group)

    def remove(self, group: Any) -> None:
        """Forget a group, and close the context with the last one."""
        global _current
        self._groups.discard(group)
        with _lock:
            if self._groups or _current is not self:
                return
            _current = None
        self.native.close()

    def close(self) -> None:
        """Close all groups. Their operations fail, their threads end."""
        for group in list(self._groups):
            group.shutdown()
        # There is no group if none could be made.
        self.native.close()

    def is_of_this_process(self) -> bool:
        """Return whether the context was not made by a parent of this process."""
        return self._process == os.getpid()


_lock = threading.Lock()
_current: ProcessContext | None = None
_made = 0


def context_for(store: Any, global_rank: int, *, joins: bool, deadline: float) -> ProcessContext:
    """Return the context of the process; the first group makes it.

    Global rank 0 puts the address of its coordinator into torch's store, once. The key has a
    number, because a process may begin again on the same store, where the old key still is; a
    rank that joins later takes the latest address. A rank that starts before global rank 0 waits
    for it until `deadline`, of `time.monotonic`.

    Raises:
        TimeoutError: Global rank 0 has not published its address in time.
        RuntimeError: This process, or global rank 0, is in another world; or the address of a rank
            is not one that other hosts reach.
    """
    global _current, _made
    with _lock:
        if _current is not None and _current.is_of_this_process():
            _check_world(_current, store, global_rank)
            return _current
        number = _made
        if global_rank == 0:
            native = _open(global_rank, _host(store, None), None, deadline)
            address = native.address
            for key in (f"mooncake_pg/{number}", _LATEST):
                # Who finds the address finds the network, too.
                store.set(f"{key}/network", _own_network())
                store.set(key, address)
        else:
            key = _LATEST if joins else f"mooncake_pg/{number}"
            address = _published(store, key, deadline)
            if address == _OCCUPIED:
                raise RuntimeError(
                    "global rank 0 of this world is a rank of another one already: process groups "
                    "of mooncake have one world per process"
                )
            host = _host(store, address)
            network = store.get(f"{key}/network").decode()
            _check_reachable(address, host, network == _own_network())
            native = _open(global_rank, host, address, deadline)
        _made += 1
        process_settings.is_fixed = True
        _current = ProcessContext(native, global_rank, store)
        return _current


def _check_world(context: ProcessContext, store: Any, global_rank: int) -> None:
    """Check that a further group is of the world that the process is in.

    A world of its own has a store of its own. Where its ranks have the same numbers, they are in
    one world.
    """
    if _is_same_store(_base_of(store), context.store):
        return
    if global_rank != context.global_rank:
        raise RuntimeError(
            f"this process is rank {context.global_rank} of another world, and cannot be rank "
            f"{global_rank} of this one: process groups of mooncake have one world per process; "
            "make sub-groups by new_group, or destroy the groups of the other world before"
        )
    if global_rank == 0:
        # Ranks that are in no world yet wait for an address.
        store.set("mooncake_pg/0", _OCCUPIED)
        store.set(_LATEST, _OCCUPIED)


def seconds_left(deadline: float) -> float:
    """Return the seconds until `deadline`, at least one millisecond."""
    return max(deadline - time.monotonic(), 0.001)


def _open(global_rank: int, host: str, coordinator: str | None, deadline: float) -> Any:
    try:
        return _native.CollectiveContext(
            global_rank=global_rank,
            host=host,
            coordinator=coordinator,
            engine=engine_with_devices(host),
            heartbeat_timeout_us=process_settings.silence_limit_us,
            bootstrap_timeout_us=int(seconds_left(deadline) * 1e6),
        )
    except TransferFailedError as error:
        raise dist.DistBackendError(
            f"global rank 0 cannot be reached: address={coordinator}; if its process has ended, "
            "start all ranks again: a group does not outlive its rank 0"
        ) from error


def _published(store: Any, key: str, deadline: float) -> str:
    begin = time.monotonic()
    try:
        store.wait([key], timedelta(seconds=seconds_left(deadline)))
    except RuntimeError as error:
        raise TimeoutError(
            "global rank 0 has not started its process group within "
            f"{time.monotonic() - begin:.1f} s: all ranks must call init_process_group with the "
            "backend mooncake, and none of them may be in another world of mooncake, of which "
            "there is one per process"
        ) from error
    return str(store.get(key).decode())


def _host(store: Any, coordinator: str | None) -> str:
    """Return the address that other ranks reach this process at.

    That is the one on the way to the server of torch's store; where the store has none, on the way
    to the coordinator.
    """
    if process_settings.host_ip:
        return _address_of(process_settings.host_ip.strip("[]"), "set_host_ip")
    if process_settings.engine_name:
        return _address_of(_host_of(process_settings.engine_name), "set_transfer_engine")
    server = _server_of(store)
    if server is None and coordinator is not None:
        server = (_host_of(coordinator), 9)
    return _interface_towards(*(server or (_LOOPBACK, 9)))


def _check_reachable(coordinator: str, host: str, is_same_network: bool) -> None:
    """Check that a rank on another host can reach the coordinator, and be reached from there."""
    if is_same_network:
        return
    for name, address in (("global rank 0", _host_of(coordinator)), ("this rank", host)):
        if ipaddress.ip_address(address).is_loopback:
            raise RuntimeError(
                f"{name} has the address {address}, which other hosts do not reach: torch's store "
                "names no network; call mooncake.pg.set_host_ip at each rank before "
                "init_process_group"
            )


def _own_network() -> str:
    """Return what tells the network of this process from that of other hosts and containers."""
    with open(_BOOT_ID, encoding="ascii") as file:
        return f"{file.read().strip()} {os.stat(_NETWORK).st_ino}"


def _host_of(name: str) -> str:
    """Return the host of `host`, `host:port`, `[address]:port` or an IPv6 address."""
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.rpartition(":")[0] if name.count(":") == 1 else name


def _address_of(host: str, call: str) -> str:
    """Return an IP address of a host."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{call}: the host name has no address: host={host}") from error
    # Ranks of several hosts rather have addresses of version 4 in common.
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def _base_of(store: Any) -> Any:
    """Return the store behind those that only put a prefix before each key."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


def _is_same_store(one: Any, other: Any) -> bool:
    """Return whether two stores have the same keys."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    places = [
        tuple(getattr(store, name, None) for name in ("host", "port", "path"))
        for store in (one, other)
    ]
    return places[0] == places[1] and any(places[0])


def _server_of(store: Any) -> tuple[str, int] | None:
    """Return host and port of the server behind torch's store, if it has one."""
    store = _base_of(store)
    host, port = getattr(store, "host", None), int(getattr(store, "port", 0) or 0)
    return (host, port) if host and port else None


def _interface_towards(host: str, port: int) -> str:
    """Return the own address on the route to a host; no packet is sent."""
    for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise OSError(f"no route to the host of torch's store: host={host}; call set_host_ip")


def _after_fork() -> None:
    """Make a forked child begin anew: the threads of the parent are not there."""
    global _current, _lock, _made
    _lock = threading.Lock()
    _current = None
    _made = 0


def _close_at_exit() -> None:
    """End the native threads before the interpreter is gone."""
    context = _current
    if context is not None and context.is_of_this_process():
        context.close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_close_at_exit)
