"""What goes in and out of a transfer engine besides numbers."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake._runtime import _native

__all__ = [
    "InnerTransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "inner_engine",
    "shared_engine",
]


class TransferOpcode(Enum):
    """Which way the bytes go. It does not compare with numbers."""

    Read = 0
    Write = 1
    # The documents' names for the same.
    READ = 0  # noqa: PIE796
    WRITE = 1  # noqa: PIE796

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)


class TransferNotify:
    """A message that follows the bytes of a transfer."""

    __slots__ = ("_msg", "_name")

    def __init__(self, name: str = "", msg: str = "") -> None:
        """Make a message.

        Args:
            name: Who or what it is about.
            msg: What it says.

        Raises:
            TypeError: One of them is no text.
        """
        self.name = name
        self.msg = msg

    @property
    def name(self) -> str:
        """Who or what it is about."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = _text("name", name)

    @property
    def msg(self) -> str:
        """What it says."""
        return self._msg

    @msg.setter
    def msg(self, msg: str) -> None:
        self._msg = _text("msg", msg)


class InnerTransferEngine:
    """The engine behind a `TransferEngine`, for `MooncakeDistributedStore.setup(engine=…)`."""

    __slots__ = ("__weakref__", "_native")

    _native: _native.Engine

    def __init__(self) -> None:
        """Refuse: only `TransferEngine.get_engine` makes one."""
        raise TypeError("InnerTransferEngine has no constructor; use TransferEngine.get_engine()")


def inner_engine(native: _native.Engine) -> InnerTransferEngine:
    """Wrap a native engine."""
    inner = object.__new__(InnerTransferEngine)
    inner._native = native
    return inner


def shared_engine(engine: object) -> _native.Engine | None:
    """Unwrap what a caller gives to share its engine.

    Raises:
        RuntimeError: It is something else, for instance the `TransferEngine` itself.
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
