"""Upstream's module of a copy without the GIL: many arrays, one after the other, into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake._runtime import _native
from mooncake.errors import InvalidArgumentError

__all__ = ["concat_arrays_into"]


def concat_arrays_into(
    arrays: list[npt.NDArray[Any]],
    dest_ptr: int,
    dest_size: int,
    start: int = 0,
    count: int | None = -1,
    nthreads: int = 1,
    /,
) -> int:
    """Copy arrays to an address, one after the other, without the GIL.

    Args:
        arrays: Arrays in C order.
        dest_ptr: Address of the destination.
        dest_size: Length of the destination in bytes.
        start: First array that is copied; a negative one is 0.
        count: Number of arrays; None, a negative or a too large one for all the rest.
        nthreads: Threads that copy, at most 16.

    Returns:
        The number of bytes.

    Raises:
        InvalidArgumentError: An array is not in C order, or the arrays do not fit.
        TypeError: The arrays are not a list of arrays, or hold Python objects.
    """
    if not isinstance(arrays, list):
        raise TypeError(f"arrays must be a list of numpy arrays, not {type(arrays).__name__}")
    first = max(start, 0)
    end = None if count is None or count < 0 else first + count
    chosen: list[Any] = [_flat(array) for array in arrays[first:end]]
    total = sum(array.nbytes for array in chosen)
    if total > dest_size:
        raise InvalidArgumentError(
            "destination buffer too small: the arrays are larger than the destination "
            f"bytes={total} size={dest_size}"
        )
    return _native.concat_arrays_into(chosen, dest_ptr, dest_size, 0, None, nthreads)


def _flat(array: Any) -> npt.NDArray[Any]:
    """Return an array as one that the copy reads in place."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"arrays must be numpy arrays, not {type(array).__name__}")
    if array.dtype.hasobject:
        raise TypeError(f"an array of dtype {array.dtype} holds Python objects")
    if not array.flags.c_contiguous:
        raise InvalidArgumentError(
            f"arrays must be C-contiguous; convert one of shape {array.shape} with "
            "numpy.ascontiguousarray"
        )
    is_plain = array.ndim > 0 and array.dtype.kind in "biufc"
    if is_plain:
        return array
    return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
