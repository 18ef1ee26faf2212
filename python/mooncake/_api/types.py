"""What listings of objects and segments return, and the names of common types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from mooncake._api.outcomes import all_of
from mooncake.errors import BusyError, MooncakeError, NotFoundError, NotReadyError

__all__ = ["Cleared", "Deleted", "Key", "ObjectInfo", "Progress", "SegmentInfo"]

Key: TypeAlias = str | bytes

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the number of finished items and the number of all items."""


class Cleared(int):
    """Number of objects that `clear` removed, and of those that stayed.

    A tensor in shards is one removed object. The other numbers count the objects of which it
    consists.

    Attributes:
        leased: Objects that stayed because a client holds a lease on them; `force` removes them.
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
    def of(
        cls,
        manifests: tuple[int, int, int, int],
        shards: tuple[int, int, int, int],
        others: tuple[int, int, int, int],
    ) -> Self:
        """Return what the calls for the parts of tensors and for all others counted."""
        leased, pinned, being_copied = [
            sum(counts) for counts in zip(manifests[1:], shards[1:], others[1:], strict=True)
        ]
        removed = manifests[0] + others[0]
        return cls(removed, leased=leased, pinned=pinned, being_copied=being_copied)


def _cleared(removed: int, leased: int, pinned: int, being_copied: int) -> Cleared:
    return Cleared(removed, leased=leased, pinned=pinned, being_copied=being_copied)


class Deleted(list[bool]):
    """For each key of `delete_many` in order whether its object was removed.

    Attributes:
        removed: Keys of the removed objects.
        missing: Keys that no object has.
        kept: Keys of the objects that stayed, and for each the reason: a `BusyError` (leased,
            hard-pinned, being copied) or a `NotReadyError` (being written).
    """

    removed: list[Key]
    missing: list[Key]
    kept: dict[Key, MooncakeError]

    @classmethod
    def of(cls, keys: Sequence[Key], outcomes: Sequence[bool | MooncakeError]) -> Self:
        """Return the result of a removal, or raise the first failure that is no reason to stay."""
        missing = [isinstance(each, NotFoundError) for each in outcomes]
        kept = [isinstance(each, BusyError | NotReadyError) for each in outcomes]
        plain = [
            False if is_missing or is_kept else each
            for each, is_missing, is_kept in zip(outcomes, missing, kept, strict=True)
        ]
        made = cls(all_of(plain))
        made.removed = [key for key, is_removed in zip(keys, made, strict=True) if is_removed]
        made.missing = [key for key, is_missing in zip(keys, missing, strict=True) if is_missing]
        made.kept = {
            key: each
            for key, each in zip(keys, outcomes, strict=True)
            if isinstance(each, BusyError | NotReadyError)
        }
        return made

    def __repr__(self) -> str:
        counts = f"removed={len(self.removed)}, missing={len(self.missing)}"
        return f"Deleted({counts}, kept={[*self.kept]})"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object in a listing.

    Attributes:
        key: Key of the object as text; `key_bytes` has it as bytes. Bytes that are not valid UTF-8
            are surrogates, as Python has them in names of files; every call takes such keys.
        size: Length in bytes.
        is_complete: True if the object can be read; false while it is being written.
        replicas: Number of copies.
        disk_replicas: How many of them are on disks.
    """

    key: str
    size: int
    is_complete: bool
    replicas: int
    disk_replicas: int = 0

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
