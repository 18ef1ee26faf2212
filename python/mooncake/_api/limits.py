"""Limits of the duration of methods that make several native calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mooncake._api.native_calls import AsyncNative
    from mooncake._runtime import _native

__all__ = ["limited"]

N = TypeVar("N", "_native.Store", "AsyncNative")

_LEFT_MIN_S = 1e-9


def limited(native: N, timeout_s: float | None) -> Callable[[], N]:
    """Limit the sum of the durations of several native calls.

    Args:
        native: The native store.
        timeout_s: Longest duration of all calls from now; None uses the limits of the
            configuration.

    Returns:
        A function that returns the store for the next call, limited to the time that is left.
    """
    if timeout_s is None:
        return lambda: native
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real):
        kind = type(timeout_s).__name__
        raise TypeError(f"timeout_s is a number of seconds, not {kind}: {timeout_s!r:.60}")
    if not timeout_s > 0:
        # The native store says what is wrong with it.
        return lambda: native.within(timeout_s)
    until = time.monotonic() + timeout_s
    return lambda: native.within(max(until - time.monotonic(), _LEFT_MIN_S))
