"""Works: what torch waits for. A work keeps the memory of its operation alive until it is done."""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from weakref import WeakMethod

    from .memory import HostMemory

__all__ = ["CombinedWork", "MooncakeWork", "PendingWorks"]

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_Work: Any = torch._C._distributed_c10d.Work


class MooncakeWork(_Work):  # type: ignore[misc]
    """One operation that was begun.

    `wait` returns when the operation is done, also if a rank was lost: the lost ranks are in
    `failed_ranks`. It raises if the operation cannot be done at all, or if its time is up.
    """

    def __init__(
        self,
        completion: Any,
        memory: Sequence[HostMemory],
        sources: Sequence[HostMemory],
        results: list[torch.Tensor],
        timeout_s: float,
        pending: PendingWorks,
    ) -> None:
        super().__init__()
        self._completion = completion
        self._memory = memory
        self._sources = sources
        self._results = results
        self._timeout_s = timeout_s
        self._pending = pending
        self.max_group_size = pending.max_group_size
        self._lock = threading.Lock()
        self._is_stored = False
        self._future: Any = None
        pending.keep(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Waits until the operation is done and its results are in the tensors.

        Raises:
            DistBackendError: The operation failed as a whole, or its time is up.
        """
        limit_s = _seconds(timeout) or self._timeout_s
        if not self._completion.wait(limit_s):
            raise dist.DistBackendError(
                f"the operation is not done after {limit_s:g} s: another rank has not called it; "
                "allow more time by the timeout of init_process_group"
            )
        self._store()
        error = self._completion.error()
        if error is not None:
            raise dist.DistBackendError(str(error)) from error
        return True

    def synchronize(self) -> None:
        """Does what `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether the operation is done."""
        if not self._completion.done():
            return False
        self._store()
        return True

    def is_success(self) -> bool:
        """Returns whether the operation is done and did not fail as a whole."""
        return self.is_completed() and self._completion.error() is None

    def exception(self) -> BaseException | None:
        """Returns the error of an operation that failed as a whole."""
        error: BaseException | None = self._completion.error() if self.is_completed() else None
        return error

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the operation wrote."""
        return self._results

    def source_rank(self) -> int:
        """Returns the in-group rank that a receive from any rank got its message from."""
        source = self._completion.source()
        return -1 if source is None else int(source)

    def _source_rank(self) -> int:
        return self.source_rank()

    def failed_ranks(self) -> list[int]:
        """Returns the in-group ranks that this rank saw fail in the operation."""
        return list(self._completion.failed_ranks())

    def get_future(self) -> Any:
        """Returns a future whose value is the list of the tensors."""
        with self._lock:
            if self._future is None:
                devices = sorted({t.device for t in self._results if t.is_cuda}, key=str)
                self._future = torch.futures.Future(devices=devices)
                is_new = True
            else:
                is_new = False
        if is_new:
            # Called at once if the operation is done, otherwise by a native thread.
            self._completion.add_done_callback(self._complete_future)
        return self._future

    def get_future_result(self) -> Any:
        """Does what `get_future` does."""
        return self.get_future()

    def _complete_future(self) -> None:
        """Gives the future its value. No lock is held: its callbacks run in here."""
        try:
            self._store()
        except RuntimeError as failure:
            self._future.set_exception(failure)
            return
        error = self._completion.error()
        if error is None:
            self._future.set_result(self._results)
        else:
            self._future.set_exception(dist.DistBackendError(str(error)))

    def _store(self) -> None:
        """Copies results into tensors that are not their own host memory, once."""
        if self._is_stored:
            return
        with self._lock:
            if not self._is_stored:
                if self._completion.error() is None:
                    for memory in self._memory:
                        memory.store()
                if self._pending.on_loss is not None and self.failed_ranks():
                    refresh = self._pending.on_loss()
                    if refresh is not None:
                        refresh()
                self._is_stored = True

    def __del__(self) -> None:
        # The tensors of a work that nobody holds must live until the operation is done.
        if not self._is_stored:
            self._pending.adopt(self._completion, self._memory, self._sources)


class CombinedWork(_Work):  # type: ignore[misc]
    """Several operations that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)
        self._future: Any = None
        self.max_group_size = self._works[0].max_group_size if self._works else 0
        if self._works:
            self._works[0]._pending.keep(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Waits for each operation."""
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        """Does what `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether each operation is done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Returns whether each operation is done and none failed as a whole."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Returns the first error."""
        return next((e for e in (work.exception() for work in self._works) if e), None)

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the operations wrote."""
        return [tensor for work in self._works for tensor in work.result()]

    def failed_ranks(self) -> list[int]:
        """Returns the in-group ranks that this rank saw fail in one of the operations."""
        return sorted({rank for work in self._works for rank in work.failed_ranks()})

    def get_future(self) -> Any:
        """Returns a future whose value is the list of all tensors."""
        if self._future is None:
            together = torch.futures.collect_all([work.get_future() for work in self._works])

            def tensors(done: Any) -> list[torch.Tensor]:
                return [tensor for future in done.value() for tensor in future.value()]

            self._future = together.then(tensors)
        return self._future


class PendingWorks:
    """Memory of operations that nobody waits for, and works that old versions of torch forget."""

    def __init__(self, max_group_size: int) -> None:
        self.max_group_size = max_group_size
        # Called when a work ends that has lost a rank.
        self.on_loss: WeakMethod[Callable[[], None]] | None = None
        self._orphans: deque[tuple[Any, Sequence[HostMemory], Sequence[HostMemory]]] = deque()
        # Before 2.7, C++ drops the Python half of a work that it was handed, and then waits for
        # ever in the base class.
        self._recent: deque[Any] | None = deque(maxlen=256) if _TORCH < (2, 7) else None

    def keep(self, work: Any) -> None:
        """Holds a new work where torch would forget it, and frees memory that is not in use."""
        if self._recent is not None:
            self._recent.append(work)
        if self._orphans:
            self._free_done()

    def adopt(
        self, completion: Any, memory: Sequence[HostMemory], sources: Sequence[HostMemory]
    ) -> None:
        """Holds the memory of an operation whose work is gone until it is done."""
        self._orphans.append((completion, memory, sources))

    def _free_done(self) -> None:
        for _ in range(len(self._orphans)):
            completion, memory, sources = self._orphans.popleft()
            if not completion.done():
                self._orphans.append((completion, memory, sources))
            elif completion.error() is None:
                for part in memory:
                    part.store()


def _seconds(timeout: timedelta | float | None) -> float:
    """Returns a time-out in seconds; 0 stands for none, as torch passes it."""
    if timeout is None:
        return 0.0
    if isinstance(timeout, timedelta):
        return max(timeout.total_seconds(), 0.0)
    return max(float(timeout), 0.0)
