"""The engine over whose RDMA devices ranks of other hosts read memory of this process."""

from __future__ import annotations

import logging

from mooncake._runtime import _native
from mooncake.engine.types import shared_engine

from .settings import process_settings

__all__ = ["engine_with_devices"]

_log = logging.getLogger("mooncake.pg")


def engine_with_devices(host: str) -> _native.Engine | None:
    """Return the engine of `set_transfer_engine`, or a new one if this machine has RDMA devices.

    Without devices the result is None: ranks send bytes over their own connections.
    """
    if process_settings.engine is not None:
        return shared_engine(process_settings.engine.get_engine())
    devices, _ = _native.rdma_devices()
    if all(device.chosen is None for device in devices):
        return None
    wanted = ",".join(process_settings.device_filter or ())
    engine = _native.Engine.start(name=host, metadata="P2PHANDSHAKE", rdma_devices=wanted)
    _log.debug("process groups use RDMA devices: segment=%s", engine.segment)
    return engine
