"""Which reads of a tensor are repeated: those that failed while it was being replaced.

A search says in which versions it saw the stored objects. If two searches in succession saw the
same, nothing was replaced between them, and the failure of the first is not due to a writer.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.errors import (
    DeadlineError,
    InvalidArgumentError,
    MooncakeError,
    NotFoundError,
    NotReadyError,
    TransferFailedError,
)
from mooncake.tensor.calls import Operation, Pause
from mooncake.tensor.search import State, Unsettled
from mooncake.tensor.transfer import replaced

__all__ = ["Failure", "Retries"]

_AT_ONCE_MAX = 8
"""Number of attempts without a pause, while the tensor is replaced during each of them."""

_SAME_MAX = 8
"""Number of attempts if the same version is found each time and the read of it is too late."""

_UNCHANGED_MAX_S = 5.0
"""Time that shards of different versions stay as they are before their writer counts as dead."""

_PAUSE_MIN_S = 0.0005
_PAUSE_MAX_S = 0.05

_REPLACED = (DeadlineError, InvalidArgumentError, NotFoundError, NotReadyError)
"""What a read of an object fails with if the object is replaced or removed meanwhile."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt has failed.

    Attributes:
        error: The failure.
        state: What the search of the attempt saw; empty without a search.
        is_mixed: The objects are of different versions of the tensor.
    """

    error: MooncakeError
    state: State
    is_mixed: bool

    @classmethod
    def of_search(cls, unsettled: Unsettled) -> Failure:
        """Return the failure of a search."""
        return cls(unsettled.error, unsettled.state, unsettled.is_mixed)

    @classmethod
    def of_read(cls, error: MooncakeError, state: State = ()) -> Failure:
        """Return the failure of a read of what a search has found."""
        return cls(error, state, isinstance(error, NotReadyError))


class Retries:
    """Decides which reads of a batch are repeated, and when."""

    def __init__(self) -> None:
        """Begin with the first attempt."""
        self._attempts = 0
        self._pause_s = 0.0
        self._seen: dict[int, tuple[State, float]] = {}
        self._reasons: dict[int, MooncakeError] = {}
        self._open: set[int] = set()
        self._has_time = True

    def choose(self, failures: dict[int, Failure]) -> Operation[list[int]]:
        """Wait if need be, and return which of the failed reads are repeated.

        Args:
            failures: Why each failed, by its place in the batch.
        """
        self._open = set()
        if not failures:
            if self._reasons:
                # The last attempt may have been cut: the clock says whether its failures mean that.
                _, self._has_time = yield Pause(0.0)
            return []
        self._attempts += 1
        waits = self._attempts > _AT_ONCE_MAX or any(each.is_mixed for each in failures.values())
        self._pause_s = min(max(self._pause_s * 2, _PAUSE_MIN_S), _PAUSE_MAX_S) if waits else 0.0
        passed, self._has_time = yield Pause(self._pause_s)
        repeated = [at for at, failure in failures.items() if self._goes_on(at, failure, passed)]
        for at in repeated:
            reason = _reason(failures[at])
            # An attempt that was cut says less than one before it.
            if not isinstance(reason, DeadlineError) or at not in self._reasons:
                self._reasons[at] = reason
        self._open = set(repeated)
        return repeated if self._has_time else []

    def explained(self, at: int, result: object) -> object:
        """Return why a read was repeated until its time was over, or else its result."""
        is_late = isinstance(result, TransferFailedError) and not self._has_time
        if at in self._open or is_late or isinstance(result, DeadlineError):
            return self._reasons.get(at, result)
        return result

    def _goes_on(self, at: int, failure: Failure, passed: float) -> bool:
        """Return whether the failure may be due to a writer.

        Args:
            at: Place of the read.
            failure: Why it failed.
            passed: Seconds since its begin.
        """
        before, since = self._seen.get(at, ((), passed))
        if not failure.state or failure.state != before:
            self._seen[at] = failure.state, passed
            return isinstance(failure.error, _REPLACED)
        if failure.is_mixed:
            return passed - since < _UNCHANGED_MAX_S
        return isinstance(failure.error, DeadlineError) and self._attempts < _SAME_MAX


def _reason(failure: Failure) -> MooncakeError:
    """Return what to say of a read that is repeated until its time is over."""
    is_known = failure.is_mixed or isinstance(failure.error, DeadlineError)
    return failure.error if is_known else replaced(failure.error.key)
