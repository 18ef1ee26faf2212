"""What listings of objects and segments return, and the names of common types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

__all__ = ["Cleared", "Key", "ObjectInfo", "Progress", "SegmentInfo"]

Key: TypeAlias = str | bytes

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the number of finished items and the number of all items."""


class Cleared(int):
    """Number of objects that `clear` removed, and of those that stayed.

    Attributes:
        leased: Objects that stayed because a recent read has leased them; `force` removes them.
        pinned: Hard-pinned objects that stayed; `pinned=True` removes them.
        being_copied: Objects that stayed because a copy of them is running; `force` removes them.
    """

    leased: int
    pinned: int
    being_copied: int

    def __new__(
        cls, removed: int = 0, *, leased: int = 0, pinned: int = 0, being_copied: int = 0
    ) -> Self:
        """Make a number of removed objects."""
        self = super().__new__(cls, removed)
        self.leased, self.pinned, self.being_copied = leased, pinned, being_copied
        return self

    @property
    def removed(self) -> int:
        """Number of removed objects; the value itself."""
        return int(self)

    @property
    def kept(self) -> int:
        """Number of objects that stayed."""
        return self.leased + self.pinned + self.being_copied

    def __str__(self) -> str:
        return int.__repr__(self)

    def __repr__(self) -> str:
        reasons = f"leased={self.leased}, pinned={self.pinned}, being_copied={self.being_copied}"
        return f"Cleared({int(self)}, {reasons})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _cleared, (int(self), self.leased, self.pinned, self.being_copied)

    @classmethod
    def of(cls, counts: tuple[int, int, int, int]) -> Self:
        """Return what a call of the native store counted."""
        removed, leased, pinned, being_copied = counts
        return cls(removed, leased=leased, pinned=pinned, being_copied=being_copied)


def _cleared(*counts: int) -> Cleared:
    removed, leased, pinned, being_copied = counts
    return Cleared.of((removed, leased, pinned, being_copied))


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    Attributes:
        key: Key of the object as text; `key_bytes` has it as bytes. Bytes that are not valid UTF-8
            are surrogates, as Python has them in names of files; every call takes such keys.
        size: Length in bytes.
        is_complete: True if the object can be read; false while it is being written.
        replicas: Number of copies.
    """

    key: str
    size: int
    is_complete: bool
    replicas: int

    @property
    def key_bytes(self) -> bytes:
        """Key of the object as bytes."""
        return self.key.encode("utf-8", "surrogateescape")


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A range of memory that a process lends to the pool.

    Attributes:
        id: Id of the segment.
        name: Name of the process that lends it.
        endpoint: Address of the transfer engine that owns it.
        protocol: Transport by which every peer can reach it.
        base: First address in the owner's process.
        capacity_bytes: Length.
        used_bytes: Bytes that objects occupy.
        takes_objects: True if new objects may be placed there.
        is_connected: False while its process has lost its connection to the master, so that its
            objects cannot be read; it leaves the pool if it does not come back.
    """

    id: str
    name: str
    endpoint: str
    protocol: str
    base: int
    capacity_bytes: int
    used_bytes: int
    takes_objects: bool
    is_connected: bool = True
