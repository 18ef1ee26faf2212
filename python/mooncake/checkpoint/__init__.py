"""Checkpoints: state dicts and other trees of tensors, saved under a name and loaded as a whole.

A checkpoint is visible when all of its parts are stored, and not before. The how-to page shows its
use, and the reference what is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake.checkpoint.inventory import Checkpoint, delete, list_checkpoints, verify
from mooncake.checkpoint.loading import load
from mooncake.checkpoint.saving import save
from mooncake.checkpoint.slices import safe_open

if TYPE_CHECKING:
    from mooncake.checkpoint.distributed import Reader, Writer

list = list_checkpoints  # noqa: A001 - the name that a user of the module expects

__all__ = [
    "Checkpoint",
    "Reader",
    "Writer",
    "delete",
    "list",
    "load",
    "safe_open",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch on first use."""
    if name not in ("Reader", "Writer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mooncake.tensor.dtypes import load_torch

    load_torch()
    from mooncake.checkpoint import distributed

    return getattr(distributed, name)
