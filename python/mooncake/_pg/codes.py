"""Codes of element types and reductions, as the native side knows them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["REDUCIBLE_DTYPES", "dtype_code", "operation_code"]

REDUCIBLE_DTYPES: dict[torch.dtype, int] = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float32: 5,
    torch.float64: 6,
    torch.bool: 7,
    torch.float16: 8,
    torch.bfloat16: 9,
    torch.complex64: 10,
    torch.complex128: 11,
    torch.uint16: 12,
    torch.uint32: 13,
    torch.uint64: 14,
}

SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
_OPERATIONS = {getattr(dist.ReduceOp, name): code for code, name in enumerate(_NAMES)}
_FLOATING = {5, 6, 8, 9, 10, 11}
_COMPLEX = {10, 11}


def operation_code(operation: Any, dtype: torch.dtype) -> int:
    """Returns the code of a reduction.

    Raises:
        TypeError: The reduction is not defined for `dtype`, or not known.
    """
    # A ReduceOp carries its kind in `op`; the kinds themselves (ReduceOp.SUM) are passed too.
    code = _OPERATIONS.get(getattr(operation, "op", operation))
    if code is None:
        raise TypeError(f"the reduction is not supported: operation={operation}")
    kind = dtype_code(dtype)
    undefined = (
        (code in (BAND, BOR, BXOR) and kind in _FLOATING)
        or (code in (MIN, MAX) and kind in _COMPLEX)
        or (code == AVG and kind not in _FLOATING)
    )
    if undefined:
        raise TypeError(f"{_NAMES[code]} is not defined for the type: dtype={dtype}")
    return code


def dtype_code(dtype: torch.dtype) -> int:
    """Returns the code of an element type that can be reduced.

    Raises:
        TypeError: Elements of `dtype` cannot be reduced.
    """
    code = REDUCIBLE_DTYPES.get(dtype)
    if code is None:
        raise TypeError(f"elements of this type cannot be reduced: dtype={dtype}")
    return code
