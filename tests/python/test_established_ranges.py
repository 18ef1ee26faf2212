"""Parts of objects by the established names: ranges in one call, and sessions."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.buffer_pool import BufferPool
from mooncake.store import MooncakeDistributedStore as Established, ReplicateConfig

INVALID, UNREADY, MISSING, EXISTS = -600, -703, -704, -705


@pytest.fixture
def registered(established: Established):
    """Two registered buffers of 64 bytes."""
    buffers = [np.zeros(64, np.uint8) for _ in range(2)]
    for buffer in buffers:
        assert established.register_buffer(buffer.ctypes.data, 64) == 0
    return buffers


def plain(value):
    """Lists all the way down, of plain integers."""
    assert type(value) in (list, int)
    return value if isinstance(value, int) else [plain(each) for each in value]


def test_fragments_of_several_objects_go_into_several_buffers(established: Established, registered):
    first, second = registered
    at = [buffer.ctypes.data for buffer in registered]
    text = bytes(range(40))
    assert established.put_batch(["key1", "key2"], [text, text[::-1]]) == 0
    results = established.get_into_ranges(
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
    assert not first[4:8].any(), "what was not asked for is untouched"


def test_each_fragment_has_its_own_answer(established: Established, registered):
    (at, other), loose = [b.ctypes.data for b in registered], np.zeros(64, np.uint8)
    assert established.put("k", b"0123456789") == 0
    ranges = established.get_into_ranges
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


def test_lists_that_differ_in_length_are_refused_where_they_differ(
    established: Established, registered
):
    at = registered[0].ctypes.data
    assert established.put("k", b"0123456789") == 0
    ranges = established.get_into_ranges
    assert ranges([at, at], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
    assert ranges([at], [["k", "k"]], [[[0]]], [[[0], [0]]], [[[1], [1]]]) == [
        [[INVALID], [INVALID]]
    ]
    answer = ranges([at], [["k", "k"]], [[[0, 1], [2]]], [[[0], [0]]], [[[1], [1]]])
    assert answer == [[[INVALID, INVALID], [1]]]
    with pytest.raises(TypeError):
        ranges(at, [["k"]], [[[0]]], [[[0]]], [[[1]]])


def test_memory_of_a_pool_counts_as_registered(established: Established):
    assert established.put("k", b"0123456789") == 0
    pool = BufferPool(established)
    with pool.buffer(10) as lease:
        got = established.get_into_ranges([lease.ptr], [["k"]], [[[2]]], [[[5]]], [[[3]]])
        assert got == [[[3]]]
        with lease.buffer as view:
            assert bytes(view[2:5]) == b"567"
    pool.close()


def test_a_hundred_thousand_fragments_are_one_call(established: Established):
    count = 100_000
    value = np.arange(count, dtype=np.uint64)
    target = np.zeros(count, np.uint64)
    assert established.put("k", value) == 0
    assert established.register_buffer(target.ctypes.data, target.nbytes) == 0
    order = np.random.default_rng(1).permutation(count)
    there, here = (order * 8).tolist(), list(range(0, count * 8, 8))
    got = established.get_into_ranges(
        [target.ctypes.data], [["k"]], [[here]], [[there]], [[[8] * count]]
    )
    assert got == [[[8] * count]]
    assert np.array_equal(target, value[order])


def test_an_object_is_written_in_a_session_and_seen_at_its_end(established: Established):
    source = np.arange(100, dtype=np.uint8)
    at = source.ctypes.data
    assert established.batch_put_session_start(["k"], [100]) == [0]
    assert established.batch_put_session_start(["k"], [100]) == [INVALID]
    write = established.batch_put_from_multi_buffer_ranges
    assert write(["k"], [[at + 50]], [[50]], [[50]]) == [50]
    assert established.is_exist("k") == 0
    assert established.get("k") == b""
    assert established.get_buffer("k") is None
    assert established.get_size("k") == UNREADY
    assert established.remove("k", force=True) == UNREADY
    assert established.batch_get_session_start(["k"]) == [UNREADY]
    assert established.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]]
    assert established.put("k", b"other") == 0, "it is kept, as an object that is there is"
    assert write(["k"], [[at, at + 20]], [[20, 30]], [[0, 20]]) == [50]
    assert plain(established.batch_put_session_end(["k"])) == [0]
    assert established.get("k") == source.tobytes()
    assert established.batch_put_session_start(["k"], [10]) == [EXISTS]


def test_a_session_of_writing_refuses_what_does_not_fit(established: Established):
    source = np.zeros(100, np.uint8)
    at = source.ctypes.data
    assert established.batch_put_session_start(["k", "none"], [10, 0]) == [0, INVALID]
    assert established.batch_put_session_start(["a", "b"], [10]) == [INVALID, INVALID]
    write = established.batch_put_from_multi_buffer_ranges
    assert write(["k"], [[at]], [[11]], [[0]]) == [INVALID]
    assert write(["k"], [[at]], [[1]], [[10]]) == [INVALID]
    assert write(["other"], [[at]], [[1]], [[0]]) == [INVALID]
    assert write(["k"], [[at]], [[1]], []) == [INVALID]
    assert write(["k"], [[at, at]], [[1]], [[0]]) == [INVALID]
    assert established.batch_put_session_revoke(["k", "other"]) == [0, INVALID]
    assert established.batch_put_session_end(["k"]) == [INVALID]
    assert established.get_size("k") == MISSING
    assert established.put("k", b"free again") == 0


def test_a_config_counts_in_a_session(established: Established):
    config = ReplicateConfig()
    config.group_ids = ["g", "g"]
    assert established.batch_put_session_start(["a", "b"], [1, 1], config) == [0, 0]
    assert established.batch_put_session_revoke(["a", "b"]) == [0, 0]
    config.group_ids = ["g"]
    assert established.batch_put_session_start(["a", "b"], [1, 1], config) == [INVALID] * 2


def test_an_object_is_read_in_a_session(established: Established):
    target = np.zeros(20, np.uint8)
    to = target.ctypes.data
    assert established.put("k", b"0123456789") == 0
    read = established.batch_get_into_multi_buffer_ranges
    assert read(["k"], [[to]], [[1]], [[0]]) == [INVALID]
    assert plain(established.batch_get_session_start(["k", "no"])) == [0, MISSING]
    assert read(["k"], [[to, to + 10]], [[3, 2]], [[7, 0]]) == [5]
    assert target[:3].tobytes() + target[10:12].tobytes() == b"78901"
    assert read(["k", "no"], [[to], [to]], [[11], [1]], [[0], [0]]) == [INVALID, INVALID]
    assert read(["k"], [[to]], [[1]], []) == [INVALID]
    assert established.batch_get_session_end(["k", "no"]) == 0
    assert read(["k"], [[to]], [[1]], [[0]]) == [INVALID]
