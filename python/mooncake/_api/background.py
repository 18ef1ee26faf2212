"""Calls that are repeated in the background: by a thread, or by a task of an event loop."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable

from mooncake._hints import asyncio

__all__ = ["AsyncRepeater", "Repeater"]


class Repeater:
    """Repeats a call in a thread until the call returns false, or `stop`."""

    __slots__ = ("_call", "_every_s", "_is_stopped", "_name", "_thread")

    def __init__(self, call: Callable[[], bool], every_s: float, name: str) -> None:
        """Prepare a thread of that name."""
        self._call = call
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
        """Stop the thread and wait for its end."""
        thread, self._thread = self._thread, None
        self._is_stopped.set()
        if thread is not None:
            thread.join()

    def _run(self, is_stopped: threading.Event) -> None:
        while not is_stopped.wait(self._every_s) and self._call():
            pass


class AsyncRepeater:
    """Repeats a coroutine in a task until it returns false, or `stop`."""

    __slots__ = ("_call", "_every_s", "_name", "_task")

    def __init__(self, call: Callable[[], Awaitable[bool]], every_s: float, name: str) -> None:
        """Prepare a task of that name."""
        self._call = call
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
        await asyncio.sleep(self._every_s)
        while await self._call():
            await asyncio.sleep(self._every_s)
