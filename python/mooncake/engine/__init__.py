"""Upstream's API of the transfer engine, whose calls return numbers instead of raising."""

from __future__ import annotations

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

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
