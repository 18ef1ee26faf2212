"""`TransferEngine`: upstream's calls over the native engine."""
# Callers may pass settings that this build does not use.
# ruff: noqa: ARG002
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mooncake._aliases import accept_aliases
from mooncake._names import rebrand
from mooncake._runtime import _native
from mooncake._variants import variants
from mooncake.engine import codes
from mooncake.engine.device import DeviceTransfers
from mooncake.engine.lifetime import EngineLifetime
from mooncake.engine.timeout import transfer_timeout_s
from mooncake.engine.types import (
    InnerTransferEngine,
    TransferNotify,
    TransferOpcode as _Opcode,
    inner_engine,
)
from mooncake.errors import (
    AlreadyExistsError,
    DeadlineError,
    MooncakeError,
    NotFoundError,
    with_remedy,
)

__all__ = ["TransferEngine"]

T = TypeVar("T")

_PROBE_S = 5.0
_LOCATION = "*"

# Protocols without a transport in this build. All other words mean TCP, as in upstream on a host
# without such a device.
_PROTOCOLS_REFUSED = ("xgmi",)
# Words that callers pass on purpose; another one is probably a mistake, and is logged.
_PROTOCOLS_KNOWN = (
    *("tcp", "rdma", "efa", "ascend", "ascend_direct", "hccl", "nvlink", "nvlink_intra"),
    *("barex", "cxl", "shm", "local", "rpc_only", "ub", "hip", "maca"),
)

# Second names of arguments of the calls for one range, and for many.
_ONE = {"target": "target_hostname", "peer_addr": "peer_buffer_address"}
_MANY = {"target": "target_hostname", "peer_addrs": "peer_buffer_addresses"}

_log = logging.getLogger("mooncake.engine")


class TransferEngine(DeviceTransfers, EngineLifetime):
    """Transfers bytes between registered memory of processes.

    Calls return numbers: 0 is success, a negative number a failure; `mooncake.last_error()`
    describes the last failure of the thread. Only arguments of a wrong type raise, and
    `read_bytes_from_buffer`, which cannot return a number.

    Any number of threads may use one engine. Before `initialize`, and in a forked child, every call
    fails.
    """

    TransferOpcode = _Opcode

    __slots__ = ("__weakref__", "_local_name", "_timeout_s")

    def __init__(self) -> None:
        """Make an engine that is not initialized yet. Reads ``MC_TRANSFER_TIMEOUT``."""
        self._native: _native.Engine | None = None
        self._local_name = ""
        self._timeout_s = transfer_timeout_s()

    # Lifecycle

    @accept_aliases(hostname="local_hostname")
    def initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
    ) -> int:
        """Start the engine; a running engine is replaced.

        Args:
            local_hostname: ``host`` or ``host:port`` by which peers reach this process. With a
                metadata server it is the name of the segment; with ``"P2PHANDSHAKE"`` the port is
                ignored, and the segment is ``host:get_rpc_port()``.
            metadata_server: ``"P2PHANDSHAKE"``, ``"http://host:port/metadata"``,
                ``"etcd://host:port"`` (also without the scheme) or ``"redis://host:port"``.
            protocol: ``"rdma"`` uses RDMA devices, if there are any; other words mean TCP, and one
                that is unknown is logged.
            device_name: Names of RDMA devices, separated by commas; "" or None uses all.

        Returns:
            0, or -1; after a failure no engine runs.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    @accept_aliases(hostname="local_hostname")
    def initialize_ext(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
        metadata_type: str,
    ) -> int:
        """Start the engine; the type of metadata server is a separate argument.

        Args:
            local_hostname: Name as for `initialize`.
            metadata_server: Address as for `initialize`, also without a scheme.
            protocol: Protocol as for `initialize`.
            device_name: Devices as for `initialize`.
            metadata_type: Scheme for an address without one.

        Returns:
            0, or -1.
        """
        words = {
            "local_hostname": local_hostname,
            "metadata_server": metadata_server,
            "protocol": protocol,
            "device_name": device_name or "",
            "metadata_type": metadata_type,
        }
        for name, word in words.items():
            if not isinstance(word, str):
                raise TypeError(f"initialize(): {name} must be str, not {type(word).__name__}")
        server = metadata_server.strip()
        if metadata_type and server.upper() != "P2PHANDSHAKE" and "://" not in server:
            server = f"{metadata_type}://{server}"
        # The old engine must release the name before the new one can take it.
        self._native = None
        try:
            if protocol.lower() in _PROTOCOLS_REFUSED:
                text = f"this build has no transport for protocol {protocol!r}"
                raise _native.failure(codes.NOT_SUPPORTED, text)
            self._native = _native.Engine.start(
                name=local_hostname.strip(),
                metadata=server,
                rdma_devices=words["device_name"] if protocol.lower() == "rdma" else None,
            )
        except MooncakeError as error:
            _log.error("initialize failed: %s", with_remedy(error))
            return codes.FAILED
        self._local_name = local_hostname.strip()
        if protocol and protocol.lower() not in _PROTOCOLS_KNOWN:
            known = ", ".join(sorted(_PROTOCOLS_KNOWN))
            text = f"the protocol {protocol!r} is unknown; TCP is used; known are {known}"
            # Upstream returns success, too; the text is for `mooncake.last_error()`.
            _log.warning("%s", _native.failure(codes.NOT_SUPPORTED, text))
        return codes.OK

    def get_rpc_port(self) -> int:
        """Return the port that answers metadata requests of peers; -1 before `initialize`."""
        return codes.FAILED if self._native is None else self._native.rpc_port

    def get_engine(self) -> InnerTransferEngine | None:
        """Return the `engine` argument of `MooncakeDistributedStore.setup`, or None.

        None is returned before `initialize`.
        """
        return None if self._native is None else inner_engine(self._native)

    def get_engine_ptr(self) -> int:
        """Return a number that is unique among the engines of the process; 0 before `initialize`.

        The number is not a pointer that another library could use.
        """
        return 0 if self._native is None else self._native.identity

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return which network devices are near which memory, as JSON text.

        Reads the file that ``MC_CUSTOM_TOPO_JSON`` names if it is set, else the kernel's
        description.

        Args:
            device_name: Names of devices, separated by commas; None for all.

        Returns:
            ``{"cpu:0": [[nearest devices], [other devices]], …}``, also before `initialize`.
        """
        try:
            return _native.local_topology(device_name or "")
        except MooncakeError as error:
            _log.warning("%s; using the topology of the kernel", error)
            return _native.local_topology(device_name or "", is_custom=False)

    # Memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = _LOCATION) -> int:
        """Register memory of this process for peers. Touches no page.

        Args:
            buffer_addr: First address.
            capacity: Length in bytes.
            location: Location like ``"cpu:0"``, which peers see.

        Returns:
            0; -7 if the memory overlaps registered memory; -1 for other failures.
        """
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def unregister_memory(self, buffer_addr: int) -> int:
        """Unregister memory. Once the call returns, no peer accesses the memory any more.

        Args:
            buffer_addr: First address.

        Returns:
            0; -3 if no registered memory begins at the address; -1 for other failures. After -1 a
            peer may still access the memory: do not free it before a repeated call returns 0.
        """
        return self.batch_unregister_memory([buffer_addr])

    @accept_aliases(addresses="buffer_addresses")
    def batch_register_memory(
        self,
        buffer_addresses: Sequence[int],
        capacities: Sequence[int],
        location: str = _LOCATION,
    ) -> int:
        """Register memory of this process for peers: all of the ranges, or none.

        Args:
            buffer_addresses: First addresses.
            capacities: Length of each range in bytes.
            location: Location like ``"cpu:0"``, which peers see.

        Returns:
            0; -7 if a range overlaps registered memory; -1 for other failures.
        """
        return self._call_status(
            lambda native: native.register(buffer_addresses, capacities, location=location)
        )

    @accept_aliases(addresses="buffer_addresses")
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Unregister memory. Every range is tried, also after a failure.

        Args:
            buffer_addresses: First addresses.

        Returns:
            0; -3 if no registered memory begins at one of the addresses; -1 for other failures.
        """
        return self._call_status(lambda native: native.unregister(buffer_addresses))

    def allocate_managed_buffer(self, length: int) -> int:
        """Return the address of memory that peers can reach without registration, or 0.

        Args:
            length: Length in bytes; rounded up to 8 KiB times a power of two.
        """
        return self._call_value(lambda native: native.allocate(length), 0)

    @accept_aliases(ptr="buffer_addr")
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Free a managed buffer.

        Args:
            buffer_addr: Address that `allocate_managed_buffer` returned.
            length: Length that was passed to `allocate_managed_buffer`.

        Returns:
            0; -1 if there is no such buffer.
        """
        return self._call_status(lambda native: native.free(buffer_addr, length))

    def write_bytes_to_buffer(
        self, dest_address: int, src_ptr: bytes | bytearray | str, length: int
    ) -> int:
        """Copy bytes to an address of this process.

        Args:
            dest_address: Destination.
            src_ptr: The bytes, or text, which is encoded as UTF-8.
            length: Number of bytes to copy.

        Returns:
            0; -1 if the source is shorter, or the memory is not writable.
        """
        data = src_ptr.encode() if isinstance(src_ptr, str) else src_ptr
        try:
            _native.write_memory(dest_address, data, length)
        except MooncakeError as error:
            return _status_code(error)
        return codes.OK

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """Return the bytes at an address of this process.

        Args:
            source_address: Address of the first byte.
            length: Number of bytes.

        Raises:
            InvalidArgumentError: The memory is not readable.
        """
        return _native.read_memory(source_address, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Return the address of the memory that a segment registered first, or 0.

        Args:
            segment_name: Name by which peers open the segment.
        """
        nothing: list[tuple[int, int]] = []
        timeout_s = self._timeout_s
        found = self._call_value(
            lambda native: native.ranges(segment_name, timeout_s=timeout_s), nothing
        )
        return found[0][0] if found else 0

    # Synchronous transfers

    def _transfer_one(
        self,
        is_write: bool,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """{Read from|Write to} a peer's memory and wait until the bytes are {here|there}.

        Args:
            target_hostname: Name of the peer's segment.
            buffer: Local address; it need not be registered.
            peer_buffer_address: Remote address.
            length: Length in bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            0, or -1.
        """
        timeout_s, hint = self._timeout_s, transport_hint or ""
        try:
            self._started().transfer_one(
                target_hostname, buffer, peer_buffer_address, length, is_write, timeout_s, hint
            )
        except MooncakeError as error:
            _log.debug("%s", error)
            return codes.FAILED
        return codes.OK

    transfer_sync_read, transfer_sync_write = variants(
        _transfer_one, "transfer_sync_read", "transfer_sync_write", **_ONE
    )

    @accept_aliases(**_ONE)
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Read or write, wait, and then send a message.

        Args:
            target_hostname: Name of the peer's segment.
            buffer: Local address; it need not be registered.
            peer_buffer_address: Remote address.
            length: Length in bytes; 0 to send the message only.
            opcode: Read or Write.
            notify: Message that the peer gets from `get_notifies` after the bytes have arrived.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            0, or -1.
        """
        if notify is None:
            return self._transfer_one(
                _is_write(opcode),
                target_hostname,
                buffer,
                peer_buffer_address,
                length,
                transport_hint,
            )
        return self.batch_transfer_sync(
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            opcode,
            notify,
            transport_hint,
        )

    def _transfer_many(
        self,
        is_write: bool,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """{Read|Write} many ranges {of|to} a peer's memory; wait until the bytes are {here|there}.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            0, or -1; after a failure some ranges may have been {read|written}.
        """
        opcode = _Opcode.Write if is_write else _Opcode.Read
        return self.batch_transfer_sync(
            target_hostname, buffers, peer_buffer_addresses, lengths, opcode, None, transport_hint
        )

    batch_transfer_sync_read, batch_transfer_sync_write = variants(
        _transfer_many, "batch_transfer_sync_read", "batch_transfer_sync_write", **_MANY
    )

    @accept_aliases(**_MANY)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Read or write many ranges, wait, and then send a message.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            opcode: Read or Write.
            notify: Message that the peer gets from `get_notifies` after the bytes have arrived.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            0, or -1; after a failure some ranges may have been transferred.
        """
        is_write = _is_write(opcode)
        if notify is not None and not isinstance(notify, TransferNotify):
            kind = type(notify).__name__
            raise TypeError(f"notify must be TransferNotify or None, not {kind}")
        message = None if notify is None else (notify.name, notify.msg)
        failure = self._call_failure(
            lambda native: native.transfer(
                target_hostname,
                buffers,
                peer_buffer_addresses,
                lengths,
                is_write=is_write,
                timeout_s=self._timeout_s,
                notify=message,
                hint=transport_hint or "",
            )
        )
        return codes.OK if failure is None else codes.FAILED

    # Asynchronous transfers

    @accept_aliases(**_ONE)
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Start to write to a peer's memory.

        Args:
            target_hostname: Name of the peer's segment.
            buffer: Local address; the memory must not change before the batch has ended.
            peer_buffer_address: Remote address.
            length: Length in bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            Number of the batch, or 0 if it was not started.
        """
        return self._submit(
            True, target_hostname, [buffer], [peer_buffer_address], [length], transport_hint
        )

    def _submit(
        self,
        is_write: bool,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Start to {read|write} many ranges {of|to} a peer's memory.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            Number of the batch, or 0 if it was not started.
        """
        return self._call_value(
            lambda native: native.submit(
                target_hostname,
                buffers,
                peer_buffer_addresses,
                lengths,
                is_write=is_write,
                timeout_s=self._timeout_s,
                hint=transport_hint or "",
            ),
            codes.NO_BATCH,
        )

    batch_transfer_async_read, batch_transfer_async_write = variants(
        _submit, "batch_transfer_async_read", "batch_transfer_async_write", **_MANY
    )

    @accept_aliases(**_MANY)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """Start to read or write many ranges.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            opcode: Read or Write.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first; other
                words leave the choice to the engine.

        Returns:
            Number of the batch, or 0 if it was not started.
        """
        is_write = _is_write(opcode)
        return self._submit(
            is_write, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint
        )

    def transfer_check_status(self, batch_id: int) -> int:
        """Return the status of a batch.

        A final status is reported once; afterwards the number of the batch is unknown.

        Args:
            batch_id: Number of the batch.

        Returns:
            1 done, 0 running, -1 failed or unknown, -2 timed out.
        """
        try:
            is_done = self._started().is_done(batch_id)
        except DeadlineError:
            return codes.TIMED_OUT
        except MooncakeError:
            return codes.FAILED
        return codes.DONE if is_done else codes.RUNNING

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait until all of the batches have ended. Afterwards their numbers are unknown.

        Args:
            batch_ids: Numbers of the batches.

        Returns:
            0 if all are done, -1 if one failed, timed out or is unknown.
        """
        failure = self._call_failure(lambda native: native.wait(batch_ids))
        return codes.OK if failure is None else codes.FAILED

    # Peers

    def get_notifies(self) -> list[TransferNotify]:
        """Take the messages received from peers, oldest first."""
        nothing: list[tuple[str, str]] = []
        taken = self._call_value(lambda native: native.take_notifications(), nothing)
        return [TransferNotify(name, msg) for name, msg in taken]

    def send_probe(self, peer_server_name: str) -> int:
        """Check whether the owner of a segment answers.

        Args:
            peer_server_name: Name of the peer's segment.

        Returns:
            0; -102 if the owner does not answer; -200 if the metadata server has no such segment;
            -1 before `initialize`.
        """
        if self._native is None:
            return _status_code(_not_initialized())
        failure = self._call_failure(
            lambda native: native.probe(peer_server_name, timeout_s=_PROBE_S)
        )
        if failure is None:
            return codes.OK
        return codes.NO_SEGMENT if isinstance(failure, NotFoundError) else codes.UNREACHABLE

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Do nothing: this build has no EFA.

        Args:
            segment_name: Name of the peer's segment.

        Returns:
            0; -1 before `initialize`.
        """
        return codes.FAILED if self._native is None else codes.OK

    # Metrics

    def metrics(self) -> dict[str, Any]:
        """Return counters and the fill levels of the pools; {} before `initialize`.

        Batches, bytes, errors and latencies are under ``"transports"`` and, for each peer, under
        ``"peers"``; refused requests are under ``"refused"``.
        """
        nothing: dict[str, Any] = {}
        return self._call_value(lambda native: native.snapshot(), nothing)

    def metrics_text(self) -> str:
        """Return the counters as Prometheus text; "" before `initialize`."""
        return self._call_value(lambda native: native.metrics_text(), "")

    # Private

    def _started(self) -> _native.Engine:
        if self._native is None:
            raise _not_initialized()
        return self._native

    def _call_failure(self, call: Callable[[_native.Engine], object]) -> MooncakeError | None:
        try:
            call(self._started())
        except MooncakeError as error:
            _log.debug("%s", error)
            # A traceback would keep the frames of callers alive, and with them the engine.
            return error.with_traceback(None)
        return None

    def _call_status(self, call: Callable[[_native.Engine], None]) -> int:
        failure = self._call_failure(call)
        return codes.OK if failure is None else _status_code(failure)

    def _call_value(self, call: Callable[[_native.Engine], T], otherwise: T) -> T:
        try:
            return call(self._started())
        except MooncakeError as error:
            _log.debug("%s", error)
            return otherwise


rebrand(TransferEngine)


def _status_code(error: MooncakeError) -> int:
    if isinstance(error, AlreadyExistsError):
        return codes.OVERLAP
    return codes.UNKNOWN_ADDRESS if isinstance(error, NotFoundError) else codes.FAILED


def _is_write(opcode: _Opcode) -> bool:
    if not isinstance(opcode, _Opcode):
        raise TypeError(f"opcode must be TransferOpcode, not {type(opcode).__name__}")
    return opcode is _Opcode.Write


def _not_initialized() -> MooncakeError:
    return _native.failure(codes.FAILED, "the engine is not initialized", is_closed=True)
