"""Transfers of memory of CUDA devices, or of this process, in the order of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake._aliases import accept_aliases
from mooncake.errors import MooncakeError

if TYPE_CHECKING:
    from mooncake._runtime import _native

__all__ = ["DeviceTransfers"]


class DeviceTransfers:
    """Upstream's calls for transfers in the order of a CUDA stream.

    Each call runs after all work submitted to the stream before and before all work submitted
    later. It returns when the bytes are transferred, and raises RuntimeError if they are not.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        _timeout_s: float

        def _started(self) -> _native.Engine: ...

    @accept_aliases(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Write one range to a peer's memory, after the work submitted to the stream.

        Args:
            target_hostname: Name of the peer's segment.
            buffer: Local address, of a device or of this process.
            peer_buffer_address: Remote address.
            length: Length in bytes.
            stream_ptr: A CUDA stream; 0 is the default stream.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were written.
        """
        self._on_cuda(
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            stream=stream_ptr,
            hint=transport_hint,
            is_write=True,
        )

    @accept_aliases(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Read one range of a peer's memory, before later work of the stream.

        Args:
            target_hostname: Name of the peer's segment.
            buffer: Local address, of a device or of this process.
            peer_buffer_address: Remote address.
            length: Length in bytes.
            stream_ptr: A CUDA stream; 0 is the default stream.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were read.
        """
        self._on_cuda(
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            stream=stream_ptr,
            hint=transport_hint,
            is_write=False,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Write many ranges to a peer's memory, after the work submitted to the stream.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses, of devices or of this process.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            stream_ptr: A CUDA stream; 0 is the default stream.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were written.
        """
        self._on_cuda(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            stream=stream_ptr,
            hint=transport_hint,
            is_write=True,
        )

    @accept_aliases(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Read many ranges of a peer's memory, before later work of the stream.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses, of devices or of this process.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            stream_ptr: A CUDA stream; 0 is the default stream.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were read.
        """
        self._on_cuda(
            target_hostname,
            buffers,
            peer_buffer_addresses,
            lengths,
            stream=stream_ptr,
            hint=transport_hint,
            is_write=False,
        )

    def _on_cuda(
        self,
        segment: str,
        addresses: Sequence[int],
        peer_addresses: Sequence[int],
        lengths: Sequence[int],
        *,
        stream: int,
        hint: str,
        is_write: bool,
    ) -> None:
        try:
            self._started().transfer_on_stream(
                segment,
                addresses,
                peer_addresses,
                lengths,
                stream=stream,
                is_write=is_write,
                timeout_s=self._timeout_s,
                hint=hint or "",
            )
        except MooncakeError as error:
            raise RuntimeError(str(error)) from error
