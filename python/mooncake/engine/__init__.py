"""The established names: a transfer engine whose calls return numbers instead of raising.

Not built yet, and therefore absent: `SharedSegment` and the RPC helper.
"""

from __future__ import annotations

from mooncake.engine.transfer import TransferEngine
from mooncake.engine.types import InnerTransferEngine, TransferNotify, TransferOpcode

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "InnerTransferEngine",
    "Read",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
]

Read = TransferOpcode.Read
Write = TransferOpcode.Write

SUPPORT_CUDA = False
SUPPORT_EFA = False
SUPPORT_HIP = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
