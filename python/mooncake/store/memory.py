"""Memory of the host for callers: shared memory by address, and the node that a thread keeps to."""

from __future__ import annotations

import ctypes
import logging
import mmap
import operator
import os
from typing import Final

from mooncake._runtime import _native
from mooncake.store.batch import unsigned

__all__ = [
    "MooncakeHostMemAllocator",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]

_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED: Final = 1
_MASK_BITS: Final = 1024

_log = logging.getLogger("mooncake.store")


class MooncakeHostMemAllocator:
    """Allocates shared memory of this host, named by its address."""

    __slots__ = ("_mapped",)

    def __init__(self) -> None:
        """Begin with nothing allocated; what is not freed goes with the allocator."""
        self._mapped: dict[int, mmap.mmap] = {}

    def alloc(self, size: int, /) -> int:
        """Return the address of new memory of zeros, aligned to pages.

        Args:
            size: How many bytes.

        Raises:
            RuntimeError: There is no memory of that size.
        """
        try:
            file = os.memfd_create("mooncake-host", os.MFD_CLOEXEC)
            try:
                os.ftruncate(file, size)
                mapped = mmap.mmap(file, size)
            finally:
                os.close(file)
        except (OSError, OverflowError, ValueError) as error:
            is_none = size <= 0 or not isinstance(error, OSError)
            reason = "Invalid argument" if is_none else "Cannot allocate memory"
            raise RuntimeError(f"Failed to map shared memory: {reason}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._mapped[address] = mapped
        return address

    def free(self, ptr: int, /) -> int:
        """Free memory that `alloc` returned.

        Args:
            ptr: Its address.

        Returns:
            0, or -1 if no memory was allocated there.
        """
        mapped = self._mapped.pop(unsigned("ptr", ptr), None)
        if mapped is None:
            return -1
        mapped.close()
        return 0


def get_alloc_func_addr() -> int:
    """Return the address of a C function that allocates memory of the host.

    It is for allocators that are plugged into others:
    ``void *(ssize_t size, int device, void *stream)``. The device and the stream do not matter.
    What it returns holds zeros and begins at a page; null: there is no memory of that size.
    """
    return _native.host_allocator()[0]


def get_free_func_addr() -> int:
    """Return the address of a C function that frees what `get_alloc_func_addr`'s allocated.

    It is ``void (void *address, ssize_t size, int device, void *stream)``. Only the address
    matters, and one that was not allocated so changes nothing.
    """
    return _native.host_allocator()[1]


def bind_to_numa_node(node: int) -> None:
    """Keep the calling thread to the cores of a NUMA node, and prefer the node's memory for it.

    Args:
        node: The number of the node. One that is not there is logged and changes nothing.
    """
    node = operator.index(node)
    try:
        with open(f"/sys/devices/system/node/node{node}/cpulist", encoding="ascii") as file:
            cores = _numbers(file.read())
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        _log.warning("bind_to_numa_node: cannot keep to node %s: %s", node, error)
        return
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None or node >= _MASK_BITS:
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(_MASK_BITS)) != 0:
        reason = os.strerror(ctypes.get_errno())
        _log.warning("bind_to_numa_node: the memory of node %s is not preferred: %s", node, reason)


def _numbers(text: str) -> set[int]:
    """Read a list like ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
