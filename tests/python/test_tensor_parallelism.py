"""Upstream's calls for tensors with axes of parallelism: names of objects, codes, every read."""

from __future__ import annotations

import ctypes
import functools
import random
from types import SimpleNamespace

import pytest

from mooncake.errors import DeadlineError
from mooncake.store import (
    MooncakeDistributedStore,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    _serialize_tensor,
)
from mooncake.store.tensors.parallelism import _read_into as read_into
from mooncake.tensor.calls import Pause
from mooncake.tensor.format import Manifest, TensorMetadata
from mooncake.tensor.inventory import find

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

INVALID = -600


@pytest.fixture(scope="module")
def store():
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 256 << 20, 64 << 20, "tcp", "", "embedded") == 0
    yield store
    store.close()


@pytest.fixture
def key(request):
    return request.node.name


def axis(kind, rank=0, size=1, **others):
    made = ParallelAxis()
    made.kind, made.rank, made.size = kind, rank, size
    for name, value in others.items():
        setattr(made, name, value)
    return made


def tp(rank, size, dim=0):
    return axis("tp", rank, size, split_dim=dim)


def parallel(*axes):
    made = TensorParallelism()
    made.axes = list(axes)
    return made


def target(mode, *axes):
    made = ReadTarget()
    made.mode = mode
    made.parallelism = parallel(*axes) if axes else None
    return made


def writer(rank, size, dim=0):
    return SimpleNamespace(rank=rank, size=size, split_dim=dim)


def numbers(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def is_same(got, expected):
    return got is not None and torch.equal(got, expected)


def put_tp(store, key, tensor, size, dim):
    for rank, part in enumerate(tensor.chunk(size, dim)):
        made = parallel(tp(rank, size, dim))
        assert store.put_tensor_with_parallelism(key, part, made) == 0


def test_classes_hold_what_is_assigned():
    made = ParallelAxis()
    fields = (made.kind, made.rank, made.size, made.split_dim, made.expert_id, made.stage_id)
    assert fields == ("", 0, 1, None, None, None)
    parallelism = parallel(made)
    parallelism.axes.append(made)
    assert len(parallelism.axes) == 1
    parallelism.axes[0].rank = 3
    assert made.rank == 3
    wanted = ReadTarget()
    assert (wanted.mode, wanted.parallelism) == ("as_stored", None)
    wanted.mode = "FULL"
    assert wanted.mode == "full"
    with pytest.raises(RuntimeError, match="Unsupported ReadTarget mode"):
        wanted.mode = "half"
    with pytest.raises(TypeError):
        ParallelAxis(kind="tp")


def test_whole_tensor_is_one_object(store, key):
    tensor = numbers(4, 6)
    assert store.put_tensor_with_parallelism(key, tensor) == 0
    assert is_same(store.get_tensor_with_parallelism(key), tensor)
    assert is_same(store.get_tensor(key), tensor)
    assert is_same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    got = store.get_tensor_with_parallelism(key, target("shard", tp(1, 3, 1)))
    assert is_same(got, tensor[:, 2:4])


def test_shards_of_one_axis_have_upstreams_names(store, key):
    tensor = numbers(8, 4)
    put_tp(store, key, tensor, 2, 0)
    head = TensorMetadata.decode(store.get(f"{key}_tp_1"))
    assert (head.global_shape, head.local_shape) == ((8, 4), (4, 4))
    (own,) = head.axes
    assert (own.kind, own.rank, own.size, own.split_dim, own.extent) == ("tp", 1, 2, 0, 4)
    manifest = Manifest.decode(store.get(f"{key}__parallelism_manifest"))
    assert (manifest.global_shape, manifest.split_dim, manifest.shard_count) == ((8, 4), 0, 2)
    exact = store.get_tensor_with_parallelism(key, target("shard", tp(1, 2)))
    assert is_same(exact, tensor[4:])
    stored = store.get_tensor_with_parallelism(key, target("as_stored", tp(1, 2)))
    assert is_same(stored, tensor[4:])
    assert store.get_tensor_with_parallelism(key) is None


@pytest.mark.parametrize("seed", range(30))
def test_shards_are_resharded_to_any_size(store, key, seed):
    rng = random.Random(seed)
    size, dim = rng.choice([1, 2, 4]), rng.randrange(2)
    tensor = numbers(4 * rng.randint(1, 4), 4 * rng.randint(1, 3), rng.randint(1, 3))
    put_tp(store, key, tensor, size, dim)
    assert is_same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    parts, of_dim = rng.randint(1, 4), rng.randrange(2)
    for rank, expected in enumerate(tensor.chunk(parts, of_dim)):
        wanted = target("shard", tp(rank, parts, of_dim))
        assert is_same(store.get_tensor_with_parallelism(key, wanted), expected)


def test_shards_of_the_older_calls_are_resharded(store, key):
    tensor = numbers(8, 6)
    assert store.put_tensor_with_tp(key, tensor, tp_size=4) == 0
    assert is_same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    wanted = target("shard", tp(1, 2, 1))
    assert is_same(store.get_tensor_with_parallelism(key, wanted), tensor[:, 3:])


def test_writer_parts_are_read_as_any_shard(store, key):
    tensor = numbers(6, 8)
    for rank in range(2):
        code = store.put_tensor_with_parallelism(key, tensor, writer_partition=writer(rank, 2, 1))
        assert code == 0
    assert store.is_exist(f"{key}__writer_1of2_sd1") == 1
    assert store.is_exist(f"{key}__writer_manifest") == 1
    assert is_same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    same = target("shard", tp(1, 2, 1))
    assert is_same(store.get_tensor_with_parallelism(key, same), tensor[:, 4:])
    other = target("shard", tp(2, 3, 0))
    assert is_same(store.get_tensor_with_parallelism(key, other), tensor[4:])


def test_mixed_axes_store_the_named_shard(store, key):
    tensor = numbers(4, 6)
    for rank in range(2):
        made = parallel(axis("DP", 0, 2), tp(rank, 2, 1))
        assert store.put_tensor_with_parallelism(key, tensor, made) == 0
    name = f"{key}__dp_0of2__tp_1of2_sd1"
    assert store.is_exist(name) == 1
    assert TensorMetadata.decode(store.get(name)).local_shape == (4, 3)
    wanted = target("shard", tp(1, 2, 1), axis("dp", 0, 2))
    assert is_same(store.get_tensor_with_parallelism(key, wanted), tensor[:, 3:])
    whole = target("full", axis("dp", 0, 2), tp(0, 2, 1))
    assert is_same(store.get_tensor_with_parallelism(key, whole), tensor)
    assert is_same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    other = target("shard", axis("dp", 0, 2), tp(3, 4, 0))
    assert is_same(store.get_tensor_with_parallelism(key, other), tensor[3:])


@pytest.mark.parametrize(
    ("own", "name"),
    [
        (axis("dp", 1, 2), "dp_1of2"),
        (axis("ep", 1, 2, expert_id=5), "ep_1of2_eid5"),
        (axis("pp", 0, 2, stage_id=3), "pp_0of2_sid3"),
    ],
    ids=["dp", "ep", "pp"],
)
def test_other_axes_store_the_tensor_as_it_is(store, key, own, name):
    tensor = numbers(3, 2)
    assert store.put_tensor_with_parallelism(key, tensor, parallel(own)) == 0
    assert store.is_exist(f"{key}__{name}") == 1
    assert store.is_exist(f"{key}__parallelism_manifest") == 0
    for mode in ("shard", "full", "as_stored"):
        assert is_same(store.get_tensor_with_parallelism(key, target(mode, own)), tensor)


def test_expert_is_read_by_its_id(store, key):
    for expert in range(4):
        made = parallel(axis("ep", expert, 4, expert_id=expert))
        assert store.put_tensor_with_parallelism(key, numbers(4, 2) + expert, made) == 0
    wanted = target("shard", axis("ep", 0, 2, expert_id=1), tp(1, 2))
    assert is_same(store.get_tensor_with_parallelism(key, wanted), numbers(4, 2)[2:] + 1)
    wanted = target("shard", axis("ep", 0, 2, expert_id=7))
    assert store.get_tensor_with_parallelism(key, wanted) is None


@pytest.mark.parametrize(
    "axes",
    [
        [],
        [axis("")],
        [axis("xp")],
        [axis("tp", 0, 2)],
        [tp(2, 2)],
        [tp(-1, 2)],
        [tp(0, 0)],
        [tp(0, 2, 5)],
        [tp(0, 2), tp(0, 2)],
        [axis("dp", 0, 2, split_dim=0)],
        [axis("ep", 0, 2)],
        [axis("ep", 0, 2, expert_id=1, split_dim=0)],
        [axis("pp", 0, 2)],
        [axis("pp", 0, 2, stage_id=1, split_dim=0)],
        [axis("dp", 0, 2), tp(0, 3, 0)],
        [axis("tp", "0", 2, split_dim=0)],
    ],
)
def test_invalid_axes_are_refused(store, key, axes):
    made = parallel(*axes)
    assert store.put_tensor_with_parallelism(key, numbers(4, 4), made) == INVALID
    wanted = target("shard")
    wanted.parallelism = made
    assert store.get_tensor_with_parallelism(key, wanted) is None
    assert store.is_exist(key) == 0


def test_expert_of_a_tp_axis_is_tolerated(store, key):
    made = parallel(axis("tp", 0, 1, split_dim=0, expert_id=3))
    assert store.put_tensor_with_parallelism(key, numbers(2), made) == 0


@pytest.mark.parametrize(
    "partition", [(0, 2, 0), {"rank": 0, "size": 2, "split_dim": 0}, writer(2, 2), writer(0, 3)]
)
def test_invalid_writer_partitions_are_refused(store, key, partition):
    code = store.put_tensor_with_parallelism(key, numbers(4), writer_partition=partition)
    assert code == INVALID


def test_axes_and_writer_exclude_each_other(store, key):
    made = parallel(tp(0, 2))
    assert (
        store.put_tensor_with_parallelism(key, numbers(4), made, writer_partition=writer(0, 2))
        == INVALID
    )


@pytest.mark.parametrize("value", [None, b"x", [1.0], np.zeros(2)])
def test_values_that_are_no_tensors_are_refused(store, key, value):
    assert store.put_tensor_with_parallelism(key, value) == INVALID
    assert store.put_tensor_with_parallelism(key, value, parallel(tp(0, 2))) == INVALID


def test_batches_report_each_item(store, key):
    keys = [f"{key}.{at}" for at in range(3)]
    tensors = [numbers(4), numbers(4) + 1, None]
    made = [None, parallel(tp(0, 1)), None]
    assert store.batch_put_tensor_with_parallelism(keys, tensors, made) == [0, 0, INVALID]
    got = store.batch_get_tensor_with_parallelism(keys, [None, target("full"), None])
    assert is_same(got[0], tensors[0])
    assert is_same(got[1], tensors[1])
    assert got[2] is None
    assert store.batch_put_tensor_with_parallelism(keys, tensors, made[:2]) == [INVALID] * 3
    assert store.batch_put_tensor_with_parallelism(keys, tensors[:2]) == [INVALID] * 3
    assert store.batch_put_tensor_with_parallelism(keys, tensors, "abc") == [INVALID] * 3
    assert store.batch_get_tensor_with_parallelism(keys, [None]) == [None] * 3
    assert store.batch_get_tensor_with_parallelism(keys, target("full")) == [None]
    assert store.batch_put_tensor_with_parallelism([], []) == []


def test_groups_must_fit_the_batch(store, key):
    config = ReplicateConfig()
    config.group_ids = ["g"]
    keys, tensors = [f"{key}.a", f"{key}.b"], [numbers(4)] * 2
    assert store.batch_put_tensor_with_parallelism(keys, tensors, config=config) == [INVALID] * 2
    config.group_ids = ["g", "h"]
    made = [parallel(tp(0, 1))] * 2
    assert store.batch_put_tensor_with_parallelism(keys, tensors, made, config) == [0, 0]


def test_upsert_replaces_and_put_keeps(store, key):
    made = parallel(tp(0, 1))
    assert store.put_tensor_with_parallelism(key, numbers(4), made) == 0
    assert store.put_tensor_with_parallelism(key, numbers(4) + 1, made) == 0
    wanted = target("shard", tp(0, 1))
    assert is_same(store.get_tensor_with_parallelism(key, wanted), numbers(4))
    assert store.upsert_tensor_with_parallelism(key, numbers(6) + 1, made) == 0
    assert is_same(store.get_tensor_with_parallelism(key, wanted), numbers(6) + 1)
    codes = store.batch_upsert_tensor_with_parallelism([key], [numbers(2)], [made])
    assert codes == [0]
    assert is_same(store.get_tensor_with_parallelism(key, target("full")), numbers(2))


class Memory:
    """Registered memory that holds a serialized tensor, or room for one."""

    def __init__(self, store, size):
        self.store, self.size = store, size
        self.bytes = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.bytes)

    def __enter__(self):
        assert self.store.register_buffer(self.address, self.size) == 0
        return self

    def __exit__(self, *_):
        assert self.store.unregister_buffer(self.address) == 0

    def write(self, tensor):
        head, address, length, _owner = _serialize_tensor(tensor)
        ctypes.memmove(self.address, head, len(head))
        ctypes.memmove(self.address + len(head), address, length)
        return len(head) + length


def test_serialized_tensor_is_split_for_all_ranks(store, key):
    tensor = numbers(4, 6)
    with Memory(store, 4096) as memory:
        size = memory.write(tensor)
        made = parallel(tp(0, 2, 1))
        assert store.put_tensor_with_parallelism_from(key, memory.address, size, made) == 0
        assert store.is_exist(f"{key}__parallelism_manifest") == 0
        assert is_same(store.get_tensor_with_parallelism(key, target("full")), tensor)
        mixed = parallel(axis("dp", 0, 1), tp(1, 2, 1))
        other = f"{key}.mixed"
        assert store.upsert_tensor_with_parallelism_from(other, memory.address, size, mixed) == 0
        assert store.is_exist(f"{other}__dp_0of1__tp_1of2_sd1") == 1
        assert store.is_exist(f"{other}__dp_0of1__tp_0of2_sd1") == 0
        codes = store.batch_put_tensor_with_parallelism_from(
            [f"{key}.a", f"{key}.b", f"{key}.c"],
            [memory.address] * 3,
            [size, size, size - 1],
            [None, None, None],
            writer_partitions=[writer(0, 2), None, None],
        )
        assert codes == [0, 0, INVALID]
        assert is_same(store.get_tensor(f"{key}.b"), tensor)
        uneven = parallel(tp(0, 4, 1))
        assert store.put_tensor_with_parallelism_from(key, memory.address, size, uneven) == INVALID
    assert store.put_tensor_with_parallelism_from(key, 0, 400) == INVALID


def test_tensors_are_read_into_registered_memory(store, key):
    tensor = numbers(8, 4)
    put_tp(store, key, tensor, 4, 0)
    with Memory(store, 4096) as memory:
        place = (memory.address, memory.size)
        got = store.get_tensor_with_parallelism_into(key, *place, target("full"))
        assert is_same(got, tensor)
        assert got.data_ptr() == memory.address + 304
        assert TensorMetadata.decode(memory.bytes, total=None).axes == ()
        wanted = target("shard", tp(1, 2, 1))
        assert is_same(store.get_tensor_with_parallelism_into(key, *place, wanted), tensor[:, 2:])
        (own,) = TensorMetadata.decode(memory.bytes, total=None).axes
        assert (own.rank, own.size, own.split_dim, own.extent) == (1, 2, 1, 2)
        store.put_tensor(key, tensor)
        assert is_same(store.get_tensor_with_parallelism_into(key, *place), tensor)
        exact = 304 + tensor.nbytes
        assert is_same(store.get_tensor_with_parallelism_into(key, place[0], exact), tensor)
        assert store.get_tensor_with_parallelism_into(key, place[0], exact - 1) is None
        beyond = memory.address + memory.size - 400
        assert store.get_tensor_with_parallelism_into(key, beyond, exact) is None
        keys, many = [key, f"{key}.absent"], ([memory.address] * 2, [2048] * 2)
        got = store.batch_get_tensor_with_parallelism_into(keys, *many, [target("full"), None])
        assert is_same(got[0], tensor)
        assert got[1] is None
        assert store.batch_get_tensor_with_parallelism_into(keys, *many, [None]) == [None, None]
    assert store.get_tensor_with_parallelism_into(key, *place) is None
    assert store.get_tensor_with_parallelism_into(key, 0, 4096) is None


def test_objects_with_the_same_attributes_are_accepted(store, key):
    own = SimpleNamespace(kind="tp", rank=0, size=2, split_dim=0)
    made = SimpleNamespace(axes=[own])
    assert store.put_tensor_with_parallelism(key, numbers(2), made) == 0
    wanted = SimpleNamespace(mode="SHARD", parallelism=made)
    assert is_same(store.get_tensor_with_parallelism(key, wanted), numbers(2))
    assert store.get_tensor_with_parallelism(key, "full") is None
    assert store.get_tensor_with_parallelism(key, SimpleNamespace(mode="half")) is None


def test_missing_shard_makes_the_whole_unreadable(store, key):
    assert store.put_tensor_with_parallelism(key, numbers(4), parallel(tp(1, 2))) == 0
    assert store.get_tensor_with_parallelism(key, target("full")) is None
    wanted = target("shard", tp(1, 2))
    assert is_same(store.get_tensor_with_parallelism(key, wanted), numbers(4))


def test_read_into_memory_without_time_left_says_why(store, key):
    put_tp(store, key, numbers(8, 4), 4, 0)
    store.remove(f"{key}_tp_2", True)
    asked = read_into([(functools.partial(find, key.encode(), None), None)], [(0, 0)])
    call, results = next(asked), None
    while results is None:
        outcome = (30.0, False) if isinstance(call, Pause) else call.make(store._native)
        try:
            call = asked.send(outcome)
        except StopIteration as end:
            results = end.value
    assert isinstance(results[0], DeadlineError)
