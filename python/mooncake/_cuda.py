"""Tells whether memory of CUDA devices works here, without loading or starting their driver.

An engine starts a driver that the process has loaded, and a process that has started one cannot
fork any more.
"""

from __future__ import annotations

import functools
import os

__all__ = ["is_usable"]

# Where the kernel shows the devices of the driver: its list, device files (also of WSL and Jetson).
_DEVICES = (
    "/proc/driver/nvidia/gpus/*",
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/nvhost-gpu",
    "/dev/nvgpu",
)


@functools.cache
def is_usable() -> bool:
    """Return whether there are a CUDA device and its driver library."""
    named = os.environ.get("MC_CUDA_DRIVER", "")
    if "/" in named:
        # A library that was named stands for its own devices.
        return os.path.exists(named)
    return any(_has_match(pattern) for pattern in _DEVICES) and _has_driver(named)


def _has_driver(named: str) -> bool:
    name = named or "libcuda.so.1"
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if any(os.path.exists(os.path.join(folder, name)) for folder in folders if folder):
        return True
    # Costs milliseconds: only a host with a device gets here.
    from ctypes.util import find_library

    return find_library(name.removeprefix("lib").split(".so")[0]) is not None


def _has_match(pattern: str) -> bool:
    from glob import iglob

    return any(True for _ in iglob(pattern))
