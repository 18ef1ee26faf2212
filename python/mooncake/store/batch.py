"""What a batch is given and what it gives back, in the form that the established calls have."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake._runtime import _native
from mooncake.errors import MooncakeError
from mooncake.store.codes import BUFFER_OVERFLOW, INVALID_PARAMS, OK

if TYPE_CHECKING:
    from typing_extensions import Buffer as Readable

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


def as_codes(outcomes: list[T | MooncakeError]) -> list[int]:
    """Return 0 for each success."""
    return [_code(value) if isinstance(value, MooncakeError) else OK for value in outcomes]


def as_numbers(outcomes: Sequence[int | MooncakeError]) -> list[int]:
    """Return the number of each success. `int` also makes plain ints of booleans."""
    return [value if type(value) is int else _number(value) for value in outcomes]


def _number(value: int | MooncakeError) -> int:
    return _code(value) if isinstance(value, MooncakeError) else int(value)


def _code(error: MooncakeError) -> int:
    return as_upstream(error.code)


def as_upstream(code: int) -> int:
    """Return the number by which established callers know a failure.

    To them a destination that is too small is a bad argument.
    """
    return INVALID_PARAMS if code == BUFFER_OVERFLOW else code


def as_bytes(value: bytes | MooncakeError) -> bytes:
    """Return the bytes, or none of them for a failure."""
    return value if isinstance(value, bytes) else b""


def invalid_argument(text: str) -> MooncakeError:
    """Note that an argument is wrong."""
    return _native.failure(INVALID_PARAMS, text)


def not_set_up() -> MooncakeError:
    """Note that the store is not set up."""
    text = "the store is not set up; call setup() first"
    return _native.failure(INVALID_PARAMS, text, is_closed=True)


def contiguous(value: Readable | Sequence[Readable]) -> Readable:
    """Return the value itself if its memory has no gaps and can be read as bytes, or else a copy.

    Raises:
        TypeError: It is nothing with bytes.
    """
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except ValueError:
        # An array of items that the buffer protocol has no name for: points in time, bfloat16.
        copied: Callable[[], bytes] | None = getattr(value, "tobytes", None)
        if copied is None:
            raise
        return copied()
    return view if view.c_contiguous and view.ndim > 0 else view.tobytes()


def have_same_length(keys: Sequence[Key], addresses: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether the lists are of one length; else that is noted as a failure."""
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
    """Join buffers; an item whose lists differ in length has none, which fails on its own."""
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
    """Return a number from 0 to 2^64-1; refuse all else by type, as the established calls do."""
    is_integer = hasattr(value, "__index__") and not isinstance(value, _NO_INTEGERS)
    number = operator.index(value) if is_integer else -1
    if not 0 <= number <= _U64_MAX:
        raise TypeError(f"{name} must be an integer from 0 to 2^64-1, not {value!r}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """Return whether a value says yes.

    As in the established calls, numbers have a say as well as booleans, and None says no; a text or
    a list is refused.
    """
    if value is not None and not hasattr(type(value), "__bool__"):
        raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    return bool(value)


def check_lists(*lists: object) -> None:
    """Refuse what is no list or tuple, which the established calls do by type."""
    for given in lists:
        # A tuple, since a union would be made anew with each call.
        if isinstance(given, _NO_LISTS) or not hasattr(given, "__len__"):
            raise TypeError(f"expected a list, not {type(given).__name__}")
