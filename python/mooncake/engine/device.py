"""Transfers of memory of CUDA devices, or of this process, in the order of a stream."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mooncake._variants import variants
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

    def _on_cuda(
        self,
        is_write: bool,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """{Read|Write} many ranges {of|to} a peer's memory in the order of the stream.

        Args:
            target_hostname: Name of the peer's segment.
            buffers: Local addresses, of devices or of this process.
            peer_buffer_addresses: Remote addresses.
            lengths: Length of each range in bytes.
            stream_ptr: A CUDA stream; 0 is the default stream.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were {read|written}.
        """
        try:
            self._started().transfer_on_stream(
                target_hostname,
                buffers,
                peer_buffer_addresses,
                lengths,
                stream=stream_ptr,
                is_write=is_write,
                timeout_s=self._timeout_s,
                hint=transport_hint or "",
            )
        except MooncakeError as error:
            raise RuntimeError(str(error)) from error

    batch_transfer_read_on_cuda, batch_transfer_write_on_cuda = variants(
        _on_cuda,
        "batch_transfer_read_on_cuda",
        "batch_transfer_write_on_cuda",
        target="target_hostname",
        peer_addrs="peer_buffer_addresses",
    )

    def _one_on_cuda(
        self,
        is_write: bool,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """{Read|Write} one range {of|to} a peer's memory in the order of the stream.

        Args:
            target_hostname: Name of the peer's segment.
            buffer: Local address, of a device or of this process.
            peer_buffer_address: Remote address.
            length: Length in bytes.
            stream_ptr: A CUDA stream; 0 is the default stream.
            transport_hint: ``"shm"``, ``"tcp"`` or ``"memory"`` to try that transport first.

        Raises:
            RuntimeError: There is no CUDA driver, the segment cannot be opened, or not all bytes
                were {read|written}.
        """
        self._on_cuda(
            is_write,
            target_hostname,
            [buffer],
            [peer_buffer_address],
            [length],
            stream_ptr,
            transport_hint,
        )

    transfer_read_on_cuda, transfer_write_on_cuda = variants(
        _one_on_cuda,
        "transfer_read_on_cuda",
        "transfer_write_on_cuda",
        target="target_hostname",
        peer_addr="peer_buffer_address",
    )
