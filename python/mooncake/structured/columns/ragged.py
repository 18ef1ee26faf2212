"""Columns whose rows are arrays, tensors or lists of numbers, each with its own shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from mooncake.structured.columns.leaf import (
    LeafCodec,
    Payloads,
    Selection,
    UnsupportedColumnError,
    checked_dtype,
    checked_nulls,
    checked_offsets,
    nulls_of,
    offsets_of,
    payload_array,
)
from mooncake.structured.members import FlatArray
from mooncake.structured.payloads import Array, concatenated, payload_of_array
from mooncake.tensor.dtypes import DType, load_torch

__all__ = ["ARRAYS", "EXACT", "TENSORS", "is_numeric_array", "is_tensor"]

EXACT: Final[Mapping[str, Any]] = {"exact": True}
"""Options of `ARRAYS` for an inferred column: lists must come back with the numbers they have."""

_INT64_ONLY: Final = {int}
_FLOAT64_ONLY: Final = {float}
_DIMS_MAX: Final = 64
# Kinds of dtypes of numpy.
_NUMBERS: Final = "biufc"
_TEXTS: Final = "SU"


def is_numeric_array(value: object) -> bool:
    """Return whether a value is an array of numbers or booleans."""
    return isinstance(value, np.ndarray) and value.dtype.kind in _NUMBERS


def is_tensor(value: object) -> bool:
    """Return whether a value is a dense torch tensor, without an import of torch."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.Tensor)
        and not value.is_nested
        and value.layout is torch.strided
    )


# Arrays and lists


def _encode_arrays(
    values: Sequence[Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], Payloads]:
    is_array = [isinstance(value, np.ndarray) for value in values]
    given = [row for row, value in enumerate(values) if value is not None]
    dtype = checked_dtype(options)
    # An inferred column of texts has a better codec.
    allowed = _NUMBERS if options is EXACT else _NUMBERS + _TEXTS
    if all(is_array[row] for row in given):
        row_format = "ndarray"
        arrays = _same_dtype([values[row] for row in given], dtype, allowed)
    else:
        row_format = "mixed" if any(is_array) else "list"
        rows = [values[row] for row in given]
        arrays = _arrays_of_lists(rows, dtype, is_exact=options is EXACT)
    kind = arrays[0].dtype if arrays else dtype or np.dtype(np.int64)
    if kind.kind not in allowed:
        raise UnsupportedColumnError(f"typed_ragged has no dtype {kind}")
    if kind.kind in _TEXTS:
        _check_texts([values[row] for row in given], arrays)
    metadata, payloads = _encode_rows(values, [each.shape for each in arrays], row_format)
    payloads["data"] = FlatArray(concatenated(arrays), kind)
    return {
        "dtype": str(kind),
        **metadata,
        "ndarray_rows": is_array if row_format == "mixed" else None,
        **({"physical_layout": "contiguous_flat"} if row_format == "ndarray" else {}),
    }, payloads


def _check_texts(rows: Sequence[Any], arrays: Sequence[Array]) -> None:
    """Check that arrays of texts or of bytes have the items of the rows.

    Raises:
        UnsupportedColumnError: Numbers became texts, or zeros at the end of a text are lost.
    """
    for row, array in zip(rows, arrays, strict=True):
        if not np.array_equal(np.asarray(row, dtype=object), array.astype(object)):
            raise UnsupportedColumnError(f"a row would not come back as it is from {array.dtype}")


def _same_dtype(arrays: Sequence[Array], dtype: np.dtype[Any] | None, allowed: str) -> list[Array]:
    """Return the arrays in C order and with one dtype in native byte order."""
    if not all(array.dtype.kind in allowed for array in arrays):
        raise UnsupportedColumnError("a row is no array of numbers")
    kinds = {array.dtype for array in arrays}
    if dtype is None and kinds:
        dtype = _common_dtype(arrays).newbyteorder("=")
    # The usual case: nothing is copied, and columns have many rows.
    if kinds == {dtype} and all(array.flags.c_contiguous for array in arrays):
        return list(arrays)
    return [np.asarray(array, dtype=dtype, order="C") for array in arrays]


def _common_dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return the dtype that holds the items of all arrays.

    An array without items has no say: numpy makes floats of an empty list.

    Raises:
        UnsupportedColumnError: There is none that holds each number as it is.
    """
    filled = [array for array in arrays if array.size] or arrays
    dtype = np.result_type(*{array.dtype for array in filled})
    if dtype.kind in "fc":
        for array in filled:
            if array.size and array.dtype.kind in "iu":
                _check_integers((array.min(), array.max()), dtype)
    return dtype


def _check_integers(numbers: Iterable[Any], dtype: np.dtype[Any]) -> None:
    """Check that a dtype of floats holds the integers among some numbers.

    Raises:
        UnsupportedColumnError: One has more digits.
    """
    largest = 1 << np.finfo(dtype).nmant + 1
    for number in numbers:
        if isinstance(number, int | np.integer) and abs(int(number)) > largest:
            raise UnsupportedColumnError(
                f"the common dtype of the rows is {dtype}, in which {number} would be another "
                "number: give the rows one dtype, or declare one in FieldSchema metadata['dtype']"
            )


def _arrays_of_lists(
    rows: Sequence[Any], dtype: np.dtype[Any] | None, *, is_exact: bool
) -> list[Array]:
    """Return lists of numbers, and arrays among them, as arrays of one dtype.

    Args:
        rows: The lists and arrays.
        dtype: Dtype of the result; None infers it.
        is_exact: True to refuse numbers of several types, instead of taking their common dtype.

    Raises:
        UnsupportedColumnError: The numbers are not of one type, or a list is not rectangular, so
            that the lists would not come back as they are.
    """
    rows = [_host(row) for row in rows]
    try:
        if dtype is None:
            dtype = _dtype_of_lists(rows) if is_exact else _common_dtype_of_lists(rows)
        return [np.asarray(row, dtype=dtype, order="C") for row in rows]
    except (TypeError, ValueError, OverflowError) as error:
        raise UnsupportedColumnError(f"a row is no rectangular list of numbers: {error}") from error


def _dtype_of_lists(rows: Sequence[Any]) -> np.dtype[Any]:
    numbers: Any = rows
    depth = 0
    while True:
        kinds = set(map(type, numbers))
        if not kinds or kinds in (_INT64_ONLY, _FLOAT64_ONLY):
            return np.dtype(np.float64 if kinds == _FLOAT64_ONLY else np.int64)
        if all(issubclass(kind, np.number) for kind in kinds) and len(kinds) == 1:
            return np.dtype(kinds.pop())
        if depth == _DIMS_MAX or not all(kind in (list, tuple) for kind in kinds):
            break
        numbers = list(chain.from_iterable(numbers))
        depth += 1
    arrays = [row for row in rows if isinstance(row, np.ndarray)]
    if not arrays:
        raise UnsupportedColumnError("the rows are not lists of numbers of one type")
    dtype = _common_dtype(arrays)
    lists = [row for row in rows if not isinstance(row, np.ndarray)]
    if lists and _dtype_of_lists(lists) != dtype:
        raise UnsupportedColumnError("the rows are arrays and lists of different types")
    return dtype


def _common_dtype_of_lists(rows: Sequence[Any]) -> np.dtype[Any]:
    """Return the dtype of numpy that can hold the numbers of all lists."""
    try:
        return _dtype_of_lists(rows)
    except UnsupportedColumnError:
        arrays = [np.asarray(row) for row in rows]
        # Integers of a list with floats in it are floats in its array already.
        for row, array in zip(rows, arrays, strict=True):
            if array.dtype.kind in "fc" and not isinstance(row, np.ndarray):
                _check_integers(np.asarray(row, dtype=object).flat, array.dtype)
        return _common_dtype(arrays)


def _host(row: Any) -> Any:
    return row.detach().cpu().numpy() if is_tensor(row) else row


def _decode_arrays(payloads: Payloads, rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    data, offsets, shapes, nulls = _checked_rows(payloads, rows)
    if data.dtype.kind not in _NUMBERS + _TEXTS:
        raise ValueError(f"typed_ragged has no dtype {data.dtype}")
    row_format = metadata.get("row_format")
    is_array = metadata.get("ndarray_rows") if row_format == "mixed" else None
    if is_array is not None and (not isinstance(is_array, list) or len(is_array) != rows):
        raise ValueError(f"ndarray_rows does not describe {rows} rows")
    values: list[Any] = []
    for row in range(rows):
        if nulls[row]:
            values.append(None)
            continue
        value = data[offsets[row] : offsets[row + 1]]
        if shapes is not None:
            value = value.reshape(shapes[row])
        keeps_array = row_format == "ndarray" if is_array is None else is_array[row]
        values.append(value if keeps_array else value.tolist())
    return values


# Tensors


def _encode_tensors(
    values: Sequence[Any], _options: Mapping[str, Any]
) -> tuple[dict[str, Any], Payloads]:
    torch = load_torch()
    tensors = [
        torch.from_numpy(np.array(value)) if is_numeric_array(value) else value
        for value in values
        if value is not None
    ]
    if not all(map(is_tensor, tensors)):
        raise UnsupportedColumnError("a row is no dense tensor")
    names = sorted({str(tensor.dtype) for tensor in tensors})
    if len(names) > 1:
        raise UnsupportedColumnError(f"mixed tensor dtype: {names}")
    dtype = tensors[0].dtype if tensors else torch.float32
    storage = _storage_dtype(DType.of_torch(dtype))
    shapes = [tuple(tensor.shape) for tensor in tensors]
    metadata, payloads = _encode_rows(values, shapes, "ndarray")
    if all(tensor.device.type == "cpu" for tensor in tensors):
        flat = [_elements(tensor, storage) for tensor in tensors]
        payloads["data"] = FlatArray(concatenated(flat), storage)
    else:
        # One copy from the device, instead of one for each row.
        device = next(each.device for each in tensors if each.device.type != "cpu")
        joined = torch.cat([each.detach().to(device).reshape(-1) for each in tensors]).cpu()
        payloads["data"] = FlatArray(payload_of_array(_elements(joined, storage)), storage)
    return {
        "dtype": str(dtype),
        **metadata,
        "ndarray_rows": None,
        "physical_layout": "contiguous_flat",
    }, payloads


def _elements(tensor: Any, storage: np.dtype[Any]) -> Array:
    """Return the elements of a tensor on the host as an array."""
    torch = load_torch()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    elements: Array = plain.view(getattr(torch, storage.name)).numpy()
    return elements


def _storage_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy dtype that a tensor's elements are stored as.

    Elements of types that numpy lacks, such as bfloat16, are stored as integers of the same length,
    also if ml_dtypes has added them to numpy.
    """
    return np.dtype(dtype.name if dtype.is_of_numpy else f"u{dtype.itemsize}")


def _decode_tensors(payloads: Payloads, rows: int, metadata: Mapping[str, Any]) -> list[Any]:
    torch = load_torch()
    data, offsets, shapes, nulls = _checked_rows(payloads, rows)
    try:
        dtype = DType.of_name(str(metadata.get("dtype", "torch.float32")))
    except TypeError as error:
        raise ValueError(str(error)) from error
    if data.dtype.itemsize != dtype.itemsize or data.dtype.kind not in _NUMBERS:
        raise ValueError(f"the data of {data.dtype} cannot hold tensors of {dtype.name}")
    data = data if data.flags.writeable else data.copy()
    elements = torch.from_numpy(data).view(dtype.torch())
    values: list[Any] = []
    for row in range(rows):
        part = elements[offsets[row] : offsets[row + 1]]
        if shapes is not None and not nulls[row]:
            part = part.view(shapes[row])
        values.append(None if nulls[row] else part)
    return values


# Shapes and offsets


def _encode_rows(
    values: Sequence[Any], shapes: Sequence[tuple[int, ...]], row_format: str
) -> tuple[dict[str, Any], Payloads]:
    """Return the metadata and the payloads that tell the shape and the place of each row.

    Args:
        values: All rows.
        shapes: Shape of each row that is not None.
        row_format: Form in which rows are returned.
    """
    nulls = nulls_of(values)
    given = np.flatnonzero(~nulls)
    dims = np.zeros(len(values), dtype=np.int16)
    dims[given] = [len(shape) for shape in shapes]
    width = int(dims.max(initial=0))
    table = np.zeros((len(values), width), dtype=np.int64)
    if len(set(map(len, shapes))) == 1:
        table[given] = np.array(shapes, dtype=np.int64).reshape(len(shapes), width)
    else:
        for row, shape in zip(given, shapes, strict=True):
            table[row, : len(shape)] = shape
    counts = np.zeros(len(values), dtype=np.int64)
    counts[given] = [math.prod(shape) for shape in shapes]
    metadata = {"max_ndim": width, "shape_policy": "ragged", "row_format": row_format}
    return metadata, {
        "data": None,
        "offsets": offsets_of(counts),
        "shapes": table,
        "ndims": dims,
        "nulls": nulls,
    }


def _checked_rows(
    payloads: Payloads, rows: int
) -> tuple[Array, list[int], list[tuple[int, ...]] | None, list[bool]]:
    """Return the items, the offsets, the shapes and the nulls, after checking that they agree.

    The shapes are None if all rows have one dimension.
    """
    data = payload_array(payloads, "data")
    if data.ndim != 1:
        raise ValueError(f"the payload data has {data.ndim} dimensions, expected 1")
    offsets = checked_offsets(payloads, rows, len(data))
    shapes, dims, nulls = _checked_shapes(payloads, rows)
    lengths = np.diff(offsets)
    used = np.arange(shapes.shape[1]) < dims[:, None]
    sizes = np.where(used, shapes, 1)
    # Floats do not overflow, so that a product which is too large for an integer is found, too.
    with np.errstate(all="ignore"):
        counts = np.prod(sizes.astype(np.float64), axis=1)
    if bool((counts[~nulls] != lengths[~nulls]).any()):
        row = int(np.flatnonzero((counts != lengths) & ~nulls)[0])
        raise ValueError(
            f"the shape of row {row} does not match its {int(lengths[row])} items: "
            f"{tuple(sizes[row].tolist())}"
        )
    table = None
    if bool((dims[~nulls] != 1).any()):
        pairs = zip(sizes.tolist(), dims.tolist(), strict=True)
        table = [tuple(shape[:count]) for shape, count in pairs]
    return data, offsets.tolist(), table, nulls.tolist()


def _checked_shapes(payloads: Payloads, rows: int) -> tuple[Array, Array, Array]:
    nulls = checked_nulls(payloads, rows)
    dims = payload_array(payloads, "ndims")
    shapes = payload_array(payloads, "shapes")
    if dims.shape != (rows,) or shapes.ndim != 2 or len(shapes) != rows:
        raise ValueError(
            f"the payloads ndims and shapes have shapes {dims.shape} and {shapes.shape}, "
            f"expected {rows} rows"
        )
    width = shapes.shape[1]
    if shapes.dtype.kind not in "iu" or dims.dtype.kind not in "iu" or width > _DIMS_MAX:
        raise ValueError(f"the payloads ndims and shapes are not valid max_ndim={width}")
    if bool(((dims < 0) | (dims > width)).any()) or bool((shapes < 0).any()):
        raise ValueError("a number of dimensions or a shape is out of range")
    return shapes, dims, nulls


def _select(payloads: Payloads, rows: int, metadata: Mapping[str, Any], chosen: Array) -> Selection:
    offsets = checked_offsets(payloads, rows, None)
    shapes, dims, nulls = _checked_shapes(payloads, rows)
    starts, ends = offsets[chosen], offsets[chosen + 1]
    kept = dict(metadata)
    is_array = metadata.get("ndarray_rows")
    if isinstance(is_array, list) and len(is_array) == rows:
        kept["ndarray_rows"] = [is_array[row] for row in chosen]
    selected = {
        "offsets": offsets_of(ends - starts),
        "shapes": shapes[chosen],
        "ndims": dims[chosen],
        "nulls": nulls[chosen],
    }
    return Selection(selected, kept, starts, ends)


_PAYLOADS: Final = ("offsets", "shapes", "ndims", "nulls")

ARRAYS: Final = LeafCodec(_encode_arrays, _decode_arrays, _select, _PAYLOADS)
TENSORS: Final = LeafCodec(_encode_tensors, _decode_tensors, _select, _PAYLOADS)
