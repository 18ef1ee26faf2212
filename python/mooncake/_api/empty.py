"""Empty files: the pool has no object without a byte, so that a tag marks the one in its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake._api.native_calls import Native
from mooncake._api.outcomes import only
from mooncake._api.types import Key
from mooncake._api.values import changed
from mooncake._runtime import PutOptions
from mooncake.errors import MooncakeError

__all__ = ["EMPTY_VALUE", "are_empty", "is_empty_mark", "is_version_empty", "with_empty_mark"]

EMPTY_VALUE = b"\0"
"""The bytes of the object that stands for an empty file."""

_TAG, _MARK = "mooncake.file", "empty"


def with_empty_mark(options: PutOptions | None) -> PutOptions:
    """Return the options for a put of `EMPTY_VALUE` that stands for an empty file."""
    tags = options.tags if options is not None else {}
    return changed(options, tags={**tags, _TAG: _MARK})


def is_empty_mark(size: int, tags: Mapping[str, str]) -> bool:
    """Return whether an object of that size with these tags stands for an empty file."""
    return size == len(EMPTY_VALUE) and tags.get(_TAG) == _MARK


def are_empty(native: Native, keys: Sequence[Key]) -> list[bool]:
    """Return for each key whether its object stands for an empty file."""
    described = native.describe(keys) if keys else []
    return [
        not isinstance(each, MooncakeError) and is_empty_mark(each["size"], each["tags"])
        for each in described
    ]


def is_version_empty(native: Native, key: Key, size: int, version: int) -> bool | None:
    """Return whether a version of an object stands for an empty file; None if it was replaced."""
    if size != len(EMPTY_VALUE):
        return False
    found = only(native.describe([key]))
    if found["version"] != version:
        return None
    return is_empty_mark(found["size"], found["tags"])
