"""Descriptions of copies and tasks in upstream's API."""

from __future__ import annotations

from typing import Any

from mooncake.store.config import ReplicaStatus, TaskStatus, TaskType

__all__ = [
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "QueryTaskResponse",
    "ReplicaDescriptor",
]


class Descriptor:
    """Location of a copy in memory."""

    __slots__ = ("buffer_address", "size", "transport_endpoint")

    def __init__(self) -> None:
        """Make an empty description."""
        self.size: int = 0
        self.buffer_address: int = 0
        self.transport_endpoint: str = ""

    def __repr__(self) -> str:
        return (
            f"<Descriptor size={self.size} buffer_address={self.buffer_address} "
            f"transport_endpoint={self.transport_endpoint}>"
        )


class MemoryDescriptor:
    """A copy in memory."""

    __slots__ = ("buffer_descriptor",)

    def __init__(self) -> None:
        """Make an empty description."""
        self.buffer_descriptor = Descriptor()

    def __repr__(self) -> str:
        return f"<MemoryDescriptor buffer_descriptor={self.buffer_descriptor!r}>"


class DiskDescriptor:
    """A copy in a file."""

    __slots__ = ("file_path", "object_size")

    def __init__(self) -> None:
        """Make an empty description."""
        self.file_path: str = ""
        self.object_size: int = 0

    def __repr__(self) -> str:
        return f"<DiskDescriptor file_path={self.file_path} object_size={self.object_size}>"


class ReplicaDescriptor:
    """A copy of an object. Only the store makes instances."""

    __slots__ = ("_memory", "_place")

    _memory: MemoryDescriptor | None
    _place: dict[str, Any]

    def __init__(self) -> None:
        """Raise: only the store makes instances."""
        raise TypeError("mooncake.store.ReplicaDescriptor: No constructor defined!")

    @property
    def status(self) -> ReplicaStatus:
        """State of the copy."""
        return ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        """Return whether the copy is in memory."""
        return not self._place["is_disk"]

    def is_disk_replica(self) -> bool:
        """Return whether the copy is in a file."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Return whether the copy is on the local disk of a client."""
        return bool(self._place["is_disk"])

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Describe the copy in memory.

        Raises:
            RuntimeError: The copy is on disk.
        """
        if self._place["is_disk"]:
            raise RuntimeError("Expected MemoryDescriptor")
        if self._memory is None:
            # Built on first use, since most callers only count copies.
            self._memory = MemoryDescriptor()
            described = self._memory.buffer_descriptor
            described.size = self._place["size"]
            described.buffer_address = self._place["address"]
            described.transport_endpoint = self._place["endpoint"]
        return self._memory

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Describe the copy in a file.

        Raises:
            RuntimeError: The copy is not in a file.
        """
        raise RuntimeError("Expected DiskDescriptor")

    def __repr__(self) -> str:
        if self._place["is_disk"]:
            size, endpoint = self._place["size"], self._place["endpoint"]
            return (
                f"<ReplicaDescriptor status={self.status} local_disk object_size={size} "
                f"transport_endpoint={endpoint}>"
            )
        return f"<ReplicaDescriptor status={self.status} {self.get_memory_descriptor()!r}>"


def replica_of(place: dict[str, Any]) -> ReplicaDescriptor:
    """Describe a complete copy: its address, size and endpoint."""
    replica = object.__new__(ReplicaDescriptor)
    replica._memory = None
    replica._place = place
    return replica


class QueryTaskResponse:
    """State of a task."""

    __slots__ = (
        "assigned_client",
        "created_at_ms_epoch",
        "id",
        "last_updated_at_ms_epoch",
        "message",
        "status",
        "type",
    )

    def __init__(self) -> None:
        """Make an empty description."""
        self.id: tuple[int, int] = (0, 0)
        self.type = TaskType.REPLICA_COPY
        self.status = TaskStatus.PENDING
        self.created_at_ms_epoch: int = 0
        self.last_updated_at_ms_epoch: int = 0
        self.assigned_client: tuple[int, int] = (0, 0)
        self.message: str = ""

    def __repr__(self) -> str:
        return (
            f"QueryTaskResponse(id={self.id[0]}-{self.id[1]}, type={int(self.type)}, "
            f"status={int(self.status)}, created_at={self.created_at_ms_epoch}, "
            f"last_updated_at={self.last_updated_at_ms_epoch}, "
            f"assigned_client={self.assigned_client[0]}-{self.assigned_client[1]}, "
            f'message="{self.message}")'
        )
