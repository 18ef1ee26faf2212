"""Memory for results: leased from a `BufferPool`, returned when the arrays are gone."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mooncake.tensor.format import METADATA_BYTES

if TYPE_CHECKING:
    from mooncake.structured.payloads import Array

__all__ = ["ResultMemory", "is_leased", "release"]

# Shorter results are allocated by numpy, which is as fast.
_LEASED_BYTES_MIN: Final = 1 << 20


class _LeasedMemory:
    """Leased memory as numpy sees it: arrays over it keep it, and it keeps the lease.

    The lease ends when the last array is gone, or in `end`. After `end` the memory stays valid
    until the last array is gone, but the pool lends other memory in its place.
    """

    __slots__ = ("__weakref__", "_lease", "_view", "address", "nbytes")

    def __init__(self, lease: Any) -> None:
        self._lease: Any = lease
        # The view makes the pool give the memory away, instead of lending it again, if the lease
        # ends before the arrays do.
        self._view: memoryview | None = lease.buffer
        self.address: int = lease.ptr
        self.nbytes: int = lease.size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
        }

    def end(self) -> None:
        """End the lease; the memory stays valid for the arrays over it."""
        self._lease = None

    def __del__(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            # No array is left, so the pool may lend the memory again.
            view.release()
        self._lease = None


# By the address of the memory, from which a tensor or an array is found back.
_leased: weakref.WeakValueDictionary[int, _LeasedMemory] = weakref.WeakValueDictionary()


class ResultMemory:
    """Allocates the memory of results."""

    def __init__(self, store: Any, pool: Any) -> None:
        """Use a pool.

        Args:
            store: Store for which a pool is made on first use, if it has a local buffer.
            pool: A `BufferPool` of the caller, or None.
        """
        self._store = store
        self._pool = pool

    def allocate(self, nbytes: int) -> Array:
        """Return an array of unsigned bytes; leased memory if the pool has it now."""
        pool = self._pool_or_none() if nbytes >= _LEASED_BYTES_MIN else None
        if pool is not None:
            # An exhausted or closed pool must not fail a read that needs no registered memory.
            with contextlib.suppress(RuntimeError):
                memory = _LeasedMemory(pool.acquire(nbytes, False))
                _leased[memory.address] = memory
                return np.asarray(memory)
        return np.empty(nbytes, dtype=np.uint8)

    def _pool_or_none(self) -> Any:
        if self._pool is None and hasattr(self._store, "_get_pyclient_capsule"):
            from mooncake.store import BufferPool

            with contextlib.suppress(RuntimeError):  # a store without a local buffer
                self._pool = BufferPool(self._store)
        return self._pool


def is_leased(array: Array) -> bool:
    """Return whether the memory of an array is registered with a store."""
    return array.__array_interface__["data"][0] in _leased


def release(value: Any) -> None:
    """Empty the dictionaries of a result, and end the leases of its arrays and tensors.

    The pool lends memory again to which no array refers any more. Arrays that are referenced
    elsewhere stay valid, and the pool does not wait for them.

    Args:
        value: An array, a tensor, or a list, tuple, dictionary or object array of such.
    """
    leased = [weakref.ref(memory) for memory in map(_leased.get, _addresses(value)) if memory]
    for part in value if isinstance(value, list) else [value]:
        _clear(part)
    for each in leased:
        memory = each()
        if memory is not None:
            memory.end()


def _addresses(value: Any) -> set[int]:
    """Return the addresses at which the memory of arrays and tensors in a result may begin."""
    if isinstance(value, np.ndarray):
        if not value.dtype.hasobject:
            return {_owner_address(value)}
        return set().union(*map(_addresses, value))
    if isinstance(value, dict):
        return set().union(*map(_addresses, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(_addresses, value))
    if hasattr(value, "untyped_storage"):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without memory
            address: int = value.untyped_storage().data_ptr()
            # The storage of a tensor member begins behind the metadata of the stored tensor.
            return {address, address - METADATA_BYTES}
    return set()


def _clear(result: Any) -> None:
    """Empty a result and its sections, but no dictionary that the caller put."""
    if isinstance(result, dict):
        for name in ("batch", "non_tensor_batch"):
            section = result.get(name)
            if isinstance(section, dict):
                section.clear()
        result.clear()


def _owner_address(array: Array) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    address: int = array.__array_interface__["data"][0]
    return address
