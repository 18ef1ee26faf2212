"""`TransferEngine` as a context manager, and how it is shown."""

from __future__ import annotations

from types import TracebackType
from typing import Literal, Self, TypeAlias

from mooncake._runtime import _native

__all__ = ["EngineLifetime"]

_Engine: TypeAlias = _native.Engine


class EngineLifetime:
    """The methods of `TransferEngine` that begin and end its use."""

    __slots__ = ("_native",)

    _native: _Engine | None

    def __enter__(self) -> Self:
        """Return the engine; the end of the block releases it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        """Release the engine. It closes with the last store that uses it."""
        self._native = None
        return False

    def __repr__(self) -> str:
        """Show the port that peers use."""
        native = self._native
        state = "not initialized" if native is None else f"port={native.rpc_port}"
        return f"<mooncake.engine.TransferEngine {state}>"
