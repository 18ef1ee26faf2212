"""Upstream's calls for tensors, one module for each kind of call."""

from __future__ import annotations

from mooncake.store.tensors.batch import BatchTensorCalls
from mooncake.store.tensors.into import TensorBufferCalls
from mooncake.store.tensors.parallelism import ParallelTensorCalls
from mooncake.store.tensors.plain import PlainTensorCalls
from mooncake.store.tensors.safetensors import SafetensorsCalls
from mooncake.store.tensors.tensor_parallel import TensorParallelCalls

__all__ = ["TensorCalls"]


class TensorCalls(
    PlainTensorCalls,
    BatchTensorCalls,
    TensorBufferCalls,
    TensorParallelCalls,
    ParallelTensorCalls,
    SafetensorsCalls,
):
    """Puts and gets of torch tensors."""

    __slots__ = ()
