"""Cases in which upstream crashes or corrupts data, and ours returns an error or a result."""

from __future__ import annotations

import ctypes
import logging
import mmap

import numpy as np
import pytest
from conftest import MIB

import mooncake
from mooncake.store import MooncakeDistributedStore as CompatStore

INVALID, MISSING, EXISTS, NO_SPACE = -600, -704, -705, -200
libc = ctypes.CDLL(None)


@pytest.fixture
def unmapped():
    """The address of a mebibyte that is unmapped."""
    mapped = mmap.mmap(-1, MIB)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    mapped.close()
    return at


def bad_addresses(unmapped):
    return [0, 8, unmapped, 2**64 - 4096, 2**63]


def test_every_put_rejects_bad_addresses(compat_store: CompatStore, unmapped):
    good = np.ones(100, np.uint8)
    for at in bad_addresses(unmapped):
        assert compat_store.put_from("k", at, 100) < 0
        assert compat_store.upsert_from("k", at, 100) < 0
        assert compat_store.put_from_with_metadata("k", at, good.ctypes.data, 100, 10) < 0
        assert compat_store.put_from_with_metadata("k", good.ctypes.data, at, 100, 10) < 0
        assert compat_store.batch_put_from(["k"], [at], [100])[0] < 0
        multi = compat_store.batch_put_from_multi_buffers
        assert multi(["k"], [[good.ctypes.data, at]], [[10, 10]])[0] < 0
        assert compat_store.is_exist("k") == 0
        assert str(mooncake.last_error())
        assert compat_store.batch_put_session_start(["s"], [10]) == [0]
        write = compat_store.batch_put_from_multi_buffer_ranges
        assert write(["s"], [[at]], [[10]], [[0]])[0] < 0
        assert compat_store.batch_put_session_revoke(["s"])[0] in (0, INVALID)
    assert compat_store.put_from("k", good.ctypes.data, 100) == 0


def test_every_get_rejects_bad_addresses(compat_store: CompatStore, unmapped):
    assert compat_store.put("k", b"v" * 100) == 0
    assert compat_store.batch_get_session_start(["k"]) == [0]
    for at in bad_addresses(unmapped):
        assert compat_store.get_into("k", at, 100) < 0
        assert compat_store.batch_get_into(["k"], [at], [100])[0] < 0
        assert compat_store.batch_get_into_multi_buffers(["k"], [[at]], [[100]])[0] < 0
        read = compat_store.batch_get_into_multi_buffer_ranges
        assert read(["k"], [[at]], [[10]], [[0]])[0] < 0
        assert compat_store.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[9]]]) == [
            [[INVALID]]
        ]
        assert compat_store.register_buffer(at, 100) == INVALID
    # A reserved mapping without access rights can be registered, and fails when it is written.
    reserved = mmap.mmap(-1, 4096)
    at = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
    assert libc.mprotect(ctypes.c_void_p(at), 4096, 0) == 0
    assert compat_store.register_buffer(at, 100) == 0
    got = compat_store.get_into_ranges([at], [["k"]], [[[0]]], [[[0]]], [[[9]]])
    assert got[0][0][0] < 0
    assert compat_store.unregister_buffer(at) == 0
    assert compat_store.get("k") == b"v" * 100


def test_range_beyond_mapped_memory_fails(compat_store: CompatStore):
    mapped = mmap.mmap(-1, 2 * 4096)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert libc.mprotect(ctypes.c_void_p(at + 4096), 4096, 0) == 0
    assert compat_store.put_from("k", at, 2 * 4096) < 0
    assert compat_store.is_exist("k") == 0
    assert compat_store.put_from("k", at, 4096) == 0
    assert compat_store.get_into("k", at + 4096, 4096) < 0


def test_datetime_and_strided_arrays_are_stored(
    compat_store: CompatStore,
):
    times = np.arange(6).astype("datetime64[s]").reshape(2, 3)
    assert compat_store.put("times", times) == 0
    assert compat_store.get("times") == times.tobytes()
    assert compat_store.upsert_batch(["times", "b"], [times[:, ::2], b"b"]) == 0
    assert compat_store.get_batch(["times", "b"]) == [times[:, ::2].tobytes(), b"b"]
    gaps = np.arange(10, dtype=np.uint8)
    assert compat_store.put_parts("gaps", gaps[::2], b"x", gaps[::-1]) == 0
    assert compat_store.get("gaps") == gaps[::2].tobytes() + b"x" + gaps[::-1].tobytes()
    released = memoryview(b"gone")
    released.release()
    with pytest.raises(ValueError, match="released"):
        compat_store.put("gone", released)
    assert compat_store.is_exist("gone") == 0


def test_empty_puts_succeed_and_are_logged(compat_store: CompatStore, caplog):
    caplog.set_level(logging.INFO, "mooncake.store")
    at = np.ones(10, np.uint8).ctypes.data
    calls = [
        lambda: compat_store.put_from("key-of-nothing", at, 0),
        lambda: compat_store.put_from_with_metadata("key-of-nothing", at, at, 0, 5),
        lambda: compat_store.put_parts("key-of-nothing"),
        lambda: compat_store.put_parts("key-of-nothing", b"", b""),
        lambda: compat_store.upsert_parts("key-of-nothing", b""),
        lambda: compat_store.upsert_from("key-of-nothing", at, 0),
    ]
    for call in calls:
        caplog.clear()
        assert call() == 0
        assert "nothing was stored" in caplog.text
        assert "key-of-nothing" in caplog.text
    assert compat_store.get_size("key-of-nothing") == MISSING


def test_metadata_and_data_form_one_object(compat_store: CompatStore):
    data, metadata = np.arange(100, dtype=np.uint8), np.full(7, 9, np.uint8)
    at, before = data.ctypes.data, metadata.ctypes.data
    assert compat_store.put_from_with_metadata("both", at, before, 100, 7) == 0
    assert compat_store.get("both") == metadata.tobytes() + data.tobytes()
    assert compat_store.put_from_with_metadata("data", at, 0, 100, 0) == 0
    assert compat_store.get("data") == data.tobytes()
    assert compat_store.put_from_with_metadata("both", at, 0, 100, 0) == 0, "the old object is kept"
    with pytest.raises(TypeError):
        compat_store.put_from_with_metadata("none", at, 0, 100, None)  # type: ignore[arg-type]
    # The sum of the sizes overflows 64 bits.
    most = (1 << 64) - 1
    assert compat_store.put_from_with_metadata("most", at, before, most, most) == NO_SPACE
    assert compat_store.batch_put_from_multi_buffers(["most"], [[at, at]], [[most, most]]) == [
        NO_SPACE
    ]
    assert compat_store.batch_get_into_multi_buffers(["data"], [[at, at]], [[most, most]]) == [-800]
    assert compat_store.get_size("both") == 107


@pytest.mark.parametrize("kind", ["put", "from", "parts", "batch"])
def test_failed_upsert_keeps_the_old_value(compat_store: CompatStore, kind):
    large = np.zeros(80 * MIB, np.uint8)
    assert compat_store.put("k", b"old") == 0
    calls = {
        "put": lambda: compat_store.upsert("k", large),
        "from": lambda: compat_store.upsert_from("k", large.ctypes.data, large.nbytes),
        "parts": lambda: compat_store.upsert_parts("k", large, large),
        "batch": lambda: compat_store.batch_upsert_from(["k"], [large.ctypes.data], [large.nbytes])[
            0
        ],
    }
    assert calls[kind]() == NO_SPACE
    assert compat_store.get("k") == b"old"


def test_upsert_from_bad_address_keeps_the_old_value(compat_store: CompatStore, unmapped):
    assert compat_store.put("k", b"old") == 0
    assert compat_store.upsert_from("k", unmapped, 100) < 0
    assert compat_store.get("k") == b"old"


def test_calls_accept_values_above_local_buffer():
    store = CompatStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 64 * MIB, 4096, "tcp", "", "embedded") == 0
    value = np.random.default_rng(3).integers(0, 256, 3 * MIB, np.uint8)
    assert store.put("a", value) == 0
    assert store.put_batch(["b", "c"], [value, value]) == 0
    assert store.put_parts("d", value[:MIB], value[MIB:]) == 0
    for key in "abcd":
        assert store.get(key) == value.tobytes()
    assert [bytes(handle) for handle in store.batch_get_buffer(["a", "d"])] == [value.tobytes()] * 2
    store.close()


def test_duplicate_keys_are_processed_in_order(compat_store: CompatStore):
    """The first value wins in puts, and the last in upserts."""
    first, second = np.full(10, 1, np.uint8), np.full(20, 2, np.uint8)
    at, sizes = [first.ctypes.data, second.ctypes.data], [10, 20]
    assert compat_store.put_batch(["a", "a"], [first, second]) == 0
    assert compat_store.get("a") == first.tobytes()
    assert compat_store.batch_put_from(["b", "b"], at, sizes) == [0, 0]
    assert compat_store.get("b") == first.tobytes()
    buffers = [[each] for each in at]
    lengths = [[each] for each in sizes]
    multi = compat_store.batch_put_from_multi_buffers
    assert multi(["c", "c"], buffers, lengths) == [0, 0]
    assert compat_store.get("c") == first.tobytes()
    assert compat_store.upsert_batch(["d", "d"], [first, second]) == 0
    assert compat_store.get("d") == second.tobytes()
    assert compat_store.batch_upsert_from(["e", "e"], at, sizes) == [0, 0]
    assert compat_store.get("e") == second.tobytes()
    assert compat_store.get_batch(["e", "e"]) == [second.tobytes()] * 2
    assert compat_store.batch_remove(["e", "e"], force=True) == [0, MISSING]
    assert compat_store.batch_put_session_start(["f", "f"], [1, 1]) == [0, EXISTS]
    assert compat_store.batch_put_session_revoke(["f"]) == [0]
