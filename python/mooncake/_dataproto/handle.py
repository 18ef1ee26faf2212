"""Checked views of DataProto handles and of the names that a catalog takes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_values

__all__ = [
    "Handle",
    "HandleCopies",
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
        """Refuses a handle that does not have a row for each key.

        Raises:
            ValueError: It has another number of rows.
        """
        if self.batch_size != count:
            raise ValueError(
                f"DataProto batch size {self.batch_size} does not match {count} logical keys"
            )


class HandleCopies(dict[str, Handle]):
    """Handles by fragment, each of which is copied when it is first taken out.

    An answer may name thousands of fragments of which its reader takes few. The reader may change
    what it takes out, without an effect on what other readers get.
    """

    def __init__(self, handles: Mapping[str, Handle]) -> None:
        super().__init__(handles)
        # Names whose handles are the reader's own.
        self._own: set[str] = set()

    def __getitem__(self, name: str) -> Handle:
        handle = super().__getitem__(name)
        if name not in self._own:
            handle = copied(handle)
            self[name] = handle
        return handle

    def __setitem__(self, name: str, handle: Handle) -> None:
        super().__setitem__(name, handle)
        self._own.add(name)

    def __iter__(self) -> Iterator[str]:
        # Without this method, `dict(...)` and `{**...}` would read the items past `__getitem__`.
        return super().__iter__()

    def __or__(self, other: Mapping[Any, Any]) -> dict[Any, Any]:
        return {**self, **other}

    def __reduce__(self) -> tuple[type, tuple[dict[str, Handle]]]:
        # Readers in other processes, and deep copies, get a plain dictionary.
        return dict, (dict(self),)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the handle of a fragment, or `default`."""
        # `dict.get` would return what others have, too.
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> dict_items[str, Handle]:
        """Returns the fragments and their handles."""
        self._copy_all()
        return super().items()

    def values(self) -> dict_values[str, Handle]:
        """Returns the handles."""
        self._copy_all()
        return super().values()

    def copy(self) -> dict[str, Handle]:
        """Returns the handles in a plain dictionary."""
        return dict(self)

    def pop(self, name: str, *default: Any) -> Any:
        """Removes a fragment; returns its handle, or `default`."""
        self._copy_all()
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Handle]:
        """Removes a fragment; returns it with its handle."""
        self._copy_all()
        return super().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Returns the handle of a fragment, after setting it to `default` if there is none."""
        self._copy_all()
        return super().setdefault(name, default)

    def _copy_all(self) -> None:
        for name in tuple(self):
            # Taking a handle out copies it.
            self.get(name)


def view_handle(handle: object) -> HandleView:
    """Returns a checked copy of a handle that `export_dataproto_ref` made, with all of its fields.

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
    """Returns distinct, non-empty strings in their order.

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
    return [copied(dict(tag)) for tag in tags]


def is_plain(values: Mapping[str, Any]) -> bool:
    """Returns whether a shallow copy of a mapping shares nothing that can change."""
    return all(each.__class__ in _PLAIN for each in values.values())


def copied(value: _Value) -> _Value:
    """Returns a deep copy of a value of JSON, several times faster than `copy.deepcopy`."""
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
    """Returns `value` if it is a string with at least one character.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string")
    return value
