"""What the master lets clients do with copies: tasks that copy or move one object, and drains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from mooncake._runtime import _native

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "CopyInfo",
    "Drain",
    "DrainInfo",
    "Handle",
    "JobId",
    "PollSchedule",
    "Task",
    "TaskInfo",
    "copies_of",
    "done_drain",
    "done_task",
    "drain_info",
    "poll_until_over",
    "task_info",
]

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


class Handle:
    """What the master works at, known by its id; other processes know it by the same."""

    __slots__ = ("id",)

    def __init__(self, job_id: JobId) -> None:
        """Name a task or a drain of a pool; stores make these.

        Args:
            job_id: Its id.

        Raises:
            TypeError: That is no id: two integers.
        """
        is_pair = isinstance(job_id, tuple) and len(job_id) == 2
        if not is_pair or not all(isinstance(half, int) for half in job_id):
            raise TypeError(f"an id is a tuple of two integers, not {job_id!r}")
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


class _NativeHandle(Handle):
    """One that asks through a handle on the pool, and waits for the answer."""

    __slots__ = ("_native",)

    def __init__(self, native: _native.Store, job_id: JobId) -> None:
        """Name a task or a drain of a pool; stores make these.

        Args:
            native: A handle on the pool.
            job_id: Its id.

        Raises:
            TypeError: That is no id: two integers.
        """
        super().__init__(job_id)
        self._native = native


class Task(_NativeHandle):
    """A copy or a move that some client carries out, a moment after it was asked for."""

    __slots__ = ()

    def info(self) -> TaskInfo:
        """Say how it stands.

        Raises:
            NotFoundError: The master does not know it, or not any more.
        """
        return task_info(self._native.task(self.id))

    def wait(self, timeout_s: float | None = None) -> TaskInfo:
        """Wait until it is done.

        Args:
            timeout_s: For so long; None waits as long as it takes.

        Raises:
            TransferFailedError: It failed; the message says why.
            DeadlineError: It is not over after `timeout_s`. It goes on all the same.
            NotFoundError: The master does not know it, or not any more.
        """
        return done_task(poll_until_over(self.info, timeout_s, None))


class Drain(_NativeHandle):
    """Segments that are being emptied: what lies in them is moved elsewhere."""

    __slots__ = ()

    def info(self) -> DrainInfo:
        """Say how it stands.

        Raises:
            NotFoundError: The master does not know it, or not any more.
        """
        return drain_info(self._native.drain_info(self.id))

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
        return done_drain(poll_until_over(self.info, timeout_s, progress))

    def cancel(self) -> DrainInfo:
        """End it: nothing more leaves its segments, and they take objects again.

        Raises:
            NotFoundError: The master does not know it, or not any more.
            InvalidArgumentError: It is over.
        """
        return drain_info(self._native.cancel_drain(self.id))

    def __enter__(self) -> Self:
        """Return the drain."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Wait for the end of it, or cancel it if the block failed."""
        if error is None:
            self.wait()
        elif not self.info().is_over:
            self.cancel()


def task_info(reply: dict[str, Any]) -> TaskInfo:
    """Return what the native call told of a task."""
    return TaskInfo(
        id=reply["id"],
        kind=reply["kind"],
        state=reply["status"],
        created=_moment(reply["created_at_ms"]),
        updated=_moment(reply["updated_at_ms"]),
        message=reply["message"],
    )


def done_task(info: TaskInfo) -> TaskInfo:
    """Return how a task ended, or raise why it failed."""
    if info.state == "failed":
        raise _native.failure(_TRANSFER_FAIL, f"the {info.kind} failed: {info.message}")
    return info


def drain_info(reply: dict[str, Any]) -> DrainInfo:
    """Return what the native call told of a drain."""
    return DrainInfo(
        id=reply["id"],
        state=reply["status"],
        segments=list(reply["segments"]),
        succeeded=reply["succeeded"],
        failed=reply["failed"],
        blocked=reply["blocked"],
        active=reply["active"],
        moved_bytes=reply["moved_bytes"],
        created=_moment(reply["created_at_ms"]),
        updated=_moment(reply["updated_at_ms"]),
        message=reply["message"],
    )


def done_drain(info: DrainInfo) -> DrainInfo:
    """Return how a drain ended, or raise why it failed."""
    if info.state == "failed":
        text = f"the drain failed: {info.message} failed={info.failed} blocked={info.blocked}"
        raise _native.failure(_TRANSFER_FAIL, text)
    return info


def copies_of(places: list[dict[str, Any]]) -> list[CopyInfo]:
    """Return what the native call told of the copies of an object."""
    return [
        CopyInfo(
            segment=place["segment"],
            segment_id=place["segment_id"],
            endpoint=place["endpoint"],
            size=place["size"],
        )
        for place in places
    ]


def _moment(millis: int) -> datetime:
    return datetime.fromtimestamp(millis / 1000, UTC)


class PollSchedule(Generic[I]):
    """What is made of each look at something that goes on: is it over, and when to look again."""

    __slots__ = ("_before", "_pause_s", "_progress", "_timeout_s", "_until")

    def __init__(self, timeout_s: float | None, progress: Callable[[I], object] | None) -> None:
        """Begin to wait.

        Args:
            timeout_s: For so long; None waits as long as it takes.
            progress: Told what was seen, whenever that is news.
        """
        self._timeout_s = timeout_s
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._progress: Callable[[I], object] | None = progress
        self._pause_s = _PAUSE_MIN_S
        self._before: I | None = None

    def next_pause_s(self, info: I) -> float | None:
        """Take note of a look; return when to look again: soon at first, then less often.

        Args:
            info: What was seen.

        Returns:
            In how many seconds; None if it is over.

        Raises:
            DeadlineError: It is not over, and the time is.
        """
        if self._progress is not None and info != self._before:
            self._progress(info)
        if info.is_over:
            return None
        self._before = info
        pause_s = self._pause_s
        left_s = pause_s if self._until is None else self._until - time.monotonic()
        if left_s <= 0:
            text = f"it is still {info.state} after timeout_s={self._timeout_s}"
            raise _native.failure(_TIMEOUT, text)
        self._pause_s = min(pause_s * 2, _PAUSE_MAX_S)
        return min(pause_s, left_s)


def poll_until_over(
    query: Callable[[], I], timeout_s: float | None, progress: Callable[[I], object] | None
) -> I:
    """Look until it is over.

    Args:
        query: Says how it stands.
        timeout_s: For so long; None looks as long as it takes.
        progress: Told what was seen, whenever that is news.

    Raises:
        DeadlineError: It is not over after `timeout_s`.
    """
    schedule = PollSchedule(timeout_s, progress)
    while (pause_s := schedule.next_pause_s(info := query())) is not None:
        time.sleep(pause_s)
    return info
