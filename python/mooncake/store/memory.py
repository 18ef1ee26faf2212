"""Host memory for callers: shared memory by address, and binding of threads to NUMA nodes."""

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
    """Allocates shared memory of this host, identified by its address."""

    __slots__ = ("_mapped",)

    def __init__(self) -> None:
        """Make an empty allocator. Memory that is not freed is freed with the allocator."""
        self._mapped: dict[int, mmap.mmap] = {}

    def alloc(self, size: int, /) -> int:
        """Return the address of zeroed, page-aligned memory.

        Args:
            size: Length in bytes.

        Raises:
            RuntimeError: The system has no memory of that size.
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
            ptr: Address of the memory.

        Returns:
            0, or -1 if no memory was allocated at the address.
        """
        mapped = self._mapped.pop(unsigned("ptr", ptr), None)
        if mapped is None:
            return -1
        mapped.close()
        return 0


def get_alloc_func_addr() -> int:
    """Return the address of a C function that allocates host memory.

    The function is for pluggable allocators: ``void *(ssize_t size, int device, void *stream)``. It
    ignores the device and the stream. It returns zeroed, page-aligned memory, or null if there is
    no memory of that size.
    """
    return _native.host_allocator()[0]


def get_free_func_addr() -> int:
    """Return the address of a C function that frees memory of `get_alloc_func_addr`'s function.

    The signature is ``void (void *address, ssize_t size, int device, void *stream)``. Only the
    address is used; an address that was not allocated by that function is ignored.
    """
    return _native.host_allocator()[1]


def bind_to_numa_node(node: int) -> None:
    """Bind the calling thread to the cores of a NUMA node, and prefer the node's memory for it.

    Args:
        node: Number of the node. A node that does not exist is logged and has no effect.
    """
    node = operator.index(node)
    try:
        with open(f"/sys/devices/system/node/node{node}/cpulist", encoding="ascii") as file:
            cores = _numbers(file.read())
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        _log.warning("bind_to_numa_node: cannot bind to node %s: %s", node, error)
        return
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is None or node >= _MASK_BITS:
        return
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(_MASK_BITS)) != 0:
        reason = os.strerror(ctypes.get_errno())
        _log.warning("bind_to_numa_node: cannot prefer the memory of node %s: %s", node, reason)


def _numbers(text: str) -> set[int]:
    """Parse a list like ``0-3,8``."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
