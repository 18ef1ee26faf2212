"""Upstream's `ElasticBuffer` for GPUs: its names; it refuses to be made."""

from __future__ import annotations

import functools
from typing import Any

from ._refusals import refused
from .mooncake_ep_buffer import EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventOverlap"]

_refused = functools.partial(refused, "ElasticBuffer")


class ElasticBuffer:
    """Would exchange tokens between GPUs; refuses to be made, and all its calls refuse."""

    def __init__(self, group: Any, num_bytes: int | None = None, **options: Any) -> None:  # noqa: ARG002
        _refused("__init__")()

    get_buffer_size_hint = staticmethod(_refused("get_buffer_size_hint"))
    get_engram_storage_size_hint = staticmethod(_refused("get_engram_storage_size_hint"))
    get_pp_buffer_size_hint = staticmethod(_refused("get_pp_buffer_size_hint"))
    get_agrs_buffer_size_hint = staticmethod(_refused("get_agrs_buffer_size_hint"))
    capture = staticmethod(_refused("capture"))
    calculate_buffer_size = staticmethod(_refused("calculate_buffer_size"))
    barrier = _refused("barrier")
    combine = _refused("combine")
    destroy = _refused("destroy")
    dispatch = _refused("dispatch")
    get_gid = _refused("get_gid")
    get_ipc_handle = _refused("get_ipc_handle")
    get_local_lids = _refused("get_local_lids")
    get_local_qpns = _refused("get_local_qpns")
    get_logical_domain_size = _refused("get_logical_domain_size")
    get_mr_info = _refused("get_mr_info")
    get_physical_domain_size = _refused("get_physical_domain_size")
    get_theoretical_num_sms = _refused("get_theoretical_num_sms")
    ibgda_disabled = _refused("ibgda_disabled")
    is_roce = _refused("is_roce")
    sync_ibgda_peers = _refused("sync_ibgda_peers")
    sync_nvlink_ipc_handles = _refused("sync_nvlink_ipc_handles")
    update_ep_member = _refused("update_ep_member")
    update_local_qpns = _refused("update_local_qpns")
    use_fast_path = _refused("use_fast_path")


class EPHandle:
    """Would describe a round of `ElasticBuffer`; refuses to be made."""

    __init__ = refused("EPHandle", "__init__")
