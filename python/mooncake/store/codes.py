"""Upstream's error codes that the adapter itself returns; no other module has them."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BUFFER_OVERFLOW",
    "DFS_SERVICE_UNAVAILABLE",
    "FILE_NOT_FOUND",
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "NOT_SUPPORTED",
    "NO_AVAILABLE_HANDLE",
    "OK",
    "RPC_FAIL",
    "RPC_TIMEOUT",
    "SEGMENT_NOT_FOUND",
    "UNABLE_OFFLOAD",
]

OK: Final = 0
INTERNAL_ERROR: Final = -1
BUFFER_OVERFLOW: Final = -10
SEGMENT_NOT_FOUND: Final = -101
NO_AVAILABLE_HANDLE: Final = -200
INVALID_PARAMS: Final = -600
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901
NOT_SUPPORTED: Final = -1012
FILE_NOT_FOUND: Final = -1100
UNABLE_OFFLOAD: Final = -1300
DFS_SERVICE_UNAVAILABLE: Final = -1601
