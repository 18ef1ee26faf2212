"""`SharedSegment`: memory of one process that other processes of the host and user map, too."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final

__all__ = ["SharedSegment"]

_MAGIC: Final = b"MKS1"
_PAGE: Final = mmap.PAGESIZE
_SIZE_MAX: Final = 1 << 46
_BLOB_BYTES_MAX: Final = 4096


class SharedSegment:
    """Memory that all ranks of a group share.

    The owner's memory is shared once each rank has the blobs of all ranks: each rank calls
    `create`, passes the bytes it gets to all others (by any means the group has), and calls
    `complete` with the bytes of all ranks. The memory has no name in the file system: it is freed
    when no rank maps it any more.
    """

    __slots__ = ("__weakref__", "_description", "_fd", "_mapping", "_ready")

    _fd: int
    _mapping: mmap.mmap | None
    _ready: bool
    _description: dict[str, Any]

    def __init__(self) -> None:
        """Raise: `create` makes instances."""
        raise TypeError("SharedSegment has no constructor; use SharedSegment.create")

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,  # noqa: ARG004
        mmap: bool = True,
        host_register: bool = False,
    ) -> tuple[SharedSegment, bytes]:
        """Create a segment; the first of two steps.

        Args:
            name: Name of the segment, the same in all ranks.
            size: Length in bytes.
            world_size: Number of ranks.
            rank_id: Number of this rank, from 0.
            owner_rank: Rank that owns the memory.
            device_id: Accepted; device memory is not supported.
            mmap: Must be true: the memory is mapped.
            host_register: Must be false: the memory is not registered with a device.

        Returns:
            The segment, and the blob to pass to the other ranks.

        Raises:
            RuntimeError: A number is out of range, the kind is not supported, or the system has no
                memory of that size.
        """
        if not SharedSegment.supported(mmap, host_register):
            raise RuntimeError("a shared segment is mapped, and not registered with a device")
        if not 0 < size <= _SIZE_MAX:
            raise RuntimeError(f"a shared segment has 1 byte to {_SIZE_MAX}, not {size}")
        if not (0 <= rank_id < world_size and 0 <= owner_rank < world_size):
            raise RuntimeError(
                f"rank_id={rank_id} and owner_rank={owner_rank} must be below "
                f"world_size={world_size}, and none of them negative"
            )
        segment = object.__new__(SharedSegment)
        segment._fd, segment._mapping, segment._ready = -1, None, False
        segment._description = {
            "name": name,
            "size": size,
            "world_size": world_size,
            "owner_rank": owner_rank,
            "rank": rank_id,
        }
        if rank_id == owner_rank:
            segment._allocate(size)
        return segment, _MAGIC + json.dumps(segment._description).encode()

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Return whether segments of a kind can be created.

        Args:
            mmap: The memory is mapped.
            host_register: The memory is registered with a device.

        Returns:
            True for memory that is mapped and not registered.
        """
        return bool(mmap) and not host_register

    def complete(self, blobs: Sequence[bytes | str]) -> None:
        """Complete a segment; the second step. Does nothing if the segment is complete.

        Args:
            blobs: Blobs that `create` returned, in the order of the ranks.

        Raises:
            RuntimeError: The blobs are not those of this segment, or the owner is gone or belongs
                to another user or container.
        """
        world_size = self._description["world_size"]
        if len(blobs) != world_size:
            raise RuntimeError(
                f"expected one blob for each of {world_size} ranks, got {len(blobs)}"
            )
        descriptions = [_decode(blob) for blob in blobs]
        for rank, other in enumerate(descriptions):
            for key in ("name", "size", "world_size", "owner_rank"):
                if other.get(key) != self._description[key]:
                    raise RuntimeError(
                        f"rank {rank} made another segment: its {key} is {other.get(key)!r}, "
                        f"not {self._description[key]!r}"
                    )
            if other.get("rank") != rank:
                raise RuntimeError(f"the blob in place {rank} is that of rank {other.get('rank')}")
        if not self._ready and self._mapping is None:
            self._attach(descriptions[self._description["owner_rank"]])
        self._ready = True

    def ready(self) -> bool:
        """Return whether all ranks share the memory."""
        return self._ready

    def base_addr(self) -> int:
        """Return the address of the first byte in this process; 0 if nothing is mapped yet."""
        if self._mapping is None:
            return 0
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def device_addr(self) -> int:
        """Return 0: devices cannot access the memory."""
        return 0

    def size(self) -> int:
        """Return the length in bytes."""
        return int(self._description["size"])

    def __del__(self) -> None:
        fd = getattr(self, "_fd", -1)
        if fd >= 0:
            os.close(fd)

    def _allocate(self, size: int) -> None:
        token = os.urandom(16).hex()
        try:
            self._fd = os.memfd_create(f"mooncake-{token}", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, _page_aligned(size))
            self._mapping = mmap.mmap(self._fd, _page_aligned(size))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"no shared memory of {size} bytes: {error}") from error
        self._description |= {"pid": os.getpid(), "fd": self._fd, "token": token}

    def _attach(self, owner: dict[str, Any]) -> None:
        size = _page_aligned(int(owner["size"]))
        try:
            path = f"/proc/{int(owner['pid'])}/fd/{int(owner['fd'])}"
            # The process or descriptor number may have been reused.
            if f"mooncake-{owner['token']}" not in os.readlink(path):
                raise FileNotFoundError(path)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapping = mmap.mmap(fd, size)
            finally:
                os.close(fd)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                "the owner's memory cannot be mapped: it is gone, or belongs to another user or "
                f"container: {error}"
            ) from error


def _page_aligned(size: int) -> int:
    return (size + _PAGE - 1) // _PAGE * _PAGE


def _decode(blob: bytes | str) -> dict[str, Any]:
    raw = blob.encode() if isinstance(blob, str) else bytes(blob)
    try:
        if raw.startswith(_MAGIC) and len(raw) <= _BLOB_BYTES_MAX:
            description = json.loads(raw[len(_MAGIC) :])
            if isinstance(description, dict):
                return description
    except ValueError:
        pass
    raise RuntimeError("the blob was not made by SharedSegment.create")
