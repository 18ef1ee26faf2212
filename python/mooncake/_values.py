"""Validation of arguments that Python would misread: text as a list, a list as a value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake._runtime import PutOptions

__all__ = ["check_value", "decoded", "encoded", "key_list", "name_list", "with_groups"]

_TEXTS = (str, bytes)
_LISTS = (list, tuple)


def check_value(value: object) -> None:
    """Refuse a list of values for a single value; the native put would concatenate the list."""
    if isinstance(value, _LISTS):
        raise TypeError(f"a value is a bytes-like object, not {type(value).__name__}")
    if hasattr(value, "data_ptr"):
        raise TypeError("a value is a bytes-like object, not a tensor; use put_tensor")


def key_list(keys: Iterable[str | bytes]) -> list[str | bytes]:
    """Return keys as a list; refuse a single key, whose characters would be taken for keys."""
    if isinstance(keys, _TEXTS):
        raise TypeError(f"keys must be an iterable of keys, not {type(keys).__name__}")
    return list(keys)


def name_list(names: str | Sequence[str]) -> list[str]:
    """Return names as a list; a single name becomes a list of one."""
    return [names] if isinstance(names, str) else list(names)


def encoded(key: str | bytes) -> bytes:
    """Return a key or a prefix as bytes."""
    if not isinstance(key, _TEXTS):
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
    return key.encode() if isinstance(key, str) else key


def decoded(key: bytes) -> str | bytes:
    """Return a key as text, or unchanged if it is not valid UTF-8."""
    try:
        return key.decode()
    except UnicodeDecodeError:
        return key


def with_groups(options: PutOptions, groups: Sequence[str]) -> PutOptions:
    """Return the same options with other groups."""
    return PutOptions(
        replicas=options.replicas,
        soft_pin=options.soft_pin,
        soft_pin_ttl_ms=options.soft_pin_ttl_ms,
        is_hard_pinned=options.is_hard_pinned,
        preferred_segments=options.preferred_segments,
        prefers_own_segments=options.prefers_own_segments,
        data_type=options.data_type,
        groups=groups,
    )
