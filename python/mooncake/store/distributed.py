"""`MooncakeDistributedStore`: the established calls over the native store."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from mooncake._names import rebrand
from mooncake._runtime import _native
from mooncake.engine.types import shared_engine
from mooncake.errors import MooncakeError, NotSupportedError
from mooncake.store.batch import invalid_argument, unsigned
from mooncake.store.codes import INTERNAL_ERROR, INVALID_PARAMS, OK
from mooncake.store.pointers import PointerCalls
from mooncake.store.queries import QueryCalls
from mooncake.store.ranges import RangeCalls
from mooncake.store.segments import SegmentCalls
from mooncake.store.sessions import SessionCalls
from mooncake.store.setup import MASTER_ADDRESS, SetupArguments, connect
from mooncake.store.tasks import TaskCalls
from mooncake.store.values import ValueCalls

__all__ = ["MooncakeDistributedStore"]

_log = logging.getLogger("mooncake.store")


class MooncakeDistributedStore(
    ValueCalls, QueryCalls, PointerCalls, RangeCalls, SessionCalls, SegmentCalls, TaskCalls
):
    """A distributed store of bytes by key.

    Calls return numbers: 0 or a count is success, a negative number is a failure, by the table in
    the reference. `mooncake.last_error()` tells in words what the last failure in the thread was
    about. Only arguments of a wrong type raise.

    Any number of threads may use one store. Before `setup` and after `close`, and in a forked
    child, every call fails with -600, None, ``b""`` or an empty list.
    """

    __slots__ = ()

    # Life

    def setup(
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
        config: dict[str, Any] | None = None,
    ) -> int:
        """Join the pool, by arguments or by one dictionary of settings.

        A store that is set up already is closed first.

        Args:
            local_hostname: ``host`` or ``host:port`` by which peers reach this process, or a
                dictionary with the settings (the same as `config`).
            metadata_server: ``"P2PHANDSHAKE"`` or ``"http://host:port/metadata"``.
            global_segment_size: Bytes to lend to the pool; 0, or at least 16 MiB.
            local_buffer_size: How much a `BufferPool` of the store may lend. Copying calls need no
                buffer: values of any size go straight to and from the memory of the caller.
            protocol: ``"tcp"``, or ``"rdma"`` (TCP where there is no device).
            rdma_devices: Names of devices, for ``"rdma"``; "" chooses.
            master_server_addr: ``host:port`` of the master, or ``"embedded"`` for one in this
                process.
            engine: What `TransferEngine.get_engine` returned, to share that engine; None for one of
                its own.
            enable_ssd_offload: Not in this build: true fails with -1300.
            ssd_offload_path: A directory, with `enable_ssd_offload`.
            tenant_id: Whose namespace the keys live in; "" is the default tenant.
            enable_client_http_server: Serve ``/health``, ``/metrics`` and ``/metrics/summary`` of
                this client over HTTP.
            client_http_port: The port where it does.
            config: A dictionary with the settings above under the same names. Sizes may be text
                like ``"512MB"`` and default to 16 MiB. Also read: ``master_server_address`` and
                ``device_name``. Unknown names are logged.

        Returns:
            0, or a negative number; the log and `mooncake.last_error()` say why.
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
        }
        _check_form(given, config)
        shared = shared_engine(engine)
        self.close()
        try:
            if config is not None:
                arguments = SetupArguments.from_dict(config)
            else:
                arguments = SetupArguments(**given)
            self._name = arguments.local_hostname
            arguments.check()
            self._native = connect(arguments, shared)
        except MooncakeError as error:
            _log.error("setup failed: %s (%s)", error, error.remedy)
            # Callers know a setup that failed by one number, but for what a build cannot do.
            return error.code if isinstance(error, NotSupportedError) else INVALID_PARAMS
        self._name = self._native.hostname
        self._local_bytes = arguments.local_buffer_size
        self._is_outage_logged = False
        return OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Join the pool as a guest of the daemon of this host, a running `mooncake_client`.

        The daemon lends the memory and knows the master; bytes go straight between this process
        and wherever they lie. While the daemon is away calls fail at once with -900; they go on by
        themselves when it, or another one on its port, is back. What this process put stays in the
        pool when it ends. All calls are there but for those that lend memory, which fail with -1.

        A store that is set up already is closed first.

        Args:
            mem_pool_size: How much memory `alloc_from_mem_pool` may hand out; it takes room as it
                is written.
            local_buffer_size: How much a `BufferPool` of the store may lend.
            server_address: ``host:port`` of the daemon, on this host.

        Returns:
            0, or -1 if no daemon answers there within `MC_RPC_CONNECT_TIMEOUT_MS`, or it does not
            reach its master, or there is no memory.
        """
        unsigned("setup_dummy(): mem_pool_size", mem_pool_size)
        unsigned("setup_dummy(): local_buffer_size", local_buffer_size)
        if not isinstance(server_address, str):
            raise TypeError("setup_dummy(): server_address must be str")
        self.close()
        try:
            self._native = _native.Store.connect_daemon(server_address, pool_bytes=mem_pool_size)
        except MooncakeError as error:
            _log.error("setup_dummy failed: %s (%s)", error, error.remedy)
            return INTERNAL_ERROR
        self._local_bytes = local_buffer_size
        self._is_outage_logged = False
        return OK

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16777216) -> int:
        """Join the pool of a master on this host, with as little said as can be.

        The same as `setup` with ``"localhost"``, ``"P2PHANDSHAKE"`` and the default master.

        Args:
            protocol: ``"tcp"`` or ``"rdma"``.
            device_name: Names of devices, for ``"rdma"``; "" chooses.
            mount_segment_size: Bytes to lend to the pool; 0, or at least 16 MiB.

        Returns:
            0, or a negative number: -600 also if the store is set up already, -1 if that was done
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
        """Leave the pool. What only this process held a copy of is gone.

        Returns:
            0, also when it is closed already.
        """
        native, self._native = self._native, None
        self._mounted.clear()
        self._name = ""
        if native is not None:
            native.close()
        return OK

    def health_check(self) -> int:
        """Say how it is: 0 healthy, 1 not set up or closed, 2 the master is unreachable."""
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

        "" before `setup` and after `setup_dummy`, since a guest lends none.
        """
        return self._name

    def get_offload_rpc_read_count(self) -> int:
        """Return how many reads were served from another process's disk tier; there is none."""
        return 0

    def alloc_from_mem_pool(self, size: int) -> int:
        """Return memory of the pool that `setup_dummy` made; it goes when the store is closed.

        Args:
            size: How many bytes.

        Returns:
            The address, at the beginning of a page; 0 if so much is not left, and always after
            `setup`, which makes no such pool: `BufferPool` and `MooncakeHostMemAllocator` lend
            memory there.
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
        """Return what `BufferPool` is made of; None if it is not set up. Wrappers pass it on."""
        return None if self._native is None else self


rebrand(MooncakeDistributedStore)


def _check_form(given: dict[str, Any], config: dict[str, Any] | None) -> None:
    """Refuse half of one form of `setup`, or some of both."""
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
            raise TypeError(f"setup() got {name!r} beside a dictionary; say it there")
