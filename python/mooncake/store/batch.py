"""Conversion of the arguments and results of upstream's calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar

from mooncake._hints import Readable
from mooncake._runtime import _native
from mooncake.errors import MooncakeError
from mooncake.store.codes import BUFFER_OVERFLOW, INVALID_PARAMS, OK

__all__ = [
    "Key",
    "as_bool",
    "as_bytes",
    "as_codes",
    "as_numbers",
    "as_upstream",
    "check_lists",
    "contiguous",
    "have_same_length",
    "invalid_argument",
    "not_set_up",
    "ranges_of",
    "unsigned",
]

T = TypeVar("T")
Key = str | bytes

_U64_MAX = (1 << 64) - 1
_NO_INTEGERS = (bool, Enum)
_NO_LISTS = (str, bytes, dict, set, frozenset)
_OBJECTS = "the items are Python objects, whose bytes are addresses of this process"


def as_codes(outcomes: list[T | MooncakeError]) -> list[int]:
    """Return 0 for each success, and the code of each failure."""
    return [_code(value) if isinstance(value, MooncakeError) else OK for value in outcomes]


def as_numbers(outcomes: Sequence[int | MooncakeError]) -> list[int]:
    """Return the number of each success, and the code of each failure.

    `int` also turns booleans into plain ints.
    """
    return [value if type(value) is int else _number(value) for value in outcomes]


def _number(value: int | MooncakeError) -> int:
    return _code(value) if isinstance(value, MooncakeError) else int(value)


def _code(error: MooncakeError) -> int:
    return as_upstream(error.code)


def as_upstream(code: int) -> int:
    """Return the code that upstream returns for a failure.

    Upstream reports a destination that is too small as an invalid argument.
    """
    return INVALID_PARAMS if code == BUFFER_OVERFLOW else code


def as_bytes(value: bytes | MooncakeError) -> bytes:
    """Return the bytes, or ``b""`` for a failure."""
    return value if isinstance(value, bytes) else b""


def invalid_argument(text: str) -> MooncakeError:
    """Record an invalid argument as the last failure."""
    return _native.failure(INVALID_PARAMS, text)


def not_set_up() -> MooncakeError:
    """Record as the last failure that the store is not set up."""
    text = "the store is not set up; call setup() first"
    return _native.failure(INVALID_PARAMS, text, is_closed=True)


def contiguous(value: Readable | Sequence[Readable]) -> Readable:
    """Return a value unchanged if its memory is contiguous bytes, else a contiguous copy.

    Raises:
        TypeError: The value does not have the buffer protocol.
        ObjectItemsError: The items are Python objects.
    """
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except ValueError:
        # Arrays of dtypes without a buffer-protocol format, such as datetime64 or bfloat16.
        copied: Callable[[], bytes] | None = getattr(value, "tobytes", None)
        if copied is None:
            raise
        if getattr(getattr(value, "dtype", None), "hasobject", False):
            raise _native.ObjectItemsError(_OBJECTS) from None
        return copied()
    if view.c_contiguous and view.ndim > 0:
        return view
    if _native.holds_objects(view.format.encode()):
        raise _native.ObjectItemsError(_OBJECTS)
    return view.tobytes()


def have_same_length(keys: Sequence[Key], addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether the lists have one length; record a failure if they do not."""
    check_lists(keys, addresses, sizes)
    if len(keys) == len(addresses) == len(sizes):
        return True
    invalid_argument(
        f"the lists differ in length keys={len(keys)} buffer_ptrs={len(addresses)} "
        f"sizes={len(sizes)}"
    )
    return False


def ranges_of(
    keys: Sequence[Key],
    all_addresses: Sequence[Sequence[int]],
    all_sizes: Sequence[Sequence[int]],
) -> list[list[tuple[int, int]]] | None:
    """Pair addresses and sizes of each item; an item whose lists differ in length gets no ranges.

    Such an item then fails on its own.
    """
    check_lists(keys, all_addresses, all_sizes)
    if not len(keys) == len(all_addresses) == len(all_sizes):
        invalid_argument(
            f"the lists differ in length keys={len(keys)} all_buffer_ptrs={len(all_addresses)} "
            f"all_sizes={len(all_sizes)}"
        )
        return None
    return [
        list(zip(addresses, sizes, strict=True)) if len(addresses) == len(sizes) else []
        for addresses, sizes in zip(all_addresses, all_sizes, strict=True)
    ]


def unsigned(name: str, value: Any) -> int:
    """Return a number from 0 to 2^64-1; raise TypeError for anything else, as upstream does."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, _NO_INTEGERS)
    number = operator.index(value) if is_integer else -1
    if not 0 <= number <= _U64_MAX:
        raise TypeError(f"{name} must be an integer from 0 to 2^64-1, not {value!r}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """Return a value as bool.

    As in upstream's calls, booleans, numbers and None are accepted; text and lists are refused.
    """
    if value is not None and not hasattr(type(value), "__bool__"):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return bool(value)


def check_lists(*lists: object) -> None:
    """Raise TypeError for anything but a list or tuple, as upstream does."""
    for given in lists:
        # A tuple of types, since a union would be built on each call.
        if isinstance(given, _NO_LISTS) or not hasattr(given, "__len__"):
            raise TypeError(f"expected a list, not {type(given).__name__}")
