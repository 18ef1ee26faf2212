"""Copy and move tasks, locations of copies, and removal of copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mooncake.errors import MooncakeError
from mooncake.store.base import StoreBase
from mooncake.store.batch import Key, check_lists
from mooncake.store.codes import INVALID_PARAMS, OK, SEGMENT_NOT_FOUND
from mooncake.store.config import TaskStatus, TaskType
from mooncake.store.descriptors import QueryTaskResponse, ReplicaDescriptor, replica_of

if TYPE_CHECKING:
    from mooncake._runtime import _native

__all__ = ["TaskCalls"]

_NONE = (0, 0)
_KINDS = {"copy": TaskType.REPLICA_COPY, "move": TaskType.REPLICA_MOVE}
_U64_MAX = (1 << 64) - 1


class TaskCalls(StoreBase):
    """Tasks and copies."""

    __slots__ = ()

    def get_replica_desc(self, key: Key) -> list[ReplicaDescriptor]:
        """Describe the copies of an object and lease it; an empty list if it does not exist.

        Args:
            key: Key of the object.
        """
        places = self._call_batch(1, lambda native: native.replicas([key]))[0]
        return [] if isinstance(places, MooncakeError) else [replica_of(at) for at in places]

    def batch_get_replica_desc(self, keys: Sequence[Key]) -> dict[str, list[ReplicaDescriptor]]:
        """Describe the copies of many objects and lease the objects.

        Args:
            keys: Keys of the objects.

        Returns:
            The copies by key, without keys of missing objects.
        """
        found = self._call_batch(len(keys), lambda native: native.replicas(keys))
        described = {}
        for key, places in zip(keys, found, strict=True):
            if not isinstance(places, MooncakeError):
                described[_text(key)] = [replica_of(place) for place in places]
        return described

    def batch_replica_clear(self, keys: Sequence[Key], segment_name: str = "") -> list[str]:
        """Drop copies of objects; an object whose last copy is dropped is removed.

        Objects that were read or probed recently, or are being copied, are skipped.

        Args:
            keys: Keys of the objects.
            segment_name: Drop only copies in segments of that name; "" drops all copies.

        Returns:
            Keys of the objects that lost a copy.
        """
        cleared = self._call_batch(
            len(keys), lambda native: native.clear_replicas(keys, segment=segment_name)
        )
        return [
            _text(key) for key, is_cleared in zip(keys, cleared, strict=True) if is_cleared is True
        ]

    def create_copy_task(self, key: Key, targets: Sequence[str]) -> tuple[tuple[int, int], int]:
        """Create a task that copies an object to more segments; it runs in the background.

        Args:
            key: Key of the object.
            targets: Names of the segments. Segments that have a copy are skipped.

        Returns:
            The id of the task and 0, or ``(0, 0)`` and a negative number: -704 if the object does
            not exist, -600 for no targets or an unknown one.
        """
        check_lists(targets)
        return self._create_task(lambda native: native.copy_object(key, list(targets)))

    def create_move_task(self, key: Key, source: str, target: str) -> tuple[tuple[int, int], int]:
        """Create a task that moves a copy of an object to another segment, in the background.

        Args:
            key: Key of the object.
            source: Name of the segment that loses the copy.
            target: Name of the segment that gets the copy.

        Returns:
            The id of the task and 0, or ``(0, 0)`` and a negative number: -704 if the object does
            not exist, -600 for an unknown segment, a source without a copy, or a source that is the
            target.
        """
        return self._create_task(lambda native: native.move_object(key, source, target))

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """Return the state of a task.

        Args:
            task_id: Id that `create_copy_task` or `create_move_task` returned.

        Returns:
            The state and 0, or None and a negative number: -1400 if there is no such task.
        """
        is_id = isinstance(task_id, tuple) and len(task_id) == 2
        if not is_id or not all(isinstance(half, int) for half in task_id):
            raise TypeError("task_id must be a tuple of two ints")
        if not all(0 <= half <= _U64_MAX for half in task_id):
            raise TypeError("both parts of a task_id must be integers from 0 to 2^64-1")

        def call(native: _native.Store) -> list[dict[str, Any] | MooncakeError]:
            return [native.task(task_id)]

        reply = self._call_batch(1, call)[0]
        if isinstance(reply, MooncakeError):
            return None, reply.code
        response = QueryTaskResponse()
        response.id = reply["id"]
        response.type = _KINDS[reply["kind"]]
        response.status = TaskStatus[reply["status"].upper()]
        response.created_at_ms_epoch = reply["created_at_ms"]
        response.last_updated_at_ms_epoch = reply["updated_at_ms"]
        response.assigned_client = reply["client"]
        response.message = reply["message"]
        return response, OK

    def _create_task(
        self, call: Callable[[_native.Store], tuple[int, int]]
    ) -> tuple[tuple[int, int], int]:
        def alone(native: _native.Store) -> list[tuple[int, int] | MooncakeError]:
            return [call(native)]

        made = self._call_batch(1, alone)[0]
        if isinstance(made, MooncakeError):
            # Upstream has one number for an unknown segment and for no segment.
            is_unknown = made.code == SEGMENT_NOT_FOUND
            return _NONE, INVALID_PARAMS if is_unknown else made.code
        return made, OK


def _text(key: Key) -> str:
    return key if isinstance(key, str) else key.decode(errors="surrogateescape")
