"""`read_ranges` of the native module: columns of 64-bit integers instead of lists."""

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


def columns(memory, starts, destinations, offsets, lengths):
    base = memory.buffer_info()[0]
    return (
        array("q", starts),
        array("q", [base + at for at in destinations]),
        array("q", offsets),
        array("q", lengths),
    )


def read(store, keys, memory, *lists, is_registered=False):
    wanted = columns(memory, *lists)
    return _native.read_ranges(store._native, keys, wanted, is_registered=is_registered)


def test_ranges_of_many_objects_are_gathered(store):
    memory = array("B", b"." * 8)
    lists = ([0, 2, 3], [0, 6, 3], [8, 0, 4], [2, 2, 2])
    assert read(store, ["digits", "letters"], memory, *lists) == [4, 2]
    assert memory.tobytes() == b"89.ef.01"


def test_failure_is_that_of_its_object(store):
    memory = array("B", b"." * 8)
    lists = ([0, 1, 2, 4, 4], [0, 1, 2, 3], [0, 0, 9, 1], [1, 1, 2, 1])
    found = read(store, ["digits", "absent", "letters", "digits"], memory, *lists)
    assert found[0] == 1
    assert isinstance(found[1], mooncake.NotFoundError)
    assert found[1].key == "absent"
    assert isinstance(found[2], mooncake.InvalidArgumentError)
    assert found[3] == 0


def test_negative_numbers_are_refused(store):
    memory = array("B", b"." * 8)
    for lists in (([0, 1], [0], [-1], [1]), ([0, 1], [0], [0], [-1])):
        assert isinstance(read(store, ["digits"], memory, *lists)[0], mooncake.InvalidArgumentError)
    assert memory.tobytes() == b"." * 8


def test_unregistered_memory_is_refused_on_request(store):
    memory = array("B", b"." * 8)
    lists = ([0, 1], [0], [0], [1])
    refused = read(store, ["digits"], memory, *lists, is_registered=True)[0]
    assert isinstance(refused, mooncake.InvalidArgumentError)
    assert read(store, ["digits"], memory, *lists) == [1]


@pytest.mark.parametrize(
    "lists",
    [
        ([0], [0], [0], [1]),
        ([1, 1], [0], [0], [1]),
        ([0, 2], [0], [0], [1]),
        ([0, -1], [0], [0], [1]),
        ([0, 1], [0], [0, 1], [1]),
        ([0, 1], [0], [0], [1, 1]),
    ],
)
def test_columns_that_do_not_fit_are_refused(store, lists):
    with pytest.raises(mooncake.InvalidArgumentError, match=r"starts|differ in length"):
        read(store, ["digits"], array("B", b"." * 8), *lists)


def test_columns_are_buffers_of_64_bit_integers(store):
    for wrong in ([0, 1], array("i", [0, 1]), array("d", [0, 1]), b"\0" * 16):
        with pytest.raises((TypeError, BufferError)):
            _native.read_ranges(store._native, ["digits"], (wrong, wrong, wrong, wrong))
