"""`ReplicateConfig` and the enumerations of upstream's API."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from mooncake._runtime import PutOptions, _native
from mooncake.store.batch import as_bool, unsigned
from mooncake.store.codes import DFS_SERVICE_UNAVAILABLE, INVALID_PARAMS

__all__ = [
    "ExistOptions",
    "ObjectDataType",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "put_options",
]

# The master makes at most 128 copies of an object, and refuses more than 1,024.
_REPLICAS_MAX: Final = 128
_REPLICAS_REFUSED: Final = 1025


class _Named(Enum):
    """An enumeration whose members convert to numbers but do not compare with them."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __hash__(self) -> int:
        return int(self.value)

    @classmethod
    def _missing_(cls, value: object) -> _Named:
        # Upstream's enumerations accept any number and print it as "???".
        member = object.__new__(cls)
        member._name_ = "???"
        member._value_ = operator.index(value)  # type: ignore[arg-type]
        return member


class ReplicaStatus(_Named):
    """State of a copy of an object."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(_Named):
    """State of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(_Named):
    """Kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class SoftPinAction(_Named):
    """Effect of a put on the soft pin of an object."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(_Named):
    """Kind of data of an object."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ExistOptions:
    """Options of `is_exist` and `batch_is_exist`.

    Attributes:
        prefetch_to_memory: True if the pool is to bring objects into memory that only a disk has.
            The call does not wait for that.
    """

    __slots__ = ("_prefetch_to_memory",)

    def __init__(self, prefetch_to_memory: bool = False) -> None:
        """Set the options."""
        self.prefetch_to_memory = prefetch_to_memory

    def __repr__(self) -> str:
        return f"ExistOptions(prefetch_to_memory={self._prefetch_to_memory})"

    @property
    def prefetch_to_memory(self) -> bool:
        """Whether objects that only a disk has are brought into memory."""
        return self._prefetch_to_memory

    @prefetch_to_memory.setter
    def prefetch_to_memory(self, value: bool) -> None:
        self._prefetch_to_memory = as_bool("prefetch_to_memory", value)


class ReplicateConfig:
    """Options of puts: copies, pins and placement.

    Attributes:
        replica_num: Number of copies, each on another segment; fewer if there are not enough
            segments.
        soft_pin_action: Effect on the soft pin, which protects objects from eviction for a while.
        soft_pin_ttl_ms: Duration of a soft pin, with ``ENABLE``; None uses the master's default.
        with_soft_pin: Older form of `soft_pin_action`: true is ``ENABLE``.
        with_hard_pin: True if the objects must never be evicted.
        preferred_segments: Names of segments to use first.
        preferred_segment: Older form; overrides `preferred_segments` if it is set.
        prefer_alloc_in_same_node: Use the segments of this process first. Only for
            `batch_put_from_multi_buffers` with one replica.
        group_ids: Group of each key of the call; "" for none.
        data_type: Kind of data.
        nof_replica_num: Copies on NVMe over fabrics, which this build does not support.
        preferred_nof_segments: Segments for those copies.
        dfs_replica_num: Copies on a distributed file system, which this build does not support.
        session_ids: Stored for callers that set it; without effect.
    """

    __slots__ = (
        "_data_type",
        "_dfs_replica_num",
        "_group_ids",
        "_nof_replica_num",
        "_prefer_alloc_in_same_node",
        "_preferred_nof_segments",
        "_preferred_segment",
        "_preferred_segments",
        "_replica_num",
        "_session_ids",
        "_soft_pin_action",
        "_soft_pin_ttl_ms",
        "_with_hard_pin",
    )

    def __init__(self) -> None:
        """Set the defaults."""
        self._replica_num = 1
        self._nof_replica_num = 0
        self._dfs_replica_num = 0
        self._soft_pin_action = SoftPinAction.PRESERVE
        self._soft_pin_ttl_ms: int | None = None
        self._with_hard_pin = False
        self._preferred_segments: list[str] = []
        self._preferred_segment = ""
        self._preferred_nof_segments: list[str] = []
        self._prefer_alloc_in_same_node = False
        self._group_ids: list[str] | None = None
        self._data_type = ObjectDataType.UNKNOWN
        self._session_ids: Any = None

    @property
    def replica_num(self) -> int:
        """Number of copies."""
        return self._replica_num

    @replica_num.setter
    def replica_num(self, value: int) -> None:
        self._replica_num = unsigned("replica_num", value)

    @property
    def nof_replica_num(self) -> int:
        """The number of copies on NVMe over fabrics."""
        return self._nof_replica_num

    @nof_replica_num.setter
    def nof_replica_num(self, value: int) -> None:
        self._nof_replica_num = unsigned("nof_replica_num", value)

    @property
    def dfs_replica_num(self) -> int:
        """The number of copies on a distributed file system."""
        return self._dfs_replica_num

    @dfs_replica_num.setter
    def dfs_replica_num(self, value: int) -> None:
        self._dfs_replica_num = unsigned("dfs_replica_num", value)

    @property
    def soft_pin_action(self) -> SoftPinAction:
        """Effect of a put on the soft pin, which protects objects from eviction for a while."""
        return self._soft_pin_action

    @soft_pin_action.setter
    def soft_pin_action(self, value: SoftPinAction) -> None:
        self._soft_pin_action = _instance("soft_pin_action", value, SoftPinAction)

    @property
    def with_soft_pin(self) -> bool:
        """Older form of `soft_pin_action`."""
        return self._soft_pin_action is SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, value: bool) -> None:
        is_on = as_bool("with_soft_pin", value)
        self._soft_pin_action = SoftPinAction.ENABLE if is_on else SoftPinAction.PRESERVE

    @property
    def soft_pin_ttl_ms(self) -> int | None:
        """Duration of a soft pin."""
        return self._soft_pin_ttl_ms

    @soft_pin_ttl_ms.setter
    def soft_pin_ttl_ms(self, value: int | None) -> None:
        self._soft_pin_ttl_ms = None if value is None else unsigned("soft_pin_ttl_ms", value)

    @property
    def with_hard_pin(self) -> bool:
        """True if the objects are never evicted."""
        return self._with_hard_pin

    @with_hard_pin.setter
    def with_hard_pin(self, value: bool) -> None:
        self._with_hard_pin = as_bool("with_hard_pin", value)

    @property
    def preferred_segments(self) -> list[str]:
        """Copy of the names of segments to use first."""
        return list(self._preferred_segments)

    @preferred_segments.setter
    def preferred_segments(self, value: Sequence[str]) -> None:
        self._preferred_segments = _texts("preferred_segments", value)

    @property
    def preferred_segment(self) -> str:
        """Name of the segment to use first."""
        return self._preferred_segment

    @preferred_segment.setter
    def preferred_segment(self, value: str) -> None:
        self._preferred_segment = _instance("preferred_segment", value, str)

    @property
    def preferred_nof_segments(self) -> list[str]:
        """Copy of the names of segments on NVMe over fabrics."""
        return list(self._preferred_nof_segments)

    @preferred_nof_segments.setter
    def preferred_nof_segments(self, value: Sequence[str]) -> None:
        self._preferred_nof_segments = _texts("preferred_nof_segments", value)

    @property
    def prefer_alloc_in_same_node(self) -> bool:
        """True if the segments of this process are used first."""
        return self._prefer_alloc_in_same_node

    @prefer_alloc_in_same_node.setter
    def prefer_alloc_in_same_node(self, value: bool | str) -> None:
        # Some of upstream's documents pass text; upstream's code uses the truth value.
        if isinstance(value, str):
            if value.lower() not in ("", "true", "false"):
                raise TypeError("prefer_alloc_in_same_node must be a bool")
            value = value.lower() == "true"
        self._prefer_alloc_in_same_node = as_bool("prefer_alloc_in_same_node", value)

    @property
    def group_ids(self) -> list[str] | None:
        """Copy of the group of each key."""
        return None if self._group_ids is None else list(self._group_ids)

    @group_ids.setter
    def group_ids(self, value: Sequence[str] | None) -> None:
        self._group_ids = None if value is None else _texts("group_ids", value)

    @property
    def data_type(self) -> ObjectDataType:
        """Kind of data."""
        return self._data_type

    @data_type.setter
    def data_type(self, value: ObjectDataType) -> None:
        self._data_type = _instance("data_type", value, ObjectDataType)

    @property
    def session_ids(self) -> Any:
        """Any value of the caller; upstream does not document its meaning."""
        return self._session_ids

    @session_ids.setter
    def session_ids(self, value: Any) -> None:
        self._session_ids = value

    def __str__(self) -> str:
        ttl = "default" if self._soft_pin_ttl_ms is None else str(self._soft_pin_ttl_ms)
        older = self._preferred_segment
        fields = [
            f"replica_num: {self._replica_num}",
            f"nof_replica_num: {self._nof_replica_num}",
            f"dfs_replica_num: {self._dfs_replica_num}",
            f"soft_pin_action: {self._soft_pin_action.name}",
            f"soft_pin_ttl_ms: {ttl}",
            f"with_hard_pin: {int(self._with_hard_pin)}",
            f"preferred_segments: [{', '.join(self._preferred_segments)}]",
            *([f"preferred_segment (deprecated): {older}"] if older else []),
            f"preferred_nof_segments: [{', '.join(self._preferred_nof_segments)}]",
            f"prefer_alloc_in_same_node: {int(self._prefer_alloc_in_same_node)}",
            f"data_type: {self._data_type.name}",
        ]
        if self._group_ids is not None:
            fields.append(f"group_ids: [{', '.join(self._group_ids)}]")
        return f"ReplicateConfig: {{ {', '.join(fields)} }}"


def put_options(
    config: ReplicateConfig | None, *, may_prefer_own: bool = False
) -> PutOptions | None:
    """Convert a config to native options; None if it is omitted.

    Raises:
        TypeError: The argument is not a `ReplicateConfig`.
        MooncakeError: An option is invalid, or this build does not support it.
    """
    if config is None:
        return None
    config = _instance("config", config, ReplicateConfig)
    if config.dfs_replica_num == 1:
        raise _native.failure(
            DFS_SERVICE_UNAVAILABLE, "no distributed file system is configured dfs_replica_num=1"
        )
    if config.dfs_replica_num > 1 or config.nof_replica_num > 0:
        raise _native.failure(
            INVALID_PARAMS, "this build does not support dfs_replica_num > 1 or nof_replica_num > 0"
        )
    own = config.prefer_alloc_in_same_node
    if own and not (may_prefer_own and config.replica_num == 1):
        raise _native.failure(
            INVALID_PARAMS,
            "prefer_alloc_in_same_node is for batch_put_from_multi_buffers with one replica",
        )
    if config.replica_num >= _REPLICAS_REFUSED:
        raise _native.failure(INVALID_PARAMS, f"too many replicas replicas={config.replica_num}")
    older = config.preferred_segment
    return PutOptions(
        replicas=min(config.replica_num, _REPLICAS_MAX),
        soft_pin=config.soft_pin_action.name.lower(),
        soft_pin_ttl_ms=config.soft_pin_ttl_ms,
        is_hard_pinned=config.with_hard_pin,
        preferred_segments=[older] if older else config.preferred_segments,
        prefers_own_segments=own,
        data_type=config.data_type.value,
        groups=config.group_ids,
    )


def _instance(name: str, value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    return value


def _texts(name: str, value: Any) -> list[str]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list of str, not {type(value).__name__}")
    others = [each for each in value if not isinstance(each, str)]
    if others:
        raise TypeError(f"each of {name} must be a str, not {type(others[0]).__name__}")
    return list(value)
