"""Keys, names and options of calls: text is not taken for a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mooncake._runtime import PutOptions

__all__ = ["decoded", "encoded", "key_list", "name_list", "with_groups"]

_TEXTS = (str, bytes)


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
    return key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key


def decoded(key: bytes) -> str:
    """Return a key as text. Bytes that are not valid UTF-8 become surrogates, as in file names."""
    return key.decode("utf-8", "surrogateescape")


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
