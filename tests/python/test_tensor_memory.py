"""Tensors and arrays as contiguous memory, and memory as tensors and arrays."""

from __future__ import annotations

import struct
import sys

import pytest

from mooncake.tensor import dtypes, memory
from mooncake.tensor.dtypes import DType
from mooncake.tensor.format import FormatError, TensorMetadata

np = pytest.importorskip("numpy", reason="needs numpy: pip install numpy")
torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

# torch has these, numpy and ml_dtypes do not.
TORCH_ONLY = {"float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (3, 5, 6, 7)
}
NUMPY_DTYPES = [dtype for dtype in dtypes.ALL if dtype.name not in TORCH_ONLY]
INT64 = DType.of_name("int64")
# Layouts of one tensor of 2 x 3 elements: strides that are not those of a contiguous tensor.
VIEWS = {
    "contiguous": lambda base: base.reshape(-1)[7:13].reshape(2, 3),
    "columns": lambda base: base[:2, 1:4],
    "transposed": lambda base: base[:3, :2].t(),
    "strided": lambda base: base[::2, ::2][:2, :3],
    "expanded": lambda base: base[:1, :3].expand(2, 3),
}


def base_tensor(dtype: DType) -> torch.Tensor:
    """Return 6 x 6 elements with different bytes."""
    data = bytearray(index % 251 for index in range(36 * dtype.itemsize))
    if dtype.name == "bool":
        data = bytearray(index % 2 for index in range(36))
    return torch.frombuffer(data, dtype=dtype.torch()).reshape(6, 6)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the bytes of the elements in row-major order, one element at a time."""
    if tensor.dim() == 0:
        return bytes(tensor.reshape(1).view(torch.uint8).tolist())
    return b"".join(bytes_of(tensor[index]) for index in range(tensor.shape[0]))


def object_of(tensor: torch.Tensor) -> tuple[bytearray, TensorMetadata]:
    """Return the object that a put of the tensor would store."""
    kept = memory.of(tensor)
    metadata = kept.metadata()
    pieces = [bytes(memory.at_address(address, length)) for address, length in kept.ranges()]
    return bytearray(b"".join((metadata.encode(), *pieces))), metadata


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    data, _ = object_of(tensor)
    return memory.restore(data, TensorMetadata.decode(data, total=len(data)))


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda dtype: dtype.name)
def test_every_dtype_and_stride_round_trips(dtype, view):
    tensor = view(base_tensor(dtype))
    back = round_trip(tensor)
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bytes_of(back) == bytes_of(tensor)


def test_every_torch_dtype_is_known_or_refused():
    known = {dtype.torch() for dtype in dtypes.ALL}
    others = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - known
    assert {str(dtype) for dtype in others} == {
        "torch.qint8",
        "torch.quint8",
        "torch.qint32",
        "torch.quint4x2",
        "torch.quint2x4",
    }
    for dtype in others:
        with pytest.raises(TypeError, match="int_repr"):
            DType.of_torch(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 2, 1, 2, 1, 2, 1, 2)], ids=str)
def test_shapes_round_trip(shape):
    tensor = torch.rand(shape)
    back = round_trip(tensor)
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


def test_contiguous_tensors_are_not_copied():
    tensor = torch.arange(24).reshape(2, 3, 4)
    for value in (tensor, tensor[1], torch.nn.Parameter(tensor.float())):
        kept = memory.of(value)
        assert (kept.address, kept.nbytes) == (value.data_ptr(), value.nbytes)
    array = np.arange(24.0).reshape(4, 6)
    assert memory.of(array[1:3]).address == array.ctypes.data + 48


def test_gradients_and_channels_last_are_stored():
    tensor = torch.rand(2, 3, 4, 5, requires_grad=True)
    assert torch.equal(round_trip(tensor * 2), (tensor * 2).detach())
    shuffled = tensor.detach().to(memory_format=torch.channels_last)
    assert torch.equal(round_trip(shuffled), tensor.detach())


def test_lazy_conjugates_and_negatives_are_resolved():
    tensor = torch.complex(torch.rand(2, 3), torch.rand(2, 3))
    assert torch.equal(round_trip(tensor.conj()), tensor.conj().resolve_conj())
    assert torch.equal(round_trip(tensor.conj().imag), -tensor.imag)


@pytest.mark.parametrize("lengths", [[2, 4, 1], [0], [3, 0, 0, 2], [0, 0]], ids=str)
def test_jagged_tensors_round_trip(lengths):
    parts = [torch.rand(length, 3).to(torch.bfloat16) for length in lengths]
    tensor = torch.nested.nested_tensor(parts, layout=torch.jagged)
    back = round_trip(tensor)
    assert (back.layout, back.dtype) == (torch.jagged, torch.bfloat16)
    found = back.unbind()
    assert len(found) == len(parts)
    assert all(torch.equal(one, other) for one, other in zip(found, parts, strict=True))


def test_transposed_and_narrowed_jagged_tensors_round_trip():
    parts = [torch.rand(length, 3) for length in (2, 4)]
    tensor = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    back = round_trip(tensor)
    assert [part.shape for part in back.unbind()] == [(3, 2), (3, 4)]
    assert all(torch.equal(a, b.t()) for a, b in zip(back.unbind(), parts, strict=True))
    padded = torch.arange(30.0).reshape(2, 5, 3)
    starts, lengths = torch.tensor([1, 0]), torch.tensor([3, 2])
    narrowed = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    back = round_trip(narrowed).unbind()
    assert torch.equal(back[0], padded[0, 1:4])
    assert torch.equal(back[1], padded[1, :2])


def test_rejects_lying_offsets_of_sequences():
    parts = [torch.rand(2, 3), torch.rand(4, 3)]
    data, metadata = object_of(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert struct.unpack_from("<3q", data, 304) == (0, 2, 6)
    for offsets in ((1, 2, 6), (0, 7, 6), (0, 2, 5), (0, -1, 6), (0, 1 << 62, 6)):
        struct.pack_into("<3q", data, 304, *offsets)
        with pytest.raises(FormatError, match="offsets of the sequences"):
            memory.restore(data, metadata)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), r"use \.to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), r"use \.to_dense"),
        (lambda: torch.empty(3, device="meta"), "device meta has no elements"),
        (lambda: torch.rand([1] * 9), "9 dimensions"),
        (lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)]), "layout=torch.jagged"),
        (lambda: np.zeros(2, dtype=object), "dtype object"),
        (lambda: np.zeros(2, dtype="datetime64[s]"), "datetime64"),
        (lambda: np.zeros(2, dtype=[("a", "<i4")]), "not supported"),
        (lambda: np.zeros([1] * 9), "9 dimensions"),
        (lambda: np.ma.masked_equal(np.arange(3), 1), "filled"),
        (lambda: np.float32(3), "not float32"),
        (lambda: [1, 2], "not list"),
        (lambda: None, "not NoneType"),
    ],
)
# torch announces that these layouts may change.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR")
def test_refusals_have_the_reason_and_the_remedy(make, reason):
    with pytest.raises(TypeError, match=reason):
        memory.of(make())


def test_fake_tensors_are_refused():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    with pytest.raises(TypeError, match="no elements"):
        memory.of(fake)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=lambda dtype: dtype.name)
def test_arrays_of_every_dtype_round_trip(dtype):
    pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
    element = dtype.numpy()
    array = np.zeros((4, 6), dtype=element)
    array.view(np.uint8)[:] = np.arange(array.nbytes, dtype=np.uint8).reshape(4, -1) % 2
    for view in (array, array.T, array[::2, 1:3], array[:1, :1].reshape(()), array[:0]):
        kept = memory.of(view)
        assert (kept.dtype, kept.shape) == (dtype, view.shape)
        data = bytes(memory.at_address(kept.address, kept.nbytes))
        assert data == view.tobytes()
        back = memory.as_numpy(data, kept.dtype, kept.shape)
        assert (back.dtype, back.shape, back.tobytes()) == (element, view.shape, data)


@pytest.mark.parametrize("name", sorted(TORCH_ONLY))
def test_dtypes_of_torch_alone_have_no_arrays(name):
    with pytest.raises(TypeError, match=f"no dtype {name}"):
        DType.of_name(name).numpy()


def test_arrays_of_foreign_byte_order_are_converted():
    kept = memory.of(np.array([1, 2, 3], dtype=">i4"))
    assert bytes(memory.at_address(kept.address, kept.nbytes)) == struct.pack("<3i", 1, 2, 3)


def test_restored_tensors_share_and_keep_the_memory():
    data = bytearray(8 * 4)
    tensor = memory.as_torch(data, INT64, (3,), offset=8)
    tensor[0] = -1
    assert data == bytes(8) + b"\xff" * 8 + bytes(16)
    del data
    assert tensor.tolist() == [-1, 0, 0]


def test_the_default_device_of_torch_does_not_matter():
    with torch.device("meta"):
        for shape in ((0,), (3,), (1, 3)):
            assert memory.as_torch(bytearray(24), INT64, shape).device.type == "cpu"


def test_rejects_memory_that_is_too_short():
    for build in (memory.as_torch, memory.as_numpy):
        with pytest.raises(ValueError, match="too short for the tensor length=23"):
            build(bytearray(23), INT64, (3,))
        with pytest.raises(ValueError, match="offset=1"):
            build(bytearray(24), INT64, (3,), offset=1)
        assert build(bytearray(24), INT64, (3,)).shape == (3,)


def test_missing_torch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"mooncake-transfer-engine\[tensor\]"):
        memory.as_torch(bytearray(8), INT64, (1,))


def test_missing_ml_dtypes_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="pip install ml_dtypes"):
        memory.as_numpy(bytearray(8), DType.of_name("bfloat16"), (4,))
    assert memory.as_numpy(bytearray(8), DType.of_name("float16"), (4,)).tolist() == [0.0] * 4
