"""`mooncake.ep`: the names of `mooncake.pg` and `Buffer`, as callers import them."""

from __future__ import annotations

from .mooncake_ep_buffer import (
    Buffer as Buffer,
    EventOverlap as EventOverlap,
)
from .pg import *  # noqa: F403 - callers use either module for each name
from .pg import __all__ as _pg_names

__all__ = sorted([*_pg_names, "Buffer", "EventOverlap"])
