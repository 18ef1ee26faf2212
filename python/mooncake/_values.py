"""Arguments that Python would take for something else: texts as lists, lists as values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["check_value", "encoded", "key_list", "name_list"]

_TEXTS = (str, bytes)
_LISTS = (list, tuple)


def check_value(value: object) -> None:
    """Refuse several values for one, which the native put would join."""
    if isinstance(value, _LISTS):
        raise TypeError(f"a value is a bytes-like object, not {type(value).__name__}")


def key_list(keys: Iterable[str | bytes]) -> list[str | bytes]:
    """Return keys as a list; refuse a single one, whose characters would be taken for keys."""
    if isinstance(keys, _TEXTS):
        raise TypeError(f"expected many keys, not one of type {type(keys).__name__}")
    return list(keys)


def name_list(names: str | Sequence[str]) -> list[str]:
    """Return names as a list, also a single one."""
    return [names] if isinstance(names, str) else list(names)


def encoded(key: str | bytes) -> bytes:
    """Return the bytes of a key or of a prefix."""
    if not isinstance(key, _TEXTS):
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
    return key.encode() if isinstance(key, str) else key
