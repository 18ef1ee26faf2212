"""Arrays of dtypes that only numpy has: structures, text of fixed length, dates.

They are stored as tensors of bytes with one more dimension, the length of an element. The dtype,
as in files of `numpy.save`, stands between the metadata and the elements. It is a literal of
strings, tuples and lists; nothing of it is executed.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from mooncake._hints import np
from mooncake.tensor.dtypes import DType, load_numpy
from mooncake.tensor.format import METADATA_BYTES, TensorMetadata
from mooncake.tensor.memory import TensorMemory

__all__ = ["encode", "is_described", "restore"]

_ALIGNMENT = 16


def is_described(value: object) -> bool:
    """Return whether a value is an array whose dtype is stored beside it."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    try:
        DType.of_numpy(value.dtype)
    except TypeError:
        return True
    return False


def encode(array: np.ndarray[Any, Any]) -> tuple[TensorMetadata, bytes, TensorMemory]:
    """Return the metadata of an array, its dtype as the bytes that follow, and its elements.

    Raises:
        TypeError: The elements are Python objects, or of a dtype that numpy cannot describe.
        FormatError: The array has too many dimensions.
    """
    numpy = load_numpy()
    if array.dtype.hasobject:
        raise TypeError(f"arrays of Python objects are not supported dtype={array.dtype}")
    descr = numpy.lib.format.dtype_to_descr(array.dtype)
    if numpy.lib.format.descr_to_dtype(descr) != array.dtype:
        raise TypeError(f"arrays of dtype {array.dtype} are not supported")
    described = repr(descr).encode()
    described += b" " * (-len(described) % _ALIGNMENT)
    shape, dtype = (*array.shape, array.dtype.itemsize), DType.of_name("uint8")
    metadata = TensorMetadata(dtype, shape, shape, data_offset=METADATA_BYTES + len(described))
    array = numpy.asarray(array, order="C")
    return metadata, described, TensorMemory(array.ctypes.data, array.nbytes, dtype, shape, array)


def restore(stored: np.ndarray[Any, Any], metadata: TensorMetadata) -> np.ndarray[Any, Any]:
    """Return an array that shares the memory of its object.

    Raises:
        ValueError: The bytes between metadata and elements do not describe a dtype of their length.
    """
    numpy = load_numpy()
    described = stored[METADATA_BYTES : metadata.data_offset].tobytes()
    try:
        dtype = numpy.lib.format.descr_to_dtype(ast.literal_eval(described.decode().rstrip()))
    except (KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"the dtype of the array is damaged: {error}") from None
    *shape, itemsize = metadata.local_shape
    if dtype.hasobject or dtype.itemsize != itemsize:
        raise ValueError(f"the dtype of the array is damaged dtype={dtype} itemsize={itemsize}")
    array: np.ndarray[Any, Any] = numpy.ndarray(shape, dtype, stored.data, metadata.data_offset)
    return array
