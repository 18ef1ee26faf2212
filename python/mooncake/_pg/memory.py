"""Tensors as host memory: contiguous copies where needed, and pinned staging for CUDA tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HostMemory", "Staging", "Use", "check_same", "read_from", "uses_of", "write_to"]

Use = tuple[bool, int, int]
"""Whether a tensor is staged, and where its elements begin and end."""


class HostMemory:
    """The bytes of one tensor in host memory, at `address`.

    A contiguous CPU tensor is its own memory. Any other tensor gets a contiguous copy, which
    `store` writes back.
    """

    __slots__ = ("_host", "_staging", "_tensor", "address", "nbytes", "numel")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, staging: Staging | None) -> None:
        self._tensor = tensor
        self._host = host
        self._staging = staging
        self.numel = numel = host.numel()
        self.nbytes = numel * host.element_size()
        # The address of an empty tensor may be null or stale; the native side must not see it.
        self.address = host.data_ptr() if numel else 0

    def store(self) -> bool:
        """Copy the bytes into the tensor, if they are not its own memory.

        Returns:
            Whether the copy runs on a stream, so that `join` must be called where it is used.
        """
        if self._host is self._tensor or not self.nbytes:
            return False
        if self._staging is None:
            self._tensor.detach().copy_(self._host)
            return False
        self._staging.copy_back(self._tensor, self._host)
        return True

    def join(self) -> None:
        """Let the current stream of this thread wait for the copy that `store` has begun."""
        if self._staging is not None:
            self._staging.join()

    def overlaps(self, uses: Sequence[Use]) -> bool:
        """Return whether one of the tensors shares elements with this one, and either is staged.

        Operations on memory that is not staged are carried out in the order of calls.
        """
        is_staged = self._host is not self._tensor
        if not (is_staged or any(use[0] for use in uses)):
            return False
        _, begin, end = _use_of(self._tensor)
        return any(
            (is_staged or is_other_staged) and first < end and begin < last
            for is_other_staged, first, last in uses
        )


def read_from(tensor: torch.Tensor) -> HostMemory:
    """Return memory that holds the elements of `tensor`, in order."""
    _check(tensor)
    if tensor.is_cpu:
        return HostMemory(tensor, _plain(tensor).contiguous(), None)
    staging = Staging(tensor.device)
    return HostMemory(tensor, staging.copy_out(_plain(tensor)), staging)


def write_to(tensor: torch.Tensor, *, keeps_content: bool = False) -> HostMemory:
    """Return memory whose bytes `store` puts into `tensor`.

    Args:
        tensor: Tensor that is written.
        keeps_content: Whether the memory starts with the elements of the tensor.
    """
    _check(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return HostMemory(tensor, tensor, None)
    if any(
        not stride and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ValueError(
            "a result cannot be written into a tensor whose elements share memory: pass a copy of "
            f"it, shape={tuple(tensor.shape)}, stride={tensor.stride()}"
        )
    if keeps_content:
        return read_from(tensor)
    if tensor.is_cpu:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return HostMemory(tensor, host, None)
    staging = Staging(tensor.device)
    return HostMemory(tensor, staging.pinned(tensor), staging)


def check_same(tensors: Sequence[torch.Tensor], dtype: torch.dtype, call: str) -> None:
    """Raise TypeError if a tensor has another type of elements than `dtype`."""
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"{call}: tensors differ in dtype: {tensor.dtype} and {dtype}")


def uses_of(tensors: Sequence[torch.Tensor]) -> list[Use]:
    """Return how an operation uses memory that these tensors have."""
    return [_use_of(tensor) for tensor in tensors if tensor.numel()]


def _use_of(tensor: torch.Tensor) -> Use:
    begin = tensor.data_ptr()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return _is_staged(tensor), begin, begin + (last + 1) * tensor.element_size()


def _is_staged(tensor: torch.Tensor) -> bool:
    """Return whether the native side sees a copy of the tensor, not the tensor itself."""
    return not (
        tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its conjugation and negation carried out, without its gradient."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().resolve_conj().resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def _check(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise TypeError(f"process groups move dense tensors only: layout={tensor.layout}")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(f"process groups move tensors of CPU and CUDA only: device={tensor.device}")


class Staging:
    """Copies between a CUDA device and pinned host memory on a side stream.

    The copy out waits for what the caller's stream did so far; the copy back is ordered before the
    later work of a stream by `join`, which each stream that uses the result needs.
    """

    _streams: dict[int, Any] = {}  # noqa: RUF012 - one side stream per device, for the process

    def __init__(self, device: torch.device) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "collectives of mooncake cannot be captured in a CUDA graph: they pass through "
                "host memory; call them outside of the capture"
            )
        self._device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = self._streams.get(index)
        if stream is None:
            stream = self._streams.setdefault(index, torch.cuda.Stream(device=device))
        self._stream = stream
        self._event: Any = None

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return uninitialized pinned memory of the tensor's shape."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def copy_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor into pinned memory and return when its bytes are there."""
        host = self.pinned(tensor)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)
        self._stream.synchronize()
        return host

    def copy_back(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """Start the copy into the tensor, and make the current stream wait for it."""
        current = torch.cuda.current_stream(self._device)
        # Work on the old content of the tensor may still run on the caller's stream.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            tensor.detach().copy_(host, non_blocking=True)
            tensor.record_stream(self._stream)
            self._event = self._stream.record_event()
        self.join()

    def join(self) -> None:
        """Let the current stream wait for the copy back."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
