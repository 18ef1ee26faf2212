"""The variables of the connector, read once."""

from __future__ import annotations

from dataclasses import dataclass

from mooncake._runtime import _native

__all__ = ["Settings", "settings"]

_WORKERS_MAX = 256
_PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Settings:
    """Values of the variables ``VLLM_MOONCAKE_*``.

    Attributes:
        side_channel_port: First port of the ZMQ sockets of prefill workers.
        abort_request_timeout_s: Time after which blocks that nobody asked for are freed.
        sender_workers: Threads that send blocks.
        protocol: Protocol of the transfer engine.
    """

    side_channel_port: int
    abort_request_timeout_s: int
    sender_workers: int
    protocol: str


def settings() -> Settings:
    """Return the settings of this process.

    Raises:
        ValueError: A variable is not a number, or is out of range.
    """
    values = {name: value or default for name, _, default, _, value in _native.environment()}

    def number(name: str, low: int, high: int) -> int:
        text = values[name]
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError(f"{name}={text!r}; set a number from {low} to {high}")
        return value

    return Settings(
        side_channel_port=number("VLLM_MOONCAKE_SIDE_CHANNEL_PORT", 1, _PORT_MAX),
        abort_request_timeout_s=number("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", 1, 86_400),
        sender_workers=number("VLLM_MOONCAKE_SENDER_WORKERS", 1, _WORKERS_MAX),
        protocol=values["VLLM_MOONCAKE_PROTOCOL"],
    )
