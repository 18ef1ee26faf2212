"""Stores for the tests of structured objects: the four calls that any store has, or all calls."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

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
        self.configs: list[Any] = []
        self.puts_until_failure = -1

    def put(self, key: str, value: object, *, config: object = None) -> int:
        self.configs.append(config)
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


class FullStore(PlainStore):
    """A store with all calls, which does not keep tensors as bytes.

    It writes and reads only memory that is registered or leased from a pool, and notes the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.tensors: dict[str, Any] = {}
        self.registered: dict[int, int] = {}
        self.refused: dict[str, int] = {}

    def register_buffer(self, address: int, size: int) -> int:
        self.registered[address] = size
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.registered[address]
        return 0

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.calls.append("batch_get_into")
        return [
            self._copy(*each) for each in zip(keys, addresses, [0] * len(keys), sizes, strict=True)
        ]

    def get_into_ranges(self, buffers, keys, to, of, sizes) -> list[Any]:
        self.calls.append("get_into_ranges")
        # As upstream's store, this one knows a buffer by its beginning.
        assert all(base in self.registered for base in buffers)
        return [
            [
                [
                    self._copy(key, base + at, first, size)
                    for at, first, size in zip(*parts, strict=True)
                ]
                for key, *parts in zip(*row, strict=True)
            ]
            for base, *row in zip(buffers, keys, to, of, sizes, strict=True)
        ]

    def put_tensor(self, key: str, tensor: Any) -> int:
        self.calls.append("put_tensor")
        return self._keep(key, tensor)

    def pub_tensor(self, key: str, tensor: Any, *, config: Any = None) -> int:
        self.calls.append("pub_tensor")
        self.configs.append(config)
        return self._keep(key, tensor)

    def get_tensor(self, key: str) -> Any:
        self.calls.append("get_tensor")
        return self.tensors.get(key)

    def put_tensor_from(self, key: str, address: int, size: int) -> int:
        self.calls.append("put_tensor_from")
        self.objects[key] = ctypes.string_at(address, size)
        return 0

    def put_from(self, key: str, address: int, size: int, *, config: Any = None) -> int:
        self.calls.append("put_from")
        self.configs.append(config)
        self.objects[key] = ctypes.string_at(address, size)
        return 0

    def batch_put_from(self, keys, addresses, sizes, *, config: Any = None) -> list[int]:
        self.calls.append("batch_put_from")
        self.configs.append(config)
        for key, address, size in zip(keys, addresses, sizes, strict=True):
            self.objects[key] = ctypes.string_at(address, size)
        return [0] * len(keys)

    def batch_remove(self, keys: list[str], force: bool = False) -> list[int]:
        self.calls.append("batch_remove")
        return [self.refused.get(key) or self.remove(key) for key in keys]

    def _keep(self, key: str, tensor: Any) -> int:
        self.tensors[key] = tensor.clone()
        self.objects[key] = b"not bytes"
        return 0

    def _copy(self, key: str, address: int, first: int, size: int) -> int:
        spans = self.registered.items()
        assert any(at <= address and address + size <= at + length for at, length in spans)
        if key not in self.objects:
            return MISSING
        part = self.objects[key][first : first + size]
        ctypes.memmove(address, part, len(part))
        return len(part)


class Pool:
    """A pool of a caller, with leases that count their releases; its memory is registered."""

    def __init__(self, store: FullStore) -> None:
        self.store = store
        self.leases: list[Any] = []
        self.is_exhausted = False

    def acquire(self, nbytes: int) -> Any:
        if self.is_exhausted:
            raise RuntimeError("the pool is exhausted")
        memory = ctypes.create_string_buffer(nbytes)
        lease = SimpleNamespace(ptr=ctypes.addressof(memory), size=nbytes, releases=0)
        lease.buffer = memory
        self.store.registered[lease.ptr] = nbytes

        def release() -> None:
            lease.releases += 1

        lease.release = release
        self.leases.append(lease)
        return lease


class Config:
    """A configuration of a store that is not ours."""

    def __init__(self, group_ids: Any = None) -> None:
        self.group_ids = group_ids
        self.replica_num = 2


def key_names(store: PlainStore) -> list[str]:
    """Return the part of each key behind the id of its bundle, in the order of the puts."""
    return [key.split("/", 3)[-1] for key in store.objects]


def column(rows: list[object]) -> np.ndarray:
    """Return an array of objects with one item for each row."""
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
