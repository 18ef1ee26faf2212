"""`UBShmemAllocator`: memory that UB can reach, from a native library for Ascend NPUs.

This package does not contain the library: `ubshmem_fabric_allocator.so` is looked for in the folder
of the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .fabric_allocator_utils import get_mooncake_so_path

__all__ = ["UBShmemAllocator"]


class UBShmemAllocator:
    """Makes allocators of memory that other hosts reach over UB."""

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        """Refuse to make an allocator: this package has none for NPUs.

        Raises:
            ImportError: The library is missing.
            NotImplementedError: It is there, and this package does not use it.
        """
        path = get_mooncake_so_path(
            "ubshmem_fabric_allocator.so",
            "UBShmemAllocator needs ubshmem_fabric_allocator.so and torch_npu, which this package "
            f"does not contain or support: {Path(__file__).parent} has no such file; use the "
            "allocator of torch",
        )
        raise NotImplementedError(
            f"memory of NPUs is not supported device={device} library={path}; use the allocator of "
            "torch"
        )
