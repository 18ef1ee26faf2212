"""Codes of types of elements and of reductions, as the native side knows them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from mooncake._runtime import _native

__all__ = [
    "PREMUL_SUM",
    "REDUCIBLE_DTYPES",
    "SUM",
    "dtype_code",
    "element_code",
    "premultiplied",
    "reduction_codes",
]

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

# All types by which ranks compare their calls, also those that cannot be reduced. This torch may
# not have all of them.
_ELEMENTS = {
    getattr(torch, name): code
    for code, name in enumerate(_native.CollectiveContext.element_names())
    if hasattr(torch, name)
}
_OTHER_ELEMENT = 255

# The native side does not know the last one: its elements are scaled here.
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_OPERATIONS = {
    getattr(dist.ReduceOp, name): code
    for code, name in enumerate(_NAMES)
    if hasattr(dist.ReduceOp, name)
}
_FLOATING = {5, 6, 8, 9, 10, 11}
_COMPLEX = {10, 11}


def reduction_codes(operation: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Return the codes of a reduction, and of the type of its elements.

    Raises:
        TypeError: The reduction is not defined for `dtype`, or not known.
    """
    # A ReduceOp carries its kind in `op`; the kinds themselves (ReduceOp.SUM) are passed too.
    return _codes(getattr(operation, "op", operation), dtype)


@functools.cache
def _codes(operation: Any, dtype: torch.dtype) -> tuple[int, int]:
    code = _OPERATIONS.get(operation)
    if code is None:
        raise TypeError(f"the reduction is not supported: operation={operation}")
    kind = dtype_code(dtype)
    undefined = (
        (code in (BAND, BOR, BXOR) and kind in _FLOATING)
        or (code in (MIN, MAX) and kind in _COMPLEX)
        or (code in (AVG, PREMUL_SUM) and kind not in _FLOATING)
    )
    if undefined:
        raise TypeError(f"{_NAMES[code]} is not defined for the type: dtype={dtype}")
    return code, kind


def premultiplied(tensor: torch.Tensor, operation: Any) -> torch.Tensor:
    """Return a copy of the tensor that is scaled by the factor of a PREMUL_SUM.

    Raises:
        TypeError: It has no factor.
    """
    factor = getattr(operation, "factor", None)
    if factor is None and hasattr(operation, "__getstate__"):
        # Before torch 2.15, only the state shows the factor.
        state = operation.__getstate__()
        factor = state[1] if isinstance(state, tuple) else None
    if factor is None:
        raise TypeError("PREMUL_SUM needs a factor: ReduceOp.PREMUL_SUM(factor)")
    if isinstance(factor, torch.Tensor):
        factor = factor.detach().to(tensor.device, tensor.dtype).reshape(())
    return tensor.detach() * factor


def element_code(dtype: torch.dtype) -> int:
    """Return the code by which ranks compare the types of their elements."""
    return _ELEMENTS.get(dtype, _OTHER_ELEMENT)


def dtype_code(dtype: torch.dtype) -> int:
    """Return the code of an element type that can be reduced.

    Raises:
        TypeError: Elements of `dtype` cannot be reduced.
    """
    code = REDUCIBLE_DTYPES.get(dtype)
    if code is None:
        raise TypeError(f"elements of this type cannot be reduced: dtype={dtype}")
    return code
