"""Handles on tasks and drains, whose calls are coroutines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from mooncake._api.native_calls import AsyncNative, async_pause
from mooncake._api.tasks import (
    DrainInfo,
    Handle,
    JobId,
    PollSchedule,
    TaskInfo,
    drain_info,
    final_drain,
    final_task,
    task_info,
)

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["AsyncDrain", "AsyncTask"]

I = TypeVar("I", TaskInfo, DrainInfo)  # noqa: E741


class AsyncJob(Handle):
    """A handle that asks the master through a native store."""

    __slots__ = ("_native",)

    def __init__(self, native: AsyncNative, job_id: JobId) -> None:
        """Make a handle on a task or a drain; stores call this.

        Args:
            native: The native store.
            job_id: Id of the task or drain.

        Raises:
            TypeError: The id is not a tuple of two integers.
        """
        super().__init__(job_id)
        self._native = native


class AsyncTask(AsyncJob):
    """A copy or a move of an object that a client carries out in the background.

    A caller that stops waiting does not stop the task.
    """

    __slots__ = ()

    async def info(self) -> TaskInfo:
        """Return the current state.

        Raises:
            NotFoundError: The master does not know the id, or no longer.
        """
        return task_info(await self._native.task(self.id))

    async def wait(self, timeout_s: float | None = None) -> TaskInfo:
        """Wait until the task has ended.

        Args:
            timeout_s: Longest wait in seconds; None waits without limit.

        Raises:
            TransferFailedError: The task failed; the message says why.
            DeadlineError: The task has not ended within `timeout_s`. It continues.
            NotFoundError: The master does not know the id, or no longer.
        """
        return final_task(await poll_until_over(self.info, PollSchedule(timeout_s, None)))


class AsyncDrain(AsyncJob):
    """Segments that are being emptied: their objects are moved to other segments.

    ``async with`` waits for the end of the drain, and cancels it if the block failed.
    """

    __slots__ = ()

    async def info(self) -> DrainInfo:
        """Return the current state.

        Raises:
            NotFoundError: The master does not know the id, or no longer.
        """
        return drain_info(await self._native.drain_info(self.id))

    async def wait(
        self,
        timeout_s: float | None = None,
        *,
        progress: Callable[[DrainInfo], object] | None = None,
    ) -> DrainInfo:
        """Wait until the segments are empty, or the drain was cancelled.

        Args:
            timeout_s: Longest wait in seconds; None waits without limit.
            progress: Called with the state of the drain, now and after each change.

        Raises:
            TransferFailedError: A copy could not be moved; the message has the counts.
            DeadlineError: The drain has not ended within `timeout_s`. It continues.
            NotFoundError: The master does not know the id, or no longer.
        """
        return final_drain(await poll_until_over(self.info, PollSchedule(timeout_s, progress)))

    async def cancel(self) -> DrainInfo:
        """Cancel the drain: no more copies leave the segments, and they accept objects again.

        Raises:
            NotFoundError: The master does not know the id, or no longer.
            InvalidArgumentError: The drain has ended.
        """
        return drain_info(await self._native.cancel_drain(self.id))

    async def __aenter__(self) -> Self:
        """Return the drain."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Literal[False]:
        """Wait for the end of the drain, or cancel it if the block failed."""
        if error is None:
            await self.wait()
        elif not (await self.info()).is_over:
            await self.cancel()
        return False


async def poll_until_over(query: Callable[[], Awaitable[I]], schedule: PollSchedule[I]) -> I:
    """Query until the operation has ended."""
    while (pause_s := schedule.next_pause_s(info := await query())) is not None:
        await async_pause(pause_s)
    return info
