"""The calls of a native store as coroutines."""

# Generated from mooncake/_native.pyi by scripts/generate_native_calls.py; do not edit.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from mooncake._hints import Readable
from mooncake._runtime import _native
from mooncake.errors import MooncakeError

__all__ = ["AsyncCalls"]

_T = TypeVar("_T")
_Key: TypeAlias = "str | bytes"
_Keys: TypeAlias = "Sequence[_Key]"
_Values: TypeAlias = "Sequence[Readable | Sequence[Readable | _native.AddressRange]]"
_Options: TypeAlias = "_native.PutOptions | None"


class AsyncCalls(ABC):
    """Calls that take and return what those of the native store do."""

    __slots__ = ()

    @abstractmethod
    async def outcome_of(self, begin: Callable[[_native.Pending], _native.Begun[_T]]) -> _T:
        """Begin a call in the running loop and wait for its outcome."""

    async def put(
        self,
        keys: _Keys,
        values: _Values,
        *,
        options: _Options = None,
        is_upsert: bool = False,
        if_absent: _Keys | _native.AbsentSuffixes | None = None,
    ) -> list[bool | MooncakeError]:
        """Put values: true where the value was stored, false where an existing object was kept."""
        return await self.outcome_of(
            lambda calls: calls.put(
                keys, values, options=options, is_upsert=is_upsert, if_absent=if_absent
            )
        )

    async def get(self, keys: _Keys, *, lease: bool = True) -> list[bytes | MooncakeError]:
        """Get objects as bytes; lease them unless `lease` is false."""
        return await self.outcome_of(lambda calls: calls.get(keys, lease=lease))

    async def get_buffers(
        self, keys: _Keys, *, is_signed: bool = False, lease: bool = True
    ) -> list[_native.Buffer | MooncakeError]:
        """Get objects as buffers of unsigned (format B) or signed (format b) bytes."""
        return await self.outcome_of(
            lambda calls: calls.get_buffers(keys, is_signed=is_signed, lease=lease)
        )

    async def read_into(
        self, keys: _Keys, buffers: Sequence[Readable], *, lease: bool = True
    ) -> list[int | MooncakeError]:
        """Get objects into writable buffers, one for each key; return their lengths."""
        return await self.outcome_of(lambda calls: calls.read_into(keys, buffers, lease=lease))

    async def locate(
        self, keys: _Keys, *, lease: bool = True
    ) -> list[_native.Located | MooncakeError]:
        """Locate objects, to read ranges of them; lease them unless `lease` is false."""
        return await self.outcome_of(lambda calls: calls.locate(keys, lease=lease))

    async def read_located(self, located: _native.Located, offset: int, length: int) -> bytes:
        """Read a range of a located object."""
        return await self.outcome_of(lambda calls: calls.read_located(located, offset, length))

    async def read_located_into(
        self, located: _native.Located, offset: int, buffer: Readable
    ) -> int:
        """Read a range of a located object into a writable buffer; return the buffer's length."""
        return await self.outcome_of(lambda calls: calls.read_located_into(located, offset, buffer))

    async def exists(
        self, keys: _Keys, *, lease: bool = True, prefetch: bool = False
    ) -> list[bool | MooncakeError]:
        """Return which objects exist and are complete; lease them unless `lease` is false."""
        return await self.outcome_of(
            lambda calls: calls.exists(keys, lease=lease, prefetch=prefetch)
        )

    async def exists_or_suffixed(
        self, keys: _Keys, suffixes: Sequence[bytes]
    ) -> list[int | MooncakeError]:
        """Look for objects with the keys, or else with keys that are these with a suffix."""
        return await self.outcome_of(lambda calls: calls.exists_or_suffixed(keys, suffixes))

    async def sizes(self, keys: _Keys, *, lease: bool = True) -> list[int | MooncakeError]:
        """Return the lengths of objects; lease them unless `lease` is false."""
        return await self.outcome_of(lambda calls: calls.sizes(keys, lease=lease))

    async def describe(self, keys: _Keys) -> list[dict[str, Any] | MooncakeError]:
        """Return what the master knows of objects: version, size, expiry, tags and pins."""
        return await self.outcome_of(lambda calls: calls.describe(keys))

    async def set_expiry(self, keys: _Keys, ttl_ms: int | None) -> list[bool | MooncakeError]:
        """Let objects expire after a time from now; None: never."""
        return await self.outcome_of(lambda calls: calls.set_expiry(keys, ttl_ms))

    async def remove(
        self,
        keys: _Keys,
        *,
        force: bool = False,
        spare_pinned: bool = False,
        if_version: int | None = None,
    ) -> list[bool | MooncakeError]:
        """Remove objects, or those that have a version; with `force` also leased ones."""
        return await self.outcome_of(
            lambda calls: calls.remove(
                keys, force=force, spare_pinned=spare_pinned, if_version=if_version
            )
        )

    async def remove_matching(
        self,
        *,
        regex: str | None = None,
        prefix: bytes | None = None,
        force: bool = False,
        spare_pinned: bool = False,
    ) -> tuple[int, int, int, int]:
        """Remove all objects, or those that a regex or a prefix selects."""
        return await self.outcome_of(
            lambda calls: calls.remove_matching(
                regex=regex, prefix=prefix, force=force, spare_pinned=spare_pinned
            )
        )

    async def segments(self) -> Sequence[dict[str, Any]]:
        """Return the segments of the pool."""
        return await self.outcome_of(lambda calls: calls.segments())

    async def status(self) -> dict[str, Any]:
        """Return the status of the master."""
        return await self.outcome_of(lambda calls: calls.status())

    async def health(self) -> None:
        """Raise unless the master answers and knows this client."""
        return await self.outcome_of(lambda calls: calls.health())

    async def replicas(
        self, keys: _Keys, *, lease: bool = True
    ) -> list[list[dict[str, Any]] | MooncakeError]:
        """Describe the copies of objects; lease the objects unless `lease` is false."""
        return await self.outcome_of(lambda calls: calls.replicas(keys, lease=lease))

    async def copy_object(self, key: _Key, targets: Sequence[str]) -> tuple[int, int]:
        """Create a task that copies an object to more segments; return its id."""
        return await self.outcome_of(lambda calls: calls.copy_object(key, targets))

    async def move_object(self, key: _Key, source: str, target: str) -> tuple[int, int]:
        """Create a task that moves a copy of an object to another segment; return its id."""
        return await self.outcome_of(lambda calls: calls.move_object(key, source, target))

    async def task(self, task_id: tuple[int, int]) -> dict[str, Any]:
        """Return the state of a task."""
        return await self.outcome_of(lambda calls: calls.task(task_id))

    async def drain(
        self,
        segments: Sequence[str],
        *,
        targets: Sequence[str] = (),
        concurrency: int = 0,
        may_evict: bool = False,
    ) -> dict[str, Any]:
        """Start a drain of segments into the targets, or anywhere; return its state."""
        return await self.outcome_of(
            lambda calls: calls.drain(
                segments, targets=targets, concurrency=concurrency, may_evict=may_evict
            )
        )

    async def drain_info(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Return the state of a drain."""
        return await self.outcome_of(lambda calls: calls.drain_info(job_id))

    async def cancel_drain(self, job_id: tuple[int, int]) -> dict[str, Any]:
        """Cancel a drain; its segments accept objects again."""
        return await self.outcome_of(lambda calls: calls.cancel_drain(job_id))

    async def list(
        self, *, prefix: bytes = b"", after: bytes | None = None, limit: int = 0
    ) -> tuple[Sequence[tuple[bytes, int, bool, int, int]], bool]:
        """Return a page of a listing, and whether it is the last one."""
        return await self.outcome_of(
            lambda calls: calls.list(prefix=prefix, after=after, limit=limit)
        )
