"""References to stored batches, and their JSON form for other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from mooncake.structured.manifest import RemoteBundleRef

__all__ = [
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "STORAGE_GROUP_ID",
    "DataProtoRefLike",
    "HandleNumberError",
    "MooncakeDataProtoRef",
    "StructuredFieldLocation",
    "export_dataproto_ref",
    "import_dataproto_ref",
    "is_dataproto_ref_handle",
    "resolved_ref",
]

DATAPROTO_REF_HANDLE_TYPE: Final = "mooncake_dataproto_ref"
DATAPROTO_REF_HANDLE_VERSION: Final = 1
STORAGE_GROUP_ID: Final = "storage_group_id"
_KIND: Final = "bundle_stages"
_SECTIONS: Final = ("batch", "non_tensor_batch")
# Upstream also reads version 2, in which the group is not optional.
_GROUPED_VERSION: Final = 2
_ROWS_MAX: Final = 1 << 40

Section: TypeAlias = Literal["batch", "non_tensor_batch"]


@dataclass(frozen=True)
class StructuredFieldLocation:
    """Where a field of a batch is stored.

    Attributes:
        stage: Name of the stage.
        member: Name of the member in the object of the stage; for a field that a codec encoded, the
            beginning of the names of its payloads.
        section: Section of the batch.
    """

    stage: str
    member: str
    section: Section


@dataclass
class MooncakeDataProtoRef:
    """A stored batch: its fields, each in one of several stages.

    Attributes:
        batch_size: Number of rows.
        stage_refs: Object of each stage.
        field_index: Place of each field.
        meta_info: The batch's own metadata, which stays in the reference.
        namespace: Name that the caller chose.
        partition: Part of the keys.
        global_indexes: Numbers of the rows in a larger batch, or None.
        encoded_non_tensor: Codec of each field that is a column of Python objects.

    Later fields get the storage group of the batch, which its handle has as `STORAGE_GROUP_ID`.
    """

    batch_size: int
    stage_refs: dict[str, RemoteBundleRef]
    field_index: dict[str, StructuredFieldLocation]
    meta_info: dict[str, Any]
    namespace: str = "default"
    partition: str = "default"
    global_indexes: Any = None
    encoded_non_tensor: dict[str, Any] = field(default_factory=dict)
    _storage_group_id: str | None = field(default=None, repr=False)


class HandleNumberError(TypeError, ValueError):
    """A number of a handle is not valid; a TypeError as of ``int``, which upstream raises."""


DataProtoRefLike: TypeAlias = MooncakeDataProtoRef | Mapping[str, Any]


def is_dataproto_ref_handle(value: Any) -> bool:
    """Return whether a value is the JSON form of a reference."""
    return isinstance(value, Mapping) and value.get("type") == DATAPROTO_REF_HANDLE_TYPE


def export_dataproto_ref(ref: MooncakeDataProtoRef) -> dict[str, Any]:
    """Return the JSON form of a reference.

    Raises:
        TypeError: The argument is no reference, or its field names or `meta_info` have values
            without a JSON form, such as tensors.
    """
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"expected MooncakeDataProtoRef, got {type(ref).__name__}")
    for name in ref.field_index:
        if name is not None and not isinstance(name, str | int | float):
            raise TypeError(
                f"field names of handles must be str, int, float, bool or None, not "
                f"{type(name).__name__}"
            )
    handle: dict[str, Any] = {
        "type": DATAPROTO_REF_HANDLE_TYPE,
        "version": DATAPROTO_REF_HANDLE_VERSION,
        "kind": _KIND,
        "batch_size": int(ref.batch_size),
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": _plain(ref.global_indexes),
        "stage_refs": {
            stage: {"manifest_key": each.manifest_key} for stage, each in ref.stage_refs.items()
        },
        "field_index": {
            name: {"stage": each.stage, "member": each.member, "section": each.section}
            for name, each in ref.field_index.items()
        },
        "meta_info": _plain(ref.meta_info),
        "encoded_non_tensor": _plain(ref.encoded_non_tensor),
    }
    if ref._storage_group_id is not None:
        handle[STORAGE_GROUP_ID] = ref._storage_group_id
    return handle


def import_dataproto_ref(handle: Mapping[str, Any]) -> MooncakeDataProtoRef:
    """Return the reference of a JSON form. The store is not asked until the batch is read.

    Raises:
        ValueError: The handle is not valid; the message names the part.
    """
    if not is_dataproto_ref_handle(handle):
        raise ValueError("not a Mooncake DataProto ref handle")
    version = _whole(handle.get("version"))
    if version not in (DATAPROTO_REF_HANDLE_VERSION, _GROUPED_VERSION):
        raise HandleNumberError(
            f"unsupported DataProto ref handle version: {handle.get('version')!r}"
        )
    if handle.get("kind") != _KIND:
        raise ValueError(f"unsupported DataProto ref handle kind: {handle.get('kind')!r}")
    stages = {
        _text("stage_refs", name): RemoteBundleRef(
            _text("manifest_key", _mapping(f"stage_refs[{name!r}]", each).get("manifest_key")), {}
        )
        for name, each in _mapping("stage_refs", handle.get("stage_refs")).items()
    }
    fields = {
        _text("field_index", name): _location(name, each, stages)
        for name, each in _mapping("field_index", handle.get("field_index")).items()
    }
    rows = _whole(handle.get("batch_size"))
    if rows is None or not 0 <= rows <= _ROWS_MAX:
        raise HandleNumberError(
            f"DataProto ref handle batch_size is not valid: {handle.get('batch_size')!r}"
        )
    group = handle.get(STORAGE_GROUP_ID)
    if (group is None and version == _GROUPED_VERSION) or not (
        group is None or (isinstance(group, str) and group)
    ):
        raise ValueError("DataProto ref handle has invalid storage_group_id")
    return MooncakeDataProtoRef(
        rows,
        stages,
        fields,
        dict(_mapping("meta_info", handle.get("meta_info", {}))),
        str(handle.get("namespace", "default")),
        str(handle.get("partition", "default")),
        _indexes(handle.get("global_indexes")),
        dict(_mapping("encoded_non_tensor", handle.get("encoded_non_tensor", {}))),
        group,
    )


def resolved_ref(ref: Any) -> MooncakeDataProtoRef:
    """Return a reference, also from its JSON form.

    Raises:
        TypeError: The argument is neither.
    """
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if is_dataproto_ref_handle(ref):
        return import_dataproto_ref(ref)
    raise TypeError(f"expected MooncakeDataProtoRef or DataProto handle, got {type(ref).__name__}")


def _location(
    name: str, raw: Any, stages: Mapping[str, RemoteBundleRef]
) -> StructuredFieldLocation:
    location = _mapping(f"field_index[{name!r}]", raw)
    section = location.get("section")
    if section not in _SECTIONS:
        raise ValueError(f"invalid DataProto field section: {section!r}")
    stage, member = _text("stage", location.get("stage")), _text("member", location.get("member"))
    if stage not in stages:
        raise ValueError(f"DataProto ref handle field {name!r} references unknown stage {stage!r}")
    return StructuredFieldLocation(stage, member, section)


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"DataProto ref handle {name} must be a mapping")
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"DataProto ref handle {name} must be non-empty text, got {value!r}")
    return value


def _whole(value: Any) -> int | None:
    """Return a number, also from text; None for anything else."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _indexes(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("DataProto ref handle global_indexes must be a list or null")
    if not all(type(each) is int for each in value):
        raise ValueError("DataProto ref handle global_indexes must contain integers")
    return value


def _plain(value: Any) -> Any:
    """Return a value with the types of JSON, for numbers and arrays of numpy and tuples.

    Raises:
        TypeError: The value has no such form.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.generic | np.ndarray):
        plain = value.tolist()
        return _plain(plain) if value.dtype.kind not in "biuf" else plain
    raise TypeError(
        f"DataProto ref handles support only JSON-safe values, got {type(value).__name__}"
    )
