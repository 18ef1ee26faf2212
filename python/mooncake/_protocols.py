"""Names of transport protocols in settings."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

__all__ = ["PROTOCOLS", "unknown_protocol"]

PROTOCOLS: Final = frozenset(
    {
        *("tcp", "rdma", "efa", "nvmeof", "nvlink", "musa", "nvlink_intra", "hip", "barex"),
        *("cxl", "ascend", "ub", "ubshmem", "maca", "sunrise_link", "rpc_only"),
    }
)
"""Those that settings may name, of which this package has its own choice for each transfer."""

_SIMILARITY_MIN = 0.6


def unknown_protocol(name: str) -> str:
    """Return what is wrong with the name of a protocol; "" if it is known."""
    if name.strip().lower() in PROTOCOLS:
        return ""
    similar = get_close_matches(name.lower(), sorted(PROTOCOLS), 1, _SIMILARITY_MIN)
    end = f"; did you mean {similar[0]!r}?" if similar else "; use tcp or rdma"
    return f"no protocol has the name {name!r}{end}"
