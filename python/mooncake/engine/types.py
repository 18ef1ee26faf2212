"""Value types of the transfer engine."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from mooncake._runtime import _native

__all__ = [
    "InnerTransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "inner_engine",
    "shared_engine",
]

_Engine: TypeAlias = _native.Engine


class TransferOpcode(Enum):
    """Direction of a transfer. Members do not compare with numbers."""

    Read = 0
    Write = 1
    # Names in upstream's documents
    READ = 0  # noqa: PIE796
    WRITE = 1  # noqa: PIE796

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class TransferNotify:
    """A message that is sent after the bytes of a transfer."""

    __slots__ = ("_msg", "_name")

    def __init__(self, name: str = "", msg: str = "") -> None:
        """Make a message.

        Args:
            name: Name of the message.
            msg: Text of the message.

        Raises:
            TypeError: One of the arguments is not a string.
        """
        self.name = name
        self.msg = msg

    @property
    def name(self) -> str:
        """Name of the message."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = _text("name", name)

    @property
    def msg(self) -> str:
        """Text of the message."""
        return self._msg

    @msg.setter
    def msg(self, msg: str) -> None:
        self._msg = _text("msg", msg)


class InnerTransferEngine:
    """The engine behind a `TransferEngine`, for `MooncakeDistributedStore.setup(engine=…)`."""

    __slots__ = ("__weakref__", "_native")

    _native: _Engine

    def __init__(self) -> None:
        """Raise: only `TransferEngine.get_engine` makes instances."""
        raise TypeError("InnerTransferEngine has no constructor; use TransferEngine.get_engine()")


def inner_engine(native: _native.Engine) -> InnerTransferEngine:
    """Wrap a native engine."""
    inner = object.__new__(InnerTransferEngine)
    inner._native = native
    return inner


def shared_engine(engine: object) -> _native.Engine | None:
    """Unwrap the engine that a caller wants to share.

    Raises:
        RuntimeError: The argument has another type, for instance `TransferEngine`.
    """
    if engine is None:
        return None
    if isinstance(engine, InnerTransferEngine):
        return engine._native
    raise RuntimeError(
        f"Unable to cast engine from {type(engine).__name__} to InnerTransferEngine; pass what "
        "TransferEngine.get_engine() returns"
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"TransferNotify: {name} must be str, not {type(value).__name__}")
    return value
