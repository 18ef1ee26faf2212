"""Layouts and plans of reads, with slices of numpy arrays as the expected result."""

from __future__ import annotations

import itertools
import random

import pytest

np = pytest.importorskip("numpy")

from mooncake.errors import InvalidArgumentError  # noqa: E402
from mooncake.tensor.dtypes import DType  # noqa: E402
from mooncake.tensor.format import TensorMetadata  # noqa: E402
from mooncake.tensor.layout import Axis, Box, Layout, Shard, split_bounds  # noqa: E402
from mooncake.tensor.planner import (  # noqa: E402
    Grid,
    IncompleteError,
    Source,
    plan,
)
from mooncake.tensor.search import Found, Part  # noqa: E402
from mooncake.tensor.transfer import RANGES_MAX, Job, fill  # noqa: E402


def cut(array, box):
    return array[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]


def read(objects, grids, nbytes):
    """Carry out a plan on objects in memory."""
    memory = np.full(nbytes, 0xEE, dtype=np.uint8)
    for stored, grid in zip(objects, grids, strict=True):
        if grid.length == 0:
            continue
        for point in itertools.product(*(range(count) for count, _, _ in grid.dimensions)):
            offset, into = grid.offset, grid.destination
            for at, (_, of_object, of_memory) in zip(point, grid.dimensions, strict=True):
                offset += at * of_object
                into += at * of_memory
            memory[into : into + grid.length] = stored[offset : offset + grid.length]
    return memory


def check(array, stored, wanted, data_offset=0):
    """Check that reading `wanted` from the stored boxes equals slicing the array.

    Returns:
        The number of ranges.
    """
    pad = np.zeros(data_offset, dtype=np.uint8)
    objects = [
        np.concatenate([pad, np.frombuffer(cut(array, box).tobytes(), dtype=np.uint8)])
        for box in stored
    ]
    sources = tuple(Source(box, data_offset) for box in stored)
    grids = plan(sources, wanted, array.itemsize)
    expected = cut(array, wanted)
    got = read(objects, grids, expected.nbytes)
    assert got.tobytes() == expected.tobytes()
    assert sum(grid.nbytes for grid in grids) == expected.nbytes
    for grid, stored_bytes in zip(grids, objects, strict=True):
        assert grid.offset + grid.span <= len(stored_bytes)
    return sum(grid.count for grid in grids)


def random_layout(rng, shape):
    """Return the boxes of a random layout, and the shard of a random rank."""
    if not shape or rng.random() < 0.2:
        return [Box.whole(shape)], Box.whole(shape)
    layout = Layout(
        rng.randint(1, 7), rng.randrange(len(shape)), rng.choice(["chunk", "tensor_split"])
    )
    boxes = [shard.box(shape) for shard in layout.shards()]
    return boxes, rng.choice(boxes)


@pytest.mark.parametrize("seed", range(300))
def test_any_layout_to_any_layout_equals_slicing(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(0 if rng.random() < 0.1 else 1, 9) for _ in range(rng.randint(0, 4)))
    dtype = rng.choice([np.uint8, np.float16, np.float32, np.complex128])
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    stored, _ = random_layout(rng, shape)
    _, wanted = random_layout(rng, shape)
    check(array, stored, wanted, rng.choice([0, 304]))


def test_plan_merges_adjacent_ranges():
    array = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    halves = [shard.box(array.shape) for shard in Layout(2, 0).shards()]
    assert check(array, halves, Box.whole(array.shape)) == 2
    middle = [shard.box(array.shape) for shard in Layout(2, 1).shards()]
    assert check(array, middle, Box.whole(array.shape)) == 8
    assert check(array, middle, Box.whole(array.shape).narrow(0, 1, 2)) == 2


def test_plan_refuses_missing_parts():
    first, second = (shard.box((8, 2)) for shard in Layout(2).shards())
    with pytest.raises(IncompleteError, match="stored_bytes=32"):
        plan((Source(first),), Box.whole((8, 2)), 4)
    with pytest.raises(IncompleteError):
        plan((Source(first), Source(first), Source(second)), Box.whole((8, 2)), 4)


def test_many_ranges_are_planned_as_few_numbers():
    shape = (100_000, 2)
    columns = tuple(Source(shard.box(shape), 304) for shard in Layout(2, 1).shards())
    assert plan(columns, Box.whole(shape), 4) == (
        Grid(304, 0, 4, ((100_000, 4, 8),)),
        Grid(304, 4, 4, ((100_000, 4, 8),)),
    )


def test_read_of_too_many_ranges_is_refused():
    shape = (1 << 24, 2, 512)
    shards = [shard.box(shape) for shard in Layout(2, 1).shards()]
    metadata = TensorMetadata(DType.of_name("uint8"), shape, shards[0].shape)
    parts = tuple(Part(b"shard", b"", metadata, box) for box in shards)
    job = Job(Found(b"tensor", Box.whole(shape), parts), 0, None)
    operation = fill([job], lease=False)
    assert next(operation).keys == []
    with pytest.raises(StopIteration) as end:
        operation.send([])
    (refusal,) = end.value.value
    assert isinstance(refusal, InvalidArgumentError)
    assert f"ranges={1 << 25} limit={RANGES_MAX}" in str(refusal)


@pytest.mark.parametrize("extent", [0, 1, 5, 8, 10, 17])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_bounds_follow_the_rules_of_torch_and_numpy(extent, size):
    whole = np.arange(extent)
    bounds = split_bounds(extent, size, "tensor_split")
    for rank, part in enumerate(np.array_split(whole, size)):
        assert whole[bounds[rank] : bounds[rank + 1]].tolist() == part.tolist()
    torch = pytest.importorskip("torch")
    bounds = split_bounds(extent, size, "chunk")
    parts = [whole[bounds[rank] : bounds[rank + 1]].tolist() for rank in range(size)]
    chunks = [chunk.tolist() for chunk in torch.arange(extent).chunk(size)]
    assert [part for part in parts if part] == [chunk for chunk in chunks if chunk]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("xp", 0, 1), "unknown kind of axis kind='xp' known=dp, tp, ep, pp"),
        (("tp", 2, 2, 0), "the rank is outside of its axis axis=tp rank=2 size=2"),
        (("tp", -1, 2, 0), "the rank is outside of its axis"),
        (("tp", 0, 0, 0), "an axis has 1 to 65536 ranks axis=tp size=0"),
        (("tp", 0, 2), "needs dim"),
        (("tp", 0, 2, -1), "dim is negative"),
        (("dp", 0, 2, 0), "has no dim axis=dp dim=0"),
        (("ep", 0, 2), "needs id .expert. axis=ep"),
        (("pp", 0, 2, None, -3), "id is negative axis=pp id=-3"),
        (("tp", 0, 2, 0, 3), "has no id axis=tp id=3"),
    ],
)
def test_axis_refuses_wrong_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        Axis(*arguments)


def test_shard_orders_its_axes_and_refuses_two_of_a_kind():
    shard = Shard((Axis.pp(0, 2, stage=3), Axis.tp(1, 4, dim=1), Axis.dp(0, 2)))
    assert [axis.kind for axis in shard.axes] == ["dp", "tp", "pp"]
    assert str(shard) == "dp=0/2 tp=1/4 dim=1 pp=0/2 stage=3"
    with pytest.raises(ValueError, match="at most one axis of each kind"):
        Shard((Axis.dp(0, 2), Axis.dp(1, 2)))
    with pytest.raises(ValueError, match="at least one axis"):
        Shard(())
    with pytest.raises(ValueError, match="unknown rule split='even'"):
        Layout(2, split="even")


def test_shard_refuses_tensor_without_its_dimension():
    with pytest.raises(ValueError, match="dim=2 dimensions=2"):
        Shard.tp(0, 2, dim=2).box((4, 4))
