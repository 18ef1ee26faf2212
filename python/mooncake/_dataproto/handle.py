"""Checked views of DataProto handles and of the names that a catalog takes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

__all__ = [
    "Handle",
    "HandleView",
    "checked_names",
    "checked_tags",
    "checked_text",
    "copied",
    "is_plain",
    "view_handle",
]

Handle: TypeAlias = dict[str, Any]

_Value = TypeVar("_Value")
# Classes whose values cannot change.
_PLAIN = frozenset((str, int, float, bool, bytes, type(None)))


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
        """Refuse a handle that does not have a row for each key.

        Raises:
            ValueError: It has another number of rows.
        """
        if self.batch_size != count:
            raise ValueError(
                f"DataProto batch size {self.batch_size} does not match {count} logical keys"
            )


def view_handle(handle: object) -> HandleView:
    """Return a checked copy of a handle that `export_dataproto_ref` made, with all of its fields.

    Raises:
        ValueError: It is no such handle, its version is unknown, or its fields name stages that
            it does not have.
    """
    # Imported at use: it needs numpy.
    from mooncake.structured.references import export_dataproto_ref, import_dataproto_ref

    # import_dataproto_ref refuses what is no mapping.
    ref = import_dataproto_ref(cast("Mapping[str, Any]", handle))
    return HandleView(
        handle=export_dataproto_ref(ref),
        batch_size=ref.batch_size,
        partition=ref.partition,
        fields=checked_names(tuple(ref.field_index), "field names"),
        stages={stage: each.manifest_key for stage, each in ref.stage_refs.items()},
    )


def checked_names(values: object, label: str) -> tuple[str, ...]:
    """Return distinct, non-empty strings in their order.

    Raises:
        ValueError: They are no iterable with an order, there are none, or a name is repeated.
    """
    if isinstance(values, str | bytes | Set) or not isinstance(values, Iterable):
        raise ValueError(f"{label} must be a sequence of non-empty strings")
    names = tuple(values)
    is_text = set(map(type, names)) == {str} or all(isinstance(name, str) for name in names)
    distinct = set(names) if is_text else set()
    if not names or not is_text or "" in distinct:
        raise ValueError(f"{label} must be non-empty strings")
    if len(distinct) != len(names):
        raise ValueError(f"{label} must be unique")
    return names


def checked_tags(
    tags: Sequence[Mapping[str, Any]] | None, count: int
) -> list[dict[str, Any]] | None:
    """Return a copy of the tags, one mapping for each key, or None.

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
    return [copied(dict(tag)) for tag in tags]


def is_plain(values: Mapping[str, Any]) -> bool:
    """Return whether a shallow copy of a mapping shares nothing that can change."""
    return all(each.__class__ in _PLAIN for each in values.values())


def copied(value: _Value) -> _Value:
    """Return a deep copy of a value of JSON, several times faster than `copy.deepcopy`."""
    result: Any = value
    if value.__class__ in _PLAIN:
        return value
    if value.__class__ is dict:
        # Most values are plain: they cost no call.
        result = {
            name: each if each.__class__ in _PLAIN else copied(each)
            for name, each in result.items()
        }
        return cast("_Value", result)
    if value.__class__ is list:
        return cast("_Value", [copied(each) for each in result])
    return copy.deepcopy(value)


def checked_text(value: object, name: str) -> str:
    """Return `value` if it is a string with at least one character.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string")
    return value
