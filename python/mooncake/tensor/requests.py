"""Arguments of the calls for tensors and arrays as items and requests, and their outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from mooncake._api.types import Key
from mooncake._api.values import encoded, key_list
from mooncake.tensor.layout import Layout, Shard
from mooncake.tensor.read import Request
from mooncake.tensor.write import Item

__all__ = ["Items", "Targets", "item", "item_list", "request_list"]

Items: TypeAlias = Mapping[str, Any] | Mapping[bytes, Any] | Iterable[tuple[Key, Any]]
Targets: TypeAlias = "Shard | Sequence[Shard | None] | None"


def item(key: Key, value: Any, layout: Layout | Shard | None, shape: Sequence[int] | None) -> Item:
    """Return a tensor or an array to put."""
    return Item(encoded(key), value, layout, None if shape is None else tuple(shape))


def item_list(items: Items, layout: Layout | Shard | None, prefix: Key = "") -> list[Item]:
    """Return the tensors or arrays of a batch to put, with a prefix in front of their keys."""
    pairs, start = items.items() if isinstance(items, Mapping) else items, encoded(prefix)
    return [Item(start + encoded(key), value, layout) for key, value in pairs]


def request_list(keys: Iterable[Key], target: Targets, out: Sequence[Any] | None) -> list[Request]:
    """Return the requests of a batch to get; a list has one item for each key."""
    wanted = key_list(keys)
    targets = list(target) if isinstance(target, Sequence) else [target] * len(wanted)
    outs = [None] * len(wanted) if out is None else list(out)
    for name, given in (("target", targets), ("out", outs)):
        if len(given) != len(wanted):
            raise ValueError(f"the lists differ in length keys={len(wanted)} {name}={len(given)}")
    return [
        Request(encoded(key), shard, into)
        for key, shard, into in zip(wanted, targets, outs, strict=True)
    ]
