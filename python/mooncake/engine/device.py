"""Transfers of device memory in the order of a stream. Not built yet: every call says so."""
# The arguments are the established ones; nothing reads them yet.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Sequence

from mooncake.engine.aliases import also

__all__ = ["DeviceTransfers"]


class DeviceTransfers:
    """The established calls for device memory, which all raise RuntimeError in this build."""

    __slots__ = ()

    @also(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not built yet: raises RuntimeError.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here.
            peer_buffer_address: The address there.
            length: How many bytes.
            stream_ptr: A CUDA stream.
            transport_hint: Which way.
        """
        raise _no_cuda()

    @also(target="target_hostname", peer_addr="peer_buffer_address")
    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not built yet: raises RuntimeError.

        Args:
            target_hostname: The peer's segment.
            buffer: The address here.
            peer_buffer_address: The address there.
            length: How many bytes.
            stream_ptr: A CUDA stream.
            transport_hint: Which way.
        """
        raise _no_cuda()

    @also(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not built yet: raises RuntimeError.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            stream_ptr: A CUDA stream.
            transport_hint: Which way.
        """
        raise _no_cuda()

    @also(target="target_hostname", peer_addrs="peer_buffer_addresses")
    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Not built yet: raises RuntimeError.

        Args:
            target_hostname: The peer's segment.
            buffers: The addresses here.
            peer_buffer_addresses: The addresses there.
            lengths: How many bytes each has.
            stream_ptr: A CUDA stream.
            transport_hint: Which way.
        """
        raise _no_cuda()


def _no_cuda() -> RuntimeError:
    return RuntimeError(
        "this build moves no device memory, and no CUDA driver is loaded: copy to host memory "
        "first and use the calls without _on_cuda"
    )
