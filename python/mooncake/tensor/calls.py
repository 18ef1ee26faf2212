"""Calls of the native store as values, and the two ways to make them.

An operation on tensors is a generator that yields calls and receives their outcomes. `run` makes
the calls in the calling thread, `run_async` awaits them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from mooncake._api.limits import limited
from mooncake._api.native_calls import AsyncNative
from mooncake._hints import Begun, Readable, asyncio
from mooncake._runtime import PutOptions, _native

__all__ = [
    "Call",
    "Describe",
    "Dimension",
    "ExistsOrSuffixed",
    "Lease",
    "List",
    "MemoryGrid",
    "Operation",
    "Pause",
    "Put",
    "ReadGrids",
    "Remove",
    "run",
    "run_async",
]

_PAUSES_MAX_S = 30.0
"""Time after which an operation without a limit of its own waits no longer."""

T = TypeVar("T")
Key: TypeAlias = str | bytes

Dimension: TypeAlias = tuple[int, int, int]
"""Number of ranges along a dimension of a grid; their distances in the object and in memory."""

MemoryGrid: TypeAlias = tuple[int, int, int, Sequence[Dimension]]
"""Ranges of one length at regular distances: address, offset in the object, and length of the first
one, and the dimensions, outermost first."""


class Call(Protocol):
    """A call of the native store."""

    def make(self, store: _native.Store) -> Any:
        """Make the call and return its outcome."""

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call for an event loop and return its number."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Waits. The outcome is the time since the operation began, and whether there is time left.

    Attributes:
        seconds: Time to wait; 0 only asks for the time.
    """

    seconds: float = 0.0


Operation: TypeAlias = Generator[Call | Pause, Any, T]
"""A generator that yields calls, receives the outcome of each, and returns a result."""


@dataclass(frozen=True, slots=True)
class ReadGrids:
    """Reads ranges of objects into memory.

    The outcome of each object is the number of bytes, its version, and the value of the tag.

    Attributes:
        keys: Keys of the objects.
        grids: The ranges of each object.
        owner: Object that keeps the memory.
        is_registered: Refuse memory that is not registered.
        lease: Lease the objects.
        tag: Name of a tag of the objects; "" for none.
    """

    keys: Sequence[Key]
    grids: Sequence[Sequence[MemoryGrid]]
    owner: object
    is_registered: bool = False
    lease: bool = True
    tag: str = ""

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return _native.read_grids(
            store,
            self.keys,
            self.grids,
            is_registered=self.is_registered,
            lease=self.lease,
            tag=self.tag,
        )

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.read_grids(self.keys, self.grids, self.owner, lease=self.lease, tag=self.tag)


@dataclass(frozen=True, slots=True)
class Put:
    """Puts objects. The outcome is for each object whether it was stored.

    Attributes:
        keys: Keys of the objects.
        values: For each object the buffers that make it up.
        options: Number of copies, pins, placement.
        is_upsert: Replace existing objects.
        if_absent: Keys of objects that must not exist; an `AlreadyExistsError` is the outcome of
            the objects that were not put since one does.
    """

    keys: Sequence[Key]
    values: Sequence[Sequence[Readable]]
    options: PutOptions | None = None
    is_upsert: bool = False
    if_absent: Sequence[Key] = ()

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return store.put(
            self.keys,
            self.values,
            options=self.options,
            is_upsert=self.is_upsert,
            if_absent=self.if_absent,
        )

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.put(
            self.keys,
            self.values,
            options=self.options,
            is_upsert=self.is_upsert,
            if_absent=self.if_absent,
        )


@dataclass(frozen=True, slots=True)
class Remove:
    """Removes objects. The outcome is true for each object that was removed.

    Attributes:
        keys: Keys of the objects.
        force: Remove leased objects, too.
        spare_pinned: Leave hard-pinned objects.
    """

    keys: Sequence[Key]
    force: bool = False
    spare_pinned: bool = False

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return store.remove(self.keys, force=self.force, spare_pinned=self.spare_pinned)

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.remove(self.keys, force=self.force, spare_pinned=self.spare_pinned)


@dataclass(frozen=True, slots=True)
class List:
    """Lists one page of the objects whose key has a prefix. The outcome is that of the store.

    Attributes:
        prefix: Prefix of the keys.
        after: Last key of the page before.
    """

    prefix: bytes
    after: bytes | None = None

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return store.list(prefix=self.prefix, after=self.after)

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.list(prefix=self.prefix, after=self.after)


@dataclass(frozen=True, slots=True)
class ExistsOrSuffixed:
    """Looks for objects with the keys, or else with keys that are these with a suffix.

    Leases none. The outcome is a number for each key: 1 for an object with the key itself, else the
    sum of ``2 << n`` for each suffix ``n``.

    Attributes:
        keys: The keys.
        suffixes: The suffixes.
    """

    keys: Sequence[Key]
    suffixes: Sequence[bytes]

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return store.exists_or_suffixed(self.keys, self.suffixes)

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.exists_or_suffixed(self.keys, self.suffixes)


@dataclass(frozen=True, slots=True)
class Lease:
    """Leases objects. The outcome of each is its length.

    Attributes:
        keys: Keys of the objects.
    """

    keys: Sequence[Key]

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return store.sizes(self.keys, lease=True)

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.sizes(self.keys, lease=True)


@dataclass(frozen=True, slots=True)
class Describe:
    """Asks what the master knows of objects. The outcome is a dictionary for each.

    Attributes:
        keys: Keys of the objects.
    """

    keys: Sequence[Key]

    def make(self, store: _native.Store) -> Any:
        """Make the call."""
        return store.describe(self.keys)

    def begin(self, calls: _native.Pending) -> Begun[Any]:
        """Begin the call."""
        return calls.describe(self.keys)


def run(store: _native.Store, operation: Operation[T], timeout_s: float | None = None) -> T:
    """Carry out an operation in this thread, within a time if one is given."""
    next_store, clock = limited(store, timeout_s), _Clock(timeout_s)
    try:
        call = next(operation)
        while True:
            try:
                if isinstance(call, Pause):
                    time.sleep(clock.allowed(call.seconds))
                    outcome = clock.read()
                else:
                    outcome = call.make(next_store())
            except Exception as error:  # noqa: BLE001 - the operation handles it or raises it
                call = operation.throw(error)
            else:
                call = operation.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result


async def run_async(
    calls: AsyncNative, operation: Operation[T], timeout_s: float | None = None
) -> T:
    """Carry out an operation for the running event loop, within a time if one is given."""
    next_calls, clock = limited(calls, timeout_s), _Clock(timeout_s)
    try:
        call = next(operation)
        while True:
            try:
                if isinstance(call, Pause):
                    await asyncio.sleep(clock.allowed(call.seconds))
                    outcome = clock.read()
                else:
                    outcome = await next_calls().outcome_of(call.begin)
            except Exception as error:  # noqa: BLE001 - the operation handles it or raises it
                call = operation.throw(error)
            else:
                call = operation.send(outcome)
    except StopIteration as end:
        result: T = end.value
        return result


class _Clock:
    """The time of one operation."""

    def __init__(self, timeout_s: float | None) -> None:
        self._begin = time.monotonic()
        self._limit_s = _PAUSES_MAX_S if timeout_s is None else timeout_s

    def read(self) -> tuple[float, bool]:
        """Return the seconds since the operation began, and whether there is time left."""
        passed = time.monotonic() - self._begin
        return passed, passed < self._limit_s

    def allowed(self, seconds: float) -> float:
        """Return how long of that time the operation may wait."""
        return min(seconds, max(self._limit_s - self.read()[0], 0.0))
