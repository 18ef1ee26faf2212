"""`TransferEngine`: the established calls over the native engine."""
# Callers may pass settings that this build has no use for.
# ruff: noqa: ARG002

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mooncake._aliases import accept_aliases
from mooncake._names import rebrand
from mooncake._runtime import _native
from mooncake.engine import codes
from mooncake.engine.device import DeviceTransfers
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
)

__all__ = ["TransferEngine"]

T = TypeVar("T")

_TIMEOUT_S_MIN = 5.0
_TIMEOUT_S_DEFAULT = 30.0
_PROBE_S = 5.0
_LOCATION = "*"

# What this build has no transport for. All other words mean TCP, as they do where there is no
# device for them.
_PROTOCOLS_REFUSED = ("xgmi",)

_log = logging.getLogger("mooncake.engine")


class TransferEngine(DeviceTransfers):
    """Moves bytes between registered memory of processes.

    Calls return numbers: 0 is success, a negative number a failure; `mooncake.last_error()` tells
    in words what the last failure in the thread was about. Only arguments of a wrong type raise,
    and `read_bytes_from_buffer` where there is nothing to return.

    Any number of threads may use one engine. Before `initialize`, and in a forked child, every
    call fails.
    """

    TransferOpcode = _Opcode

    __slots__ = ("__weakref__", "_native", "_timeout_s")

    def __init__(self) -> None:
        """Make an engine that is not initialized yet. Reads ``MC_TRANSFER_TIMEOUT``."""
        self._native: _native.Engine | None = None
        self._timeout_s = _transfer_timeout()

    # Life

    @accept_aliases(hostname="local_hostname")
    def initialize(
        self,
        local_hostname: str,
        metadata_server: str,
        protocol: str,
        device_name: str | None,
    ) -> int:
        """Start the engine. One that runs already is replaced.

        Args:
            local_hostname: ``host`` or ``host:port`` by which peers reach this process. With a
                metadata server it is the name of the segment; with ``"P2PHANDSHAKE"`` the port is
                ignored, and the segment is ``host:get_rpc_port()``.
            metadata_server: ``"P2PHANDSHAKE"``, ``"http://host:port/metadata"``,
                ``"etcd://host:port"`` (also without the scheme) or ``"redis://host:port"``.
            protocol: ``"tcp"``, or another word, which means TCP too in this build.
            device_name: Names of devices; unused without RDMA.

        Returns:
            0, or -1; then nothing is left of the attempt.
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
        """Start the engine, with the kind of the metadata server beside its address.

        Args:
            local_hostname: As of `initialize`.
            metadata_server: As of `initialize`, also without a scheme.
            protocol: As of `initialize`.
            device_name: As of `initialize`.
            metadata_type: The scheme of a server that is given without one.

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
        # The name must be free before it can be taken again.
        self._native = None
        try:
            if protocol.lower() in _PROTOCOLS_REFUSED:
                text = f"this build has no transport for protocol {protocol!r}"
                raise _native.failure(codes.NOT_SUPPORTED, text)
            self._native = _native.Engine.start(name=local_hostname.strip(), metadata=server)
        except MooncakeError as error:
            _log.error("initialize failed: %s (%s)", error, error.remedy)
            return codes.FAILED
        return codes.OK

    def get_rpc_port(self) -> int:
        """Return the port on which peers ask for the segment; -1 before `initialize`."""
        return codes.FAILED if self._native is None else self._native.rpc_port

    def get_engine(self) -> InnerTransferEngine | None:
        """Return what `MooncakeDistributedStore.setup` takes as `engine`; None before."""
        return None if self._native is None else inner_engine(self._native)

    def get_engine_ptr(self) -> int:
        """Return a number that tells this engine from others of the process; 0 before.

        It is no address that another library could call.
        """
        return 0 if self._native is None else self._native.identity

    def get_local_topology(self, device_name: str | None = None) -> str:
        """Return which network devices are near which memory, as JSON text.

        The file that ``MC_CUSTOM_TOPO_JSON`` names comes first, then what the kernel tells.

        Args:
            device_name: Names of devices, with commas between them; None for all.

        Returns:
            ``{"cpu:0": [[those beside it], [the others]], …}``, also before `initialize`.
        """
        try:
            return _native.local_topology(device_name or "")
        except MooncakeError as error:
            _log.warning("%s; the topology is what the kernel tells", error)
            return _native.local_topology(device_name or "", is_custom=False)

    # Memory

    def register_memory(self, buffer_addr: int, capacity: int, location: str = _LOCATION) -> int:
        """Let peers reach memory of this process. Touches no page of it.

        Args:
            buffer_addr: Its first address.
            capacity: How many bytes.
            location: What it is, like ``"cpu:0"``; peers see it.

        Returns:
            0; -7 if it overlaps memory that is registered; -1 for other failures.
        """
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def unregister_memory(self, buffer_addr: int) -> int:
        """Withdraw memory. When it returns nobody reaches it any more.

        Args:
            buffer_addr: Its first address.

        Returns:
            0; -3 if no registered memory begins there; -1 for other failures.
        """
        return self.batch_unregister_memory([buffer_addr])

    @accept_aliases(addresses="buffer_addresses")
    def batch_register_memory(
        self,
        buffer_addresses: Sequence[int],
        capacities: Sequence[int],
        location: str = _LOCATION,
    ) -> int:
        """Let peers reach memory of this process: all of the ranges, or none.

        Args:
            buffer_addresses: The first addresses.
            capacities: How many bytes each has.
            location: What it is, like ``"cpu:0"``; peers see it.

        Returns:
            0; -7 if one overlaps memory that is registered; -1 for other failures.
        """
        return self._call_status(
            lambda native: native.register(buffer_addresses, capacities, location=location)
        )

    @accept_aliases(addresses="buffer_addresses")
    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Withdraw memory. Every one of the ranges is tried.

        Args:
            buffer_addresses: The first addresses.

        Returns:
            0; -3 if no registered memory begins at one of them; -1 for other failures.
        """
        return self._call_status(lambda native: native.unregister(buffer_addresses))

    def allocate_managed_buffer(self, length: int) -> int:
        """Return the address of memory that peers reach without registering it, or 0.

        Args:
            length: How many bytes; rounded up to 8 KiB times a power of two.
        """
        return self._call_value(lambda native: native.allocate(length), 0)

    @accept_aliases(ptr="buffer_addr")
    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Take a managed buffer back.

        Args:
            buffer_addr: What `allocate_managed_buffer` returned.
            length: The length it was asked for.

        Returns:
            0; -1 if no such buffer is lent, and then nothing changes.
        """
        return self._call_status(lambda native: native.free(buffer_addr, length))

    def write_bytes_to_buffer(
        self, dest_address: int, src_ptr: bytes | bytearray | str, length: int
    ) -> int:
        """Copy bytes to an address of this process.

        Args:
            dest_address: Where to.
            src_ptr: The bytes, or text, which counts as its UTF-8 bytes.
            length: How many of them.

        Returns:
            0; -1 if there are fewer bytes, or the memory cannot be written.
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
            source_address: Where from.
            length: How many.

        Raises:
            InvalidArgumentError: The memory cannot be read.
        """
        return _native.read_memory(source_address, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """Return the address of the memory that a segment registered first, or 0.

        Args:
            segment_name: The name by which peers open it.
        """
        nothing: list[tuple[int, int]] = []
        timeout_s = self._timeout_s
        found = self._call_value(
            lambda native: native.ranges(segment_name, timeout_s=timeout_s), nothing
        )
        return found[0][0] if found else 0

    # Transfers that wait

    @accept_aliases(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Write to a peer's memory and wait until the bytes are there.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here; it need not be registered.
            peer_buffer_address: The address there.
            length: How many bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            0, or -1.
        """
        return self._transfer_one(
            target_hostname, buffer, peer_buffer_address, length, True, transport_hint
        )

    @accept_aliases(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Read from a peer's memory and wait until the bytes are here.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here; it need not be registered.
            peer_buffer_address: The address there.
            length: How many bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            0, or -1.
        """
        return self._transfer_one(
            target_hostname, buffer, peer_buffer_address, length, False, transport_hint
        )

    @accept_aliases(target="target_hostname", peer_addr="peer_buffer_address")
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
            target_hostname: The peer's segment.
            buffer: The address here; it need not be registered.
            peer_buffer_address: The address there.
            length: How many bytes; 0 to send the message only.
            opcode: Read or Write.
            notify: What the peer finds in its `get_notifies` after the bytes have arrived.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            0, or -1.
        """
        if notify is None:
            is_write = _is_write(opcode)
            return self._transfer_one(
                target_hostname, buffer, peer_buffer_address, length, is_write, transport_hint
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

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Write many ranges to a peer's memory and wait until the bytes are there.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            0, or -1; then some may have been written.
        """
        return self.batch_transfer_sync(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            _Opcode.Write,
            None,
            transport_hint,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Read many ranges of a peer's memory and wait until the bytes are here.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            0, or -1; then some may have been read.
        """
        return self.batch_transfer_sync(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            _Opcode.Read,
            None,
            transport_hint,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
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
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            opcode: Read or Write.
            notify: What the peer finds in its `get_notifies` after the bytes have arrived.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            0, or -1; then some may have been moved.
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

    # Transfers that go on

    @accept_aliases(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begin to write to a peer's memory.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here; the memory must not change before the batch has ended.
            peer_buffer_address: The address there.
            length: How many bytes.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            The number of the batch, or 0 if it was not begun.
        """
        return self.batch_transfer_async(
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            _Opcode.Write,
            transport_hint,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to write many ranges to a peer's memory.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            The number of the batch, or 0 if it was not begun.
        """
        return self.batch_transfer_async(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            _Opcode.Write,
            transport_hint,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to read many ranges of a peer's memory.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            The number of the batch, or 0 if it was not begun.
        """
        return self.batch_transfer_async(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            _Opcode.Read,
            transport_hint,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """Begin to read or write many ranges.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            opcode: Read or Write.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first; other words
                leave the choice to the engine.

        Returns:
            The number of the batch, or 0 if it was not begun.
        """
        is_write = _is_write(opcode)
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

    def transfer_check_status(self, batch_id: int) -> int:
        """Say how far a batch is. How it ended is told once; afterwards its number is unknown.

        Args:
            batch_id: What began it.

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
            batch_ids: What began them.

        Returns:
            0 if all are done, -1 if one failed, timed out or is unknown.
        """
        failure = self._call_failure(lambda native: native.wait(batch_ids))
        return codes.OK if failure is None else codes.FAILED

    # Peers

    def get_notifies(self) -> list[TransferNotify]:
        """Return the messages that have come from peers, oldest first, each once."""
        nothing: list[tuple[str, str]] = []
        taken = self._call_value(lambda native: native.take_notifications(), nothing)
        return [TransferNotify(name, msg) for name, msg in taken]

    def send_probe(self, peer_server_name: str) -> int:
        """Ask whether the owner of a segment is there.

        Args:
            peer_server_name: The peer's segment.

        Returns:
            0; -102 if nobody answers; -200 if the metadata server knows no such segment; -1
            before `initialize`.
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
        """Do nothing: there is no EFA here.

        Args:
            segment_name: The peer's segment.

        Returns:
            0; -1 before `initialize`.
        """
        return codes.FAILED if self._native is None else codes.OK

    # What it has done

    def metrics(self) -> dict[str, Any]:
        """Return what was moved over which way to whom, and how full the pools are; {} before.

        Bytes, pieces, errors and latencies stand under ``"transports"`` and, for each peer, under
        ``"peers"``; who was turned away under ``"refused"``.
        """
        nothing: dict[str, Any] = {}
        return self._call_value(lambda native: native.snapshot(), nothing)

    def metrics_text(self) -> str:
        """Return the same as text that Prometheus reads; "" before `initialize`."""
        return self._call_value(lambda native: native.metrics_text(), "")

    # Inside

    def _started(self) -> _native.Engine:
        if self._native is None:
            raise _not_initialized()
        return self._native

    def _transfer_one(
        self,
        segment: str,
        address: int,
        peer_address: int,
        length: int,
        is_write: bool,
        hint: str,
    ) -> int:
        try:
            self._started().transfer_one(
                segment, address, peer_address, length, is_write, self._timeout_s, hint or ""
            )
        except MooncakeError as error:
            _log.debug("%s", error)
            return codes.FAILED
        return codes.OK

    def _call_failure(self, call: Callable[[_native.Engine], object]) -> MooncakeError | None:
        try:
            call(self._started())
        except MooncakeError as error:
            _log.debug("%s", error)
            # A trace would tie the engine to the frames of its callers, and keep it from ending.
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


def _transfer_timeout() -> float:
    for name, _, _, _, value in _native.environment():
        if name == "MC_TRANSFER_TIMEOUT" and value is not None and value.strip():
            try:
                timeout_s = float(value)
            except ValueError:
                timeout_s = math.nan
            if math.isfinite(timeout_s):
                return max(_TIMEOUT_S_MIN, timeout_s)
            _log.warning("%s=%r is no number of seconds and is ignored", name, value)
    return _TIMEOUT_S_DEFAULT
