"""Upstream's status codes that the adapter of the transfer engine returns."""

from __future__ import annotations

from typing import Final

__all__ = [
    "DONE",
    "FAILED",
    "NOT_SUPPORTED",
    "NO_BATCH",
    "NO_SEGMENT",
    "OK",
    "OVERLAP",
    "RUNNING",
    "TIMED_OUT",
    "UNKNOWN_ADDRESS",
    "UNREACHABLE",
]

OK: Final = 0
FAILED: Final = -1

# Registration
UNKNOWN_ADDRESS: Final = -3
OVERLAP: Final = -7

# Common error codes
NOT_SUPPORTED: Final = -1012

# Submission: an invalid batch number
NO_BATCH: Final = 0

# Status of a batch
RUNNING: Final = 0
DONE: Final = 1
TIMED_OUT: Final = -2

# Probes
UNREACHABLE: Final = -102
NO_SEGMENT: Final = -200
