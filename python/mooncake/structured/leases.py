"""Memory for results: leased from a pool, returned when the arrays are gone or are released."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from mooncake.structured.payloads import Array
from mooncake.tensor.format import METADATA_BYTES

__all__ = ["ResultMemory", "is_leased", "is_leased_address", "release"]

# Shorter results are allocated by numpy, which is as fast.
_LEASED_BYTES_MIN: Final = 1 << 20
_PLAIN_TYPES: Final = {bool, bytes, float, int, str, type(None)}
_SECTIONS: Final = ("batch", "non_tensor_batch", "meta_info")


class _LeasedMemory:
    """Leased memory as numpy sees it: arrays over it keep it, and it keeps the lease.

    The lease ends when the last array is gone, or in `end`. After `end`, memory of a `BufferPool`
    stays valid until the last array is gone, but the pool lends other memory in its place; a pool
    of another class may lend the memory again.
    """

    __slots__ = ("__weakref__", "_lease", "_view", "address", "nbytes")

    def __init__(self, lease: Any, nbytes: int, *, is_own: bool) -> None:
        """Use a lease.

        Args:
            lease: The lease.
            nbytes: Length of the memory that is used.
            is_own: True for a lease of a `BufferPool`.
        """
        self._lease: Any = lease
        # The view makes the pool give the memory away, instead of lending it again, if the lease
        # ends before the arrays do.
        self._view: memoryview | None = lease.buffer if is_own else None
        self.address: int = lease.ptr
        self.nbytes: int = nbytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "data": (self.address, False),
            "shape": (self.nbytes,),
            "typestr": "|u1",
        }

    def end(self) -> None:
        """End the lease, once."""
        lease, self._lease = self._lease, None
        if lease is not None and self._view is None:
            lease.release()

    def __del__(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            # No array is left, so the pool may lend the memory again.
            view.release()
            self._lease = None
            return
        with contextlib.suppress(Exception):
            self.end()


# By the address of the memory, from which a tensor or an array is found back.
_leased: weakref.WeakValueDictionary[int, _LeasedMemory] = weakref.WeakValueDictionary()
# Memory of the pools of callers, whose leases `release` ends.
_released: weakref.WeakSet[_LeasedMemory] = weakref.WeakSet()


class ResultMemory:
    """Allocates the memory of results."""

    def __init__(self, store: Any, pool: Any) -> None:
        """Use a pool.

        Args:
            store: Store for which a pool is made on first use, if it has a local buffer.
            pool: A pool of the caller, or None.
        """
        self._store = store
        self._callers = pool
        self._pool: Any = None

    def allocate(self, nbytes: int, *, is_member: bool = True) -> Array:
        """Return an array of unsigned bytes; leased memory if a pool has it now.

        A pool of the caller is asked for all arrays and bytes of results, the pool that is made for
        a store only for large memory, which it keeps for the next result.

        Args:
            nbytes: Length of the memory.
            is_member: True if it will be an array or bytes of a result.
        """
        is_large = nbytes >= _LEASED_BYTES_MIN
        pool = None
        if self._callers is not None:
            pool = self._callers if nbytes and (is_large or is_member) else None
        elif is_large:
            pool = self._pool_or_none()
        if pool is not None:
            # An exhausted or closed pool must not fail a read that needs no registered memory.
            with contextlib.suppress(RuntimeError):
                return np.asarray(self._lease(pool, nbytes))
        return np.empty(nbytes, dtype=np.uint8)

    def _lease(self, pool: Any, nbytes: int) -> _LeasedMemory:
        from mooncake.store import BufferPool

        is_own = isinstance(pool, BufferPool)
        lease = pool.acquire(nbytes, False) if is_own else pool.acquire(nbytes)
        leased = _LeasedMemory(lease, nbytes, is_own=is_own)
        _leased[leased.address] = leased
        if pool is self._callers:
            _released.add(leased)
        return leased

    def _pool_or_none(self) -> Any:
        capsule = getattr(self._store, "_get_pyclient_capsule", None)
        if self._pool is None and callable(capsule):
            from mooncake.store import BufferPool

            with contextlib.suppress(RuntimeError):  # a store without a local buffer
                self._pool = BufferPool(self._store)
        return self._pool


def is_leased(array: Array) -> bool:
    """Return whether the memory of an array is registered with a store."""
    return is_leased_address(array.__array_interface__["data"][0])


def is_leased_address(address: int) -> bool:
    """Return whether memory that begins at an address is registered with a store."""
    return len(_leased) > 0 and address in _leased


def release(value: Any) -> None:
    """End the leases of the arrays and tensors of a result, without changing it.

    A pool of the caller gets its memory back at once. The pool that was made for a store gets it
    when the last array is gone, so that the memory can be lent again.

    Args:
        value: Anything; arrays and tensors in it are found in mappings, lists, tuples, arrays of
            objects, and objects with the sections of a batch.
    """
    if not len(_released):
        return
    for address in _addresses(value):
        leased = _leased.get(address)
        if leased is not None and leased in _released:
            leased.end()


def _addresses(value: Any) -> set[int]:
    """Return the addresses at which the memory of arrays and tensors may begin."""
    found: set[int] = set()
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if type(each) in _PLAIN_TYPES:
            continue
        if isinstance(each, np.ndarray) and not each.dtype.hasobject:
            found.add(_owner_address(each))
        elif hasattr(each, "untyped_storage"):
            found |= _tensor_addresses(each)
        elif id(each) not in seen:
            seen.add(id(each))
            left += _items(each)
    return found


def _items(value: Any) -> Iterable[Any]:
    """Return what is in a container, or in the sections of a batch; nothing for anything else."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray):
        items: list[Any] = value.ravel().tolist()
        return items
    objects = getattr(value, "objects", None)
    if isinstance(objects, Mapping):
        return list(objects.values())
    if hasattr(value, "batch") and hasattr(value, "non_tensor_batch"):
        return [getattr(value, name, None) for name in _SECTIONS]
    return ()


def _tensor_addresses(tensor: Any) -> set[int]:
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a tensor without memory
        address: int = tensor.untyped_storage().data_ptr()
        # The storage of a tensor member begins behind the metadata of the stored tensor.
        return {address, address - METADATA_BYTES}
    return set()


def _owner_address(array: Array) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    address: int = array.__array_interface__["data"][0]
    return address
