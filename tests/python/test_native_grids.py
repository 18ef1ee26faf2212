"""`read_grids` of the native module: ranges of objects at regular distances."""

from __future__ import annotations

from array import array

import pytest

import mooncake
from mooncake import Store, StoreConfig
from mooncake._runtime import _native


@pytest.fixture(scope="module")
def store():
    with Store(config=StoreConfig(segment_bytes="64MB")) as store:
        store.put("digits", b"0123456789")
        store.put("letters", b"abcdefghij")
        yield store


def read(store, keys, memory, grids, is_registered=False):
    """Read grids whose addresses are offsets within the memory."""
    base = memory.buffer_info()[0]
    lists = [[(base + into, *rest) for into, *rest in own] for own in grids]
    outcomes = _native.read_grids(store._native, keys, lists, is_registered=is_registered)
    return [each if isinstance(each, Exception) else each[0] for each in outcomes]


def test_ranges_of_many_objects_are_gathered(store):
    memory = array("B", b"." * 8)
    grids = [[(0, 8, 2, ()), (6, 0, 2, ())], [(3, 4, 2, ())]]
    assert read(store, ["digits", "letters"], memory, grids) == [4, 2]
    assert memory.tobytes() == b"89.ef.01"


def test_ranges_lie_at_the_points_of_a_grid(store):
    memory = array("B", b"." * 12)
    # Two rows of three points: digits 0, 2, 4 and 5, 7, 9.
    grids = [[(1, 0, 1, ((2, 5, 6), (3, 2, 1)))], [(4, 1, 2, [(2, 7, 6)])]]
    assert read(store, ["digits", "letters"], memory, grids) == [6, 4]
    assert memory.tobytes() == b".024bc.579ij"


def test_empty_grids_read_nothing(store):
    memory = array("B", b"." * 4)
    grids = [[(0, 9, 0, ())], [(0, 0, 1, ((0, 1, 1), (5, 1, 1)))], []]
    assert read(store, ["digits", "letters", "digits"], memory, grids) == [0, 0, 0]
    assert memory.tobytes() == b"...."


def test_failure_is_that_of_its_object(store):
    memory = array("B", b"." * 8)
    outside = [(2, 1, 1, ()), (3, 0, 2, ((2, 9, 1),))]
    grids = [[(0, 0, 1, ())], [(1, 0, 1, ())], outside, []]
    found = read(store, ["digits", "absent", "letters", "digits"], memory, grids)
    assert found[0] == 1
    assert isinstance(found[1], mooncake.NotFoundError)
    assert found[1].key == "absent"
    assert isinstance(found[2], mooncake.InvalidArgumentError)
    assert found[3] == 0
    assert memory.tobytes() == b"0......."


@pytest.mark.parametrize(
    "grid",
    [
        (0, 1 << 63, 1, ()),
        (0, 0, 1, ((1 << 63, 2, 0),)),
        (0, 0, 1, ((3, 0, 1 << 63),)),
        (0, 0, (1 << 64) - 1, ((2, 1, 1),)),
    ],
)
def test_grids_beyond_the_last_address_are_refused(store, grid):
    memory = array("B", b"." * 8)
    assert isinstance(read(store, ["digits"], memory, [[grid]])[0], mooncake.InvalidArgumentError)
    assert memory.tobytes() == b"." * 8


def test_unregistered_memory_is_refused_on_request(store):
    memory = array("B", b"." * 8)
    grids = [[(0, 0, 1, ((2, 1, 1),))]]
    refused = read(store, ["digits"], memory, grids, is_registered=True)[0]
    assert isinstance(refused, mooncake.InvalidArgumentError)
    assert read(store, ["digits"], memory, grids) == [2]


def test_every_key_has_a_list_of_grids(store):
    with pytest.raises(mooncake.InvalidArgumentError, match="differ in length"):
        _native.read_grids(store._native, ["digits"], [])
    for wrong in ([(0, 0, 1)], [(0, -1, 1, ())], [(0, 0, 1 << 64, ())], [(0, 0, 1, (1, 2))], 7):
        with pytest.raises((TypeError, ValueError)):
            _native.read_grids(store._native, ["digits"], [wrong])


def test_version_and_tag_are_those_of_the_object(store):
    options = mooncake.PutOptions(tags={"colour": "blue"})
    store.put("sky", b"1", options=options)
    found = _native.read_grids(store._native, ["sky", "digits"], [[], []], tag="colour")
    assert [tag for _, _, tag in found] == ["blue", ""]
    assert found[0][1] == store.info("sky").version
