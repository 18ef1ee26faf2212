"""Other names of `mooncake.store`: embedding tables (Engram), C allocators, NVMe-oF."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
from conftest import set_up

from mooncake import store as module
from mooncake.store import (
    BufferPool,
    EngramStore,
    EngramStoreConfig,
    MooncakeDistributedNoFRegister,
    MooncakeDistributedStore,
    get_alloc_func_addr,
    get_free_func_addr,
)


def layer(store: object, sizes: tuple[int, ...] = (4, 6), dim: int = 3) -> EngramStore:
    config = EngramStoreConfig()
    config.table_vocab_sizes = list(sizes)
    config.embedding_dim = dim
    return EngramStore(7, config, store)


def tables(*sizes: int, dim: int = 3) -> list[np.ndarray]:
    return [
        (100 * head + np.arange(rows * dim, dtype=np.float32)).reshape(rows, dim)
        for head, rows in enumerate(sizes)
    ]


def test_engram_looks_up_rows_by_head(compat_store):
    engram = layer(compat_store)
    assert engram.get_store_keys() == ["engram:l7:h0", "engram:l7:h1"]
    assert (engram.get_num_heads(), engram.get_embedding_dim()) == (2, 3)
    assert engram.get_table_vocab_sizes() == [4, 6]
    stored = tables(4, 6)
    assert engram.populate(stored) is None
    ids = np.array([[[0, 5], [3, 0], [0, 0]], [[1, 1], [2, 2], [3, 3]]])
    expected = np.stack([stored[head][ids[:, :, head]] for head in range(2)], axis=2)
    for form in (ids, ids.tolist(), ids.astype(np.int32), ids.astype(np.uint8)):
        found = engram.lookup(form)
        assert found.dtype == np.float32
        assert np.array_equal(found, expected)
    assert engram.lookup(np.empty((0, 5, 2), np.int64)).shape == (0, 5, 2, 3)
    assert compat_store.get("engram:l7:h1") == stored[1].tobytes()
    with pytest.raises(RuntimeError, match=r"remove_from_store failed, rc=-706"):
        engram.remove_from_store()
    assert engram.remove_from_store(force=True) == 2
    assert engram.remove_from_store() == 0


def test_engram_tables_are_stored_atomically(compat_store):
    engram = layer(compat_store)
    for wrong, text in [
        (tables(4), "must match num_heads"),
        (tables(4, 5), "populate failed"),
        ([each.astype(np.float64) for each in tables(4, 6)], "populate failed"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            engram.populate(wrong)
        assert compat_store.batch_is_exist(engram.get_store_keys()) == [0, 0]
    assert compat_store.put("engram:l7:h1", b"in the way") == 0
    with pytest.raises(RuntimeError, match="'engram:l7:h1' is there already"):
        engram.populate(tables(4, 6))
    assert compat_store.batch_is_exist(engram.get_store_keys()) == [0, 1]
    assert compat_store.get("engram:l7:h1") == b"in the way"


def test_engram_rejects_invalid_lookups(compat_store):
    engram = layer(compat_store)
    ids = np.zeros((1, 1, 2), np.int64)
    with pytest.raises(RuntimeError, match="lookup failed"):
        engram.lookup(ids)
    engram.populate(tables(4, 6))
    for wrong, text in [
        (np.array([[0, 1]]), r"shape \[B, L, H\]"),
        (np.zeros((1, 1, 3), np.int64), "must match num_heads"),
        (np.array([[[0, 6]]]), "lookup failed"),
        (np.array([[[-1, 0]]]), "lookup failed"),
        (np.array([[[0.5, 0]]]), "lookup failed"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            engram.lookup(wrong)


def test_engram_needs_a_shape_and_a_store():
    for sizes, dim in [((), 3), ((0,), 3), ((4,), 0)]:
        with pytest.raises(ValueError, match="EngramStoreConfig"):
            layer(None, sizes, dim)
    alone = layer(None)
    with pytest.raises(RuntimeError, match="populate failed"):
        alone.populate(tables(4, 6))
    with pytest.raises(RuntimeError, match="lookup failed"):
        alone.lookup(np.zeros((1, 1, 2), np.int64))
    with pytest.raises(RuntimeError, match="rc=-600"):
        alone.remove_from_store()
    with pytest.raises(RuntimeError, match="not initialized"):
        layer(MooncakeDistributedStore())


def test_c_allocator_functions_work(compat_store):
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
        get_alloc_func_addr()
    )
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
        get_free_func_addr()
    )
    at = allocate(100_000, 0, None)
    assert at
    assert at % os.sysconf("SC_PAGE_SIZE") == 0
    assert ctypes.string_at(at, 100_000) == bytes(100_000)
    ctypes.memset(at, 5, 100_000)
    assert compat_store.register_buffer(at, 100_000) == 0
    assert compat_store.put_from("k", at, 100_000) == 0
    assert compat_store.unregister_buffer(at) == 0
    assert compat_store.get("k") == b"\5" * 100_000
    free(at, 100_000, 0, None)
    assert compat_store.put_from("gone", at, 100_000) == -600, "the memory is unmapped"
    # Freeing memory twice, or memory that was never allocated, has no effect.
    free(at, 100_000, 0, None)
    free(None, 0, 0, None)
    for impossible in (0, -1, 1 << 60):
        assert allocate(impossible, 0, None) is None


def test_nvme_targets_are_unsupported():
    register = MooncakeDistributedNoFRegister()
    assert register.real_register("127.0.0.1:1", 1, "e", 2, 3, 4, "n") == -1012
    assert register.real_unregister_by_endpoint("127.0.0.1:1", 1, "e", 2, "n") == -1012


def test_wrapper_exposes_its_store():
    class Wrapper:
        def __init__(self, store: MooncakeDistributedStore) -> None:
            self.store = store

        def _get_pyclient_capsule(self) -> object:
            return self.store._get_pyclient_capsule()

    store = MooncakeDistributedStore()
    assert module._get_pyclient_from_wrapper(store) is None
    assert set_up(store, "embedded") == 0
    passed = module._get_pyclient_from_wrapper(Wrapper(store))
    assert passed is module._get_pyclient_from_wrapper(store)
    assert passed is not None
    with BufferPool(Wrapper(store)).acquire(10) as lease:
        assert lease.size == 10
    for wrong in (None, 3):
        with pytest.raises(TypeError):
            module._get_pyclient_from_wrapper(wrong)
    assert store.close() == 0
