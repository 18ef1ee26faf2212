"""Stores for the tests of structured objects: the four calls that any store has, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake.structured_object_store import MooncakeBundleTransfer

if TYPE_CHECKING:
    from mooncake.store import MooncakeDistributedStore

MISSING = -704


class PlainStore:
    """A store in memory with the calls of `BundleStore` and no others."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.puts_until_failure = -1

    def put(self, key: str, value: object, config: object = None) -> int:
        if self.puts_until_failure == 0:
            return -200
        self.puts_until_failure -= 1
        self.objects[key] = bytes(memoryview(value))
        return 0

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else MISSING

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)


def key_names(store: PlainStore) -> list[str]:
    """Returns the part of each key behind the id of its bundle, in the order of the puts."""
    return [key.split("/", 3)[-1] for key in store.objects]


def column(rows: list[object]) -> np.ndarray:
    """Returns an array of objects with one item for each row."""
    array = np.empty(len(rows), dtype=object)
    for at, row in enumerate(rows):
        array[at] = row
    return array


@pytest.fixture
def plain() -> PlainStore:
    return PlainStore()


@pytest.fixture(params=["four calls", "mooncake"])
def transfer(
    request: pytest.FixtureRequest,
) -> Iterator[MooncakeBundleTransfer]:
    """A transfer over a store in memory, and over a store of this package."""
    if request.param == "four calls":
        yield MooncakeBundleTransfer(PlainStore(), "test")
        return
    store: MooncakeDistributedStore = request.getfixturevalue("compat_store")
    yield MooncakeBundleTransfer(store, "test")
