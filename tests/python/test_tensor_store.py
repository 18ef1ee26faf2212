"""Tensors and arrays in `Store` and `AsyncStore`: every layout is read as every other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading

import pytest

import mooncake
from mooncake import AsyncStore, Store, StoreConfig
from mooncake._command import main as command
from mooncake.tensor import Axis, Info, Layout, Shard
from mooncake.tensor.format import MANIFEST_BYTES, TensorMetadata

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def store():
    with Store(config=StoreConfig(segment_bytes="256MB")) as store:
        yield store


@pytest.fixture
def key(request):
    return request.node.name


def part(tensor, shard):
    """Return the part of a tensor that a shard holds, as torch slices it."""
    box = shard.box(tensor.shape)
    return tensor[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]


def numbers(*shape):
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def random_shape(rng):
    return tuple(rng.randint(1, 12) for _ in range(rng.randint(1, 4)))


def random_layout(rng, shape):
    rule = rng.choice(["chunk", "tensor_split"])
    return Layout(rng.randint(1, 6), rng.randrange(len(shape)), rule)


def put_in_any_layout(store, key, seed):
    """Put a tensor; return the generator of random choices, the tensor and its layout."""
    rng = random.Random(seed)
    tensor = numbers(*random_shape(rng))
    stored = rng.choice([None, random_layout(rng, tensor.shape)])
    assert store.put_tensor(key, tensor, layout=stored)
    return rng, tensor, stored


@pytest.mark.parametrize("seed", range(60))
def test_any_layout_is_read_as_any_other(store, key, seed):
    rng, tensor, stored = put_in_any_layout(store, key, seed)
    assert torch.equal(store.get_tensor(key), tensor)
    for _ in range(4):
        shard = rng.choice(list(random_layout(rng, tensor.shape).shards()))
        got = store.get_tensor(key, target=shard)
        assert torch.equal(got, part(tensor, shard)), (stored, shard)


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_any_layout_are_those_of_the_tensor(store, key, seed):
    rng, tensor, stored = put_in_any_layout(store, key, seed)
    for _ in range(6):
        ends = [rng.choice([None, rng.randint(-14, 14)]) for _ in range(2)]
        rows, shard = slice(*ends), rng.choice(list(random_layout(rng, tensor.shape).shards()))
        assert torch.equal(store.get_tensor(key, rows=rows), tensor[rows]), (stored, rows)
        assert (store.get_array(key, rows=rows) == tensor[rows].numpy()).all()
        got = store.get_tensor(key, target=shard, rows=rows)
        assert torch.equal(got, part(tensor, shard)[rows]), (stored, shard, rows)


def test_rows_that_cannot_be_read_are_refused(store, key):
    store.put_array(key, np.zeros((4, 2)))
    into = np.ones((2, 2))
    assert store.get_array(key, rows=slice(1, 3), out=into) is into
    assert not into.any()
    with pytest.raises(mooncake.InvalidArgumentError, match=r"stored=float64\(1, 2\)"):
        store.get_array(key, rows=slice(3, 9), out=into)
    with pytest.raises(mooncake.InvalidArgumentError, match="without a step"):
        store.get_array(key, rows=slice(None, None, 2))
    store.put_array(f"{key}.scalar", np.zeros(()))
    with pytest.raises(mooncake.InvalidArgumentError, match="has no rows"):
        store.get_array(f"{key}.scalar", rows=slice(1))
    store.put_array(f"{key}.records", np.zeros(3, dtype="i4,f8"))
    with pytest.raises(mooncake.InvalidArgumentError, match="read whole"):
        store.get_array(f"{key}.records", rows=slice(1))


def test_rows_transfer_their_bytes_only(store, key):
    """The objects of other rows are not needed."""
    tensor = numbers(8, 4)
    store.put_tensor(key, tensor, layout=Layout(4))
    store.delete(f"{key}_tp_0", force=True)
    assert torch.equal(store.get_tensor(key, target=Shard.tp(1, 2), rows=slice(1)), tensor[4:5])


def test_ranks_put_their_shards(store, key):
    tensor = numbers(8, 6)
    for rank in range(4):
        shard = Shard.tp(rank, 4, dim=0)
        assert store.put_tensor(key, part(tensor, shard), layout=shard)
    assert torch.equal(store.get_tensor(key), tensor)
    half = Shard.tp(1, 2, dim=1)
    assert torch.equal(store.get_tensor(key, target=half), part(tensor, half))


def test_uneven_shards_need_the_shape_of_the_tensor(store, key):
    tensor = numbers(10, 3)
    for rank in range(4):
        shard = Shard.tp(rank, 4, dim=0)
        store.put_tensor(key, part(tensor, shard), layout=shard, shape=(10, 3))
    assert torch.equal(store.get_tensor(key), tensor)
    with pytest.raises(ValueError, match=r"expected=\(3, 3\) given=\(2, 3\)"):
        store.put_tensor("other", numbers(2, 3), layout=Shard.tp(0, 4), shape=(10, 3))


def test_missing_shards_are_named(store, key):
    tensor = numbers(8, 4)
    for rank in (0, 3):
        shard = Shard.tp(rank, 4)
        store.put_tensor(key, part(tensor, shard), layout=shard)
    with pytest.raises(mooncake.NotFoundError, match=f"{key}_tp_1, {key}_tp_2"):
        store.get_tensor(key)
    first = Shard.tp(0, 8)
    assert torch.equal(store.get_tensor(key, target=first), part(tensor, first))
    with pytest.raises(mooncake.NotFoundError, match=f"missing: {key}_tp_1 key="):
        store.get_tensor(key, target=Shard.tp(2, 8))
    # Putting the tensor again stores what is missing and keeps the rest.
    assert store.put_tensor(key, tensor, layout=Layout(4))
    assert torch.equal(store.get_tensor(key), tensor)
    assert not store.put_tensor(key, tensor, layout=Layout(4))


def test_shard_of_an_uncertain_place_is_not_guessed(store, key):
    """By one rule rank 3 of 5 has the index 6 of 7, by the other one the index 5."""
    tensor = numbers(7)
    for split in ("chunk", "tensor_split"):
        own = Shard.tp(3, 5, split=split)
        name = f"{key}.{split}"
        store.put_tensor(name, part(tensor, own), layout=own, shape=(7,))
        with pytest.raises(mooncake.NotFoundError, match=f"missing: {name}_tp_0, {name}_tp_1"):
            store.get_tensor(name, target=Shard.tp(6, 7))
        store.put_tensor(name, tensor, layout=Layout(5, split=split))
        assert store.get_tensor(name, target=Shard.tp(6, 7)).tolist() == [6]
        assert store.get_tensor(name, target=Shard.tp(5, 7)).tolist() == [5]


def test_first_shard_missing_is_named(store, key):
    tensor = numbers(8, 4)
    shard = Shard.tp(1, 2)
    store.put_tensor(key, part(tensor, shard), layout=shard)
    assert torch.equal(store.get_tensor(key, target=shard), part(tensor, shard))
    with pytest.raises(mooncake.NotFoundError, match=f"missing: {key}_tp_0 key="):
        store.get_tensor(key)


def test_experts_are_selected_by_id(store, key):
    experts = [numbers(4, 6) + 100 * expert for expert in range(4)]
    for expert, tensor in enumerate(experts):
        shard = Shard((Axis.ep(expert // 2, 2, expert=expert),))
        store.put_tensor(key, tensor, layout=shard)
    for expert, tensor in enumerate(experts):
        of_other_size = Shard((Axis.ep(expert, 4, expert=expert),))
        assert torch.equal(store.get_tensor(key, target=of_other_size), tensor)
        split = Shard((Axis.ep(0, 1, expert=expert), Axis.tp(1, 3, dim=1)))
        assert torch.equal(store.get_tensor(key, target=split), part(tensor, split))
    with pytest.raises(ValueError, match=r"must name one of the ep axes .* ids=\[0, 1, 2, 3\]"):
        store.get_tensor(key)
    with pytest.raises(mooncake.NotFoundError, match="expert=9"):
        store.get_tensor(key, target=Shard((Axis.ep(0, 1, expert=9),)))


def test_stages_are_selected_by_id(store, key):
    stages = [numbers(4) + 10 * stage for stage in range(2)]
    for stage, tensor in enumerate(stages):
        store.put_tensor(key, tensor, layout=Shard((Axis.pp(stage, 2, stage=stage),)))
    wanted = Shard((Axis.pp(0, 1, stage=1),))
    assert torch.equal(store.get_tensor(key, target=wanted), stages[1])


def test_replicas_are_read_by_any_number_of_ranks(store, key):
    tensor = numbers(6, 2)
    for rank in range(2):
        store.put_tensor(key, tensor, layout=Shard((Axis.dp(rank, 2),)))
    assert torch.equal(store.get_tensor(key), tensor)
    assert torch.equal(store.get_tensor(key, target=Shard((Axis.dp(3, 4),))), tensor)
    split = Shard((Axis.dp(0, 2), Axis.tp(1, 2)))
    assert torch.equal(store.get_tensor(key, target=split), part(tensor, split))


def test_missing_replica_is_not_replaced_by_another(store, key):
    store.put_tensor(key, numbers(4), layout=Shard((Axis.dp(0, 2),)))
    with pytest.raises(mooncake.NotFoundError, match=r"target=dp=1/2 stored=__dp_0of2 key="):
        store.get_tensor(key, target=Shard((Axis.dp(1, 2),)))


@pytest.mark.parametrize("seed", range(20))
def test_mixed_axes_are_resharded(store, key, seed):
    rng = random.Random(seed)
    tensor = numbers(*random_shape(rng))
    layout = random_layout(rng, tensor.shape)
    others = (Axis.dp(0, 2), Axis.pp(1, 2, stage=rng.randint(0, 5)))[: rng.randint(1, 2)]
    stored = Layout(layout.size, layout.dim, layout.split, others)
    store.put_tensor(key, tensor, layout=stored)
    assert torch.equal(store.get_tensor(key), tensor)
    wanted = random_layout(rng, tensor.shape)
    target = Layout(wanted.size, wanted.dim, wanted.split, others).shard(wanted.size - 1)
    assert torch.equal(store.get_tensor(key, target=target), part(tensor, target))


def test_batch_reads_tensors_of_different_layouts(store, key):
    tensors = {f"{key}.{at}": numbers(4 + at, 8) for at in range(5)}
    for at, (name, tensor) in enumerate(tensors.items()):
        store.put_tensor(name, tensor, layout=Layout(at, 1) if at else None)
    for got, tensor in zip(store.get_tensors(tensors), tensors.values(), strict=True):
        assert torch.equal(got, tensor)
    target = Shard.tp(0, 2)
    for got, tensor in zip(
        store.get_tensors(tensors, target=target), tensors.values(), strict=True
    ):
        assert torch.equal(got, part(tensor, target))
    with pytest.raises(mooncake.NotFoundError) as error:
        store.get_tensors([*tensors, "absent"])
    assert "1 of 6 items failed" in error.value.__notes__
    with pytest.raises(ValueError, match="differ in length keys=5 target=1"):
        store.get_tensors(tensors, target=[target])


@pytest.mark.parametrize("dim", [1, 2])
def test_tiny_pieces_are_read_as_any_others(store, key, dim):
    """Pieces of few bytes are staged: the shards are read whole, and copied from there."""
    tensor = numbers(2048, 6, 5)
    store.put_tensor(key, tensor, layout=Layout(3, dim))
    assert torch.equal(store.get_tensor(key), tensor)
    for rank in range(2):
        target = Shard.tp(rank, 2, dim)
        assert torch.equal(store.get_tensor(key, target=target), part(tensor, target))
    other = store.get_tensors([key, key], target=[None, Shard.tp(0, 4)])
    assert torch.equal(other[0], tensor)
    assert torch.equal(other[1], tensor[:512])


def test_out_is_filled_in_place(store, key):
    tensor = numbers(4, 6)
    store.put_tensor(key, tensor, layout=Layout(2, 1))
    out = torch.zeros(4, 6)
    assert store.get_tensor(key, out=out) is out
    assert torch.equal(out, tensor)
    array = np.zeros((4, 3), dtype=np.float32)
    store.get_array(key, target=Shard.tp(1, 2, dim=1), out=array)
    assert (array == tensor.numpy()[:, 3:]).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(6, 4), r"does not fit stored=float32\(4, 6\) destination=float32\(6, 4\)"),
        (torch.zeros(4, 6, dtype=torch.float64), "destination=float64"),
        (torch.zeros(6, 4).T, "not contiguous"),
    ],
)
def test_out_that_does_not_fit_is_refused(store, key, out, message):
    store.put_tensor(key, numbers(4, 6))
    with pytest.raises(mooncake.InvalidArgumentError, match=message):
        store.get_tensor(key, out=out)


def test_read_only_array_is_not_filled(store, key):
    store.put_array(key, np.zeros(4))
    out = np.zeros(4)
    out.setflags(write=False)
    with pytest.raises(mooncake.InvalidArgumentError, match="read-only"):
        store.get_array(key, out=out)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 1, 1, 2, 1, 1, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex64])
def test_shapes_and_dtypes_survive(store, key, shape, dtype):
    tensor = torch.ones(shape).to(dtype)
    store.put_tensor(key, tensor)
    got = store.get_tensor(key)
    assert (got.shape, got.dtype) == (tensor.shape, dtype)
    assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_and_parameters_are_stored_by_value(store, key):
    store.put_tensor(key, numbers(4, 6).T)
    assert torch.equal(store.get_tensor(key), numbers(4, 6).T)
    parameter = torch.nn.Parameter(numbers(3))
    store.put_tensor(key, parameter, overwrite=True)
    assert torch.equal(store.get_tensor(key), parameter.detach())


def test_jagged_tensor_is_stored_whole(store, key):
    jagged = torch.nested.nested_tensor([numbers(2), numbers(5)], layout=torch.jagged)
    store.put_tensor(key, jagged)
    got = store.get_tensor(key)
    assert [each.tolist() for each in got.unbind()] == [numbers(2).tolist(), numbers(5).tolist()]
    with pytest.raises(ValueError, match="jagged tensor"):
        store.get_tensor(key, target=Shard.tp(0, 2))
    with pytest.raises(ValueError, match="put it whole"):
        store.put_tensor(key, jagged, layout=Layout(2))


@pytest.mark.parametrize(
    "array",
    [
        np.array(
            [(1, 2.5, b"x"), (2, 0.5, b"yz")], dtype=[("a", "<i4"), ("b", ">f8"), ("c", "S3")]
        ),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        np.array(["ab", "c"]),
        np.zeros((2, 0), dtype=[("a", "i1")]),
        np.array((1, 2), dtype=[("a", "i4", (2,)), ("b", "u1")]),
    ],
    ids=["structure", "date", "text", "empty", "scalar"],
)
def test_arrays_of_other_dtypes_are_stored(store, key, array):
    store.put_array(key, array)
    got = store.get_array(key)
    assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    out = np.zeros_like(array)
    assert store.get_array(key, out=out) is out
    assert out.tobytes() == array.tobytes()
    with pytest.raises(ValueError, match="use get_array"):
        store.get_tensor(key)
    with pytest.raises(ValueError, match="put it whole"):
        store.put_array(key, array, layout=Layout(2))


def test_description_of_a_dtype_is_not_executed(store, key):
    array = np.zeros(2, dtype=[("a", "i4")])
    store.put_array(key, array)
    stored = store.get(key)
    descr = repr([("a", "<i4")]).encode()
    assert descr in stored
    for text in (b"__import__('os')", b"'|O'", b"'<i8'", b"\xff"):
        damaged = stored.replace(descr, text.ljust(len(descr)))
        store.put(key, damaged, overwrite=True)
        with pytest.raises(ValueError, match="the dtype of the array is damaged"):
            store.get_array(key)


def test_python_objects_are_refused(store, key):
    with pytest.raises(TypeError, match="Python objects"):
        store.put_array(key, np.array([{}, None]))
    with pytest.raises(TypeError, match="tensor must be of torch or numpy, not list"):
        store.put_tensor(key, [1, 2])
    assert not store.exists(key)


def test_put_of_a_tensor_as_bytes_names_put_tensor(store, key):
    with pytest.raises(TypeError, match="use put_tensor"):
        store.put(key, torch.zeros(2))


def test_bytes_are_not_taken_for_a_tensor(store, key):
    store.put(key, b"x")
    with pytest.raises(mooncake.InvalidArgumentError, match="not a tensor object"):
        store.get_tensor(key)
    store.put(key, b"y" * 400, overwrite=True)
    with pytest.raises(mooncake.InvalidArgumentError, match="not a tensor object: magic="):
        store.get_tensor(key)


def test_tensors_are_made_on_the_host_whatever_the_default(store, key):
    for name, count in (("small", 4), ("large", 2 << 20)):
        store.put_tensor(f"{key}/{name}", torch.ones(count))
        with torch.device("meta"):
            assert store.get_tensor(f"{key}/{name}").device.type == "cpu"


def test_missing_tensor_is_not_found(store, key):
    with pytest.raises(mooncake.NotFoundError) as error:
        store.get_tensor(key)
    assert error.value.key == key
    with pytest.raises(KeyError):
        store.delete_tensor(key)


def test_target_without_its_dimension_is_refused(store, key):
    store.put_tensor(key, numbers(4))
    with pytest.raises(mooncake.InvalidArgumentError, match="dim=1 dimensions=1"):
        store.get_tensor(key, target=Shard.tp(0, 2, dim=1))
    with pytest.raises(mooncake.InvalidArgumentError, match="dim=1 dimensions=1"):
        store.put_tensor(key, numbers(4), layout=Layout(2, 1))


def test_shards_of_different_tensors_are_refused(store, key):
    store.put_tensor(key, numbers(2, 4), layout=Shard.tp(0, 2))
    store.put_tensor(key, numbers(2, 6), layout=Shard.tp(1, 2))
    with pytest.raises(mooncake.InvalidArgumentError, match="shards are of different tensors"):
        store.get_tensor(key, timeout_s=1)


def test_overwrite_replaces_other_layouts(store, key):
    first, second = numbers(8, 4), numbers(8, 4) + 1000
    forms = [Layout(4, 0), None, Layout(2, 1), Layout(2, 0, axes=(Axis.dp(0, 2),)), Layout(3, 1)]
    store.put_tensor(key, first)
    for layout in forms:
        store.put_tensor(key, second, layout=layout, overwrite=True)
        assert torch.equal(store.get_tensor(key), second)
        target = Shard.tp(1, 2)
        assert torch.equal(store.get_tensor(key, target=target), part(second, target))
        first, second = second, second + 1000
    names = list(store.keys(key, internal=True))
    assert names == [f"{key}__parallelism_manifest", *(f"{key}_tp_{rank}" for rank in range(3))]


def test_delete_removes_every_object_of_a_tensor(store, key):
    replicas = (Layout(2, axes=(Axis.dp(0, 2),)), Shard((Axis.dp(0, 2),)))
    for number, layout in enumerate((*replicas, Layout(3), None)):
        name = f"{key}.{number}"
        store.put_tensor(name, numbers(6), layout=layout)
        for stored in list(store.keys(name, internal=True)):
            store.put(stored.replace(name, key, 1), store.get(stored), overwrite=True)
    store.put(f"{key}_tp_x", b"not a shard")
    store.put(f"{key}__notes", b"not a shard")
    store.delete_tensor(key, force=True)
    assert list(store.keys(f"{key}_", internal=True)) == [f"{key}__notes", f"{key}_tp_x"]


def test_metadata_of_shards_is_that_of_the_format(store, key):
    store.put_tensor(key, numbers(5, 4), layout=Layout(2))
    stored = store.get(f"{key}_tp_1")
    metadata = TensorMetadata.decode(stored, total=len(stored))
    (axis,) = metadata.axes
    assert (axis.kind, axis.rank, axis.size, axis.split_dim, axis.extent) == ("tp", 1, 2, 0, 2)
    assert (metadata.global_shape, metadata.local_shape) == ((5, 4), (2, 4))


def test_groups_are_one_for_each_tensor(store, key):
    options = mooncake.PutOptions(groups=["a", "b"])
    items = {f"{key}.a": numbers(4), f"{key}.b": numbers(4)}
    assert store.put_tensors(items, layout=Layout(2), options=options) == [True, True]
    with pytest.raises(mooncake.InvalidArgumentError, match="groups=2 tensors=3"):
        store.put_tensors({**items, f"{key}.c": numbers(4)}, options=options)


@pytest.mark.parametrize(
    ("put", "get"),
    [(Store.put_tensor, Store.get_tensor), (Store.put_array, Store.get_array)],
    ids=["tensor", "array"],
)
def test_tensors_have_expiry_tags_and_versions(store, key, put, get):
    first, second = (np.full(4, value, dtype=np.float32) for value in (1, 2))
    if put is Store.put_tensor:
        first, second = torch.from_numpy(first), torch.from_numpy(second)
    assert put(store, key, first, ttl_s=600, tags={"model": "llama"})
    info = store.info(key)
    assert 590 < info.expires_in_s <= 600
    assert info.tags == {"model": "llama"}
    assert put(store, key, second, if_version=info.version)
    assert not put(store, key, first, if_version=info.version)
    assert float(get(store, key)[0]) == 2
    assert store.info(key).expires_in_s is None, "a put replaces expiry and tags"
    assert put(store, f"{key}.split", first, layout=Layout(2), ttl_s=600, tags={"a": "b"})
    assert [store.info(f"{key}.split_tp_{at}").tags for at in range(2)] == [{"a": "b"}] * 2
    with pytest.raises(mooncake.InvalidArgumentError, match="stored whole"):
        put(store, key, first, layout=Layout(2), if_version=info.version)


def test_versions_are_one_for_each_tensor(store, key):
    items = {f"{key}.a": numbers(4), f"{key}.b": numbers(4)}
    assert store.put_tensors(items, ttl_s=600, tags={"a": "b"}) == [True, True]
    versions = [info.version for info in store.info_many(items)]
    store.put_tensor(f"{key}.a", numbers(4), overwrite=True)
    options = mooncake.PutOptions(if_versions=versions)
    assert store.put_tensors(items, options=options) == [False, True]


def test_put_that_is_refused_removes_no_other_layout(store, key):
    store.put_tensor(key, numbers(4), layout=Layout(2))
    store.put(key, b"bytes under the same key")
    assert not store.put_tensor(key, numbers(4), overwrite=True, if_version=1 << 60)
    assert store.exists_many([f"{key}_tp_0", f"{key}_tp_1"]) == [True, True]


def test_tensor_is_deleted_soon_after_its_put(store, key):
    store.put_tensor(key, numbers(4), layout=Layout(2))
    store.info(key)
    store.delete_tensor(key)
    assert not store.exists(f"{key}_tp_0")


def test_info_describes_bytes_and_tensors(store, key):
    store.put(key, b"twelve bytes")
    info = store.info(key)
    assert info == Info(key, 12, None, version=info.version)
    assert info.version is not None
    store.put_tensor(f"{key}.whole", numbers(4, 3))
    whole = store.info(f"{key}.whole")
    assert (whole.size, whole.tensor.dtype, whole.tensor.shape) == (352, "float32", (4, 3))
    assert whole.tensor.layout == "whole"
    store.put_tensor(f"{key}.split", numbers(4, 3), layout=Layout(2))
    split = store.info(f"{key}.split")
    assert (split.size, split.tensor.shape) == (2 * 304 + 48 + MANIFEST_BYTES, (4, 3))
    assert split.tensor.layout == "2 shards along dimension 0"
    assert [part.key for part in split.tensor.parts] == [f"{key}.split_tp_{at}" for at in range(2)]
    shard = store.info(f"{key}.split_tp_1").tensor
    assert (shard.shape, shard.parts[0].shape, shard.layout) == (
        (4, 3),
        (2, 3),
        "shard tp=1/2 dim=0",
    )
    mixed = Layout(2, 1, axes=(Axis.ep(0, 1, expert=7),))
    store.put_tensor(f"{key}.mixed", numbers(4, 3), layout=mixed)
    layout = store.info(f"{key}.mixed").tensor.layout
    assert layout == "2 shards along dimension 1 ep=0/1 expert=7"
    with pytest.raises(mooncake.NotFoundError):
        store.info(f"{key}.absent")


def test_stat_prints_the_layout_of_a_tensor(store, key, capsys):
    store.put_tensor(key, numbers(4, 3), layout=Layout(2))
    assert command.main(["stat", f"--master={store.master_address}", key]) == 0
    printed = capsys.readouterr().out
    assert "dtype     float32\nshape     (4, 3)\nlayout    2 shards along dimension 0" in printed
    assert f"object    {key}_tp_1 (2, 3) tp=1/2 dim=0" in printed


def test_overwritten_tensor_is_read_in_one_version(store, key):
    """Every read returns one version, of either shape, or says that the tensor was replaced."""
    versions = [torch.full((64, 32), 1.0), torch.full((16, 8), 2.0)]
    store.put_tensor(key, versions[0])
    is_over = threading.Event()

    def overwrite():
        for at in itertools.count():
            if is_over.is_set():
                return
            store.put_tensor(key, versions[at % 2], overwrite=True)

    writer = threading.Thread(target=overwrite)
    writer.start()
    read = 0
    try:
        while read < 50:
            with contextlib.suppress(mooncake.DeadlineError):
                got = store.get_tensor(key)
                assert torch.equal(got, versions[int(got[0, 0]) - 1])
                read += 1
    finally:
        is_over.set()
        writer.join()


def test_async_store_has_the_same_calls(key):
    async def use():
        async with AsyncStore(config=StoreConfig(segment_bytes="64MB")) as store:
            tensor = numbers(6, 8)
            assert await store.put_tensor(key, tensor, layout=Layout(3, 1))
            assert torch.equal(await store.get_tensor(key), tensor)
            shard = Shard.tp(1, 2)
            assert torch.equal(await store.get_tensor(key, target=shard), part(tensor, shard))
            assert await store.put_tensors({"a": tensor, "b": tensor}) == [True, True]
            got = await store.get_tensors(["a", "b"])
            assert all(torch.equal(each, tensor) for each in got)
            assert (await store.info("a")).tensor.shape == (6, 8)
            await store.put_array("c", tensor.numpy())
            assert (await store.get_array("c") == tensor.numpy()).all()
            await store.delete_tensor("c", force=True)
            with pytest.raises(mooncake.NotFoundError):
                await store.get_tensor("c")

    asyncio.run(use())


def test_cancelled_read_keeps_its_memory(key):
    async def use():
        async with AsyncStore(config=StoreConfig(segment_bytes="64MB")) as store:
            await store.put_tensor(key, numbers(1 << 20))
            for _ in range(20):
                reading = asyncio.ensure_future(store.get_tensor(key))
                await asyncio.sleep(0)
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
            assert torch.equal(await store.get_tensor(key), numbers(1 << 20))

    asyncio.run(use())
