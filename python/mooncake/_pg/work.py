"""Works: what torch waits for. A work keeps the memory of its operation alive until it is done."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .memory import HostMemory, Use

if TYPE_CHECKING:
    from weakref import WeakMethod


__all__ = ["CombinedWork", "MooncakeWork", "PendingWorks"]

_TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
_Work: Any = torch._C._distributed_c10d.Work
_log = logging.getLogger("mooncake.pg")

# How long an operation waits that is behind one whose time is up.
_STALLED_GRACE_S = 1.0
# How long a message that arrives while its wait ends may take to be whole.
_ARRIVING_LIMIT_S = 10.0
# Operations of which the end is looked for, at each call.
_LOOKS = 8
# Functions of torch that make room for as many bytes as a tensor says that another rank has sent.
_OBJECT_RECEIVERS = ("broadcast_object_list", "recv_object_list")
# How many calls stand between these and the wait for that tensor.
_OBJECT_FRAMES = 8


class MooncakeWork(_Work):  # type: ignore[misc]
    """One operation that was begun.

    `wait` returns when the operation is done, also if a rank was lost: the lost ranks are in
    `failed_ranks`. It raises if the operation cannot be done at all, or if its time is up.
    """

    _is_stored = False
    # Why the results could not be stored, and whether somebody was told.
    _failure: Exception | None = None
    _is_told = False
    # Results that are copied by a stream.
    _streamed: Sequence[HostMemory] = ()
    _future: Any = None
    # Why the operation has failed, once that is known.
    _cause: Any = None
    # Its place among the operations that later ones may have to wait for.
    _number = -1
    # Gives up a message, and returns whether that was possible.
    _cancel: Callable[[Any], bool] | None = None
    # The rank whose bytes the tensor gets; negative for any.
    _sender: int | None = None

    def __init__(
        self,
        completion: Any,
        memory: Sequence[HostMemory],
        sources: Sequence[HostMemory],
        results: list[torch.Tensor],
        timeout_s: float,
        pending: PendingWorks,
        is_ordered: bool = True,
        is_awaited: bool = False,
    ) -> None:
        super().__init__()
        self._completion = completion
        self._memory = memory
        self._sources = sources
        self._results = results
        self._timeout_s = timeout_s
        self._pending = pending
        self._is_ordered = is_ordered
        self.max_group_size = pending.max_group_size
        self._lock = threading.Lock()
        if pending.collectives or pending.orphans or pending.recent is not None:
            pending.clean(self)
        # No later operation begins before one for which its caller waits at once.
        if is_ordered and not is_awaited:
            self._number = next(pending.numbers)
            pending.collectives[self._number] = self

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation is done and its results are in the tensors.

        A stream waits for results in memory of a GPU: that which is current where this is called.
        If the wait for a message is interrupted, or its time is up, the message is given up.

        Raises:
            DistBackendError: The operation failed as a whole, or its time is up.
        """
        limit_s = self._timeout_s if timeout is None else _seconds(timeout) or self._timeout_s
        if self._cancel is not None:
            self._await_message(limit_s)
        elif self._pending.stalled is not None:
            self.await_end(limit_s)
        elif not self._completion.wait(limit_s):
            raise self._late(limit_s)
        self._store()
        if self._failure is not None or self._cause is not None:
            error = self._error()
            assert error is not None
            raise error
        if self._sender is not None:
            self._check_objects(self._sender)
        for memory in self._streamed:
            memory.join()
        return True

    def _await_message(self, limit_s: float) -> None:
        """Wait until a message has arrived, or give it up.

        Raises:
            DistBackendError: Its time is up.
        """
        is_done = False
        try:
            is_done = self._completion.wait(limit_s)
        finally:
            if not is_done:
                is_done = self._has_arrived_late()
        if not is_done:
            raise self._late(limit_s)

    def _has_arrived_late(self) -> bool:
        """Give up a message; if it is arriving just now, wait for it and return True."""
        assert self._cancel is not None
        if self._cancel(self._completion):
            return False
        return bool(self._completion.wait(_ARRIVING_LIMIT_S))

    def _check_objects(self, sender: int) -> None:
        """Raise if torch would take old bytes of the tensor for the sizes of objects."""
        lost = self.failed_ranks()
        if lost and (sender < 0 or sender in lost) and _receives_objects():
            raise dist.DistBackendError(f"a rank is lost, and has sent no objects: ranks={lost}")

    def await_end(self, limit_s: float) -> None:
        """Wait until the operation is done, but not for the results.

        Raises:
            DistBackendError: Its time is up.
        """
        earlier = self._pending.stalled if self._is_ordered else None
        if earlier is not None and earlier is not self:
            if self._completion.wait(min(limit_s, _STALLED_GRACE_S)):
                return
            if not earlier._completion.done():
                raise dist.DistBackendError(
                    "an earlier operation of the group is not done in its time, and later ones "
                    "wait for it: another rank has not called it"
                )
            self._pending.stalled = None
        if not self._completion.wait(limit_s):
            raise self._late(limit_s)
        if earlier is self:
            self._pending.stalled = None

    def _late(self, limit_s: float) -> dist.DistBackendError:
        """Note that the time of the operation is up, and return the error that says so."""
        if self._is_ordered and self._pending.stalled is None:
            self._pending.stalled = self
        return dist.DistBackendError(
            f"the operation is not done after {limit_s:g} s: another rank has not called it; "
            "allow more time by the timeout of init_process_group"
        )

    def give_up(self) -> None:
        """Give up a message that is not done; leave any other operation alone."""
        if self._cancel is not None and not self._completion.has_ended:
            self._has_arrived_late()

    def settle(self) -> None:
        """Wait until the results are in the tensors, whatever becomes of the operation.

        Raises:
            DistBackendError: Its time is up.
        """
        self.await_end(self._timeout_s)
        self._store()

    def synchronize(self) -> None:
        """Do what `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation is done."""
        if not self._completion.done():
            return False
        self._store()
        return True

    def is_success(self) -> bool:
        """Return whether the operation is done and did not fail as a whole."""
        return self.is_completed() and self._failure is None and self._completion.error() is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed as a whole."""
        return self._error() if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operation wrote."""
        return self._results

    def source_rank(self) -> int:
        """Return the in-group rank that a receive from any rank got its message from."""
        source = self._completion.source()
        return -1 if source is None else int(source)

    def _source_rank(self) -> int:
        return self.source_rank()

    def failed_ranks(self) -> list[int]:
        """Return the in-group ranks that this rank saw fail in the operation."""
        return list(self._completion.failed_ranks())

    def overlaps(self, uses: Sequence[Use]) -> bool:
        """Return whether an operation on such memory must wait for the results of this one."""
        return any(memory.overlaps(uses) for memory in self._memory)

    def get_future(self) -> Any:
        """Return a future whose value is the list of the tensors."""
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
        """Do what `get_future` does."""
        return self.get_future()

    def _complete_future(self) -> None:
        """Give the future its value. No lock is held: its callbacks run in here."""
        self._store()
        error = self._error()
        if error is not None:
            self._future.set_exception(error)
            return
        for memory in self._streamed:
            memory.join()
        self._future.set_result(self._results)

    def _error(self) -> dist.DistBackendError | None:
        """Return why the operation has failed, as torch's callers expect it."""
        cause = self._completion.error()
        if cause is not None:
            error = dist.DistBackendError(str(cause))
        elif self._failure is not None:
            cause = self._failure
            self._is_told = True
            error = dist.DistBackendError(f"the result cannot be put into its tensor: {cause}")
        else:
            return None
        error.__cause__ = cause
        return error

    def _store(self) -> None:
        """Copy results into tensors that are not their own host memory, once."""
        if self._is_stored:
            return
        with self._lock:
            if self._is_stored:
                return
            try:
                self._cause = self._completion.error()
                if self._cause is None:
                    for memory in self._memory:
                        if memory.store():
                            self._streamed = [*self._streamed, memory]
                if self._pending.on_loss is not None and self.failed_ranks():
                    refresh = self._pending.on_loss()
                    if refresh is not None:
                        refresh()
            except RuntimeError as failure:
                # Who waits for this work gets it, no caller of another operation.
                self._failure = failure
            finally:
                self._is_stored = True
                self._sources = ()
        if self._number >= 0:
            self._pending.collectives.pop(self._number, None)

    def __del__(self) -> None:
        if not self._is_stored:
            # The tensors of a message that nobody waits for must live until it has arrived.
            self._pending.adopt(self._completion, self._memory, self._sources)
        elif self._failure is not None and not self._is_told:
            _log.warning(
                "the result of an operation was not put into its tensor: %s", self._failure
            )


class CombinedWork(_Work):  # type: ignore[misc]
    """Several operations that are waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = list(works)
        self._future: Any = None
        self.max_group_size = self._works[0].max_group_size if self._works else 0
        if self._works:
            self._works[0]._pending.remember(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for each operation. If one fails, the messages that are not done are given up."""
        try:
            for work in self._works:
                work.wait(timeout)
        except BaseException:
            self.give_up()
            raise
        return True

    def give_up(self) -> None:
        """Give up the messages that are not done."""
        for work in self._works:
            work.give_up()

    def synchronize(self) -> None:
        """Do what `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether each operation is done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether each operation is done and none failed as a whole."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error."""
        return next((e for e in (work.exception() for work in self._works) if e), None)

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the operations wrote."""
        return [tensor for work in self._works for tensor in work.result()]

    def failed_ranks(self) -> list[int]:
        """Return the in-group ranks that this rank saw fail in one of the operations."""
        return sorted({rank for work in self._works for rank in work.failed_ranks()})

    def get_future(self) -> Any:
        """Return a future whose value is the list of all tensors."""
        if self._future is None:
            together = torch.futures.collect_all([work.get_future() for work in self._works])

            def tensors(done: Any) -> list[torch.Tensor]:
                return [tensor for future in done.value() for tensor in future.value()]

            self._future = together.then(tensors)
        return self._future


class PendingWorks:
    """The operations of a group that are not done, and works that old versions of torch forget.

    Collectives are held in the order of calls, so that a later one on the same staged memory can
    wait for their results. Messages are in no order; one that nobody waits for is held by its
    memory.
    """

    def __init__(self, max_group_size: int) -> None:
        self.max_group_size = max_group_size
        # Called when a work ends that has lost a rank.
        self.on_loss: WeakMethod[Callable[[], None]] | None = None
        # The first operation whose time is up and that is not done.
        self.stalled: MooncakeWork | None = None
        self.collectives: dict[int, MooncakeWork] = {}
        self.numbers = itertools.count()
        self._lock = threading.Lock()
        self.orphans: deque[tuple[Any, Sequence[HostMemory], Sequence[HostMemory]]] = deque()
        # Before 2.7, C++ drops the Python half of a work that it was handed, and then waits for
        # ever in the base class.
        self.recent: deque[Any] | None = deque(maxlen=256) if _TORCH < (2, 7) else None

    def clean(self, work: MooncakeWork) -> None:
        """Let go of operations that have ended; hold a new work where torch would forget it."""
        self.remember(work)
        if self.collectives:
            self._store_done()
        if self.orphans:
            self._free_done()

    def remember(self, work: Any) -> None:
        """Hold a new work where torch would forget it."""
        if self.recent is not None:
            self.recent.append(work)

    def await_overlapping(self, uses: Sequence[Use]) -> None:
        """Wait for the results of operations that such memory must wait for, in their order."""
        for work in list(self.collectives.values()):
            if work.overlaps(uses):
                work.settle()

    def close(self) -> None:
        """Let go of all works; their operations have failed."""
        self.collectives.clear()
        self.stalled = None

    def adopt(
        self, completion: Any, memory: Sequence[HostMemory], sources: Sequence[HostMemory]
    ) -> None:
        """Hold the memory of a message whose work is gone until it has arrived."""
        # Called where an object is freed, perhaps in a thread that holds the lock.
        self.orphans.append((completion, memory, sources))

    def _store_done(self) -> None:
        """Store the results of works that nobody waits for, perhaps."""
        for work in list(self.collectives.values()):
            if not work._completion.has_ended:
                return
            work._store()

    def _free_done(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            for _ in range(min(len(self.orphans), _LOOKS)):
                completion, memory, sources = self.orphans.popleft()
                if not completion.has_ended:
                    self.orphans.append((completion, memory, sources))
                elif completion.error() is None:
                    for part in memory:
                        _store_unawaited(part)
        finally:
            self._lock.release()


def _store_unawaited(memory: HostMemory) -> None:
    """Put a result into its tensor where nobody is left who could be told of a failure."""
    try:
        memory.store()
    except RuntimeError as failure:
        _log.warning("a message that nobody waited for was not put into its tensor: %s", failure)


def _receives_objects() -> bool:
    """Return whether torch calls this to receive objects, of which it gets the sizes first."""
    frame = sys._getframe(1)
    for _ in range(_OBJECT_FRAMES):
        if frame.f_code.co_name in _OBJECT_RECEIVERS:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _seconds(timeout: timedelta | float | None) -> float:
    """Return a time-out in seconds; 0 stands for none, as torch passes it."""
    if timeout is None:
        return 0.0
    if isinstance(timeout, timedelta):
        return max(timeout.total_seconds(), 0.0)
    return max(float(timeout), 0.0)
