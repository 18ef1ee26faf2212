"""Finds and probes native libraries with memory allocators for PyTorch."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["ProbeValue", "get_mooncake_so_path", "logger", "probe_allocator_backend"]

logger = logging.getLogger("mooncake.allocator")
ProbeValue = TypeVar("ProbeValue")


def get_mooncake_so_path(so_name: str, import_error_message: str) -> str:
    """Return the path of a native library in the folder of this package.

    Raises:
        ValueError: `so_name` is not a plain file name.
        ImportError: There is no such file; the text is `import_error_message`.
    """
    if Path(so_name).name != so_name:
        raise ValueError(f"{so_name!r} must be only a file name")
    path = Path(__file__).parent / so_name
    if not path.is_file():
        raise ImportError(import_error_message)
    return str(path)


def probe_allocator_backend(
    so_path: str, probe_symbol: str, restype: Any, unsupported_value: ProbeValue
) -> ProbeValue:
    """Call a function without arguments in a native library.

    Returns:
        The result, or `unsupported_value` if the library cannot be loaded or has no such function.
    """
    try:
        probe = getattr(ctypes.CDLL(so_path), probe_symbol)
    except OSError as error:
        logger.info("cannot load an allocator: %s", error)
        return unsupported_value
    except AttributeError:
        logger.info("an allocator has no probe: path=%s symbol=%s", so_path, probe_symbol)
        return unsupported_value
    probe.restype = restype
    result: ProbeValue = probe()
    return result
