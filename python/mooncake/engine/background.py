"""A bounded pool of daemon threads that make blocking calls for event loops.

Daemon threads do not delay the exit of the interpreter.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

# Slow to import; a caller with an event loop has imported it already.
from mooncake._hints import asyncio

__all__ = ["run_in_background"]

T = TypeVar("T")

_THREADS_MAX = 32

_Task = Callable[[], None]

_lock = threading.Lock()
_tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
_threads = 0
_idle = 0


def run_in_background(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a call in another thread; its outcome is set on a future of the loop.

    Args:
        loop: Loop of the future. The function may be called from any thread.
        call: The blocking call. It runs to its end even if the future is cancelled.
    """
    future: asyncio.Future[T] = loop.create_future()

    def set_if_pending(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def task() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (future.set_result, call())
        except BaseException as error:  # noqa: BLE001 - every exception is the future's
            outcome = (future.set_exception, error)
        try:
            loop.call_soon_threadsafe(set_if_pending, *outcome)
        except RuntimeError:
            # The loop is closed, so nothing waits for the outcome.
            return

    _submit(task)
    return future


def _submit(task: _Task) -> None:
    global _threads
    with _lock:
        is_thread_wanted = _idle <= _tasks.qsize() and _threads < _THREADS_MAX
        if is_thread_wanted:
            _threads += 1
    _tasks.put(task)
    if is_thread_wanted:
        threading.Thread(target=_work, name="mooncake-background", daemon=True).start()


def _work() -> None:
    global _idle
    while True:
        with _lock:
            _idle += 1
        task = _tasks.get()
        with _lock:
            _idle -= 1
        task()


def _reset_after_fork() -> None:
    """Reset the pool in a forked child, which has no threads; queued calls are the parent's."""
    global _lock, _tasks, _threads, _idle
    _lock, _tasks, _threads, _idle = threading.Lock(), queue.SimpleQueue(), 0, 0


os.register_at_fork(after_in_child=_reset_after_fork)
