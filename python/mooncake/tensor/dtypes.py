"""`DType`: the element types of stored tensors, and their counterparts in torch and numpy."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mooncake._hints import np, torch

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["ALL", "EXTENSION_CODE_MIN", "DType", "load_numpy", "load_torch"]

EXTENSION_CODE_MIN: Final = 256
"""First code of the types that upstream's format lacks."""

_QUANTIZED: Final = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type. There is one instance of each, so that instances compare by identity.

    Attributes:
        name: Name of the type in torch, and in numpy or ml_dtypes where they have it.
        code: Number of the type in stored metadata.
        itemsize: Length of an element in bytes.
    """

    name: str
    code: int
    itemsize: int

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by code."""
        return DType.of_code, (self.code,)

    @classmethod
    def of_code(cls, code: int) -> DType:
        """Return the type with a code.

        Raises:
            ValueError: No type has the code.
        """
        dtype = _BY_CODE.get(code)
        if dtype is None:
            raise ValueError(f"unknown dtype code={code}")
        return dtype

    @classmethod
    def of_name(cls, name: str) -> DType:
        """Return the type with a name, like ``"bfloat16"`` or ``"torch.bfloat16"``.

        Raises:
            TypeError: No type has the name.
        """
        dtype = _BY_NAME.get(name.removeprefix("torch."))
        if dtype is None:
            raise TypeError(f"tensors of dtype {name} are not supported")
        return dtype

    @classmethod
    def of_torch(cls, dtype: torch.dtype) -> DType:
        """Return the type of a torch dtype.

        Raises:
            TypeError: Tensors of that dtype cannot be stored; the message has the remedy.
        """
        found = _dtypes_of_torch().get(dtype)
        if found is None:
            if str(dtype).removeprefix("torch.") in _QUANTIZED:
                raise TypeError(
                    f"quantized tensors are not supported dtype={dtype}: store tensor.int_repr() "
                    "and the scales"
                )
            raise TypeError(f"tensors of dtype {dtype} are not supported")
        return found

    @classmethod
    def of_numpy(cls, dtype: np.dtype[Any]) -> DType:
        """Return the type of a numpy dtype, also one of ml_dtypes, in any byte order.

        Raises:
            TypeError: Arrays of that dtype cannot be stored as tensors.
        """
        found = _of_numpy(dtype)
        if found is None:
            raise TypeError(f"arrays of dtype {dtype} are not supported as tensors")
        return found

    @property
    def is_of_numpy(self) -> bool:
        """Whether numpy has the type without ml_dtypes."""
        return self.name in _NUMPY_NAMES

    def torch(self) -> torch.dtype:
        """Return the torch dtype.

        Raises:
            ImportError: torch is not installed.
            TypeError: The installed torch is older than the dtype.
        """
        known = _elements().get(self)
        if known is None:
            version = load_torch().__version__
            raise TypeError(f"torch {version} has no dtype {self.name}; install a newer one")
        return known

    def numpy(self) -> np.dtype[Any]:
        """Return the numpy dtype.

        Raises:
            ImportError: numpy, or for types that numpy lacks ml_dtypes, is not installed.
            TypeError: Neither numpy nor the installed ml_dtypes has such a type.
        """
        numpy = load_numpy()
        scalar = self.name if self.is_of_numpy else self._ml_dtype()
        dtype: np.dtype[Any] = numpy.dtype(scalar)
        return dtype

    def _ml_dtype(self) -> Any:
        try:
            ml_dtypes = importlib.import_module("ml_dtypes")
        except ImportError as error:
            raise ImportError(
                f"arrays of dtype {self.name} need ml_dtypes: pip install ml_dtypes",
                name="ml_dtypes",
            ) from error
        scalar = getattr(ml_dtypes, self.name, None)
        if scalar is None:
            raise TypeError(f"numpy and ml_dtypes have no dtype {self.name}")
        return scalar


_UPSTREAM: Final = (
    ("float32", 4),
    ("float64", 8),
    ("int8", 1),
    ("uint8", 1),
    ("int16", 2),
    ("uint16", 2),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("bool", 1),
    ("float16", 2),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)
# Codes follow from the order of both tables: new types are added at the end of the second one.
_EXTENSION: Final = (
    ("complex64", 8),
    ("complex128", 16),
    ("complex32", 4),
    ("bcomplex32", 4),
    ("float8_e4m3fnuz", 1),
    ("float8_e5m2fnuz", 1),
    ("float8_e8m0fnu", 1),
    ("float4_e2m1fn_x2", 1),
    ("bits8", 1),
    ("bits16", 2),
    ("bits1x8", 1),
    ("bits2x4", 1),
    ("bits4x2", 1),
    *((f"{sign}int{bits}", 1) for sign in ("", "u") for bits in range(1, 8)),
)

_NUMPY_NAMES: Final = frozenset(
    {"complex64", "complex128"}
    | {name for name, _ in _UPSTREAM if name != "bfloat16" and not name.startswith("float8")}
)

ALL: Final = (
    *(DType(name, code, size) for code, (name, size) in enumerate(_UPSTREAM)),
    *(DType(name, code, size) for code, (name, size) in enumerate(_EXTENSION, EXTENSION_CODE_MIN)),
)
"""Every type that a tensor may have, by code."""

_BY_CODE: Final[Mapping[int, DType]] = MappingProxyType({dtype.code: dtype for dtype in ALL})
_BY_NAME: Final[Mapping[str, DType]] = MappingProxyType({dtype.name: dtype for dtype in ALL})


def load_torch() -> Any:
    """Return the module torch; raise an ImportError that names the extra to install."""
    return sys.modules.get("torch") or _load("torch", "tensor")


def load_numpy() -> Any:
    """Return the module numpy; raise an ImportError that names the extra to install."""
    return _load("numpy", "numpy")


def _load(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{name} is not installed: pip install 'mooncake-transfer-engine[{extra}]'", name=name
        ) from error


@functools.lru_cache(maxsize=256)
def _of_numpy(dtype: np.dtype[Any]) -> DType | None:
    found = _BY_NAME.get(dtype.name)
    # Another dtype may have the same name, for instance a structured one.
    return None if found is None or found.itemsize != dtype.itemsize else found


@functools.cache
def _elements() -> dict[DType, torch.dtype]:
    """Return the dtypes that the installed torch has."""
    torch = load_torch()
    found = ((dtype, getattr(torch, dtype.name, None)) for dtype in ALL)
    return {dtype: element for dtype, element in found if element is not None}


@functools.cache
def _dtypes_of_torch() -> dict[torch.dtype, DType]:
    return {element: dtype for dtype, element in _elements().items()}
