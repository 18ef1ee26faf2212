"""Keys, names and options of calls: text is not taken for a list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

from mooncake._runtime import PutOptions, _native

__all__ = [
    "Seconds",
    "changed",
    "check_version",
    "decoded",
    "encoded",
    "key_list",
    "milliseconds",
    "name_list",
    "options_for",
    "pairs_of",
    "with_terms",
]

Seconds: TypeAlias = float | timedelta
"""A duration: a number of seconds, or a `timedelta`."""

T = TypeVar("T")

_TEXTS = (str, bytes)
_SECONDS_MAX = 1e12
_INVALID_PARAMS = -600
_OPTIONS = (
    "replicas",
    "soft_pin",
    "soft_pin_ttl_ms",
    "is_hard_pinned",
    "preferred_segments",
    "prefers_own_segments",
    "data_type",
    "groups",
    "ttl_ms",
    "tags",
    "if_versions",
)


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


def changed(options: PutOptions | None, **changes: Any) -> PutOptions:
    """Return the options with some of them changed."""
    values = {name: getattr(options, name) for name in _OPTIONS} if options else {}
    return PutOptions(**{**values, **changes})


def options_for(options: PutOptions | None, rows: Sequence[int]) -> PutOptions | None:
    """Return the options for some items of a batch, whose groups and versions are one for each."""
    if options is None:
        return None
    each = {"groups": options.groups, "if_versions": options.if_versions}
    changes = {name: [values[at] for at in rows] for name, values in each.items() if values}
    return changed(options, **changes) if changes else options


def with_terms(
    options: PutOptions | None,
    *,
    ttl_s: Seconds | None,
    tags: Mapping[str, str] | None,
    if_version: int | None = None,
) -> PutOptions | None:
    """Return the options with what a call asks for besides; usually that is nothing.

    Raises:
        TypeError: The options are none, or the version is no number.
    """
    if options is not None and not isinstance(options, PutOptions):
        kind = type(options).__name__
        raise TypeError(f"options is a PutOptions, not {kind}; use PutOptions(replicas=...)")
    check_version(if_version)
    changes: dict[str, Any] = {}
    if ttl_s is not None:
        changes["ttl_ms"] = milliseconds(ttl_s)
    if tags is not None:
        changes["tags"] = tags
    if if_version is not None:
        changes["if_versions"] = [if_version]
    return changed(options, **changes) if changes else options


def check_version(if_version: int | None) -> None:
    """Refuse a version that is no number.

    Raises:
        TypeError: It is none, but for instance a boolean, which would count as version 0 or 1.
    """
    if if_version is not None and (isinstance(if_version, bool) or not isinstance(if_version, int)):
        raise TypeError(f"if_version is a number, not {type(if_version).__name__}")


def milliseconds(seconds: Seconds) -> int:
    """Return a duration in milliseconds, rounded up.

    Raises:
        TypeError: It is neither a number nor a `timedelta`.
        InvalidArgumentError: It is not positive.
    """
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if isinstance(seconds, (*_TEXTS, bool)) or not hasattr(seconds, "__float__"):
        kind = type(seconds).__name__
        raise TypeError(f"ttl_s is a number of seconds or a timedelta, not {kind}: {seconds!r}")
    if not 0 < seconds < _SECONDS_MAX:
        text = "a time to live is a positive number of seconds"
        raise _native.failure(_INVALID_PARAMS, text, context={"ttl_s": seconds})
    return math.ceil(seconds * 1000)


def pairs_of(
    items: Mapping[str, T] | Mapping[bytes, T] | Iterable[tuple[str | bytes, T]],
) -> list[tuple[str | bytes, T]]:
    """Return keys and values of a batch; refuse what has no pair for each item."""
    if isinstance(items, Mapping):
        return list(items.items())
    if isinstance(items, _TEXTS) or not isinstance(items, Iterable):
        kind = type(items).__name__
        raise TypeError(f"the items are a mapping or pairs of key and value, not {kind}")
    pairs: list[Any] = list(items)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            text = "each item is a pair of key and value, as in {'a': b'1'} or [('a', b'1')]"
            raise TypeError(f"{text}, not {pair!r:.60}")
    return cast("list[tuple[str | bytes, T]]", pairs)
