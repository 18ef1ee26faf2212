"""Outcomes of batches: values, and failures in their places."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake._api.values import changed
from mooncake.errors import MooncakeError, NotFoundError

if TYPE_CHECKING:
    from mooncake._api.types import Key, Progress
    from mooncake._runtime import PutOptions

__all__ = ["MISSING", "about", "all_of", "batches", "only", "options_of", "or_default"]

T = TypeVar("T")

_PROGRESS_ITEMS = 64


class _NoDefault:
    """The default of an argument whose absence differs from every value."""

    def __repr__(self) -> str:
        return "<none>"


MISSING: Any = _NoDefault()


def only(outcomes: Sequence[T | Exception]) -> T:
    """Return the value of a batch of one, or raise its failure."""
    outcome = outcomes[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def all_of(outcomes: Sequence[T | Exception]) -> list[T]:
    """Return the values of a batch, or raise its first failure."""
    values: list[T] = []
    failures: list[Exception] = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            failures.append(outcome)
        else:
            values.append(outcome)
    if failures:
        first = failures[0]
        first.add_note(f"{len(failures)} of {len(outcomes)} items failed")
        if isinstance(first, MooncakeError):
            first.outcomes = list(outcomes)
        raise first
    return values


@contextlib.contextmanager
def about(key: Key) -> Iterator[None]:
    """Set the key of the failures of a block."""
    try:
        yield
    except MooncakeError as failure:
        failure.key = key
        raise


def or_default(outcome: bytes | MooncakeError, default: Any) -> Any:
    """Return a value, the default if the object does not exist, or raise the failure."""
    if isinstance(outcome, NotFoundError) and default is not MISSING:
        return default
    return only([outcome])


def batches(count: int, progress: Progress | None) -> Iterator[slice]:
    """Split `count` items into batches: one batch if no progress is reported."""
    step = count if progress is None else _PROGRESS_ITEMS
    for first in range(0, count, max(step, 1)):
        yield slice(first, min(first + step, count))


def options_of(options: PutOptions | None, part: slice) -> PutOptions | None:
    """Return the options for a part of the items: those that have a value for each item."""
    if options is None:
        return None
    each = {"groups": options.groups, "if_versions": options.if_versions}
    changes = {name: values[part] for name, values in each.items() if values is not None}
    return changed(options, **changes) if changes else options
