"""Where tensors were found last: a tensor that is read again is read without a search.

A read verifies what it recalls, in the call that reads the tensor, and searches if anything
differs. A wrong recollection costs a wasted read. It is therefore used only after two searches in
succession have found the same: not for a key that is in several pools, or whose tensor changes its
layout all the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mooncake.tensor.layout import Shard
from mooncake.tensor.search import Found

__all__ = ["forget", "recall", "remember"]

_KEPT_MAX = 256
"""Number of reads that are remembered, each with some KiB."""

_PARTS_MAX = 64
"""Number of objects up to which a search is remembered: it is little of a read of more."""


@dataclass(slots=True)
class _Kept:
    found: Found
    is_confirmed: bool = False


_kept: dict[tuple[bytes, Shard | None], _Kept] = {}
"""Least recently found first. Its methods are atomic, and no order of two of them does harm."""


def recall(key: bytes, target: Shard | None) -> Found | None:
    """Return where a tensor was found by the last two searches."""
    kept = _kept.get((key, target))
    return kept.found if kept is not None and kept.is_confirmed else None


def remember(key: bytes, target: Shard | None, found: Found) -> None:
    """Remember what a search has found."""
    before = _kept.pop((key, target), None)
    if found.evidence is None or len(found.parts) > _PARTS_MAX:
        return
    _kept[key, target] = _Kept(found, before is not None and before.found == found)
    if len(_kept) > _KEPT_MAX:
        _kept.pop(next(iter(_kept.copy())), None)


def forget(key: bytes, target: Shard | None) -> None:
    """Forget where a tensor was found, since it is not there any more."""
    _kept.pop((key, target), None)
