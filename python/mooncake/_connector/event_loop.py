"""An event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["BackgroundLoop"]

T = TypeVar("T")

_STOP_S = 10.0
_log = logging.getLogger("mooncake.connector")


class BackgroundLoop:
    """Runs callbacks and coroutines that other threads hand over, until it is closed."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run a function in the loop's thread, and do not wait for it."""
        if not self._is_closed:
            self._loop.call_soon_threadsafe(function, *arguments)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task that `close` cancels. Called in the loop's thread only."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def result(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine and wait for its result.

        Raises:
            TimeoutError: There is no result in time; the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel the tasks, wait for them, and end the thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            _log.error("thread %s did not end within %d s", self._thread.name, _STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in self._tasks:
            task.cancel()
        waiting = asyncio.gather(*self._tasks, return_exceptions=True)
        self._loop.run_until_complete(waiting)
        self._loop.close()

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the connector failed", exc_info=error)
