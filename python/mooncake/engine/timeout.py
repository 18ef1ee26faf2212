"""The longest time that a transfer takes, from ``MC_TRANSFER_TIMEOUT``."""

from __future__ import annotations

import logging
import math

from mooncake._runtime import _native

__all__ = ["transfer_timeout_s"]

_TIMEOUT_S_MIN = 5.0
_TIMEOUT_S_DEFAULT = 30.0

_log = logging.getLogger("mooncake.engine")


def transfer_timeout_s() -> float:
    """Return the time in seconds."""
    for name, _, _, _, value in _native.environment():
        if name == "MC_TRANSFER_TIMEOUT" and value is not None and value.strip():
            try:
                timeout_s = float(value)
            except ValueError:
                timeout_s = math.nan
            if math.isfinite(timeout_s):
                return max(_TIMEOUT_S_MIN, timeout_s)
            _log.warning("%s=%r is not a number of seconds and is ignored", name, value)
    return _TIMEOUT_S_DEFAULT
