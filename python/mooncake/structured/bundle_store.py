"""Reads and removals of many objects, with the fastest calls that a store has."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "BATCH_KEYS_MAX",
    "MISSING_OBJECT_ERROR",
    "BundleStore",
    "ObjectRead",
    "Objects",
    "check_codes",
]

MISSING_OBJECT_ERROR: Final = -704

# What a store answers for memory that is registered already.
_REGISTERED_ALREADY: Final = -600
_DONE: Final = (None, 0, MISSING_OBJECT_ERROR)
# Keys in one call of the store.
BATCH_KEYS_MAX: Final = 4096
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


class ObjectRead(NamedTuple):
    """A range of an object, and the memory that it is read into.

    Attributes:
        key: Key of the object.
        object_bytes: Length of the object.
        offset: First byte of the range.
        size: Length of the range; never 0.
        address: Address of the destination.
        is_registered: True if the destination is registered memory of the store.
        is_array: True for a part of an array, which other stores are asked for by another call.
    """

    key: str
    object_bytes: int
    offset: int
    size: int
    address: int
    is_registered: bool = False
    is_array: bool = False

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
        # Stores of this package read and write memory that is not registered, and tensors are bytes
        # in them. Nothing is assumed of others.
        self.is_native = _is_native(store)

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

    def call(self, name: str) -> Callable[..., Any] | None:
        """Return a call that the store may have; None if it lacks it."""
        found = getattr(self._store, name, None)
        return found if callable(found) else None

    def read(self, reads: Sequence[ObjectRead]) -> None:
        """Read ranges of objects into memory.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        # Checks the process.
        _ = self.store
        if not self.is_native:
            for group in _adjacent(reads):
                self._read_foreign(group)
            return
        whole: list[ObjectRead] = []
        parts: list[ObjectRead] = []
        for read in reads:
            (whole if read.is_whole else parts).append(read)
        for at in range(0, len(whole), BATCH_KEYS_MAX):
            self._get_whole(whole[at : at + BATCH_KEYS_MAX])
        self._get_ranges(parts)

    @property
    def can_read_into(self) -> bool:
        """True if a store that is not of this package reads objects into memory."""
        return (
            not self.is_native and self.call("batch_get_into") is not None and self._can_register()
        )

    def read_bytes(self, keys: Sequence[str], sizes: Sequence[int]) -> list[bytes]:
        """Return objects as bytes.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        store = self.store
        batch = self.call("get_batch") if self.is_native else None
        values = [store.get(key) for key in keys] if batch is None or not keys else batch(keys)
        for key, size, length in zip(keys, sizes, map(len, values), strict=True):
            if size != length:
                raise RuntimeError(f"get failed for {key}: expected {size} bytes, got {length}")
        return list(values)

    def check_sizes(self, chunks: Sequence[tuple[str, int]], nbytes: int) -> None:
        """Compare the lengths of large objects with those that a manifest claims.

        A false manifest then cannot make this process allocate more memory than the objects have.

        Args:
            chunks: Key and length of each object.
            nbytes: Sum of the lengths.

        Raises:
            RuntimeError: An object does not exist or has another length.
        """
        size_of = None if nbytes <= UNCHECKED_BYTES_MAX else self.call("get_size")
        if size_of is None:
            return
        keys = [key for key, _ in chunks]
        sizes = [size for _, size in chunks]
        check_codes("get_size", keys, sizes, [size_of(key) for key in keys])

    def exists(self, key: str) -> bool:
        """Return whether an object exists; True if the store cannot tell.

        Raises:
            RuntimeError: The store does not answer.
        """
        ask = self.call("is_exist")
        code = 1 if ask is None else ask(key)
        if code not in (0, 1):
            raise RuntimeError(f"is_exist failed for {key}: {code}")
        return bool(code)

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also those that were read recently. A missing one is fine.

        Raises:
            RuntimeError: An object could not be removed, by a call for it alone either.
        """
        # Checks the process.
        _ = self.store
        left = list(dict.fromkeys(keys))
        batch = self.call("batch_remove")
        if batch is not None and left:
            codes = _forced(batch, left)
            if len(codes) != len(left):
                raise RuntimeError(
                    f"batch_remove returned {len(codes)} results for {len(left)} keys; check that "
                    "the store is set up and not closed"
                )
            left = [key for key, code in zip(left, codes, strict=True) if code not in _DONE]
        codes = [self._remove_one(key) for key in left]
        failed = [pair for pair in zip(left, codes, strict=True) if pair[1] not in _DONE]
        if failed:
            raise RuntimeError(f"failed to remove {len(failed)} Mooncake keys: {failed[:3]}")

    def discard(self, keys: Sequence[str]) -> None:
        """Remove objects after a failure; what cannot be removed is left."""
        try:
            self.remove(keys)
        except Exception:  # noqa: BLE001 # an earlier failure is what the caller must see
            for key in keys:
                with contextlib.suppress(Exception):
                    self._remove_one(key)

    @contextlib.contextmanager
    def registered(self, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Register memory with the store for a while, if the store has the calls.

        Args:
            spans: Address and length of each range.

        Raises:
            RuntimeError: The store refuses.
        """
        register, unregister = self.call("register_buffer"), self.call("unregister_buffer")
        done: list[int] = []
        try:
            if register is not None and unregister is not None:
                for address, size in spans:
                    code = register(address, size)
                    if code in (None, 0):
                        done.append(address)
                    elif code != _REGISTERED_ALREADY and not self.is_native:
                        raise RuntimeError(f"register_buffer failed for {size} bytes: got {code}")
            yield
        finally:
            for address in done:
                if unregister is not None:
                    unregister(address)

    def _can_register(self) -> bool:
        """Return whether the store can read into memory of the caller."""
        return None not in (self.call("register_buffer"), self.call("unregister_buffer"))

    def _remove_one(self, key: str) -> Any:
        try:
            return _forced(self.store.remove, key)
        except KeyError:
            return MISSING_OBJECT_ERROR

    def _get_whole(self, reads: Sequence[ObjectRead]) -> None:
        """Read whole objects of a store of this package."""
        store: Any = self.store
        keys, sizes = [read.key for read in reads], [read.size for read in reads]
        got = store.batch_get_into(keys, [read.address for read in reads], sizes)
        check_codes("batch_get_into", keys, sizes, got)

    def _get_ranges(self, reads: Sequence[ObjectRead]) -> None:
        """Read parts of objects of a store of this package."""
        if not reads:
            return
        rows: dict[str, list[ObjectRead]] = {}
        for read in reads:
            rows.setdefault(read.key, []).append(read)
        store: Any = self.store
        with self.registered(_spans([read for read in reads if not read.is_registered])):
            got = store.get_into_ranges(
                [0] * len(rows),
                [[key] for key in rows],
                [[[read.address for read in row]] for row in rows.values()],
                [[[read.offset for read in row]] for row in rows.values()],
                [[[read.size for read in row]] for row in rows.values()],
            )
        for (key, row), codes in zip(rows.items(), got, strict=True):
            sizes = [read.size for read in row]
            check_codes("get_into_ranges", [key] * len(row), sizes, codes[0])

    def _read_foreign(self, reads: Sequence[ObjectRead]) -> None:
        """Read into one piece of memory, which the reads fill one after the other.

        Stores that are not of this package may know no addresses but those of registered memory, so
        the whole piece is registered, and its beginning is the base of all addresses.
        """
        is_registered = all(read.is_registered for read in reads)
        call = self._foreign_call(reads, is_registered=is_registered)
        if call is None or not (is_registered or self._can_register()):
            self._copy_parts(reads)
            return
        store: Any = self.store
        keys, sizes = [read.key for read in reads], [read.size for read in reads]
        addresses = [read.address for read in reads]
        base = addresses[0]
        with self.registered(() if is_registered else [(base, sum(sizes))]):
            if call == "get_into_ranges":
                to = [[address - base] for address in addresses]
                of = [[read.offset] for read in reads]
                got = store.get_into_ranges(
                    [base], [keys], [to], [of], [[[size] for size in sizes]]
                )
                codes = [each[0] for row in got for each in row]
            elif call == "batch_get_into":
                codes = store.batch_get_into(keys, addresses, sizes)
            else:
                codes = [store.get_into(*each) for each in zip(keys, addresses, sizes, strict=True)]
        check_codes(call, keys, sizes, codes)

    def _foreign_call(self, reads: Sequence[ObjectRead], *, is_registered: bool) -> str | None:
        """Return the call of another store that reads into one piece of memory; None for `get`."""
        one, many = self.call("get_into"), self.call("batch_get_into")
        is_whole = all(read.is_whole for read in reads)
        is_array = reads[0].is_array
        if is_whole and is_array and not is_registered and one is not None and len(reads) == 1:
            return "get_into"
        needs_no_range = is_whole and not is_registered and not is_array
        has_other = is_whole and (one is not None or many is not None)
        if self.call("get_into_ranges") is not None and not (needs_no_range and has_other):
            return "get_into_ranges"
        if not has_other:
            return None
        return "get_into" if many is None else "batch_get_into"

    def _copy_parts(self, reads: Sequence[ObjectRead]) -> None:
        """Read whole objects and copy parts of them, for a store without reads into memory."""
        by_key: dict[str, list[ObjectRead]] = {}
        for read in reads:
            by_key.setdefault(read.key, []).append(read)
        for key, parts in by_key.items():
            (value,) = self.read_bytes([key], [parts[0].object_bytes])
            for read in parts:
                part = memoryview(value)[read.offset : read.offset + read.size]
                destination = (ctypes.c_char * read.size).from_address(read.address)
                memoryview(destination).cast("B")[:] = part


def _is_native(store: Any) -> bool:
    """Return whether a store is one of this package, or passes all calls on to one.

    Objects that have any attribute, as those of `unittest.mock`, are not.
    """
    if callable(getattr(type(store), "_get_pyclient_capsule", None)):
        return True
    capsule = getattr(store, "_get_pyclient_capsule", None)
    from mooncake.store import MooncakeDistributedStore

    return callable(capsule) and isinstance(capsule(), MooncakeDistributedStore)


def check_codes(call: str, keys: Sequence[str], expected: Sequence[int], got: Any) -> None:
    """Check what a call for many keys returned.

    Raises:
        RuntimeError: It returned another number for a key, or not one for each.
    """
    if isinstance(got, list) and got == expected:
        return
    if len(got) != len(keys):
        raise RuntimeError(
            f"{call} returned {len(got)} results for {len(keys)} keys; check that the store is set "
            "up and not closed"
        )
    for key, number, code in zip(keys, expected, got, strict=True):
        if code != number:
            raise RuntimeError(f"{call} failed for {key}: expected {number}, got {code}")


def _forced(remove: Callable[..., Any], keys: Any) -> Any:
    """Remove also what was read recently, if the store can."""
    try:
        return remove(keys, True)
    except TypeError:
        return remove(keys)


def _adjacent(reads: Sequence[ObjectRead]) -> list[list[ObjectRead]]:
    """Return the runs of reads that fill memory one after the other."""
    runs: list[list[ObjectRead]] = []
    end = None
    for read in reads:
        is_next = read.address == end and read.is_registered == runs[-1][-1].is_registered
        if is_next:
            runs[-1].append(read)
        else:
            runs.append([read])
        end = read.address + read.size
    return runs


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
