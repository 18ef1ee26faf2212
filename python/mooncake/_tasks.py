"""What the master lets clients do with copies: tasks that copy or move one object, and drains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from mooncake._runtime import _native

if TYPE_CHECKING:
    from typing import Self

__all__ = ["CopyInfo", "Drain", "DrainInfo", "JobId", "Task", "TaskInfo", "wait_for"]

JobId: TypeAlias = tuple[int, int]
"""The name of a task or a drain, which other processes know it by as well."""

I = TypeVar("I", "TaskInfo", "DrainInfo")  # noqa: E741

_TRANSFER_FAIL = -800
_TIMEOUT = -901
_PAUSE_MIN_S = 0.005
_PAUSE_MAX_S = 0.25


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """A copy of an object.

    Attributes:
        segment: The name of the segment that it lies in.
        segment_id: The id of that segment.
        endpoint: Where the owner of the segment answers.
        size: How many bytes.
    """

    segment: str
    segment_id: str
    endpoint: str
    size: int


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """How a task stands.

    Attributes:
        id: Its id.
        kind: What it does.
        state: Where it stands.
        created: When it was asked for, to within some milliseconds; not compared.
        updated: When it last changed, likewise.
        message: In words, above all why it failed.
    """

    id: JobId
    kind: Literal["copy", "move"]
    state: Literal["pending", "processing", "failed", "success"]
    created: datetime = field(compare=False)
    updated: datetime = field(compare=False)
    message: str

    @property
    def is_over(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ("failed", "success")


@dataclass(frozen=True, slots=True)
class DrainInfo:
    """How a drain stands.

    Attributes:
        id: Its id.
        state: Where it stands.
        segments: The names of the segments that are emptied.
        succeeded: How many copies have left them.
        failed: How many could not.
        blocked: How many something held up when they were last looked at.
        active: How many are being moved.
        moved_bytes: How many bytes have left.
        created: When it was asked for, to within some milliseconds; not compared.
        updated: When it last changed, likewise.
        message: In words, above all why it failed.
    """

    id: JobId
    state: Literal["created", "planning", "running", "succeeded", "failed", "canceled"]
    segments: list[str]
    succeeded: int
    failed: int
    blocked: int
    active: int
    moved_bytes: int
    created: datetime = field(compare=False)
    updated: datetime = field(compare=False)
    message: str

    @property
    def is_over(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ("succeeded", "failed", "canceled")


class _Handle:
    """What the master works at, known by its id; other processes know it by the same."""

    __slots__ = ("_native", "id")

    def __init__(self, native: _native.Store, job_id: JobId) -> None:
        """Name a task or a drain of a pool; stores make these.

        Args:
            native: A handle on the pool.
            job_id: Its id.

        Raises:
            TypeError: That is no id: two integers.
        """
        is_pair = isinstance(job_id, tuple) and len(job_id) == 2
        if not is_pair or not all(isinstance(half, int) for half in job_id):
            raise TypeError(f"an id is a tuple of two integers, not {job_id!r}")
        self._native = native
        self.id = job_id

    def __eq__(self, other: object) -> bool:
        """Whether both are the same."""
        return isinstance(other, type(self)) and self.id == other.id

    def __hash__(self) -> int:
        """Hash the id."""
        return hash(self.id)

    def __repr__(self) -> str:
        """Name it as the master's log does."""
        return f"<mooncake.{type(self).__name__} {self.id[0]}-{self.id[1]}>"


class Task(_Handle):
    """A copy or a move that some client carries out, a moment after it was asked for."""

    __slots__ = ()

    def info(self) -> TaskInfo:
        """Say how it stands.

        Raises:
            NotFoundError: The master does not know it, or not any more.
        """
        told = self._native.task(self.id)
        return TaskInfo(
            id=told["id"],
            kind=told["kind"],
            state=told["status"],
            created=_moment(told["created_at_ms"]),
            updated=_moment(told["updated_at_ms"]),
            message=told["message"],
        )

    def wait(self, timeout_s: float | None = None) -> TaskInfo:
        """Wait until it is done.

        Args:
            timeout_s: For so long; None waits as long as it takes.

        Raises:
            TransferFailedError: It failed; the message says why.
            DeadlineError: It is not over after `timeout_s`. It goes on all the same.
            NotFoundError: The master does not know it, or not any more.
        """
        info = wait_for(self.info, timeout_s, None)
        if info.state == "failed":
            raise _native.failure(_TRANSFER_FAIL, f"the {info.kind} failed: {info.message}")
        return info


class Drain(_Handle):
    """Segments that are being emptied: what lies in them is moved elsewhere."""

    __slots__ = ()

    def info(self) -> DrainInfo:
        """Say how it stands.

        Raises:
            NotFoundError: The master does not know it, or not any more.
        """
        return _drain_info(self._native.drain_info(self.id))

    def wait(
        self,
        timeout_s: float | None = None,
        *,
        progress: Callable[[DrainInfo], object] | None = None,
    ) -> DrainInfo:
        """Wait until the segments are empty, or the drain was cancelled.

        Args:
            timeout_s: For so long; None waits as long as it takes.
            progress: Told how the drain stands, now and whenever that has changed.

        Raises:
            TransferFailedError: Something could not be moved; the message says more.
            DeadlineError: It is not over after `timeout_s`. It goes on all the same.
            NotFoundError: The master does not know it, or not any more.
        """
        info = wait_for(self.info, timeout_s, progress)
        if info.state == "failed":
            text = f"the drain failed: {info.message} failed={info.failed} blocked={info.blocked}"
            raise _native.failure(_TRANSFER_FAIL, text)
        return info

    def cancel(self) -> DrainInfo:
        """End it: nothing more leaves its segments, and they take objects again.

        Raises:
            NotFoundError: The master does not know it, or not any more.
            InvalidArgumentError: It is over.
        """
        return _drain_info(self._native.cancel_drain(self.id))

    def __enter__(self) -> Self:
        """Return the drain."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for the end of it, or cancel it if the block failed."""
        if error is None:
            self.wait()
        elif not self.info().is_over:
            self.cancel()


def _drain_info(told: dict[str, Any]) -> DrainInfo:
    return DrainInfo(
        id=told["id"],
        state=told["status"],
        segments=list(told["segments"]),
        succeeded=told["succeeded"],
        failed=told["failed"],
        blocked=told["blocked"],
        active=told["active"],
        moved_bytes=told["moved_bytes"],
        created=_moment(told["created_at_ms"]),
        updated=_moment(told["updated_at_ms"]),
        message=told["message"],
    )


def _moment(millis: int) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)


def wait_for(
    look: Callable[[], I], timeout_s: float | None, progress: Callable[[I], object] | None
) -> I:
    """Look until it is over: soon at first, then less and less often.

    Args:
        look: Says how it stands.
        timeout_s: For so long; None looks as long as it takes.
        progress: Told what was seen, whenever that is news.

    Raises:
        DeadlineError: It is not over after `timeout_s`.
    """
    until = None if timeout_s is None else time.monotonic() + timeout_s
    pause = _PAUSE_MIN_S
    before: I | None = None
    while True:
        info = look()
        if progress is not None and info != before:
            progress(info)
        if info.is_over:
            return info
        before = info
        left = pause if until is None else until - time.monotonic()
        if left <= 0:
            raise _native.failure(_TIMEOUT, f"it is still {info.state} after timeout_s={timeout_s}")
        time.sleep(min(pause, left))
        pause = min(pause * 2, _PAUSE_MAX_S)
