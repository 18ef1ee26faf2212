"""The names of upstream's extension module for expert parallelism."""

from __future__ import annotations

from typing import Any, Final

from .errors import NotSupportedError
from .mooncake_elastic_buffer import ElasticBuffer
from .mooncake_ep_buffer import Buffer

# isort: split
import torch

__all__ = [
    "MAX_QP_COUNT",
    "Buffer",
    "ElasticBuffer",
    "EventHandle",
    "calculate_elastic_buffer_size",
    "get_ep_buffer_size_hint",
]

# Upstream's limit of queue pairs of one buffer.
MAX_QP_COUNT: Final = 256

get_ep_buffer_size_hint = Buffer.get_ep_buffer_size_hint


class EventHandle:
    """The work that a CUDA stream has at this moment. Without CUDA there is nothing to wait for."""

    def __init__(self, stream_ptr: int = 0) -> None:
        """Record the work of a stream.

        Args:
            stream_ptr: Address of the stream, as `torch.cuda.Stream.cuda_stream`; 0 stands for
                torch's current stream.
        """
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_available():
            self._event = torch.cuda.Event()
            self._event.record(_stream(stream_ptr))

    def current_stream_wait(self, stream_ptr: int = 0) -> None:
        """Let a stream wait for the recorded work.

        Args:
            stream_ptr: As for the constructor.
        """
        if self._event is not None:
            _stream(stream_ptr).wait_event(self._event)

    def synchronize(self) -> None:
        """Block until the recorded work is complete."""
        if self._event is not None:
            self._event.synchronize()


def calculate_elastic_buffer_size(*arguments: Any, **options: Any) -> int:  # noqa: ARG001
    """Refuse: `ElasticBuffer` needs kernels for GPUs."""
    raise NotSupportedError(
        "calculate_elastic_buffer_size is for ElasticBuffer, which this build does not have: use "
        "mooncake.mooncake_ep_buffer.Buffer"
    )


def _stream(stream_ptr: int) -> torch.cuda.Stream:
    if stream_ptr == 0:
        return torch.cuda.current_stream()
    return torch.cuda.ExternalStream(stream_ptr)
