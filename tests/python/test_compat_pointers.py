"""Upstream's calls that take addresses: valid and invalid input."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

import mooncake
from mooncake.store import MooncakeDistributedStore as CompatStore, ReplicateConfig

INVALID, MISSING, TRANSFER = -600, -704, -800


def filled(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def test_put_from_and_get_into_round_trip(compat_store: CompatStore):
    source, target = filled(1 << 20), np.zeros(1 << 20, np.uint8)
    assert compat_store.register_buffer(source.ctypes.data, source.nbytes) == 0
    assert compat_store.register_buffer(target.ctypes.data, target.nbytes) == 0
    assert compat_store.put_from("k", source.ctypes.data, source.nbytes) == 0
    assert compat_store.get_into("k", target.ctypes.data, target.nbytes) == source.nbytes
    assert np.array_equal(source, target)
    assert compat_store.unregister_buffer(source.ctypes.data) == 0
    assert compat_store.unregister_buffer(target.ctypes.data) == 0


def test_unregistered_memory_is_accepted(compat_store: CompatStore):
    source, target = filled(1000), np.zeros(1000, np.uint8)
    assert compat_store.put_from("k", source.ctypes.data, 1000) == 0
    assert compat_store.get_into("k", target.ctypes.data, 1000) == 1000
    assert np.array_equal(source, target)


def test_registering_needs_a_mapping(compat_store: CompatStore):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    length, no_rights = 64 << 20, 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    at = libc.mmap(None, length, no_rights, flags, -1, 0)
    assert at != 2**64 - 1, ctypes.get_errno()
    assert compat_store.register_buffer(at, length) == 0
    assert compat_store.unregister_buffer(at) == 0
    # Addresses at which no process has memory: the first page and non-canonical addresses.
    for nowhere in (8, 1 << 62, 2**64 - 4096):
        assert compat_store.register_buffer(nowhere, 100) == INVALID
        assert "nothing is mapped at this address" in str(mooncake.last_error())
        assert compat_store.unregister_buffer(nowhere) == INVALID
    # A mapping at one end of the range is enough; the rest may be mapped later.
    half = length // 2
    assert libc.munmap(ctypes.c_void_p(at + half), ctypes.c_size_t(half)) == 0
    assert compat_store.register_buffer(at, length) == 0
    assert compat_store.unregister_buffer(at) == 0
    assert libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(half)) == 0


def test_rejects_invalid_registrations(compat_store: CompatStore):
    memory = filled(8192)
    at = memory.ctypes.data
    assert compat_store.register_buffer(0, 10) == INVALID
    assert compat_store.register_buffer(at, 0) == INVALID
    assert compat_store.register_buffer(at, 4096) == 0
    assert compat_store.register_buffer(at, 4096) == INVALID
    assert compat_store.register_buffer(at + 100, 4096) == INVALID
    assert compat_store.unregister_buffer(at + 100) == INVALID
    assert compat_store.unregister_buffer(at) == 0
    assert compat_store.unregister_buffer(at) == INVALID
    with pytest.raises(TypeError):
        compat_store.register_buffer(-1, 10)
    with pytest.raises(TypeError):
        compat_store.register_buffer("x", 10)  # type: ignore[arg-type]


def test_empty_put_from_stores_nothing(compat_store: CompatStore):
    assert compat_store.put_from("k", 4096, 0) == 0
    assert compat_store.upsert_from("k", 4096, 0) == 0
    assert compat_store.is_exist("k") == 0


def test_put_from_keeps_and_upsert_from_replaces(compat_store: CompatStore):
    first, second = filled(100, 1), filled(50, 2)
    assert compat_store.put_from("k", first.ctypes.data, 100) == 0
    assert compat_store.put_from("k", second.ctypes.data, 50, ReplicateConfig()) == 0
    assert compat_store.get("k") == first.tobytes()
    assert compat_store.upsert_from("k", second.ctypes.data, 50) == 0
    assert compat_store.get("k") == second.tobytes()


def test_bad_address_fails_without_a_crash(compat_store: CompatStore):
    assert compat_store.put("k", b"0123456789") == 0
    for address in (0, 4096, 2**47 + 4096):
        assert compat_store.put_from("bad", address, 4096) < 0
        assert compat_store.is_exist("bad") == 0
        assert compat_store.get_into("k", address, 4096) < 0
    assert compat_store.get("k") == b"0123456789"
    with pytest.raises(TypeError):
        compat_store.put_from("k", -8, 8)


def test_read_only_memory_fails_without_a_crash(compat_store: CompatStore):
    import ctypes
    import mmap

    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ) == 0
    assert compat_store.put("k", b"0123456789") == 0
    assert compat_store.get_into("k", address, 4096) < 0
    assert libc.mprotect(ctypes.c_void_p(address), 4096, mmap.PROT_READ | mmap.PROT_WRITE) == 0


def test_get_into_needs_space_for_the_whole_object(compat_store: CompatStore):
    target = np.zeros(20, np.uint8)
    at = target.ctypes.data
    assert compat_store.put("k", b"0123456789") == 0
    assert compat_store.get_into("k", at, 20) == 10
    assert target[:10].tobytes() == b"0123456789"
    assert compat_store.get_into("k", at, 10) == 10
    assert compat_store.get_into("k", at, 9) == INVALID
    assert compat_store.get_into("k", at, 0) == INVALID
    assert compat_store.get_into("nope", at, 20) == MISSING


def test_batch_returns_a_code_per_item(compat_store: CompatStore):
    source, target = filled(300), np.zeros(300, np.uint8)
    at, to = source.ctypes.data, target.ctypes.data
    keys = ["a", "b", "", "d"]
    sizes = [100, 0, 100, 100]
    codes = compat_store.batch_put_from(keys, [at, at + 100, at, at + 200], sizes)
    assert codes == [0, INVALID, INVALID, 0]
    got = compat_store.batch_get_into(
        ["a", "nope", "d", "d"], [to, to, to + 100, to], [100] * 3 + [9]
    )
    assert got == [100, MISSING, 100, INVALID]
    assert target[:100].tobytes() == source[:100].tobytes()
    assert target[100:200].tobytes() == source[200:].tobytes()
    for code in (*codes, *got):
        assert type(code) is int


def test_lists_of_different_length_fail_as_a_whole(compat_store: CompatStore):
    assert compat_store.batch_put_from(["a", "b"], [4096], [1, 1]) == [INVALID] * 2
    assert compat_store.batch_upsert_from(["a"], [4096], []) == [INVALID]
    assert compat_store.batch_get_into(["a", "b"], [4096, 4096], [1]) == [INVALID] * 2
    assert compat_store.batch_put_from_multi_buffers(["a"], [], []) == [INVALID]
    assert compat_store.batch_get_into_multi_buffers(["a"], [[1]], []) == [INVALID]
    assert compat_store.batch_get_into([], [], []) == []
    with pytest.raises(TypeError):
        compat_store.batch_put_from(["a"], {4096}, [1])  # type: ignore[arg-type]


def test_batch_upsert_from_replaces(compat_store: CompatStore):
    first, second = filled(64, 1), filled(64, 2)
    for source in (first, second):
        assert compat_store.batch_upsert_from(["k"], [source.ctypes.data], [64]) == [0]
    assert compat_store.get("k") == second.tobytes()


def test_several_buffers_form_one_object(compat_store: CompatStore):
    source = filled(100)
    at = source.ctypes.data
    keys = ["joined", "uneven", "none"]
    codes = compat_store.batch_put_from_multi_buffers(
        keys, [[at, at + 50], [at], []], [[10, 20], [1, 2], []]
    )
    assert codes == [0, INVALID, INVALID]
    assert compat_store.get("joined") == source[:10].tobytes() + source[50:70].tobytes()


def test_object_is_scattered_over_buffers(compat_store: CompatStore):
    target = np.zeros(30, np.uint8)
    to = target.ctypes.data
    assert compat_store.put("k", b"0123456789") == 0
    read = compat_store.batch_get_into_multi_buffers
    assert read(["k"], [[to, to + 20]], [[4, 6]]) == [10]
    assert target[:4].tobytes() + target[20:26].tobytes() == b"0123456789"
    assert read(["k"], [[to, to + 20]], [[4, 5]]) == [INVALID]
    assert read(["k"], [[to, to + 20]], [[4, 7]]) == [TRANSFER]
    assert read(["nope"], [[to]], [[10]], True) == [MISSING]


def test_same_node_preference_needs_multi_buffer_put(compat_store: CompatStore):
    source = filled(10)
    config = ReplicateConfig()
    config.prefer_alloc_in_same_node = True
    put = compat_store.batch_put_from_multi_buffers
    assert put(["k"], [[source.ctypes.data]], [[10]], config) == [0]
    assert compat_store.batch_put_from(["l"], [source.ctypes.data], [10], config) == [INVALID]
    config.replica_num = 2
    assert put(["m"], [[source.ctypes.data]], [[10]], config) == [INVALID]


def test_large_batch_succeeds(compat_store: CompatStore):
    count = 5000
    source, target = filled(count * 8), np.zeros(count * 8, np.uint8)
    keys = [f"key-{i}" for i in range(count)]
    at = [source.ctypes.data + 8 * i for i in range(count)]
    to = [target.ctypes.data + 8 * i for i in range(count)]
    assert compat_store.batch_put_from(keys, at, [8] * count) == [0] * count
    assert compat_store.batch_is_exist(keys) == [1] * count
    assert compat_store.batch_get_into(keys, to, [8] * count) == [8] * count
    assert np.array_equal(source, target)
