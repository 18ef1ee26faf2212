"""Upstream's calls for tensors: values, codes, and refusals."""

from __future__ import annotations

import asyncio
import ctypes
import random
import struct
import sys
from collections.abc import Iterator

import pytest
from conftest import MasterProcess, set_up
from test_dummy_client import start_daemon

import mooncake
from mooncake import store as module
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.tensor import dtypes

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")

INVALID, MISSING = -600, -704
METADATA = 304


@pytest.fixture(scope="module", params=["full", "dummy"])
def store(request: pytest.FixtureRequest) -> Iterator[MooncakeDistributedStore]:
    """A store for all tests of the module, with its own memory or as a dummy client."""
    made = MooncakeDistributedStore()
    if request.param == "full":
        assert set_up(made, "embedded") == 0
        yield made
    else:
        master: MasterProcess = request.getfixturevalue("master")
        daemon = start_daemon(master.address)
        assert made.setup_dummy(1 << 20, 1 << 20, daemon.address) == 0
        yield made
        daemon.stop()
    made.close()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test uses."""
    return request.node.name


def matrix(rows: int = 4, columns: int = 6) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def why() -> str:
    return str(mooncake.last_error())


def is_same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Return whether dtype, shape and bytes are equal."""
    assert found is not None
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    whole = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected.contiguous())]
    return torch.equal(*whole)


class Memory:
    """Memory of this process, filled with a byte that no result has."""

    def __init__(self, size: int) -> None:
        self.data = ctypes.create_string_buffer(b"\xee" * size, size)
        self.at = ctypes.addressof(self.data)
        self.size = size

    def fill(self, data: bytes) -> int:
        ctypes.memmove(self.at, data, len(data))
        return len(data)


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda dtype: dtype.name)
def test_every_dtype_comes_back(store, key, dtype):
    data = bytearray(index % 2 for index in range(24 * dtype.itemsize))
    tensor = torch.frombuffer(data, dtype=dtype.torch()).reshape(4, 6)
    assert store.put_tensor(key, tensor) == 0
    assert is_same(store.get_tensor(key), tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.tensor(2.5),
        lambda: torch.empty(0),
        lambda: torch.empty(3, 0, 2),
        lambda: matrix().t(),
        lambda: matrix()[::2, 1:4],
        lambda: torch.ones(1, 2, 1, 2, 1, 2, 1, 2),
        lambda: torch.nn.Parameter(matrix()),
        lambda: matrix().requires_grad_() * 2,
        lambda: torch.complex(matrix(), matrix() + 1).conj(),
    ],
    ids=["0-d", "empty", "no rows", "transposed", "sliced", "8-d", "parameter", "graph", "conj"],
)
def test_every_kind_of_tensor_comes_back(store, key, make):
    tensor = make()
    assert store.put_tensor(key, tensor) == 0
    found = store.get_tensor(key)
    assert is_same(found, tensor.detach().resolve_conj())
    assert type(found) is torch.Tensor
    assert not found.requires_grad


def test_jagged_tensors_come_back(store, key):
    parts = [torch.rand(length, 3) for length in (2, 0, 5)]
    assert store.put_tensor(key, torch.nested.nested_tensor(parts, layout=torch.jagged)) == 0
    found = store.get_tensor(key)
    assert found.layout is torch.jagged
    assert all(map(torch.equal, found.unbind(), parts))


def test_results_own_writable_memory(store, key):
    tensor = matrix()
    assert store.put_tensor(key, tensor) == 0
    first, second = store.get_tensor(key), store.get_tensor(key)
    first += 1
    assert is_same(second, tensor)
    assert is_same(store.get_tensor(key), tensor)


def test_put_keeps_and_upsert_replaces(store, key):
    old, new = matrix(), matrix(2, 2).to(torch.int64)
    assert store.put_tensor(key, old) == 0
    for put in (store.put_tensor, store.pub_tensor):
        assert put(key, new) == 0
        assert is_same(store.get_tensor(key), old)
    for upsert in (store.upsert_tensor, store.upsert_pub_tensor):
        assert upsert(key, new) == 0
        assert is_same(store.get_tensor(key), new)
        assert upsert(key, old) == 0
        assert is_same(store.get_tensor(key), old)


def test_configs_are_applied_and_checked(store, key):
    config = ReplicateConfig()
    config.group_ids = ["a", "b"]
    for put in (store.put_tensor, store.pub_tensor, store.upsert_pub_tensor):
        assert put(key, matrix(), config) == INVALID
        with pytest.raises(TypeError, match="ReplicateConfig"):
            put(key, matrix(), {"replica_num": 1})
    assert store.is_exist(key) == 0
    keys = [f"{key}/0", f"{key}/1"]
    assert store.batch_pub_tensor(keys, [matrix(), matrix()], config) == [0, 0]
    assert store.batch_pub_tensor(keys[:1], [matrix()], config) == [INVALID]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: None, "not NoneType"),
        (lambda: [1.0], "not list"),
        (lambda: torch.ones(2).numpy(), "torch.from_numpy"),
        (lambda: torch.ones([1] * 9), "9 dimensions"),
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.empty(2, device="meta"), "no elements"),
    ],
)
def test_refused_tensors_name_the_reason(store, key, make, reason):
    value = make()
    for put in (store.put_tensor, store.pub_tensor, store.upsert_tensor, store.upsert_pub_tensor):
        assert put(key, value) == INVALID
        assert reason in why()
    assert store.batch_put_tensor([f"{key}/0", f"{key}/1"], [value, matrix()]) == [INVALID, 0]
    assert reason in why()
    assert store.is_exist(key) == 0


def test_objects_that_are_no_tensors_are_none(store, key):
    assert store.get_tensor(key) is None
    assert store.put(key, b"x" * 400) == 0
    assert store.get_tensor(key) is None
    assert "not a tensor object" in why()
    assert store.put(f"{key}/short", b"x") == 0
    assert store.get_tensor(f"{key}/short") is None
    assert "shorter than 304 bytes" in why()
    assert store.put_tensor(f"{key}/whole", matrix()) == 0
    whole = store.get(f"{key}/whole")
    assert store.put(f"{key}/cut", whole[:-1]) == 0
    assert store.get_tensor(f"{key}/cut") is None
    assert "truncated" in why()
    lying = bytearray(whole)
    struct.pack_into("<q", lying, 40, 1 << 60)
    struct.pack_into("<q", lying, 104, 1 << 60)
    assert store.put(f"{key}/huge", bytes(lying)) == 0
    assert store.get_tensor(f"{key}/huge") is None


def test_damaged_objects_are_none_or_fit_their_object(store, key):
    rng, memory = random.Random(22), Memory(500)
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    starts = []
    for at, tensor in enumerate((matrix(), torch.tensor(1), jagged)):
        assert store.put_tensor(f"{key}/{at}", tensor) == 0
        starts.append(store.get(f"{key}/{at}"))
    outcomes = set()
    for _ in range(300):
        data = bytearray(rng.choice(starts))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(4, min(len(data), 360))
            data[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        assert store.upsert(key, bytes(data)) == 0
        for found in (store.get_tensor(key), store.get_tensor_into(key, memory.at, 500)):
            outcomes.add(found is None)
            # A jagged tensor has no shape of plain numbers; its values have.
            values = found if found is None or not found.is_nested else found.values()
            assert values is None or values.nbytes <= len(data) - METADATA
    assert outcomes == {True, False}


def test_batches_fail_item_by_item(store, key):
    keys = [f"{key}/{index}" for index in range(3)]
    tensors = [matrix(index + 1) for index in range(3)]
    for put, get in (
        (store.batch_put_tensor, store.batch_get_tensor),
        (store.batch_upsert_tensor, store.batch_get_tensor),
        (store.batch_upsert_pub_tensor, store.batch_get_tensor),
    ):
        assert put([*keys, "", "none"], [*tensors, matrix(), None]) == [0, 0, 0, INVALID, INVALID]
        found = get([keys[2], f"{key}/none", keys[0]])
        assert is_same(found[0], tensors[2])
        assert found[1] is None
        assert is_same(found[2], tensors[0])
    assert store.batch_put_tensor([], []) == []
    assert store.batch_get_tensor([]) == []
    assert store.batch_put_tensor(keys, tensors[:2]) == [INVALID] * 3
    for wrong in ("key", iter(keys)):
        with pytest.raises(TypeError, match="expected a list"):
            store.batch_get_tensor(wrong)


def test_get_into_shares_the_memory(store, key):
    tensor, memory = matrix(), Memory(500)
    assert store.put_tensor(key, tensor) == 0
    found = store.get_tensor_into(key, memory.at, memory.size)
    assert is_same(found, tensor)
    assert found.data_ptr() == memory.at + METADATA
    assert memory.data.raw == store.get(key) + b"\xee" * (500 - METADATA - tensor.nbytes)


def test_get_into_refuses_bad_memory(store, key):
    memory = Memory(500)
    assert store.put_tensor(key, matrix()) == 0
    size = store.get_size(key)
    assert store.get_tensor_into(key, memory.at, size - 1) is None
    assert "smaller than the object" in why()
    for address in (0, 8, 1 << 63):
        assert store.get_tensor_into(key, address, size) is None
    assert store.get_tensor_into(f"{key}/none", memory.at, size) is None
    assert memory.data.raw == b"\xee" * 500
    assert store.put(f"{key}/bytes", b"x" * 400) == 0
    assert store.get_tensor_into(f"{key}/bytes", memory.at, 500) is None
    with pytest.raises(TypeError):
        store.get_tensor_into(key, -1, size)


def test_batch_get_into_fails_item_by_item(store, key):
    first, second = Memory(500), Memory(500)
    assert store.put_tensor(key, matrix()) == 0
    keys, sizes = [key, f"{key}/none", key], [500] * 3
    found = store.batch_get_tensor_into(keys, [first.at, second.at, second.at], sizes)
    assert is_same(found[0], matrix())
    assert found[1] is None
    assert is_same(found[2], matrix())
    assert store.batch_get_tensor_into([key, key], [first.at, 0], [500] * 2)[1] is None
    assert store.batch_get_tensor_into([key], [first.at], [500, 500]) == [INVALID]
    assert store.batch_get_tensor_into([], [], []) == []


@pytest.mark.parametrize("shape", [(), (0,), (3, 5)], ids=str)
def test_put_from_stores_serialized_tensors(store, key, shape):
    tensor, memory = torch.rand(shape).to(torch.bfloat16), Memory(500)
    assert store.put_tensor(key, tensor) == 0
    size = memory.fill(store.get(key))
    assert store.put_tensor_from(f"{key}/0", memory.at, size) == 0
    assert is_same(store.get_tensor(f"{key}/0"), tensor)
    assert store.upsert_tensor_from(f"{key}/0", memory.at, size) == 0
    many = [f"{key}/1", f"{key}/2"]
    assert store.batch_put_tensor_from(many, [memory.at] * 2, [size] * 2) == [0, 0]
    assert store.batch_upsert_tensor_from(many, [memory.at] * 2, [size] * 2) == [0, 0]
    assert all(is_same(found, tensor) for found in store.batch_get_tensor(many))


def test_put_from_refuses_what_is_no_tensor(store, key):
    memory = Memory(500)
    assert store.put_tensor(key, matrix()) == 0
    size = memory.fill(store.get(key))
    bad = [(0, size), (memory.at, size - 1), (memory.at, size + 1), (memory.at, 500)]
    bad += [(memory.at, 0), (memory.at, 303), (memory.at + 1, size), (1 << 63, size)]
    for put in (store.put_tensor_from, store.upsert_tensor_from):
        for address, length in bad:
            assert put(f"{key}/bad", address, length) == INVALID
    assert store.is_exist(f"{key}/bad") == 0
    keys, at = [f"{key}/good", f"{key}/bad"], [memory.at] * 2
    for put in (store.batch_put_tensor_from, store.batch_upsert_tensor_from):
        assert put(keys, at, [size, size - 1]) == [0, INVALID]
        assert put(keys, at, [size]) == [INVALID] * 2
    assert is_same(store.get_tensor(f"{key}/good"), matrix())


def test_tensors_are_filled_in_place(store, key):
    tensor = matrix()
    assert store.put_tensor(key, tensor) == 0
    target = torch.zeros_like(tensor)
    assert store.get_tensor_into_cuda(key, target) == tensor.nbytes
    assert is_same(target, tensor)
    assert store.get_tensor_into_cuda(f"{key}/none", target) == MISSING
    wrong = [matrix(6, 4), matrix().to(torch.int32), matrix(3), matrix(5), matrix(6, 4).t(), None]
    for other in wrong:
        assert store.get_tensor_into_cuda(key, other) == INVALID, other
    targets = [torch.zeros(4, 6), torch.zeros(1)]
    assert store.batch_get_tensor_into_cuda([key, key], targets) == [96, INVALID]
    assert is_same(targets[0], tensor)
    assert store.batch_get_tensor_into_cuda([key], []) == [INVALID]


def test_empty_and_scalar_tensors_are_filled(store, key):
    for at, tensor in enumerate((torch.tensor(3.5), torch.empty(0, 2))):
        assert store.put_tensor(f"{key}/{at}", tensor) == 0
        target = torch.zeros_like(tensor)
        assert store.get_tensor_into_cuda(f"{key}/{at}", target) == tensor.nbytes
        assert is_same(target, tensor)


@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_puts_store_all_shards(store, key, dim):
    tensor = matrix()
    assert store.put_tensor_with_tp(key, tensor, 7, 2, dim) == 0
    assert store.is_exist(key) == 0
    expected = tensor.chunk(2, dim)
    for rank in (0, 1):
        assert is_same(store.get_tensor_with_tp(key, rank, 2, dim), expected[rank])
        assert is_same(store.batch_get_tensor_with_tp([key], rank, 2)[0], expected[rank])
        memory = Memory(500)
        found = store.get_tensor_with_tp_into(key, memory.at, 500, rank, 2, dim)
        assert is_same(found, expected[rank])
        found = store.batch_get_tensor_with_tp_into([key], [memory.at], [500], rank, 2)[0]
        assert found.data_ptr() == memory.at + METADATA
    assert store.get_tensor_with_tp(key, 2, 2, dim) is None
    assert f"{key}_tp_2" in why()
    # The metadata of a shard: kind, index, rank, size, split dimension, nothing, local length.
    axis = struct.unpack_from("<6iq", store.get(f"{key}_tp_1"), 176)
    assert axis == (1, 0, 1, 2, dim, 0, expected[1].shape[dim])


def test_tensor_parallelism_of_one_is_a_plain_tensor(store, key):
    for at, size in enumerate((1, 0, -1)):
        assert store.put_tensor_with_tp(f"{key}/{at}", matrix(), 0, size) == 0
        assert is_same(store.get_tensor(f"{key}/{at}"), matrix())
        assert is_same(store.get_tensor_with_tp(f"{key}/{at}", 5, size), matrix())


@pytest.mark.parametrize(
    ("size", "dim", "reason"),
    [(2, 2, "out of range"), (2, -1, "out of range"), (4, 1, "evenly"), (7, 0, "evenly")],
)
def test_impossible_splits_are_refused(store, key, size, dim, reason):
    memory = Memory(500)
    assert store.put_tensor(f"{key}/whole", matrix()) == 0
    length = memory.fill(store.get(f"{key}/whole"))
    for code in (
        store.put_tensor_with_tp(key, matrix(), 0, size, dim),
        store.pub_tensor_with_tp(key, matrix(), tp_size=size, split_dim=dim),
        store.put_tensor_with_tp_from(key, memory.at, length, 0, size, dim),
    ):
        assert code == INVALID
        assert reason in why()
    assert store.is_exist(f"{key}_tp_0") == 0


def test_batches_of_shards_fail_item_by_item(store, key):
    keys = [f"{key}/{index}" for index in range(4)]
    jagged = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    tensors = [matrix(), matrix(3), None, jagged]
    for put in (store.batch_put_tensor_with_tp, store.batch_pub_tensor_with_tp):
        assert put(keys, tensors, tp_size=2) == [0, INVALID, INVALID, INVALID]
        assert put(keys, tensors[:1], tp_size=2) == [INVALID] * 4
        assert put([], [], tp_size=2) == []
    found = store.batch_get_tensor_with_tp(keys, 1, 2)
    assert is_same(found[0], matrix()[2:])
    assert found[1:] == [None] * 3


def test_serialized_tensors_are_split(store, key):
    memory = Memory(500)
    assert store.put_tensor(key, matrix()) == 0
    size = memory.fill(store.get(key))
    assert store.put_tensor_with_tp_from(f"{key}/0", memory.at, size, 0, 3, 1) == 0
    assert is_same(store.get_tensor_with_tp(f"{key}/0", 2, 3), matrix()[:, 4:])
    assert store.put_tensor_with_tp_from(f"{key}/1", memory.at, size) == 0
    assert is_same(store.get_tensor(f"{key}/1"), matrix())
    keys = [f"{key}/2", f"{key}/3"]
    codes = store.batch_put_tensor_with_tp_from(keys, [memory.at] * 2, [size, 300], 0, 2)
    assert codes == [0, INVALID]
    assert store.batch_put_tensor_with_tp_from(keys, [0] * 2, [size] * 2, 0, 2) == [INVALID] * 2
    assert store.batch_put_tensor_with_tp_from(keys, [0], [size], 0, 2) == [INVALID] * 2
    shard = memory.fill(store.get(f"{key}/2_tp_0"))
    assert store.put_tensor_with_tp_from(f"{key}/4", memory.at, shard, 0, 2) == INVALID
    assert "holds a shard" in why()


def test_groups_of_shards_need_one_entry_each(store, key):
    config = ReplicateConfig()
    config.group_ids = ["g"]
    assert store.pub_tensor_with_tp(key, matrix(), config, tp_size=2) == INVALID
    config.group_ids = ["g", "g"]
    assert store.pub_tensor_with_tp(key, matrix(), config, tp_size=2) == 0


def test_serialized_bytes_are_the_stored_object(store, key):
    assert module._tensor_metadata_size() == METADATA
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for at, tensor in enumerate((matrix(), torch.tensor(1), torch.empty(0), jagged)):
        metadata, address, length, owner = module._serialize_tensor(tensor)
        data = metadata + ctypes.string_at(address, length)
        assert store.put_tensor(f"{key}/{at}", tensor) == 0
        assert store.get(f"{key}/{at}") == data
        del owner
    with pytest.raises(ValueError, match="unsupported tensor for Mooncake tensor serialization"):
        module._serialize_tensor(None)


def test_deserialized_tensors_own_their_memory():
    metadata, address, length, _owner = module._serialize_tensor(matrix())
    data = metadata + ctypes.string_at(address, length)
    found = module._deserialize_tensor(data)
    found += 1
    assert is_same(module._deserialize_tensor(data), matrix())
    for bad in (b"", data[:-1], data + b"x", b"x" * 400):
        with pytest.raises(ValueError, match="invalid serialized Mooncake tensor payload"):
            module._deserialize_tensor(bad)


def test_async_calls_for_tensors_exist(master):
    async def run() -> None:
        store = MooncakeDistributedStoreAsync()
        assert set_up(store, master.address) == 0
        assert await store.async_put_tensor("async", matrix()) == 0
        assert is_same(await store.async_get_tensor("async"), matrix())
        assert await store.async_batch_put_tensor_with_tp(["async"], [matrix()], tp_size=2) == [0]
        assert store.close() == 0

    asyncio.run(run())


def test_missing_torch_names_the_extra(store, key, monkeypatch):
    assert store.put_tensor(key, matrix()) == 0
    monkeypatch.setitem(sys.modules, "torch", None)
    memory = Memory(500)
    for call in (
        lambda: store.get_tensor(key),
        lambda: store.batch_get_tensor([key]),
        lambda: store.get_tensor_into(key, memory.at, 500),
        lambda: store.get_tensor_with_tp(key, 0, 2),
        lambda: store.put_tensor_with_tp_from(key, memory.at, 500, 0, 2),
    ):
        with pytest.raises(ImportError, match=r"mooncake-transfer-engine\[tensor\]"):
            call()
    assert store.put_tensor(key, b"no tensor") == INVALID
