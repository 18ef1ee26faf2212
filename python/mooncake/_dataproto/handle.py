"""Checked views of DataProto handles and of the names that a catalog takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Handle", "HandleView", "checked_names", "checked_tags", "checked_text", "view_handle"]

Handle: TypeAlias = dict[str, Any]

_TYPE = "mooncake_dataproto_ref"


@dataclass(frozen=True, slots=True)
class HandleView:
    """A handle that was checked: a private copy, and the parts of it that a catalog needs.

    `fields` are the names of the fields in order, `stages` the manifest key of each stage.
    """

    handle: Handle
    batch_size: int
    partition: str
    fields: tuple[str, ...]
    stages: Mapping[str, str]

    @property
    def fragment_id(self) -> str:
        """The id of the fragment of a handle with one stage: the key of its manifest.

        Raises:
            ValueError: The handle has no or several stages.
        """
        if len(self.stages) != 1:
            raise ValueError("catalog fragments must contain exactly one DataProto stage")
        return next(iter(self.stages.values()))

    def require_rows(self, count: int) -> None:
        """Refuses a handle that does not have a row for each key.

        Raises:
            ValueError: It has another number of rows.
        """
        if self.batch_size != count:
            raise ValueError(
                f"DataProto batch size {self.batch_size} does not match {count} logical keys"
            )


def view_handle(handle: object) -> HandleView:
    """Returns a checked copy of a handle that `export_dataproto_ref` made.

    Raises:
        ValueError: It is no such handle, or its fields name stages that it does not have.
    """
    if not isinstance(handle, Mapping) or handle.get("type") != _TYPE:
        raise ValueError("not a Mooncake DataProto ref handle")
    batch_size, partition = handle.get("batch_size"), handle.get("partition")
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 0:
        raise ValueError(f"DataProto ref handle has an invalid batch_size: {batch_size!r}")
    stages: dict[str, str] = {}
    for stage, ref in _mapping(handle, "stage_refs").items():
        key = ref.get("manifest_key") if isinstance(ref, Mapping) else None
        stages[checked_text(stage, "DataProto stage")] = checked_text(
            key, f"manifest_key of DataProto stage {stage!r}"
        )
    fields = _mapping(handle, "field_index")
    for field, location in fields.items():
        named = location.get("stage") if isinstance(location, Mapping) else None
        if named not in stages:
            raise ValueError(
                f"DataProto ref handle field {field!r} references unknown stage {named!r}"
            )
    return HandleView(
        handle=copy.deepcopy(dict(handle)),
        batch_size=batch_size,
        partition=checked_text(partition, "DataProto partition"),
        fields=checked_names(tuple(fields), "field names"),
        stages=stages,
    )


def checked_names(values: object, label: str) -> tuple[str, ...]:
    """Returns a sequence of distinct, non-empty strings.

    Raises:
        ValueError: It is none, is empty, or repeats a name.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | Mapping):
        raise ValueError(f"{label} must be a sequence of non-empty strings")
    names = tuple(values)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{label} must be non-empty strings")
    if len(set(names)) != len(names):
        raise ValueError(f"{label} must be unique")
    return names


def checked_tags(
    tags: Sequence[Mapping[str, Any]] | None, count: int
) -> list[dict[str, Any]] | None:
    """Returns a copy of the tags, one mapping for each key, or None.

    Raises:
        ValueError: There are more or fewer tags than keys.
        TypeError: A tag is no mapping.
    """
    if tags is None:
        return None
    if len(tags) != count:
        raise ValueError("tags must have the same length as keys")
    if not all(isinstance(tag, Mapping) for tag in tags):
        raise TypeError("tags must be mappings")
    return [copy.deepcopy(dict(tag)) for tag in tags]


def checked_text(value: object, name: str) -> str:
    """Returns `value` if it is a string with at least one character.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string")
    return value


def _mapping(handle: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = handle.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"DataProto ref handle field {name} must be a mapping")
    return value
