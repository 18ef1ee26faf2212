"""`mooncake.ep`: `Buffer`, the names of `mooncake._ep` and those of `mooncake.pg`."""

from __future__ import annotations

from ._ep import (
    MAX_QP_COUNT as MAX_QP_COUNT,
    Buffer as Buffer,
    ElasticBuffer as ElasticBuffer,
    EventHandle as EventHandle,
    calculate_elastic_buffer_size as calculate_elastic_buffer_size,
    get_ep_buffer_size_hint as get_ep_buffer_size_hint,
)
from .mooncake_ep_buffer import EventOverlap as EventOverlap
from .pg import *  # noqa: F403 - callers use either module for each name
from .pg import __all__ as _pg_names

__all__ = [
    "MAX_QP_COUNT",
    *sorted([*_pg_names, "Buffer", "ElasticBuffer", "EventHandle", "EventOverlap"]),
]
