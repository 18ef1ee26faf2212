"""Upstream's `ElasticBuffer` for GPUs: its names; it refuses to be made."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import NotSupportedError

__all__ = ["EPHandle", "ElasticBuffer"]

_REASON = (
    "ElasticBuffer runs on kernels for GPUs, which this build does not have: use "
    "mooncake.mooncake_ep_buffer.Buffer"
)


class ElasticBuffer:
    """Would exchange tokens between GPUs; refuses to be made."""

    def __init__(self, group: Any, num_bytes: int | None = None, **options: Any) -> None:  # noqa: ARG002
        _refuse()


class EPHandle:
    """Would describe a round of `ElasticBuffer`; refuses to be made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ARG002
        _refuse()


def _refuse() -> NoReturn:
    raise NotSupportedError(_REASON)
