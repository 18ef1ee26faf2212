"""How long a tensor is looked for while it is being replaced."""

from __future__ import annotations

from mooncake.errors import (
    DeadlineError,
    InvalidArgumentError,
    MooncakeError,
    NotFoundError,
    NotReadyError,
    TransferFailedError,
)
from mooncake.tensor.calls import Operation, Pause
from mooncake.tensor.search import Unsettled

__all__ = ["Retries"]

_ATTEMPTS = 8
"""Number of times that a tensor is looked for at once, if it was replaced during the read."""

_ATTEMPTS_SHORTER = 64
"""The same, if the object became shorter, which a writer in a loop can do during every second read.
An object that is damaged is read as often before that is said."""

_UNCHANGED_MAX_S = 5.0
"""Time that shards of different versions stay as they are before their writer counts as dead."""

_PAUSE_MIN_S = 0.0005
_PAUSE_MAX_S = 0.05

_REPLACED = (DeadlineError, InvalidArgumentError, NotFoundError)
"""What a read of an object fails with if the object is replaced or removed meanwhile."""


class Retries:
    """Decides which reads of a batch are repeated, and when."""

    def __init__(self) -> None:
        """Begin with the first attempt."""
        self._attempts = 0
        self._pause_s = 0.0
        self._seen: dict[int, tuple[str, float]] = {}
        self._reasons: dict[int, MooncakeError] = {}
        self._has_time = True

    def choose(self, failures: dict[int, MooncakeError | Unsettled]) -> Operation[list[int]]:
        """Wait if need be, and return which of the failed reads are repeated.

        Args:
            failures: What each read failed with, by its place in the batch.
        """
        self._attempts += 1
        for at, failure in failures.items():
            if _is_mixed(failure):
                self._reasons[at] = failure.error if isinstance(failure, Unsettled) else failure
        if not failures:
            return []
        waits = any(map(_is_mixed, failures.values()))
        self._pause_s = min(max(self._pause_s * 2, _PAUSE_MIN_S), _PAUSE_MAX_S) if waits else 0.0
        passed, self._has_time = yield Pause(self._pause_s)
        if not self._has_time:
            return []
        return [at for at, failure in failures.items() if self._goes_on(at, failure, passed)]

    def explained(self, at: int, result: object) -> object:
        """Return why a read was repeated until its time was over, or else its result."""
        is_late = isinstance(result, TransferFailedError) and not self._has_time
        if is_late or isinstance(result, DeadlineError):
            return self._reasons.get(at, result)
        return result

    def _goes_on(self, at: int, failure: MooncakeError | Unsettled, passed: float) -> bool:
        if not _is_mixed(failure) and not isinstance(failure, Unsettled):
            is_shorter = isinstance(failure, InvalidArgumentError)
            most = _ATTEMPTS_SHORTER if is_shorter else _ATTEMPTS
            return isinstance(failure, _REPLACED) and self._attempts < most
        # Missing shards are looked for again once: they may have been replaced meanwhile.
        text, since = self._seen.get(at, ("", passed))
        if text != str(failure):
            self._seen[at] = str(failure), passed
            return True
        return _is_mixed(failure) and passed - since < _UNCHANGED_MAX_S


def _is_mixed(failure: MooncakeError | Unsettled) -> bool:
    if isinstance(failure, Unsettled):
        return failure.is_mixed
    return isinstance(failure, NotReadyError)
