"""Calls about one object whose key is that of a tensor in shards."""

# Generated from asynchronous/sharded.py by scripts/generate_blocking_api.py; do not edit.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mooncake._api.native_calls import Native
from mooncake._api.outcomes import about
from mooncake._api.types import Key
from mooncake._api.values import encoded
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor.calls import run
from mooncake.tensor.sharded import READS, are_sharded, refusal

__all__ = ["explained", "of_one_object", "sharded_keys"]

T = TypeVar("T")


def sharded_keys(native: Callable[[], Native], keys: Sequence[Key]) -> list[bool]:
    """Return for each key, which no object has, whether a tensor is stored in shards under it.

    Args:
        native: Returns the native store for the next call.
        keys: The keys.
    """
    if not keys:
        return []
    return run(native(), are_sharded([encoded(key) for key in keys]))


def explained(
    native: Callable[[], Native],
    keys: Sequence[Key],
    outcomes: Sequence[T | MooncakeError],
    remedy: str = READS,
) -> Sequence[T | MooncakeError]:
    """Replace the failures of missing objects where tensors are stored in shards under their keys.

    This costs a call if objects are missing.

    Args:
        native: Returns the native store for the next call.
        keys: Keys of the objects.
        outcomes: The value of each object, or its failure.
        remedy: What to do instead of the call.
    """
    missing = [at for at, each in enumerate(outcomes) if isinstance(each, NotFoundError)]
    if not missing:
        return outcomes
    found = sharded_keys(native, [keys[at] for at in missing])
    told = list(outcomes)
    for at, is_sharded in zip(missing, found, strict=True):
        if is_sharded:
            told[at] = refusal(keys[at], remedy)
    return told


def of_one_object(
    native: Callable[[], Native],
    key: Key,
    call: Callable[[], T],
    remedy: str = READS,
) -> T:
    """Make a call that is about one object; refuse it if the key is that of a tensor in shards.

    Args:
        native: Returns the native store for the next call.
        key: Key of the object, which failures name.
        call: Makes the call.
        remedy: What to do instead.
    """
    with about(key):
        try:
            return call()
        except NotFoundError:
            if (sharded_keys(native, [key]))[0]:
                raise refusal(key, remedy) from None
            raise
