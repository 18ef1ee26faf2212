"""PyTorch allocators for memory that NVLink or Barex can reach, from native libraries.

This package does not contain the libraries: `nvlink_allocator.so` is looked for in the folder of
the package, `libaccl_barex.so` also in the library folders of the system. Without them the classes
report that they are not supported, and refuse to make an allocator.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from enum import IntEnum
from pathlib import Path
from typing import Any

from .fabric_allocator_utils import get_mooncake_so_path, probe_allocator_backend

__all__ = ["BarexAllocator", "MemoryBackend", "NVLinkAllocator"]

_BAREX_PATHS = ("/usr/lib/libaccl_barex.so", "/usr/lib64/libaccl_barex.so")
_lock = threading.Lock()


class MemoryBackend(IntEnum):
    """The way in which an allocator gets memory of a device."""

    USE_CUDAMALLOC = 0
    USE_CUMEMCREATE = 1
    UNKNOWN = -1
    UNSUPPORTED = -2


class NVLinkAllocator:
    """Makes allocators of memory that other hosts reach over NVLink."""

    _instances: dict[Any, Any] = {}  # noqa: RUF012 - shared by design: one allocator per device

    @classmethod
    def detect_mem_backend(cls) -> MemoryBackend:
        """Return what the library can do on this host; UNSUPPORTED if there is no library."""
        try:
            path = cls._library()
        except ImportError:
            return MemoryBackend.UNSUPPORTED
        unsupported = int(MemoryBackend.UNSUPPORTED)
        found = probe_allocator_backend(path, "mc_allocator_probe", ctypes.c_int, unsupported)
        try:
            return MemoryBackend(found)
        except ValueError:
            return MemoryBackend.UNKNOWN

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        """Return the `CUDAPluggableAllocator` of a device.

        Raises:
            ImportError: The library or torch is missing.
        """
        symbols = ("mc_nvlink_malloc", "mc_nvlink_free")
        return _allocator(cls._instances, device, cls._library(), symbols)

    @staticmethod
    def _library() -> str:
        return get_mooncake_so_path(
            "nvlink_allocator.so",
            "NVLinkAllocator needs nvlink_allocator.so, which this package does not contain: "
            f"put one built for your GPUs into {Path(__file__).parent}, or use CUDA's allocator",
        )


class BarexAllocator:
    """Makes allocators of memory that Barex can reach."""

    _instances: dict[Any, Any] = {}  # noqa: RUF012 - shared by design: one allocator per device

    @classmethod
    def get_allocator(cls, device: Any) -> Any:
        """Return the `CUDAPluggableAllocator` of a device.

        Raises:
            ImportError: The library or torch is missing.
        """
        symbols = ("u2mm_alloc_wrapper_with_stream", "u2mm_free_wrapper_with_stream")
        return _allocator(cls._instances, device, cls._library(), symbols)

    @staticmethod
    def _library() -> str:
        for path in _BAREX_PATHS:
            if Path(path).is_file():
                return path
        return get_mooncake_so_path(
            "libaccl_barex.so",
            "BarexAllocator needs libaccl_barex.so, which this package does not contain: install "
            f"it as one of {', '.join(_BAREX_PATHS)}, or use CUDA's allocator",
        )


def _allocator(instances: dict[Any, Any], device: Any, path: str, symbols: tuple[str, str]) -> Any:
    """Return the allocator of a device, made on first use."""
    with _lock:
        if device not in instances:
            try:
                memory = importlib.import_module("torch.cuda.memory")
            except ImportError as error:
                raise ImportError("allocators need torch: pip install torch") from error
            instances[device] = memory.CUDAPluggableAllocator(path, *symbols)
        return instances[device]
