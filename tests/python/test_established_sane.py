"""Where the established implementation misbehaves: the sane answer, each with its test."""

from __future__ import annotations

import ctypes
import logging
import mmap

import numpy as np
import pytest
from conftest import MIB

import mooncake
from mooncake.store import MooncakeDistributedStore as Established

INVALID, MISSING, EXISTS, NO_SPACE = -600, -704, -705, -200
libc = ctypes.CDLL(None)


@pytest.fixture
def unmapped():
    """An address at which nothing is mapped, for a mebibyte."""
    mapped = mmap.mmap(-1, MIB)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    mapped.close()
    return at


def bad_addresses(unmapped):
    return [0, 8, unmapped, 2**64 - 4096, 2**63]


def test_bad_addresses_to_read_from_are_errors_in_every_call(established: Established, unmapped):
    good = np.ones(100, np.uint8)
    for at in bad_addresses(unmapped):
        assert established.put_from("k", at, 100) < 0
        assert established.upsert_from("k", at, 100) < 0
        assert established.put_from_with_metadata("k", at, good.ctypes.data, 100, 10) < 0
        assert established.put_from_with_metadata("k", good.ctypes.data, at, 100, 10) < 0
        assert established.batch_put_from(["k"], [at], [100])[0] < 0
        multi = established.batch_put_from_multi_buffers
        assert multi(["k"], [[good.ctypes.data, at]], [[10, 10]])[0] < 0
        assert established.is_exist("k") == 0
        assert str(mooncake.last_error())
        assert established.batch_put_session_start(["s"], [10]) == [0]
        write = established.batch_put_from_multi_buffer_ranges
        assert write(["s"], [[at]], [[10]], [[0]])[0] < 0
        assert established.batch_put_session_revoke(["s"])[0] in (0, INVALID)
    assert established.put_from("k", good.ctypes.data, 100) == 0


def test_bad_addresses_to_write_to_are_errors_in_every_call(established: Established, unmapped):
    assert established.put("k", b"v" * 100) == 0
    assert established.batch_get_session_start(["k"]) == [0]
    for at in bad_addresses(unmapped):
        assert established.get_into("k", at, 100) < 0
        assert established.batch_get_into(["k"], [at], [100])[0] < 0
        assert established.batch_get_into_multi_buffers(["k"], [[at]], [[100]])[0] < 0
        read = established.batch_get_into_multi_buffer_ranges
        assert read(["k"], [[at]], [[10]], [[0]])[0] < 0
        assert established.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[9]]]) == [
            [[INVALID]]
        ]
        if established.register_buffer(at, 100) == 0:
            # Registering touches nothing; reaching for it does.
            got = established.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[9]]])
            assert got[0][0][0] < 0
            assert established.unregister_buffer(at) == 0
    assert established.get("k") == b"v" * 100


def test_a_range_that_runs_out_of_memory_is_an_error(established: Established):
    mapped = mmap.mmap(-1, 2 * 4096)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert libc.mprotect(ctypes.c_void_p(at + 4096), 4096, 0) == 0
    assert established.put_from("k", at, 2 * 4096) < 0
    assert established.is_exist("k") == 0
    assert established.put_from("k", at, 4096) == 0
    assert established.get_into("k", at + 4096, 4096) < 0


def test_arrays_that_speak_no_buffer_protocol_and_parts_with_gaps_are_stored_whole(
    established: Established,
):
    times = np.arange(6).astype("datetime64[s]").reshape(2, 3)
    assert established.put("times", times) == 0
    assert established.get("times") == times.tobytes()
    assert established.upsert_batch(["times", "b"], [times[:, ::2], b"b"]) == 0
    assert established.get_batch(["times", "b"]) == [times[:, ::2].tobytes(), b"b"]
    gaps = np.arange(10, dtype=np.uint8)
    assert established.put_parts("gaps", gaps[::2], b"x", gaps[::-1]) == 0
    assert established.get("gaps") == gaps[::2].tobytes() + b"x" + gaps[::-1].tobytes()
    released = memoryview(b"gone")
    released.release()
    with pytest.raises(ValueError, match="released"):
        established.put("gone", released)
    assert established.is_exist("gone") == 0


def test_no_bytes_are_success_and_said(established: Established, caplog):
    caplog.set_level(logging.INFO, "mooncake.store")
    at = np.ones(10, np.uint8).ctypes.data
    calls = [
        lambda: established.put_from("key-of-nothing", at, 0),
        lambda: established.put_from_with_metadata("key-of-nothing", at, at, 0, 5),
        lambda: established.put_parts("key-of-nothing"),
        lambda: established.put_parts("key-of-nothing", b"", b""),
        lambda: established.upsert_parts("key-of-nothing", b""),
        lambda: established.upsert_from("key-of-nothing", at, 0),
    ]
    for call in calls:
        caplog.clear()
        assert call() == 0
        assert "nothing was stored" in caplog.text
        assert "key-of-nothing" in caplog.text
    assert established.get_size("key-of-nothing") == MISSING


def test_metadata_and_data_make_one_object(established: Established):
    data, metadata = np.arange(100, dtype=np.uint8), np.full(7, 9, np.uint8)
    at, before = data.ctypes.data, metadata.ctypes.data
    assert established.put_from_with_metadata("both", at, before, 100, 7) == 0
    assert established.get("both") == metadata.tobytes() + data.tobytes()
    assert established.put_from_with_metadata("data", at, 0, 100, 0) == 0
    assert established.get("data") == data.tobytes()
    assert established.put_from_with_metadata("both", at, 0, 100, 0) == 0, "kept"
    with pytest.raises(TypeError):
        established.put_from_with_metadata("none", at, 0, 100, None)  # type: ignore[arg-type]
    # Together they are more than a number can say.
    most = (1 << 64) - 1
    assert established.put_from_with_metadata("most", at, before, most, most) == NO_SPACE
    assert established.batch_put_from_multi_buffers(["most"], [[at, at]], [[most, most]]) == [
        NO_SPACE
    ]
    assert established.batch_get_into_multi_buffers(["data"], [[at, at]], [[most, most]]) == [-800]
    assert established.get_size("both") == 107


@pytest.mark.parametrize("kind", ["put", "from", "parts", "batch"])
def test_an_upsert_without_room_keeps_the_old_value(established: Established, kind):
    large = np.zeros(80 * MIB, np.uint8)
    assert established.put("k", b"old") == 0
    calls = {
        "put": lambda: established.upsert("k", large),
        "from": lambda: established.upsert_from("k", large.ctypes.data, large.nbytes),
        "parts": lambda: established.upsert_parts("k", large, large),
        "batch": lambda: established.batch_upsert_from(["k"], [large.ctypes.data], [large.nbytes])[
            0
        ],
    }
    assert calls[kind]() == NO_SPACE
    assert established.get("k") == b"old"


def test_an_upsert_from_a_bad_address_keeps_the_old_value(established: Established, unmapped):
    assert established.put("k", b"old") == 0
    assert established.upsert_from("k", unmapped, 100) < 0
    assert established.get("k") == b"old"


def test_values_larger_than_the_local_buffer_go_through_every_call():
    store = Established()
    assert store.setup("localhost", "P2PHANDSHAKE", 64 * MIB, 4096, "tcp", "", "embedded") == 0
    value = np.random.default_rng(3).integers(0, 256, 3 * MIB, np.uint8)
    assert store.put("a", value) == 0
    assert store.put_batch(["b", "c"], [value, value]) == 0
    assert store.put_parts("d", value[:MIB], value[MIB:]) == 0
    for key in "abcd":
        assert store.get(key) == value.tobytes()
    assert [bytes(handle) for handle in store.batch_get_buffer(["a", "d"])] == [value.tobytes()] * 2
    store.close()


def test_the_same_key_twice_in_a_batch_is_done_twice_in_order(established: Established):
    """So the first wins where objects are kept, and the last where they are replaced."""
    first, second = np.full(10, 1, np.uint8), np.full(20, 2, np.uint8)
    at, sizes = [first.ctypes.data, second.ctypes.data], [10, 20]
    assert established.put_batch(["a", "a"], [first, second]) == 0
    assert established.get("a") == first.tobytes()
    assert established.batch_put_from(["b", "b"], at, sizes) == [0, 0]
    assert established.get("b") == first.tobytes()
    buffers = [[each] for each in at]
    lengths = [[each] for each in sizes]
    multi = established.batch_put_from_multi_buffers
    assert multi(["c", "c"], buffers, lengths) == [0, 0]
    assert established.get("c") == first.tobytes()
    assert established.upsert_batch(["d", "d"], [first, second]) == 0
    assert established.get("d") == second.tobytes()
    assert established.batch_upsert_from(["e", "e"], at, sizes) == [0, 0]
    assert established.get("e") == second.tobytes()
    assert established.get_batch(["e", "e"]) == [second.tobytes()] * 2
    assert established.batch_remove(["e", "e"], force=True) == [0, MISSING]
    assert established.batch_put_session_start(["f", "f"], [1, 1]) == [0, EXISTS]
    assert established.batch_put_session_revoke(["f"]) == [0]
