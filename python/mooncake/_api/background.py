"""Calls that are repeated in the background: by a thread, or by a task of an event loop."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

from mooncake._hints import asyncio
from mooncake.errors import MooncakeError

__all__ = ["AsyncRepeater", "Repeater"]


class Repeater:
    """Repeats a call in a thread until the call returns a failure, or `stop`."""

    __slots__ = ("_call", "_every_s", "_is_stopped", "_name", "_on_failure", "_thread")

    def __init__(
        self,
        call: Callable[[], MooncakeError | None],
        on_failure: Callable[[MooncakeError], object],
        every_s: float,
        name: str,
    ) -> None:
        """Prepare a thread of that name, which passes the failure to `on_failure`."""
        self._call = call
        self._on_failure = on_failure
        self._every_s = every_s
        self._name = name
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_started(self) -> bool:
        """True after `start` and before `stop`."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, which makes the first call after one interval."""
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(self._is_stopped,), name=self._name, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread without waiting for its end: the outcome of a call no longer counts."""
        self._thread = None
        self._is_stopped.set()

    def _run(self, is_stopped: threading.Event) -> None:
        while not is_stopped.wait(self._every_s):
            failure = self._call()
            if failure is not None:
                if not is_stopped.is_set():
                    self._on_failure(failure)
                return


class AsyncRepeater:
    """Repeats a coroutine in a task until it returns a failure, or `stop`."""

    __slots__ = ("_call", "_every_s", "_name", "_on_failure", "_task")

    def __init__(
        self,
        call: Callable[[], Awaitable[MooncakeError | None]],
        on_failure: Callable[[MooncakeError], object],
        every_s: float,
        name: str,
    ) -> None:
        """Prepare a task of that name, which passes the failure to `on_failure`."""
        self._call = call
        self._on_failure = on_failure
        self._every_s = every_s
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        """True after `start` and before `stop`."""
        return self._task is not None

    def start(self) -> None:
        """Start the task, which makes the first call after one interval."""
        self._task = asyncio.create_task(self._run(), name=self._name)

    async def stop(self) -> None:
        """Cancel the task and wait for its end."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        failure = None
        while failure is None:
            await asyncio.sleep(self._every_s)
            failure = await self._call()
        self._on_failure(failure)
