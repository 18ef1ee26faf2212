"""Upstream's API of the transfer engine, whose calls return numbers instead of raising."""

from __future__ import annotations

from mooncake import _cuda
from mooncake.engine.rpc import (
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    create_rpc_client,
    create_rpc_server,
)
from mooncake.engine.shared import SharedSegment
from mooncake.engine.transfer import TransferEngine
from mooncake.engine.types import InnerTransferEngine, TransferNotify, TransferOpcode

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "CoroRPCInterface",
    "InnerTransferEngine",
    "Read",
    "ReceivedData",
    "ReceivedTensor",
    "RpcInterface",
    "SharedSegment",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "create_rpc_client",
    "create_rpc_server",
]

CoroRPCInterface = RpcInterface

Read = TransferOpcode.Read
Write = TransferOpcode.Write

# True where memory of CUDA devices works. Looked up when it is asked for.
SUPPORT_CUDA: bool
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False


def __getattr__(name: str) -> bool:
    if name == "SUPPORT_CUDA":
        return _cuda.is_usable()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
