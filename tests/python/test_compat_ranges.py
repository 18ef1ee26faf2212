"""Upstream's calls for parts of objects: ranges in one call, and sessions."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.buffer_pool import BufferPool
from mooncake.store import MooncakeDistributedStore as CompatStore, ReplicateConfig

INVALID, UNREADY, MISSING, EXISTS = -600, -703, -704, -705


@pytest.fixture
def registered(compat_store: CompatStore):
    """Two registered buffers of 64 bytes."""
    buffers = [np.zeros(64, np.uint8) for _ in range(2)]
    for buffer in buffers:
        assert compat_store.register_buffer(buffer.ctypes.data, 64) == 0
    return buffers


def plain(value):
    """Assert that the value consists of lists and `int`s only, and return it."""
    assert type(value) in (list, int)
    return value if isinstance(value, int) else [plain(each) for each in value]


def test_ranges_of_objects_fill_buffers(compat_store: CompatStore, registered):
    first, second = registered
    at = [buffer.ctypes.data for buffer in registered]
    text = bytes(range(40))
    assert compat_store.put_batch(["key1", "key2"], [text, text[::-1]]) == 0
    results = compat_store.get_into_ranges(
        at,
        [["key1", "key2"], ["key2", "key1"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    )
    assert plain(results) == [[[4, 3], [5]], [[6], [4]]]
    assert first[:4].tobytes() + first[20:23].tobytes() == text[1:5] + text[30:33]
    assert first[8:13].tobytes() == text[::-1][2:7]
    assert second[4:10].tobytes() + second[16:20].tobytes() == text[::-1][:6] + text[10:14]
    assert not first[4:8].any(), "bytes outside the ranges are untouched"


def test_each_range_has_its_own_result(compat_store: CompatStore, registered):
    (at, other), loose = [b.ctypes.data for b in registered], np.zeros(64, np.uint8)
    assert compat_store.put("k", b"0123456789") == 0
    ranges = compat_store.get_into_ranges
    assert ranges([at], [["k", "no"]], [[[0, 3], [5]]], [[[8, 9], [0]]], [[[2, 2], [1]]]) == [
        [[2, INVALID], [MISSING]]
    ]
    assert registered[0][:2].tobytes() == b"89"
    assert ranges([at], [["k"]], [[[60, 63, 64, 0]]], [[[0] * 4]], [[[4, 2, 1, 0]]]) == [
        [[4, INVALID, INVALID, 0]]
    ]
    for wrong in (loose.ctypes.data, 0, 8):
        assert ranges([wrong], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
    assert ranges([], [], [], [], []) == []
    assert ranges([at], [["k"]], [[[]]], [[[]]], [[[]]]) == [[[]]]
    assert ranges([other], [["k", "k"]], [[[0], [1]]], [[[0], [1]]], [[[1], [1]]]) == [[[1], [1]]]


def test_length_mismatch_fails_only_that_level(compat_store: CompatStore, registered):
    at = registered[0].ctypes.data
    assert compat_store.put("k", b"0123456789") == 0
    ranges = compat_store.get_into_ranges
    assert ranges([at, at], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
    assert ranges([at], [["k", "k"]], [[[0]]], [[[0], [0]]], [[[1], [1]]]) == [
        [[INVALID], [INVALID]]
    ]
    answer = ranges([at], [["k", "k"]], [[[0, 1], [2]]], [[[0], [0]]], [[[1], [1]]])
    assert answer == [[[INVALID, INVALID], [1]]]
    with pytest.raises(TypeError):
        ranges(at, [["k"]], [[[0]]], [[[0]]], [[[1]]])


def test_buffer_pool_memory_counts_as_registered(compat_store: CompatStore):
    assert compat_store.put("k", b"0123456789") == 0
    pool = BufferPool(compat_store)
    with pool.buffer(10) as lease:
        got = compat_store.get_into_ranges([lease.ptr], [["k"]], [[[2]]], [[[5]]], [[[3]]])
        assert got == [[[3]]]
        with lease.buffer as view:
            assert bytes(view[2:5]) == b"567"
    pool.close()


def test_one_call_reads_100000_ranges(compat_store: CompatStore):
    count = 100_000
    value = np.arange(count, dtype=np.uint64)
    target = np.zeros(count, np.uint64)
    assert compat_store.put("k", value) == 0
    assert compat_store.register_buffer(target.ctypes.data, target.nbytes) == 0
    order = np.random.default_rng(1).permutation(count)
    there, here = (order * 8).tolist(), list(range(0, count * 8, 8))
    got = compat_store.get_into_ranges(
        [target.ctypes.data], [["k"]], [[here]], [[there]], [[[8] * count]]
    )
    assert got == [[[8] * count]]
    assert np.array_equal(target, value[order])


def test_put_session_publishes_at_its_end(compat_store: CompatStore):
    source = np.arange(100, dtype=np.uint8)
    at = source.ctypes.data
    assert compat_store.batch_put_session_start(["k"], [100]) == [0]
    assert compat_store.batch_put_session_start(["k"], [100]) == [INVALID]
    write = compat_store.batch_put_from_multi_buffer_ranges
    assert write(["k"], [[at + 50]], [[50]], [[50]]) == [50]
    assert compat_store.is_exist("k") == 0
    assert compat_store.get("k") == b""
    assert compat_store.get_buffer("k") is None
    assert compat_store.get_size("k") == UNREADY
    assert compat_store.remove("k", force=True) == UNREADY
    assert compat_store.batch_get_session_start(["k"]) == [UNREADY]
    assert compat_store.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
    assert compat_store.put("k", b"other") == 0, "the pending object is kept, like a complete one"
    assert write(["k"], [[at, at + 20]], [[20, 30]], [[0, 20]]) == [50]
    assert plain(compat_store.batch_put_session_end(["k"])) == [0]
    assert compat_store.get("k") == source.tobytes()
    assert compat_store.batch_put_session_start(["k"], [10]) == [EXISTS]


def test_put_session_rejects_invalid_ranges(compat_store: CompatStore):
    source = np.zeros(100, np.uint8)
    at = source.ctypes.data
    assert compat_store.batch_put_session_start(["k", "none"], [10, 0]) == [0, INVALID]
    assert compat_store.batch_put_session_start(["a", "b"], [10]) == [INVALID, INVALID]
    write = compat_store.batch_put_from_multi_buffer_ranges
    assert write(["k"], [[at]], [[11]], [[0]]) == [INVALID]
    assert write(["k"], [[at]], [[1]], [[10]]) == [INVALID]
    assert write(["other"], [[at]], [[1]], [[0]]) == [INVALID]
    assert write(["k"], [[at]], [[1]], []) == [INVALID]
    assert write(["k"], [[at, at]], [[1]], [[0]]) == [INVALID]
    assert compat_store.batch_put_session_revoke(["k", "other"]) == [0, INVALID]
    assert compat_store.batch_put_session_end(["k"]) == [INVALID]
    assert compat_store.get_size("k") == MISSING
    assert compat_store.put("k", b"free again") == 0


def test_put_session_honors_the_config(compat_store: CompatStore):
    config = ReplicateConfig()
    config.group_ids = ["g", "g"]
    assert compat_store.batch_put_session_start(["a", "b"], [1, 1], config) == [0, 0]
    assert compat_store.batch_put_session_revoke(["a", "b"]) == [0, 0]
    config.group_ids = ["g"]
    assert compat_store.batch_put_session_start(["a", "b"], [1, 1], config) == [INVALID] * 2


def test_get_session_reads_ranges(compat_store: CompatStore):
    target = np.zeros(20, np.uint8)
    to = target.ctypes.data
    assert compat_store.put("k", b"0123456789") == 0
    read = compat_store.batch_get_into_multi_buffer_ranges
    assert read(["k"], [[to]], [[1]], [[0]]) == [INVALID]
    assert plain(compat_store.batch_get_session_start(["k", "no"])) == [0, MISSING]
    assert read(["k"], [[to, to + 10]], [[3, 2]], [[7, 0]]) == [5]
    assert target[:3].tobytes() + target[10:12].tobytes() == b"78901"
    assert read(["k", "no"], [[to], [to]], [[11], [1]], [[0], [0]]) == [INVALID, INVALID]
    assert read(["k"], [[to]], [[1]], []) == [INVALID]
    assert compat_store.batch_get_session_end(["k", "no"]) == 0
    assert read(["k"], [[to]], [[1]], [[0]]) == [INVALID]
