"""`MooncakeDistributedStore`: upstream's calls over the native store."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from mooncake._names import rebrand
from mooncake._runtime import _native
from mooncake.engine.types import shared_engine
from mooncake.errors import MooncakeError, NotSupportedError, with_remedy
from mooncake.store.batch import invalid_argument, unsigned
from mooncake.store.codes import INTERNAL_ERROR, INVALID_PARAMS, OK
from mooncake.store.pointers import PointerCalls
from mooncake.store.queries import QueryCalls
from mooncake.store.ranges import RangeCalls
from mooncake.store.segments import SegmentCalls
from mooncake.store.sessions import SessionCalls
from mooncake.store.setup import MASTER_ADDRESS, SetupArguments, connect
from mooncake.store.tasks import TaskCalls
from mooncake.store.tensors import TensorCalls
from mooncake.store.values import ValueCalls

__all__ = ["MooncakeDistributedStore"]

_log = logging.getLogger("mooncake.store")
# Programs that do not look at the number that a setup returns go on with such a store.
_NOT_SET_UP = (
    "the store is not set up: until a setup succeeds each call fails, and is_exist returns -600, "
    "which is no hit"
)


class MooncakeDistributedStore(
    ValueCalls,
    QueryCalls,
    PointerCalls,
    RangeCalls,
    SessionCalls,
    SegmentCalls,
    TaskCalls,
    TensorCalls,
):
    """A distributed store of bytes by key.

    Calls return numbers: 0 or a count is success, a negative number is a failure; the reference
    lists the codes. `mooncake.last_error()` describes the last failure of the thread. Only
    arguments of a wrong type raise.

    Any number of threads may use one store. Before `setup` and after `close`, and in a forked
    child, every call fails with -600, None, ``b""`` or an empty list.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Show name and master."""
        native = self._native
        if native is None or native.is_closed:
            state = "not set up"
        else:
            state = f"{native.hostname} master={native.master_address}"
        return f"<mooncake.store.MooncakeDistributedStore {state}>"

    # Lifecycle

    def setup(  # noqa: PLR0913 (upstream's signature)
        self,
        local_hostname: str | dict[str, Any] | None = None,
        metadata_server: str | None = None,
        global_segment_size: int = 16777216,
        local_buffer_size: int = 1073741824,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = MASTER_ADDRESS,
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = "default",
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        *,
        enable_ssd_prefetch: bool = True,
        ssd_prefetch_cooldown_sec: int = 5,
        ssd_prefetch_dedup_ttl_sec: int = 30,
        ssd_get_wait_ms: int = 10,
        config: dict[str, Any] | None = None,
    ) -> int:
        """Join the pool, with arguments or with a dictionary of settings.

        A store that is set up already is closed first, unless an argument has a wrong type.

        Args:
            local_hostname: ``host`` or ``host:port`` by which peers reach this process, or a
                dictionary with the settings (the same as `config`).
            metadata_server: ``"P2PHANDSHAKE"`` or ``"http://host:port/metadata"``.
            global_segment_size: Bytes to lend to the pool; 0, or at least 16 MiB.
            local_buffer_size: Bytes that a `BufferPool` of the store may lend. Other calls need no
                buffer: values of any size are transferred directly from and to the caller's memory.
            protocol: ``"tcp"``, or ``"rdma"`` (TCP if there is no device).
            rdma_devices: Names of devices, for ``"rdma"``, separated by commas; "" uses all.
            master_server_addr: ``host:port`` of the master, or ``"embedded"`` for one in this
                process.
            engine: Result of `TransferEngine.get_engine`, to share that engine; None starts a
                separate one.
            enable_ssd_offload: Keep copies of the pool's objects in a directory, from which they
                stay readable once they leave memory. The master needs ``--enable_offload``;
                without it the result is -1300.
            ssd_offload_path: That directory, which must exist; one process may use it. "" takes
                ``MOONCAKE_OFFLOAD_FILE_STORAGE_PATHS`` or ``MOONCAKE_OFFLOAD_FILE_STORAGE_PATH``.
            tenant_id: Tenant in whose namespace the keys are; "" is the default tenant.
            enable_client_http_server: Serve ``/health``, ``/metrics`` and ``/metrics/summary`` of
                this client over HTTP.
            client_http_port: Port of that HTTP server.
            enable_ssd_prefetch: Let `ExistOptions.prefetch_to_memory` bring objects into memory
                that only a disk has. False gives it no effect.
            ssd_prefetch_cooldown_sec: Time for which such an object is not asked for again after
                the pool refused it or it did not come.
            ssd_prefetch_dedup_ttl_sec: Time for which such an object is not asked for again.
            ssd_get_wait_ms: Time that a `get` of an object which this store has asked for waits
                until it is in memory, before it reads the disk; 0 waits for none.
            config: A dictionary with the settings above under the same names. Sizes may be text
                like ``"512MB"`` and default to 16 MiB. Also accepted: ``master_server_address`` and
                ``device_name``. Unknown names are logged.

        Returns:
            0, or a negative number; the log and `mooncake.last_error()` have the reason.
        """
        if isinstance(local_hostname, dict):
            config, local_hostname = local_hostname, None
        given: dict[str, Any] = {
            "local_hostname": local_hostname,
            "metadata_server": metadata_server,
            "global_segment_size": global_segment_size,
            "local_buffer_size": local_buffer_size,
            "protocol": protocol,
            "rdma_devices": rdma_devices,
            "master_server_addr": master_server_addr,
            "enable_ssd_offload": enable_ssd_offload,
            "ssd_offload_path": ssd_offload_path,
            "tenant_id": tenant_id,
            "enable_client_http_server": enable_client_http_server,
            "client_http_port": client_http_port,
            "enable_ssd_prefetch": enable_ssd_prefetch,
            "ssd_prefetch_cooldown_sec": ssd_prefetch_cooldown_sec,
            "ssd_prefetch_dedup_ttl_sec": ssd_prefetch_dedup_ttl_sec,
            "ssd_get_wait_ms": ssd_get_wait_ms,
        }
        _check_form(given, config)
        shared, name = shared_engine(engine), ""
        try:
            if config is not None:
                arguments = SetupArguments.from_dict(config)
            else:
                arguments = SetupArguments.from_values(given)
            name = arguments.local_hostname
            # Raises for a wrong type, which leaves the store as it is.
            arguments.check()
            self.close()
            self._native, self._held_port = connect(arguments, shared)
        except MooncakeError as error:
            self.close()
            self._name = name
            _log.error("setup failed: %s; %s", with_remedy(error), _NOT_SET_UP)
            # Upstream returns one number for every failed setup, except for unsupported features.
            return error.code if isinstance(error, NotSupportedError) else INVALID_PARAMS
        self._name = self._native.hostname
        self._local_bytes = arguments.local_buffer_size
        self._is_outage_logged = False
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Join the pool as a dummy client of the daemon of this host, a running `mooncake_client`.

        The daemon lends the memory and connects to the master. Data is transferred directly between
        this process and the memory of the objects. While the daemon is down, calls fail at once
        with -900; they work again when a daemon is back on its port. Objects that this process put
        stay in the pool when it ends. All calls are supported except those that lend memory, which
        fail with -1.

        A store that is set up already is closed first.

        Args:
            mem_pool_size: Bytes that `alloc_from_mem_pool` may allocate; pages take physical memory
                when they are written.
            local_buffer_size: Bytes that a `BufferPool` of the store may lend.
            server_address: ``host:port`` of the daemon, on this host.

        Returns:
            0, or -1 if no daemon answers there within `MC_RPC_CONNECT_TIMEOUT_MS`, or it cannot
            reach its master, or there is no memory.
        """
        unsigned("setup_dummy(): mem_pool_size", mem_pool_size)
        unsigned("setup_dummy(): local_buffer_size", local_buffer_size)
        if not isinstance(server_address, str):
            raise TypeError("setup_dummy(): server_address must be str")
        self.close()
        try:
            self._native = _native.Store.connect_daemon(
                server_address, pool_bytes=mem_pool_size, fails_as_upstream=True
            )
        except MooncakeError as error:
            _log.error("setup_dummy failed: %s; %s", with_remedy(error), _NOT_SET_UP)
            return INTERNAL_ERROR
        self._local_bytes = local_buffer_size
        self._is_outage_logged = False
        return OK

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16777216) -> int:
        """Join the pool of a master on this host, with few arguments.

        Equivalent to `setup` with ``"localhost"``, ``"P2PHANDSHAKE"`` and the default master.

        Args:
            protocol: ``"tcp"`` or ``"rdma"``.
            device_name: Names of devices, for ``"rdma"``; "" chooses.
            mount_segment_size: Bytes to lend to the pool; 0, or at least 16 MiB.

        Returns:
            0, or a negative number: -600 also if the store is set up already, -1 if it was set up
                by `setup_dummy`.
        """
        if self._native is not None:
            refused = invalid_argument("the store is set up already")
            return INTERNAL_ERROR if self._native.is_dummy else refused.code
        return self.setup(
            "localhost",
            "P2PHANDSHAKE",
            mount_segment_size,
            protocol=protocol,
            rdma_devices=device_name,
        )

    def close(self) -> int:
        """Leave the pool. Objects whose only copy this process held are lost.

        Returns:
            0, also if the store is closed already.
        """
        native, self._native = self._native, None
        held_port, self._held_port = self._held_port, None
        self._mounted.clear()
        self._name = ""
        if native is not None:
            native.close()
        if held_port is not None:
            held_port.close()
        return OK

    def health_check(self) -> int:
        """Return 0 healthy, 1 not set up or closed, 2 the master is unreachable."""
        native = self._native
        if native is None or native.is_closed:
            return 1
        try:
            native.health()
        except MooncakeError:
            return 2
        return 0

    def get_hostname(self) -> str:
        """Return ``host:port``, the name of this process's segments.

        "" before `setup` and after `setup_dummy`, since a dummy client lends no memory.
        """
        return self._name

    def get_offload_rpc_read_count(self) -> int:
        """Return how often this store had another process load records from its disk."""
        if self._native is None:
            return 0
        return int(self._native.metrics()["disk"]["remote_loads"])

    def alloc_from_mem_pool(self, size: int) -> int:
        """Allocate from the pool that `setup_dummy` made; `close` frees the memory.

        Args:
            size: Length in bytes.

        Returns:
            The address, aligned to a page; 0 if the pool is exhausted, and always after `setup`,
            which makes no such pool. `BufferPool` and `MooncakeHostMemAllocator` provide memory
            there.
        """
        unsigned("alloc_from_mem_pool(): size", size)
        native = self._native
        if native is None or not native.is_dummy:
            return 0
        try:
            return native.allocate_from_pool(size)
        except MooncakeError as error:
            _log.warning("alloc_from_mem_pool: %s", error)
            return 0

    def _get_pyclient_capsule(self) -> MooncakeDistributedStore | None:
        """Return the object that `BufferPool` needs; None before setup. Wrappers pass it on."""
        return None if self._native is None else self


rebrand(MooncakeDistributedStore)


def _check_form(given: dict[str, Any], config: dict[str, Any] | None) -> None:
    """Raise if an argument of the chosen form of `setup` is missing, or both forms are mixed."""
    if config is None:
        for name in ("local_hostname", "metadata_server"):
            if given[name] is None:
                raise TypeError(f"setup() missing required argument: {name!r}")
        return
    if not isinstance(config, dict):
        raise TypeError(f"setup(): config must be a dict, not {type(config).__name__}")
    parameters = inspect.signature(MooncakeDistributedStore.setup).parameters
    for name, value in given.items():
        if value != parameters[name].default:
            raise TypeError(f"setup() got {name!r} beside a dictionary; put it into the dictionary")
