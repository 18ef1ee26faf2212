"""Mounting and unmounting of segments: files, shared memory, memory of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from mooncake._runtime import _native
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.store.base import StoreBase
from mooncake.store.batch import invalid_argument, not_set_up, unsigned
from mooncake.store.codes import INTERNAL_ERROR, INVALID_PARAMS, OK

__all__ = ["SegmentCalls"]

_ALLOCATION_UNIT: Final = 16 << 20
_U64_MAX: Final = (1 << 64) - 1


class SegmentCalls(StoreBase):
    """Mounting and unmounting."""

    __slots__ = ()

    def mount_segment(
        self,
        path: str,
        size: int,
        offset: int = 0,
        protocol: str = "tcp",
        location: str = "",
    ) -> dict[str, Any]:
        """Lend a part of a file to the pool, for instance of a file in ``/dev/shm``.

        The file's content is not read; objects that are put there overwrite it.

        Args:
            path: Path of the file.
            size: Length in bytes; 0 mounts nothing and succeeds.
            offset: Offset of the first byte, a multiple of the page size.
            protocol: Accepted; the transport is chosen for each peer.
            location: Location of the memory, for instance ``"cpu:0"``; "" is any.

        Returns:
            ``ret``, which is 0 or -1, and ``segment_ids``. `mooncake.last_error()` has the reason
            of a failure.
        """
        unsigned("size", size)
        unsigned("offset", offset)
        _check_texts(path=path, protocol=protocol, location=location)
        ids: list[str] = []
        if size == 0 and self._native is not None:
            return {"ret": OK, "segment_ids": ids}

        def mount(native: _native.Store) -> None:
            ids.append(native.mount_file(path, size, offset=offset, location=location or "*"))

        ret = self._lend(mount)
        self._mounted.update(dict.fromkeys(ids, "file"))
        return {"ret": ret, "segment_ids": ids}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Unmount files that `mount_segment` mounted. Objects without another copy are lost.

        Args:
            segment_ids: Ids that `mount_segment` returned.
            grace_period_seconds: Time during which the segments are readable but take no objects.

        Returns:
            0, or -1 if an id is invalid, or not that of a mounted file.
        """
        return self._unmount(segment_ids, grace_period_seconds, "file")

    def allocate_and_mount_segment(
        self,
        size: int,
        protocol: str = "tcp",
        location: str = "",
    ) -> dict[str, Any]:
        """Lend more memory of this process to the pool.

        Args:
            size: Length in bytes; rounded up to a multiple of 16 MiB.
            protocol: Accepted; the transport is chosen for each peer.
            location: Accepted; pages are placed where they are first written.

        Returns:
            ``ret``, which is 0 or -1, ``segment_ids`` and ``allocated_size``.
        """
        unsigned("size", size)
        _check_texts(protocol=protocol, location=location)
        ids: list[str] = []
        # Saturates: a size whose rounding overflows is refused as too large.
        rounded = min(-(-size // _ALLOCATION_UNIT) * _ALLOCATION_UNIT, _U64_MAX)

        def mount(native: _native.Store) -> None:
            ids.extend(native.mount(rounded))

        ret = self._lend(mount)
        self._mounted.update(dict.fromkeys(ids, "own"))
        allocated = rounded if ret == OK else 0
        return {"ret": ret, "segment_ids": ids, "allocated_size": allocated}

    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Unmount memory that `allocate_and_mount_segment` mounted, and free it.

        Args:
            segment_ids: Ids that `allocate_and_mount_segment` returned.
            grace_period_seconds: Time during which the segments are readable but take no objects.

        Returns:
            0; -1 if an id is invalid, or not that of such memory; -600 if its grace period is over.
        """
        return self._unmount(segment_ids, grace_period_seconds, "own")

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Take the directories of this store out of the pool; their records stay in them.

        Args:
            grace_period_seconds: Time during which the records can still be read, while none is
                added.

        Returns:
            0, also if the store keeps no directory; -1 before `setup`, after `setup_dummy` and if
            it fails.
        """
        unsigned("grace_period_seconds", grace_period_seconds)
        native = self._native
        if native is None:
            not_set_up()
            return INTERNAL_ERROR
        if native.is_dummy:
            invalid_argument("a dummy client lends no memory")
            return INTERNAL_ERROR
        try:
            _native.unmount_disks(native, grace_s=grace_period_seconds)
        except NotFoundError:
            return OK
        except MooncakeError:
            return INTERNAL_ERROR
        return OK

    def _lend(self, mount: Callable[[_native.Store], None]) -> int:
        def call(native: _native.Store) -> list[bool | MooncakeError]:
            mount(native)
            return [True]

        # Upstream returns one number for every failed mount.
        return OK if self._call_batch(1, call)[0] is True else INTERNAL_ERROR

    def _unmount(self, segment_ids: Sequence[str], grace_s: int, kind: str) -> int:
        unsigned("grace_period_seconds", grace_s)
        is_list = isinstance(segment_ids, Sequence) and not isinstance(segment_ids, str)
        if not is_list or not all(isinstance(each, str) for each in segment_ids):
            raise TypeError("segment_ids must be a list of str")
        if self._native is None:
            not_set_up()
            return INTERNAL_ERROR
        if wrong := [each for each in segment_ids if self._mounted.get(each) != kind]:
            invalid_argument(
                f"no segment of that kind is mounted by this store segment_ids={wrong}"
            )
            return INTERNAL_ERROR
        for segment in segment_ids:

            def call(native: _native.Store, segment: str = segment) -> list[bool | MooncakeError]:
                native.unmount(segment, grace_s=grace_s)
                return [True]

            outcome = self._call_batch(1, call)[0]
            if isinstance(outcome, NotFoundError):
                # The segment left the pool at the end of a grace period that an earlier call gave
                # it.
                return INVALID_PARAMS
            if isinstance(outcome, MooncakeError):
                return INTERNAL_ERROR
            if grace_s == 0:
                self._mounted.pop(segment, None)
        return OK


def _check_texts(**texts: str) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} must be str, not {type(text).__name__}")
