"""Checks of values from outside, and the canonical JSON that ids and digests are computed from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

__all__ = [
    "U64_MAX",
    "canonical_json",
    "content_id",
    "optional_integer",
    "parse_json_object",
    "require_distinct",
    "require_fields",
    "require_integer",
    "require_integers",
    "require_items",
    "require_object",
    "require_sequence",
    "require_sha256",
    "require_text",
    "require_u64",
    "set_fields",
    "sha256_hex",
]

U64_MAX = 2**64 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Item = TypeVar("_Item")


def require_text(value: object, name: str) -> str:
    """Return `value` if it is a string with at least one character."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string: {name}={value!r}")
    return value


def require_integer(
    value: object, name: str, *, minimum: int = 0, maximum: int | None = None
) -> int:
    """Return `value` if it is an integer, not a bool, within the limits."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer at least {minimum}: {name}={value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be an integer at least {minimum}: {name}={value}")
    if maximum is not None and value > maximum:
        kind = ", a 64-bit integer" if maximum == U64_MAX else ""
        raise ValueError(f"{name} must be from {minimum} to {maximum}{kind}: {name}={value}")
    return value


def require_u64(value: object, name: str, *, minimum: int = 0) -> int:
    """Return `value` if it is an integer of 64 bits without sign."""
    return require_integer(value, name, minimum=minimum, maximum=U64_MAX)


def optional_integer(value: object, name: str) -> int | None:
    """Return `value` if it is None or an integer from 0 on."""
    return None if value is None else require_integer(value, name)


def require_integers(values: object, name: str, *, minimum: int = 0) -> tuple[int, ...]:
    """Return the integers of a sequence."""
    if not _is_sequence(values):
        kind = type(values).__name__
        raise ValueError(f"{name} must contain integers: it must be a sequence, not {kind}")
    try:
        return tuple(require_integer(value, name, minimum=minimum) for value in values)
    except ValueError as error:
        raise ValueError(f"{error} in {values!r}") from None


def require_items(values: object, name: str, item_type: type[_Item]) -> tuple[_Item, ...]:
    """Return the items of a sequence if all are of one type."""
    items = []
    for index, value in enumerate(require_sequence(values, name)):
        if not isinstance(value, item_type):
            wanted, got = item_type.__name__, type(value).__name__
            raise ValueError(f"{name} must contain {wanted} only: {name}[{index}] is {got}")
        items.append(value)
    return tuple(items)


def require_sequence(values: object, name: str) -> Sequence[object]:
    """Return `values` if it is a sequence other than a string."""
    if not _is_sequence(values):
        raise ValueError(f"{name} must be a sequence, not {type(values).__name__}")
    return values


def _is_sequence(values: object) -> TypeGuard[Sequence[object]]:
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray)


def require_sha256(value: object, name: str) -> str:
    """Return `value` if it is a SHA-256 digest in lower-case hexadecimal digits."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(
            f"{name} must be a SHA-256 digest of 64 lower-case hexadecimal digits: {name}={value!r}"
        )
    return value


def require_distinct(values: Sequence[object], name: str) -> None:
    """Refuse a sequence that contains a value twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"duplicate {name}: {value!r} is given twice")
        seen.add(value)


def canonical_json(value: object, *, is_ascii: bool = True) -> str:
    """Return the JSON text of `value` with sorted keys and without white space."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=is_ascii
    )


def sha256_hex(text: str) -> str:
    """Return the SHA-256 digest of `text` in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def content_id(value: object) -> str:
    """Return the id of a value that is named by its content."""
    return f"sha256:{sha256_hex(canonical_json(value))}"


def parse_json_object(text: object, name: str) -> Mapping[str, Any]:
    """Return the JSON object in `text`; refuse repeated fields and NaN."""
    if not isinstance(text, str | bytes | bytearray):
        raise ValueError(f"{name} must be JSON text, not {type(text).__name__}")
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}") from error
    return require_object(value, name)


def require_object(value: object, name: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a JSON object, not {type(value).__name__}")
    return value


def require_fields(
    value: object, name: str, fields: frozenset[str], optional: frozenset[str] = frozenset()
) -> Mapping[str, Any]:
    """Return the JSON object `value` if it has exactly these fields."""
    record = require_object(value, name)
    given = {str(field) for field in record}
    missing, unknown = fields - given, given - fields - optional
    if missing or unknown:
        details = [f"missing={sorted(missing)}"] if missing else []
        details += [f"unknown={sorted(unknown)}"] if unknown else []
        raise ValueError(f"{name} does not match its schema fields: {' '.join(details)}")
    return record


def set_fields(record: object, **fields: object) -> None:
    """Set fields of a frozen dataclass while it is constructed."""
    for name, value in fields.items():
        object.__setattr__(record, name, value)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        require_distinct([name for name, _ in pairs], "JSON field")
    return record


def _refuse(constant: str) -> object:
    raise ValueError(f"non-finite JSON number: {constant}")
