"""Tasks and drains as a task of an event loop asks about them, and waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar

from mooncake._tasks import (
    DrainInfo,
    Handle,
    JobId,
    PollSchedule,
    TaskInfo,
    done_drain,
    done_task,
    drain_info,
    task_info,
)

if TYPE_CHECKING:
    from types import TracebackType

    from mooncake._runtime import _native

__all__ = ["AsyncDrain", "AsyncTask", "Call"]

Call: TypeAlias = Callable[[Callable[["_native.Pending"], int]], Awaitable[Any]]
"""Has a native call begun, and waits for its outcome."""

I = TypeVar("I", TaskInfo, DrainInfo)  # noqa: E741


class _AsyncHandle(Handle):
    """One that asks through the loop that it is awaited in."""

    __slots__ = ("_call",)

    def __init__(self, call: Call, job_id: JobId) -> None:
        """Name a task or a drain of a pool; stores make these.

        Args:
            call: Makes the calls.
            job_id: Its id.

        Raises:
            TypeError: That is no id: two integers.
        """
        super().__init__(job_id)
        self._call = call


class AsyncTask(_AsyncHandle):
    """A copy or a move that some client carries out, a moment after it was asked for.

    Whoever stops waiting for it, by a timeout or because he was cancelled, does not stop it.
    """

    __slots__ = ()

    async def info(self) -> TaskInfo:
        """Say how it stands.

        Raises:
            NotFoundError: The master does not know it, or not any more.
        """
        return task_info(await self._call(lambda calls: calls.task(self.id)))

    async def wait(self, timeout_s: float | None = None) -> TaskInfo:
        """Wait until it is done.

        Args:
            timeout_s: For so long; None waits as long as it takes.

        Raises:
            TransferFailedError: It failed; the message says why.
            DeadlineError: It is not over after `timeout_s`. It goes on all the same.
            NotFoundError: The master does not know it, or not any more.
        """
        return done_task(await _poll_until_over(self.info, PollSchedule(timeout_s, None)))


class AsyncDrain(_AsyncHandle):
    """Segments that are being emptied: what lies in them is moved elsewhere.

    ``async with`` waits for the end of it, and cancels it if the block failed or was cancelled.
    """

    __slots__ = ()

    async def info(self) -> DrainInfo:
        """Say how it stands.

        Raises:
            NotFoundError: The master does not know it, or not any more.
        """
        return drain_info(await self._call(lambda calls: calls.drain_info(self.id)))

    async def wait(
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
        return done_drain(await _poll_until_over(self.info, PollSchedule(timeout_s, progress)))

    async def cancel(self) -> DrainInfo:
        """End it: nothing more leaves its segments, and they take objects again.

        Raises:
            NotFoundError: The master does not know it, or not any more.
            InvalidArgumentError: It is over.
        """
        return drain_info(await self._call(lambda calls: calls.cancel_drain(self.id)))

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
        """Wait for the end of it, or cancel it if the block failed."""
        if error is None:
            await self.wait()
        elif not (await self.info()).is_over:
            await self.cancel()
        return False


async def _poll_until_over(query: Callable[[], Awaitable[I]], schedule: PollSchedule[I]) -> I:
    """Look until it is over."""
    while (pause_s := schedule.next_pause_s(info := await query())) is not None:
        await asyncio.sleep(pause_s)
    return info
