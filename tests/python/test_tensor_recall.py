"""Tensors that are read again are read without a search, and found again when they have moved."""

from __future__ import annotations

import contextlib

import pytest

from mooncake import NotFoundError, Store, StoreConfig
from mooncake.tensor import Layout, Shard, calls, recall

np = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def store():
    with Store(config=StoreConfig(segment_bytes="64MB")) as store:
        yield store


@pytest.fixture
def key(request, store):
    yield request.node.name
    with contextlib.suppress(NotFoundError):
        store.delete_tensor(request.node.name, force=True)


@pytest.fixture
def count(monkeypatch):
    """Return the number of calls that read ranges since the last count."""
    made = []
    make = calls.ReadGrids.make

    def counting(self, store):
        made.append(self)
        return make(self, store)

    monkeypatch.setattr(calls.ReadGrids, "make", counting)

    def since() -> int:
        number = len(made)
        made.clear()
        return number

    return since


def array(rows=8, columns=6, first=0):
    return np.arange(first, first + rows * columns, dtype=np.float32).reshape(rows, columns)


@pytest.mark.parametrize("target", [None, Shard.tp(1, 2)])
@pytest.mark.parametrize("layout", [None, Layout(4), Layout(2, 1)])
def test_third_read_is_one_call(store, key, count, layout, target):
    value = array()
    store.put_array(key, value, layout=layout)
    count()
    expected = value if target is None else value[4:]
    for wanted in (2, 2, 1, 1):
        assert (store.get_array(key, target=target) == expected).all()
        assert count() == wanted


def test_new_values_are_read_where_the_old_ones_were(store, key, count):
    for step, wanted in enumerate((2, 2, 1, 1, 1)):
        store.put_array(key, array(first=step), layout=Layout(4), overwrite=True)
        count()
        assert (store.get_array(key) == array(first=step)).all()
        assert count() == wanted


@pytest.mark.parametrize(
    ("layout", "value"),
    [
        (None, array(first=100)),
        (Layout(2), array(first=100)),
        (Layout(4), array(4, 12, first=100)),
        (Layout(4), array(first=100).astype(np.int64)),
        (None, np.array(b"text")),
    ],
)
@pytest.mark.parametrize("has_old_shards", [False, True])
def test_another_tensor_under_the_key_is_found(store, key, layout, value, has_old_shards):
    store.put_array(key, array(), layout=Layout(4))
    for _ in range(3):
        store.get_array(key)
    if not has_old_shards:
        store.delete_tensor(key, force=True)
    store.put_array(key, value, layout=layout, overwrite=True)
    for _ in range(4):
        got = store.get_array(key)
        assert got.dtype == value.dtype
        assert (got == value).all()


def test_other_tensor_is_refused_for_memory_that_it_does_not_fit(store, key):
    store.put_array(key, array())
    out = np.zeros((8, 6), dtype=np.float32)
    for _ in range(3):
        store.get_array(key, out=out)
    store.put_array(key, array(2, 3), overwrite=True)
    with pytest.raises(Exception, match="the destination does not fit"):
        store.get_array(key, out=out)


def test_missing_tensor_is_reported_as_by_a_search(store, key):
    store.put_array(key, array(), layout=Layout(4))
    for _ in range(3):
        store.get_array(key)
    store.delete_tensor(key, force=True)
    with pytest.raises(NotFoundError, match="neither the tensor nor shards of it are stored"):
        store.get_array(key)


def test_pools_with_different_tensors_are_searched(store, key, count):
    """Where one pool has a tensor is no reason to look there in another one."""
    with Store(config=StoreConfig(segment_bytes="16MB")) as other:
        store.put_array(key, array(), layout=Layout(2))
        other.put_array(key, array(first=7), layout=Layout(4))
        count()
        for _ in range(4):
            assert (store.get_array(key) == array()).all()
            assert count() == 2
            assert (other.get_array(key) == array(first=7)).all()
            assert count() == 2


def test_number_of_remembered_tensors_is_limited(store, key):
    store.put_array(key, array())
    names = [f"{key}-{at}" for at in range(300)]
    for name in names:
        store.put_array(name, array(1, 2))
    for name in names:
        store.get_array(name)
    assert len(recall._kept) <= 256
