"""Upstream's calls of `Buffer` for direct links between GPUs, of which this build has none."""

from __future__ import annotations

import functools

from mooncake._refusals import refused

__all__ = ["DeviceLinks"]

_refused = functools.partial(refused, "Buffer")


class DeviceLinks:
    """Answers that no GPU is linked to another, and refuses the calls that would link them."""

    def ibgda_disabled(self) -> bool:
        """Return True: no GPU posts to an RDMA device itself."""
        return True

    def p2p_enabled(self) -> bool:
        """Return False: no GPU maps the memory of another."""
        return False

    def use_fast_path(self) -> bool:
        """Return False: tokens pass through host memory."""
        return False

    def is_roce(self) -> bool:
        """Return False: no GPU uses an RDMA device itself."""
        return False

    sync_ib = _refused("sync_ib")
    sync_roce = _refused("sync_roce")
    sync_ibgda_peers = _refused("sync_ibgda_peers")
    sync_nvlink_ipc_handles = _refused("sync_nvlink_ipc_handles")
    update_local_qpns = _refused("update_local_qpns")
    get_mr_info = _refused("get_mr_info")
    get_gid = _refused("get_gid")
    get_local_qpns = _refused("get_local_qpns")
    get_local_lids = _refused("get_local_lids")
    get_ipc_handle = _refused("get_ipc_handle")
