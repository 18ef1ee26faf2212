"""Copies of objects, tasks and drains: what they return, and when a running one is polled."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from mooncake._runtime import _native

__all__ = [
    "CopyInfo",
    "DrainInfo",
    "Handle",
    "JobId",
    "PollSchedule",
    "TaskInfo",
    "copies_of",
    "drain_info",
    "final_drain",
    "final_task",
    "task_info",
]

JobId: TypeAlias = tuple[int, int]
"""Id of a task or a drain, valid in every process of the pool."""

I = TypeVar("I", "TaskInfo", "DrainInfo")  # noqa: E741

_TRANSFER_FAIL = -800
_TIMEOUT = -901
_PAUSE_MIN_S = 0.005
_PAUSE_MAX_S = 0.25


@dataclass(frozen=True, slots=True)
class CopyInfo:
    """A copy of an object.

    Attributes:
        segment: Name of the segment that holds the copy.
        segment_id: Id of that segment.
        endpoint: Address of the transfer engine that owns the segment.
        size: Length in bytes.
    """

    segment: str
    segment_id: str
    endpoint: str
    size: int


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """State of a task.

    Attributes:
        id: Id of the task.
        kind: Kind of the task.
        state: State of the task.
        created: Creation time, to within some milliseconds; not compared.
        updated: Time of the last change, to within some milliseconds; not compared.
        message: Explanation, above all the reason of a failure.
    """

    id: JobId
    kind: Literal["copy", "move"]
    state: Literal["pending", "processing", "failed", "success"]
    created: datetime = field(compare=False)
    updated: datetime = field(compare=False)
    message: str

    @property
    def is_over(self) -> bool:
        """True if the state is final."""
        return self.state in ("failed", "success")


@dataclass(frozen=True, slots=True)
class DrainInfo:
    """State of a drain.

    Attributes:
        id: Id of the drain.
        state: State of the drain.
        segments: Names of the segments that are being emptied.
        succeeded: Number of copies that were moved.
        failed: Number of copies that could not be moved.
        blocked: Number of copies that could not be moved yet at the last attempt.
        active: Number of copies that are being moved.
        moved_bytes: Number of bytes that were moved.
        evicted: Number of other objects that were evicted to make room for copies.
        evicted_bytes: Number of bytes of these objects.
        created: Creation time, to within some milliseconds; not compared.
        updated: Time of the last change, to within some milliseconds; not compared.
        message: Explanation, above all the reason of a failure.
    """

    id: JobId
    state: Literal["created", "planning", "running", "succeeded", "failed", "canceled"]
    segments: list[str]
    succeeded: int
    failed: int
    blocked: int
    active: int
    moved_bytes: int
    evicted: int
    evicted_bytes: int
    created: datetime = field(compare=False)
    updated: datetime = field(compare=False)
    message: str

    @property
    def is_over(self) -> bool:
        """True if the state is final."""
        return self.state in ("succeeded", "failed", "canceled")


class Handle:
    """A task or a drain at the master, known by its id in every process of the pool."""

    __slots__ = ("id",)

    def __init__(self, job_id: JobId) -> None:
        """Make a handle on a task or a drain; stores call this.

        Args:
            job_id: Id of the task or drain.

        Raises:
            TypeError: The id is not a tuple of two integers.
        """
        is_pair = isinstance(job_id, tuple) and len(job_id) == 2
        if not is_pair or not all(isinstance(half, int) for half in job_id):
            raise TypeError(f"an id is a tuple of two integers, not {job_id!r}")
        self.id = job_id

    def __eq__(self, other: object) -> bool:
        """Compare type and id."""
        return isinstance(other, type(self)) and self.id == other.id

    def __hash__(self) -> int:
        """Hash the id."""
        return hash(self.id)

    def __repr__(self) -> str:
        """Show the id as the master's log does."""
        return f"<mooncake.{type(self).__name__} {self.id[0]}-{self.id[1]}>"


def task_info(reply: dict[str, Any]) -> TaskInfo:
    """Convert the native description of a task."""
    return TaskInfo(
        id=reply["id"],
        kind=reply["kind"],
        state=reply["status"],
        created=_moment(reply["created_at_ms"]),
        updated=_moment(reply["updated_at_ms"]),
        message=reply["message"],
    )


def final_task(info: TaskInfo) -> TaskInfo:
    """Return the final state of a task, or raise its failure."""
    if info.state == "failed":
        raise _native.failure(
            _TRANSFER_FAIL,
            f"the {info.kind} failed: {info.message}",
            remedy="The object is as it was; remove the cause, and start the task again.",
        )
    return info


def drain_info(reply: dict[str, Any]) -> DrainInfo:
    """Convert the native description of a drain."""
    return DrainInfo(
        id=reply["id"],
        state=reply["status"],
        segments=list(reply["segments"]),
        succeeded=reply["succeeded"],
        failed=reply["failed"],
        blocked=reply["blocked"],
        active=reply["active"],
        moved_bytes=reply["moved_bytes"],
        evicted=reply["evicted"],
        evicted_bytes=reply["evicted_bytes"],
        created=_moment(reply["created_at_ms"]),
        updated=_moment(reply["updated_at_ms"]),
        message=reply["message"],
    )


def final_drain(info: DrainInfo) -> DrainInfo:
    """Return the final state of a drain, or raise its failure."""
    if info.state == "failed":
        raise _native.failure(
            _TRANSFER_FAIL,
            f"the drain failed: {info.message}",
            context={"failed": info.failed, "blocked": info.blocked},
            remedy="Copies that were not moved are as they were; start the drain again.",
        )
    return info


def copies_of(places: list[dict[str, Any]]) -> list[CopyInfo]:
    """Convert the native descriptions of copies."""
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
    """Back-off, deadline and progress calls for polling a running operation."""

    __slots__ = ("_before", "_pause_s", "_progress", "_timeout_s", "_until")

    def __init__(self, timeout_s: float | None, progress: Callable[[I], object] | None) -> None:
        """Start the clock of the deadline.

        Args:
            timeout_s: Longest wait in seconds; None waits without limit.
            progress: Called with each state that differs from the one before.
        """
        self._timeout_s = timeout_s
        self._until = None if timeout_s is None else time.monotonic() + timeout_s
        self._progress: Callable[[I], object] | None = progress
        self._pause_s = _PAUSE_MIN_S
        self._before: I | None = None

    def next_pause_s(self, info: I) -> float | None:
        """Record a state; return the pause before the next query, short at first and then longer.

        Args:
            info: State from the last query.

        Returns:
            Seconds to wait; None if the state is final.

        Raises:
            DeadlineError: The deadline has passed and the state is not final.
        """
        if self._progress is not None and info != self._before:
            self._progress(info)
        if info.is_over:
            return None
        self._before = info
        pause_s = self._pause_s
        left_s = pause_s if self._until is None else self._until - time.monotonic()
        if left_s <= 0:
            raise _native.failure(
                _TIMEOUT,
                f"it is still {info.state} after",
                context={"timeout_s": self._timeout_s},
                remedy="It continues; wait for it again, or ask for its state with `info`.",
            )
        self._pause_s = min(pause_s * 2, _PAUSE_MAX_S)
        return min(pause_s, left_s)
