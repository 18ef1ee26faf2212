"""Puts, reads and removals of many objects, with the fastest calls that a store has."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from mooncake.structured.policy import (
    AUTO_PARALLEL_MIN_BYTES,
    AUTO_PARALLEL_MIN_CHUNKS,
    WriteOptions,
)

if TYPE_CHECKING:
    from mooncake.structured.payloads import Payload

__all__ = ["MISSING_OBJECT_ERROR", "BundleStore", "ObjectRead", "Objects"]

MISSING_OBJECT_ERROR: Final = -704

# Keys in one call of the store.
_BATCH_KEYS_MAX: Final = 4096
# Reads of more bytes than this ask for the sizes of the objects before memory is allocated.
UNCHECKED_BYTES_MAX: Final = 64 << 20


@runtime_checkable
class BundleStore(Protocol):
    """The calls that a store must have. Faster calls of `MooncakeDistributedStore` are used too."""

    def put(self, key: str, value: Any, config: Any = None) -> int:
        """Store bytes under a key; return 0 or a negative number."""

    def get(self, key: str) -> bytes:
        """Return the bytes of an object; ``b""`` if it does not exist."""

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object; return 0, `MISSING_OBJECT_ERROR` or another negative number."""

    def is_exist(self, key: str) -> int:
        """Return 1 if the object exists, 0 if not."""


@dataclass(frozen=True, slots=True)
class ObjectRead:
    """A range of an object, and the memory that it is read into.

    Attributes:
        key: Key of the object.
        object_bytes: Length of the object.
        offset: First byte of the range.
        size: Length of the range; never 0.
        address: Address of the destination.
        is_registered: True if the destination is registered memory of the store.
    """

    key: str
    object_bytes: int
    offset: int
    size: int
    address: int
    is_registered: bool = False

    @property
    def is_whole(self) -> bool:
        """True if the range is the whole object."""
        return self.offset == 0 and self.size == self.object_bytes


class Objects:
    """The objects of a store.

    A forked child must make its own: the connections of a store do not survive a fork.
    """

    def __init__(self, store: BundleStore) -> None:
        """Use a store.

        Args:
            store: A `MooncakeDistributedStore`, or any object with the calls of `BundleStore`.
        """
        self._store = store
        self._process = os.getpid()
        # Only stores of this package have groups of keys.
        self.is_grouped = hasattr(store, "_get_pyclient_capsule")
        self.has_tensors = hasattr(store, "get_tensor")

    @property
    def store(self) -> BundleStore:
        """The store.

        Raises:
            RuntimeError: The process was forked after the store was made.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "the store belongs to another process, from which this one was forked; "
                f"make a store and a MooncakeBundleTransfer in this process owner={self._process}"
            )
        return self._store

    def put(self, objects: Sequence[tuple[str, Payload]], options: WriteOptions) -> None:
        """Put objects.

        Raises:
            RuntimeError: An object could not be stored; others may be stored.
        """
        put = self._putter(options)
        policy = options.policy
        is_large = (
            len(objects) >= AUTO_PARALLEL_MIN_CHUNKS
            and sum(payload.nbytes for _, payload in objects) >= AUTO_PARALLEL_MIN_BYTES
        )
        is_parallel = policy.put_mode == "parallel" or (policy.put_mode == "auto" and is_large)
        if not is_parallel or policy.max_inflight_put == 1 or len(objects) < 2:
            for at in range(0, len(objects), _BATCH_KEYS_MAX):
                put(objects[at : at + _BATCH_KEYS_MAX])
            return
        count = min(policy.max_inflight_put, len(objects))
        # Neighbouring chunks go to different threads, so that each has about the same bytes.
        shares = [objects[first::count] for first in range(count)]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(put, shares))

    def read(self, reads: Sequence[ObjectRead]) -> None:
        """Read ranges of objects into memory.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        store = self.store
        whole = [read for read in reads if read.is_whole]
        ranges = [read for read in reads if not read.is_whole]
        into = getattr(store, "batch_get_into", None)
        if into is None:
            self._copy_parts(whole)
        else:
            for at in range(0, len(whole), _BATCH_KEYS_MAX):
                batch = whole[at : at + _BATCH_KEYS_MAX]
                sizes = [read.size for read in batch]
                keys = [read.key for read in batch]
                got = into(keys, [read.address for read in batch], sizes)
                _check("batch_get_into", keys, sizes, got)
        if hasattr(store, "get_into_ranges"):
            self._get_ranges(ranges)
        else:
            self._copy_parts(ranges)

    def read_bytes(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        """Return objects as bytes.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        store = self.store
        batch = getattr(store, "get_batch", None)
        values = [store.get(key) for key in keys] if batch is None or not keys else batch(keys)
        lengths = [len(value) for value in values]
        for key, size, length in zip(keys, sizes, lengths, strict=True):
            if size != length:
                raise RuntimeError(f"get failed for {key}: expected {size} bytes, got {length}")
        return list(values)

    def check_sizes(self, sizes: dict[str, int]) -> None:
        """Compare the lengths of large objects with those that a manifest claims.

        A false manifest then cannot make this process allocate more memory than the objects have.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        size_of = getattr(self.store, "get_size", None)
        if size_of is None or sum(sizes.values()) <= UNCHECKED_BYTES_MAX:
            return
        keys = list(sizes)
        _check("get_size", keys, list(sizes.values()), [size_of(key) for key in keys])

    def remove(self, keys: Sequence[str]) -> list[tuple[str, int]]:
        """Remove objects, also those that were read recently.

        Returns:
            The objects that could not be removed, and why. A missing object is not a failure.
        """
        store = self.store
        keys = list(dict.fromkeys(keys))
        batch = getattr(store, "batch_remove", None)
        codes = [store.remove(key, True) for key in keys] if batch is None else batch(keys, True)
        return [
            (key, code)
            for key, code in zip(keys, codes, strict=True)
            if code not in (None, 0, MISSING_OBJECT_ERROR)
        ]

    def _putter(self, options: WriteOptions) -> Callable[[Sequence[tuple[str, Payload]]], None]:
        """Return the function that puts a batch with the fastest call of the store."""
        store: Any = self.store
        multi: Any = getattr(store, "batch_put_from_multi_buffers", None)
        mode = options.policy.copy_mode
        if mode == "zero_copy" and multi is None:
            raise RuntimeError(
                "zero-copy put requires a store with batch_put_from_multi_buffers; "
                "use copy_mode='auto'"
            )

        def put_in_place(objects: Sequence[tuple[str, Payload]]) -> None:
            keys = [key for key, _ in objects]
            addresses = [payload.addresses for _, payload in objects]
            sizes = [payload.sizes for _, payload in objects]
            config = options.config_for(len(keys))
            extra = () if config is None else (config,)
            codes = multi(keys, addresses, sizes, *extra)
            _check("batch_put_from_multi_buffers", keys, [0] * len(keys), codes)

        def put_bytes(objects: Sequence[tuple[str, Payload]]) -> None:
            for key, payload in objects:
                config = options.config_for(1)
                extra = () if config is None else (config,)
                code = store.put(key, payload.tobytes(), *extra)
                if code not in (None, 0):
                    raise RuntimeError(f"put failed for {key}: got {code}")

        return put_bytes if multi is None or mode == "copy" else put_in_place

    def _get_ranges(self, reads: Sequence[ObjectRead]) -> None:
        if not reads:
            return
        rows: dict[str, list[ObjectRead]] = {}
        for read in reads:
            rows.setdefault(read.key, []).append(read)
        store: Any = self.store
        with self._registered(reads):
            got = store.get_into_ranges(
                [0] * len(rows),
                [[key] for key in rows],
                [[[read.address for read in row]] for row in rows.values()],
                [[[read.offset for read in row]] for row in rows.values()],
                [[[read.size for read in row]] for row in rows.values()],
            )
        for (key, row), codes in zip(rows.items(), got, strict=True):
            sizes = [read.size for read in row]
            _check("get_into_ranges", [key] * len(row), sizes, codes[0])

    @contextlib.contextmanager
    def _registered(self, reads: Sequence[ObjectRead]) -> Iterator[None]:
        """Register the destinations, which `get_into_ranges` requires."""
        store: Any = self.store
        spans = _spans([read for read in reads if not read.is_registered])
        done: list[int] = []
        try:
            for address, size in spans if hasattr(store, "register_buffer") else ():
                # A refusal means that the caller registered the memory already. If not, the read
                # fails and says so.
                if store.register_buffer(address, size) in (None, 0):
                    done.append(address)
            yield
        finally:
            for address in done:
                store.unregister_buffer(address)

    def _copy_parts(self, reads: Sequence[ObjectRead]) -> None:
        """Read whole objects and copy parts of them, for a store without ranged reads."""
        by_key: dict[str, list[ObjectRead]] = {}
        for read in reads:
            by_key.setdefault(read.key, []).append(read)
        for key, parts in by_key.items():
            (value,) = self.read_bytes([key], [parts[0].object_bytes])
            for read in parts:
                part = memoryview(value)[read.offset : read.offset + read.size]
                destination = (ctypes.c_char * read.size).from_address(read.address)
                memoryview(destination).cast("B")[:] = part


def _check(call: str, keys: Sequence[str], expected: Sequence[int], got: Sequence[int]) -> None:
    if len(got) != len(keys):
        raise RuntimeError(
            f"{call} returned {len(got)} results for {len(keys)} keys; check that the store is set "
            "up and not closed"
        )
    for key, number, code in zip(keys, expected, got, strict=True):
        if code != number:
            raise RuntimeError(f"{call} failed for {key}: expected {number}, got {code}")


def _spans(reads: Sequence[ObjectRead]) -> list[tuple[int, int]]:
    """Return the address and length of each run of memory that the reads fill without a gap."""
    spans: list[tuple[int, int]] = []
    for address, size in sorted((read.address, read.size) for read in reads):
        if spans and address <= sum(spans[-1]):
            first, length = spans[-1]
            spans[-1] = (first, max(length, address + size - first))
        else:
            spans.append((address, size))
    return spans
