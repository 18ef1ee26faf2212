"""What a removal of an object has come to, and how long a lease on it lasts."""

from __future__ import annotations

import time

from mooncake._api.types import Key
from mooncake._runtime import _native
from mooncake.errors import AlreadyExistsError, MooncakeError, VersionDiffersError

__all__ = ["LeaseWait", "removal_outcome"]

_RPC_TIMEOUT = -901
_LIMIT_S = 60.0
_MARGIN_S = 0.001
"""The master tells whole milliseconds, rounded down."""


def removal_outcome(outcome: bool | MooncakeError) -> bool | MooncakeError:
    """Return the outcome; a removal finds an object in its way only if the version differs."""
    return VersionDiffersError.of(outcome) if isinstance(outcome, AlreadyExistsError) else outcome


class LeaseWait:
    """Decides how long a removal waits for the lease that the master names."""

    __slots__ = ("_key", "_until")

    def __init__(self, key: Key, timeout_s: float | None) -> None:
        """Begin to wait.

        Args:
            key: Key of the object.
            timeout_s: Longest time to wait; None: a minute.
        """
        self._key = key
        self._until = time.monotonic() + (_LIMIT_S if timeout_s is None else timeout_s)

    def pause_s(self, outcome: bool | MooncakeError) -> float | None:
        """Return the time until the lease ends; None if no lease is in the way.

        Raises:
            DeadlineError: The lease lasts longer than the wait may.
        """
        if not isinstance(outcome, MooncakeError) or "lease_left_ms" not in outcome.context:
            return None
        lease_s = int(outcome.context["lease_left_ms"]) / 1000 + _MARGIN_S
        if time.monotonic() + lease_s > self._until:
            raise _native.failure(
                _RPC_TIMEOUT,
                "the lease on the object lasts longer than the wait",
                key=self._key,
                context={"lease_left_ms": outcome.context["lease_left_ms"]},
                remedy="Allow more time, or remove it with force=True.",
            ) from outcome
        return lease_s
