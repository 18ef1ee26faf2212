"""Parts of objects in the native module, on which upstream's ranges and sessions are built."""

from __future__ import annotations

import ctypes
import math
import time
from typing import TYPE_CHECKING, Any

import pytest

from mooncake._runtime import _native
from mooncake.errors import MooncakeError, NotFoundError

if TYPE_CHECKING:
    import mooncake


@pytest.fixture
def native(store: mooncake.Store) -> Any:
    return store._native


def test_many_small_parts_need_one_lookup_and_linear_time(native: Any) -> None:
    value = bytes(range(256)) * 4096
    assert native.put(["k"], [value]) == [True]

    def lookups() -> int:
        rpcs = native.metrics()["rpcs"]
        return rpcs["GetReplicaList"]["latency"]["calls"] if "GetReplicaList" in rpcs else 0

    def cpu_seconds(count: int) -> float:
        into = ctypes.create_string_buffer(count * 8)
        base = ctypes.addressof(into)
        offsets = [(i * 7919) % (len(value) - 8) for i in range(count)]
        before, start = lookups(), time.process_time()
        (got,) = native.get_parts(
            ["k"], [base], [[i * 8 for i in range(count)]], [offsets], [[8] * count]
        )
        took = time.process_time() - start
        assert lookups() - before == 1
        assert got == [8] * count
        assert into.raw == b"".join(value[o : o + 8] for o in offsets)
        return took

    # Ten times as many parts take ten times as long, or a hundred times if the work is quadratic.
    # A loaded machine slows single runs down, so that the fastest run of each size counts.
    few = many = math.inf
    for _ in range(20):
        few, many = min(few, cpu_seconds(10_000)), min(many, cpu_seconds(100_000))
        if many < 30 * few:
            return
    pytest.fail(f"100,000 parts take {many / few:.0f} times as long as 10,000")


def test_rows_and_parts_fail_independently(native: Any) -> None:
    native.put(["k"], [b"0123456789"])
    into = ctypes.create_string_buffer(64)
    base = ctypes.addressof(into)
    got = native.get_parts(
        ["k", "none", "k", "k"],
        [base, base, base, base],
        [[0, 8], [0], [0, 0], [16]],
        [[2, 5], [0], [0], [0]],
        [[3, 6], [1], [1], [0]],
    )
    assert got[0][0] == 3
    assert isinstance(got[0][1], MooncakeError)
    assert isinstance(got[1], NotFoundError)
    assert isinstance(got[2], MooncakeError)
    assert got[3] == [0]
    assert into.raw[:3] == b"234"
    (refused,) = native.get_parts(["k"], [base], [[0]], [[0]], [[1]], is_registered=True)
    assert isinstance(refused[0], MooncakeError)
    native.register_buffer(base, 64)
    assert native.get_parts(["k"], [base], [[0]], [[0]], [[1]], is_registered=True) == [[1]]
    native.unregister_buffer(base)


def test_object_is_written_and_read_in_parts(native: Any) -> None:
    source = ctypes.create_string_buffer(b"hello world", 11)
    base = ctypes.addressof(source)
    assert native.begin_writes(["k"], [11]) == [True]
    assert native.write_begun(["k"], [[base + 6, base]], [[6, 0]], [[5, 6]]) == [11]
    assert native.exists(["k"]) == [False]
    assert native.end_writes(["k"]) == [True]
    assert native.get(["k"]) == [b"hello world"]
    assert native.begin_reads(["k"]) == [True]
    into = ctypes.create_string_buffer(5)
    assert native.read_begun(["k"], [[ctypes.addressof(into)]], [[6]], [[5]]) == [5]
    assert into.raw == b"world"
    native.end_reads(["k"])
    (copies,) = native.replicas(["k"])
    assert [copy["size"] for copy in copies] == [11]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (b"", 0x2D06800538D394C2),
        (b"a", 0xE6C632B61E964E1F),
        (b"abc", 0x78AF5F94892F3950),
        (bytearray(b"abc"), 0x78AF5F94892F3950),
    ],
)
def test_checksum_is_xxh3(value: bytes, wanted: int) -> None:
    assert _native.xxh3(value) == wanted


def test_checksum_covers_every_byte_of_long_memory() -> None:
    memory = bytearray(300_000)
    sums = {_native.xxh3(memory)}
    for at in (0, 65_535, 65_536, 299_999):
        memory[at] ^= 1
        sums.add(_native.xxh3(memory))
        memory[at] ^= 1
    assert len(sums) == 5
    assert _native.xxh3(memory) in sums
    with pytest.raises(TypeError):
        _native.xxh3(5)
