"""Tensors and arrays as contiguous memory, and memory as tensors and arrays."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from mooncake._hints import Readable, np, torch
from mooncake.tensor.dtypes import DType, load_numpy, load_torch
from mooncake.tensor.format import DIMS_MAX, METADATA_BYTES, FormatError, TensorMetadata

__all__ = ["TensorMemory", "as_numpy", "as_torch", "at_address", "of", "restore"]


_WRITABLE: Final = 0x200
# A view made by ctypes itself would need a new type for each length.
_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object


class TensorMemory(NamedTuple):
    """The elements of a tensor, in row-major order and without gaps.

    Attributes:
        address: Address of the first byte, in this process or of a CUDA device; 0 if there is none.
        nbytes: Length in bytes.
        dtype: Type of the elements.
        shape: Length of each dimension.
        owner: Object that keeps all of the memory: the tensor itself, or a copy of it.
        offsets: For a jagged tensor the offsets of its sequences, as 64-bit integers.
        ragged_dim: For a jagged tensor the dimension along which its sequences are concatenated.
        is_on_device: True if the elements are in memory of a CUDA device.
    """

    address: int
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    owner: Any
    offsets: TensorMemory | None = None
    ragged_dim: int | None = None
    is_on_device: bool = False

    def metadata(self) -> TensorMetadata:
        """Return the metadata of the tensor as an object of its own."""
        gap = 0 if self.offsets is None else self.offsets.nbytes
        return TensorMetadata(
            self.dtype,
            self.shape,
            self.shape,
            data_offset=METADATA_BYTES + gap,
            ragged_dim=self.ragged_dim,
        )

    def ranges(self) -> list[tuple[int, int]]:
        """Return address and length of each piece that follows the metadata in an object."""
        pieces = (self,) if self.offsets is None else (self.offsets, self)
        return [(piece.address, piece.nbytes) for piece in pieces if piece.nbytes > 0]


def of(value: object) -> TensorMemory:
    """Return the memory of a torch tensor or a numpy array.

    The memory is the value's own if that is contiguous and in native byte order, else that of a
    copy. Memory of a CUDA device is not copied; work that was submitted to torch's current stream
    has ended when the call returns. Tensors of other devices are copied to the host.

    Raises:
        TypeError: The value is neither, or is of a kind that cannot be stored; the message has the
            reason and the remedy.
    """
    # A value of torch or numpy exists only after the module was imported.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(torch, value)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of_array(numpy, value)
    kind = type(value).__name__
    text = f"a tensor must be of torch or numpy, not {kind}"
    raise TypeError(f"{text}; make one with numpy.asarray or torch.as_tensor")


def as_torch(
    buffer: Readable, dtype: DType, shape: Sequence[int], *, offset: int = 0
) -> torch.Tensor:
    """Return a torch tensor that shares the memory of a buffer and keeps it alive.

    Args:
        buffer: Writable memory.
        dtype: Type of the elements.
        shape: Length of each dimension.
        offset: Offset of the first element in bytes.

    Raises:
        ImportError: torch is not installed.
        TypeError: The installed torch is older than the dtype.
        ValueError: The buffer is too short.
    """
    return _as_torch(buffer, dtype, tuple(shape), _count(buffer, dtype, shape, offset), offset)


def as_numpy(
    buffer: Readable, dtype: DType, shape: Sequence[int], *, offset: int = 0
) -> np.ndarray[Any, Any]:
    """Return a numpy array that shares the memory of a buffer and keeps it alive.

    Args:
        buffer: Memory; if it is read-only, so is the array.
        dtype: Type of the elements.
        shape: Length of each dimension.
        offset: Offset of the first element in bytes.

    Raises:
        ImportError: numpy or ml_dtypes is not installed.
        TypeError: numpy and ml_dtypes have no such dtype.
        ValueError: The buffer is too short.
    """
    numpy, element = load_numpy(), dtype.numpy()
    count = _count(buffer, dtype, shape, offset)
    # numpy refuses an offset at the end of a buffer.
    start = offset if count > 0 else 0
    array: np.ndarray[Any, Any] = numpy.frombuffer(buffer, element, count, start)
    return array.reshape(tuple(shape))


def restore(buffer: Readable, metadata: TensorMetadata) -> torch.Tensor:
    """Return the torch tensor of a whole object; it shares the object's memory.

    Args:
        buffer: The object, in writable memory.
        metadata: The decoded metadata of the object.

    Raises:
        FormatError: The offsets of a jagged tensor contradict its shape.
        ImportError: torch is not installed.
        TypeError: The installed torch is older than the dtype.
    """
    shape = metadata.local_shape
    values = _as_torch(buffer, metadata.dtype, shape, math.prod(shape), metadata.data_offset)
    ragged_dim = metadata.ragged_dim
    if ragged_dim is None:
        return values
    torch = load_torch()
    ends = (metadata.sequences + 1,)
    offsets = as_torch(buffer, DType.of_name("int64"), ends, offset=METADATA_BYTES)
    is_ordered = bool((offsets[1:] >= offsets[:-1]).all())
    if offsets[0] != 0 or offsets[-1] != shape[ragged_dim] or not is_ordered:
        raise FormatError(
            "the offsets of the sequences do not rise from 0 to the length of the values"
        )
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_dim + 1)


def at_address(address: int, length: int) -> memoryview:
    """Return memory at an address as a writable buffer. The caller keeps the memory alive."""
    view: memoryview = _view_memory(address, length, _WRITABLE)
    return view


def _as_torch(
    buffer: Readable, dtype: DType, shape: tuple[int, ...], count: int, offset: int
) -> torch.Tensor:
    """Return a torch tensor of `count` elements, which are all in the buffer."""
    torch, element = load_torch(), dtype.torch()
    if count == 0:
        # Without a device the result would be on the default device of the caller.
        return torch.empty(shape, dtype=element, device="cpu")
    flat = torch.frombuffer(buffer, dtype=element, count=count, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)


def _count(buffer: Readable, dtype: DType, shape: Sequence[int], offset: int) -> int:
    """Return the number of elements, after checking that the buffer holds them."""
    count = math.prod(shape)
    length = memoryview(buffer).nbytes
    if offset + count * dtype.itemsize > length:
        raise ValueError(
            f"the memory is too short for the tensor length={length} offset={offset} "
            f"dtype={dtype.name} shape={(*shape,)}"
        )
    return count


def _of_tensor(torch: Any, tensor: Any) -> TensorMemory:
    if _is_plain(torch, tensor):
        dtype = DType.of_torch(tensor.dtype)
        return TensorMemory(tensor.data_ptr(), tensor.nbytes, dtype, (*tensor.shape,), tensor)
    tensor = tensor.detach()
    if tensor.layout is torch.jagged:
        return _of_jagged(torch, tensor)
    _check_kind(torch, tensor)
    dtype = DType.of_torch(tensor.dtype)
    tensor = _contiguous(torch, tensor, dtype)
    is_on_device = tensor.device.type == "cuda"
    if is_on_device:
        torch.cuda.current_stream(tensor.device).synchronize()
    elif tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return TensorMemory(
        tensor.data_ptr(),
        tensor.nbytes,
        dtype,
        (*tensor.shape,),
        tensor,
        is_on_device=is_on_device,
    )


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor is one block of host memory as it is: the common case."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.dim() <= DIMS_MAX
    )


def _check_kind(torch: Any, tensor: Any) -> None:
    """Refuse tensors that are not one block of memory."""
    kind = type(tensor).__name__
    if tensor.is_nested:
        raise TypeError(
            "nested tensors of layout strided are not supported: convert with "
            "torch.nested.nested_tensor(tensor.unbind(), layout=torch.jagged)"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensors of layout {tensor.layout} are not supported: use .to_dense()")
    if tensor.device.type == "meta" or kind == "FakeTensor":
        raise TypeError(f"a {kind} of the device {tensor.device} has no elements to store")
    if hasattr(tensor, "to_local"):
        raise TypeError(f"a {kind} is not one tensor: store each .to_local() as a shard")
    if hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(f"a {kind} consists of several tensors: store each of them")
    if tensor.dim() > DIMS_MAX:
        raise TypeError(
            f"{tensor.dim()} dimensions are not supported, at most {DIMS_MAX}: reshape it"
        )


def _contiguous(torch: Any, tensor: Any, dtype: DType) -> Any:
    """Return the tensor, or a copy whose memory is its elements in row-major order."""
    if dtype.name.startswith("complex"):
        tensor = tensor.resolve_conj()
    tensor = tensor.resolve_neg()
    if tensor.is_contiguous():
        return tensor
    # torch cannot copy elements of some one-byte dtypes, but it can copy them as bytes.
    if dtype.itemsize == 1:
        return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
    return tensor.contiguous()


def _of_jagged(torch: Any, tensor: Any) -> TensorMemory:
    # A tensor with gaps between its sequences is packed.
    packed = tensor if tensor.lengths() is None else tensor.contiguous()
    # The length of the ragged dimension is symbolic; the batch is not a dimension of the values.
    ragged_dim = next(dim for dim, size in enumerate(packed.shape) if not isinstance(size, int)) - 1
    values = _of_tensor(torch, packed.values())
    offsets = _of_tensor(torch, packed.offsets().to("cpu", torch.int64))
    return TensorMemory(
        values.address,
        values.nbytes,
        values.dtype,
        values.shape,
        (values.owner, offsets.owner),
        offsets=offsets,
        ragged_dim=ragged_dim,
        is_on_device=values.is_on_device,
    )


def _of_array(numpy: Any, array: Any) -> TensorMemory:
    if isinstance(array, numpy.ma.MaskedArray):
        raise TypeError("masked arrays are not supported: store array.filled(value)")
    dtype = DType.of_numpy(array.dtype)
    if array.ndim > DIMS_MAX:
        raise TypeError(
            f"{array.ndim} dimensions are not supported, at most {DIMS_MAX}: reshape it"
        )
    if not (array.dtype.isnative and array.flags.c_contiguous):
        array = numpy.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return TensorMemory(array.ctypes.data, array.nbytes, dtype, array.shape, array)
