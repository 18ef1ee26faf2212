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
    """The established calls for transfers that are part of a stream.

    Each of them comes after everything that was given to the stream and before what will be. It
    returns when the bytes are where they belong, and raises RuntimeError if they are not.
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
        """Write to a peer's memory what the stream has made before.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here, of a device or of this process.
            peer_buffer_address: The address there.
            length: How many bytes.
            stream_ptr: A CUDA stream; 0: the default one.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were written.
        """
        self._on_cuda(
            target_hostname,
            ([buffer], [peer_buffer_address], [length]),
            stream_ptr,
            transport_hint,
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
        """Read a peer's memory for what the stream does next.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here, of a device or of this process.
            peer_buffer_address: The address there.
            length: How many bytes.
            stream_ptr: A CUDA stream; 0: the default one.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were read.
        """
        self._on_cuda(
            target_hostname,
            ([buffer], [peer_buffer_address], [length]),
            stream_ptr,
            transport_hint,
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
        """Write many ranges to a peer's memory, as the stream has made them before.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here, of devices or of this process.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            stream_ptr: A CUDA stream; 0: the default one.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were written.
        """
        self._on_cuda(
            target_hostname,
            (buffers, peer_buffer_addresses, lengths),
            stream_ptr,
            transport_hint,
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
        """Read many ranges of a peer's memory for what the stream does next.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here, of devices or of this process.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            stream_ptr: A CUDA stream; 0: the default one.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that way first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were read.
        """
        self._on_cuda(
            target_hostname,
            (buffers, peer_buffer_addresses, lengths),
            stream_ptr,
            transport_hint,
            is_write=False,
        )

    def _on_cuda(
        self,
        segment: str,
        batch: tuple[Sequence[int], Sequence[int], Sequence[int]],
        stream: int,
        hint: str,
        *,
        is_write: bool,
    ) -> None:
        try:
            self._started().transfer_on_stream(
                segment,
                *batch,
                stream=stream,
                is_write=is_write,
                timeout_s=self._timeout_s,
                hint=hint or "",
            )
        except MooncakeError as error:
            raise RuntimeError(str(error)) from error
