"""Upstream's calls that copy and query objects: valid and invalid input."""

from __future__ import annotations

import inspect
import time

import numpy as np
import pytest

import mooncake
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore as CompatStore, ReplicateConfig

INVALID, MISSING, LEASED, NO_SPACE = -600, -704, -706, -200


def config(**fields):
    made = ReplicateConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_put_keeps_and_upsert_replaces(compat_store: CompatStore):
    assert compat_store.put("k", b"first") == 0
    assert compat_store.put("k", b"second") == 0
    assert compat_store.get("k") == b"first"
    assert compat_store.upsert("k", b"another, longer") == 0
    assert compat_store.get("k") == b"another, longer"


def test_str_and_bytes_keys_are_equivalent(compat_store: CompatStore):
    for key in ("k", "a\0b", "ключ", "x" * 10_000):
        assert compat_store.put(key, key.encode()) == 0
        assert compat_store.get(key.encode()) == key.encode()
    assert compat_store.put(b"\xff\xfe", b"raw") == 0
    assert compat_store.get(b"\xff\xfe") == b"raw"


def test_rejects_empty_keys_and_values(compat_store: CompatStore):
    assert compat_store.put("", b"v") == INVALID
    assert compat_store.upsert("", b"v") == INVALID
    assert compat_store.put("k", b"") == INVALID
    assert compat_store.put_from("", 4096, 8) == INVALID
    assert compat_store.get("") == b""
    assert compat_store.is_exist("") == 0
    assert compat_store.get_size("") == MISSING
    assert compat_store.remove("") == MISSING
    assert compat_store.get_into("", 4096, 8) == MISSING


def test_empty_upsert_keeps_the_old_value(compat_store: CompatStore):
    assert compat_store.put("k", b"old") == 0
    assert compat_store.upsert("k", b"") == INVALID
    assert compat_store.get("k") == b"old"


@pytest.mark.parametrize("wrong", [1, 1.5, None, ["k"]])
def test_wrong_key_type_raises(compat_store: CompatStore, wrong):
    for call in (
        compat_store.get,
        compat_store.is_exist,
        compat_store.get_size,
        compat_store.remove,
    ):
        with pytest.raises(TypeError):
            call(wrong)
    with pytest.raises(TypeError):
        compat_store.put(wrong, b"v")


@pytest.mark.parametrize("wrong", ["text", 1, None, [], [b"a", b"b"], (b"a",)])
def test_value_without_buffer_raises(compat_store: CompatStore, wrong):
    for call in (compat_store.put, compat_store.upsert):
        with pytest.raises(TypeError):
            call("k", wrong)
    assert compat_store.is_exist("k") == 0


def test_config_is_none_or_replicate_config(compat_store: CompatStore):
    assert compat_store.put("k", b"v", None) == 0
    assert compat_store.put("l", b"v", config=None) == 0
    with pytest.raises(TypeError, match="ReplicateConfig"):
        compat_store.put("m", b"v", {"replica_num": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int32", "float64", "uint8", "complex64", "bool", "float16"])
def test_arrays_of_any_dtype_are_stored(compat_store: CompatStore, kind):
    array = np.arange(24).reshape(4, 6).astype(kind)
    assert compat_store.put("a", array) == 0
    assert compat_store.get_size("a") == array.nbytes
    assert np.array_equal(np.frombuffer(compat_store.get("a"), kind).reshape(4, 6), array)


def test_strided_array_is_stored_contiguously(compat_store: CompatStore):
    array = np.arange(100, dtype=np.int32)[::3]
    assert compat_store.put("a", array) == 0
    assert compat_store.get("a") == array.tobytes()
    transposed = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert compat_store.put_batch(["b", "c"], [transposed, b"x"]) == 0
    assert compat_store.get("b") == transposed.tobytes()


def test_bytes_like_objects_are_values(compat_store: CompatStore):
    for i, value in enumerate([b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]]):
        assert compat_store.put(f"k{i}", value) == 0
        assert compat_store.get(f"k{i}") == b"abc"


def test_put_batch_stores_all_or_fails(compat_store: CompatStore):
    assert compat_store.put_batch(["a", "b"], [b"1", b"2"]) == 0
    assert compat_store.get_batch(["a", "nope", "b"]) == [b"1", b"", b"2"]
    assert compat_store.put_batch(("c",), (b"3",)) == 0
    assert compat_store.put_batch([], []) == 0
    assert compat_store.put_batch(["x", "y"], [b"1"]) == INVALID
    assert compat_store.put_batch(["x", "y"], [b"1", b""]) == INVALID
    assert compat_store.get("x") == b""
    assert compat_store.put_batch(["a", "d"], [b"new", b"4"]) == 0
    assert compat_store.get_batch(["a", "d"]) == [b"1", b"4"]
    assert compat_store.put_batch(["twice", "twice"], [b"first", b"second"]) == 0
    assert compat_store.get("twice") == b"first"


def test_upsert_batch_replaces(compat_store: CompatStore):
    assert compat_store.upsert_batch(["a", "b"], [b"1", b"2"]) == 0
    assert compat_store.upsert_batch(["a", "b"], [b"11", b"22"]) == 0
    assert compat_store.get_batch(["a", "b"]) == [b"11", b"22"]
    assert compat_store.upsert_batch([], []) == 0
    assert compat_store.upsert_batch(["a"], []) == INVALID


def test_get_batch_without_keys_is_one_empty_value(compat_store: CompatStore):
    assert compat_store.get_batch([]) == [b""]
    assert compat_store.batch_get_buffer([]) == []
    assert compat_store.batch_is_exist([]) == []
    assert compat_store.batch_remove([]) == []


def test_lists_must_be_sequences(compat_store: CompatStore):
    compat_store.put("k", b"v")
    assert compat_store.batch_is_exist(("k", "l")) == [1, 0]
    for wrong in ({"k"}, (key for key in "k"), "k"):
        with pytest.raises(TypeError):
            compat_store.batch_is_exist(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            compat_store.put_batch(["m"], wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            compat_store.create_copy_task("k", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        compat_store.put_batch(["m"], {b"v"})  # type: ignore[arg-type]
    assert compat_store.is_exist("m") == 0


def test_put_parts_joins_parts(compat_store: CompatStore):
    assert compat_store.put_parts("k", b"Hello, ", bytearray(b""), memoryview(b"World!")) == 0
    assert compat_store.get("k") == b"Hello, World!"
    assert compat_store.upsert_parts("k", b"Good", b"bye") == 0
    assert compat_store.get("k") == b"Goodbye"
    assert compat_store.put_parts("none") == 0
    assert compat_store.put_parts("none", b"", b"") == 0
    assert compat_store.is_exist("none") == 0
    assert compat_store.upsert_parts("k", b"") == 0
    assert compat_store.get("k") == b"Goodbye"
    assert compat_store.put_parts("c", b"a", config=ReplicateConfig()) == 0


def test_put_parts_rejects_non_bytes(compat_store: CompatStore):
    with pytest.raises(TypeError):
        compat_store.put_parts("k", "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        compat_store.put_parts("k", b"a", ReplicateConfig())  # type: ignore[arg-type]
    for wrong in (np.zeros(3, np.int32), np.zeros((2, 2), np.uint8)):
        with pytest.raises(RuntimeError, match="parts must be 1-D bytes-like"):
            compat_store.put_parts("k", b"a", wrong)


def test_buffer_handle_owns_writable_memory(compat_store: CompatStore):
    assert compat_store.put("k", b"abcd") == 0
    handle = compat_store.get_buffer("k")
    assert handle is not None
    assert (len(handle), handle.size()) == (4, 4)
    assert bool(handle)
    view = memoryview(handle)
    assert (view.format, view.ndim, view.readonly) == ("b", 1, False)
    array = np.asarray(handle)
    assert array.dtype == np.int8
    assert array.ctypes.data == handle.ptr()
    array[0] = ord("x")
    assert bytes(handle) == b"xbcd"
    assert compat_store.get("k") == b"abcd", "the handle is a private copy"
    assert compat_store.upsert("k", b"other") == 0
    assert compat_store.close() == 0
    del handle
    assert bytes(view) == b"xbcd", "the view outlives the store and the handle"


def test_batch_get_buffer_returns_none_for_missing_keys(compat_store: CompatStore):
    assert compat_store.put("k", b"v") == 0
    first, missing = compat_store.batch_get_buffer(["k", "nope"])
    assert first is not None
    assert bytes(first) == b"v"
    assert missing is None
    assert compat_store.get_buffer("nope") is None


def test_existence_and_size_are_reported(compat_store: CompatStore):
    assert compat_store.put("k", b"12345") == 0
    assert compat_store.is_exist("k") == 1
    assert compat_store.is_exist("nope") == 0
    assert compat_store.batch_is_exist(["k", "nope", "k"]) == [1, 0, 1]
    assert compat_store.get_size("k") == 5
    assert compat_store.get_size("nope") == MISSING
    for number in (*compat_store.batch_is_exist(["k", "nope"]), compat_store.get_size("k")):
        assert type(number) is int


def test_remove_respects_the_lease_unless_forced(compat_store: CompatStore):
    assert compat_store.put("k", b"v") == 0
    assert compat_store.put("l", b"v") == 0
    assert compat_store.remove("l") == 0, "a put grants no lease"
    assert compat_store.get("k") == b"v"
    assert compat_store.remove("k") == LEASED
    assert compat_store.remove_all() == 0
    assert compat_store.remove_by_regex("k") == 0
    assert compat_store.remove("k", True) == 0
    assert compat_store.remove("k") == MISSING


def test_batch_remove_returns_a_code_per_key(compat_store: CompatStore):
    compat_store.put_batch(["a", "b"], [b"1", b"2"])
    assert compat_store.batch_remove(["a", "nope", "", "a"]) == [0, MISSING, MISSING, MISSING]
    compat_store.get("b")
    assert compat_store.batch_remove(keys=["b"]) == [LEASED]
    assert compat_store.batch_remove(["b"], force=True) == [0]


def test_remove_by_regex_counts_matches(compat_store: CompatStore):
    compat_store.put_batch(["session_1", "session_2", "other"], [b"1", b"2", b"3"])
    assert compat_store.remove_by_regex("^session_") == 2
    assert compat_store.remove_by_regex(regex="o.her") == 1
    assert compat_store.remove_by_regex(regex_pattern="nothing") == 0
    assert compat_store.remove_by_regex("(") == INVALID
    with pytest.raises(TypeError):
        compat_store.remove_by_regex()


def test_remove_all_returns_the_count(compat_store: CompatStore):
    compat_store.put_batch(["a", "b", "c"], [b"1", b"2", b"3"])
    compat_store.is_exist("a")
    assert compat_store.remove_all() == 2
    assert compat_store.remove_all(force=1) == 1  # upstream accepts 1 for True
    with pytest.raises(TypeError, match="force"):
        compat_store.remove_all(force="yes")
    assert compat_store.remove_all() == 0


def test_rejects_object_larger_than_the_pool(compat_store: CompatStore):
    assert compat_store.put("k", bytes(65 << 20)) == NO_SPACE
    error = mooncake.last_error()
    assert isinstance(error, mooncake.NoSpaceError)
    assert error.remedy


def test_put_fails_without_any_segment():
    store = CompatStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "embedded") == 0
    assert store.put("k", b"v") == NO_SPACE
    store.close()


def test_stores_objects_larger_than_local_buffer(compat_store: CompatStore):
    value = np.random.default_rng(1).bytes(20 << 20)
    assert compat_store.put("k", value) == 0
    assert compat_store.get("k") == value


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"replica_num": 3}, 0),
        ({"replica_num": 0}, INVALID),
        ({"with_hard_pin": True}, 0),
        ({"with_soft_pin": True}, 0),
        ({"soft_pin_ttl_ms": 5}, INVALID),
        ({"preferred_segment": "unknown:1"}, 0),
        ({"preferred_segments": ["unknown:1"]}, 0),
        ({"prefer_alloc_in_same_node": True}, INVALID),
        ({"group_ids": ["g"]}, 0),
        ({"group_ids": ["g", "h"]}, INVALID),
        ({"group_ids": []}, INVALID),
        ({"dfs_replica_num": 1}, -1601),
        ({"dfs_replica_num": 2}, INVALID),
        ({"nof_replica_num": 1}, INVALID),
    ],
)
def test_config_values_are_validated_by_put(compat_store: CompatStore, fields, code):
    assert compat_store.put("k", b"v", config(**fields)) == code
    assert compat_store.is_exist("k") == int(code == 0)


def test_last_error_is_per_thread(compat_store: CompatStore):
    import threading

    assert compat_store.get_size("missing-one") == MISSING
    error = mooncake.last_error()
    assert isinstance(error, mooncake.NotFoundError)
    assert isinstance(error, KeyError)
    assert (error.code, error.code_name) == (MISSING, "OBJECT_NOT_FOUND")
    assert "missing-one" in str(error)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(mooncake.last_error()))
    thread.start()
    thread.join()
    assert seen == [None]


def test_lease_expires(master):
    store = CompatStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", master.address) == 0
    try:
        assert store.put("k", b"v") == 0
        assert store.get("k") == b"v"
        assert store.remove("k") == LEASED
        deadline = time.monotonic() + 30
        while (code := store.remove("k")) == LEASED and time.monotonic() < deadline:
            time.sleep(0.02)
        assert code == 0
    finally:
        store.close()


def test_errors_name_the_public_class(compat_store: CompatStore):
    wrong = [
        ("put", lambda: compat_store.put("k", b"v", cfg=1)),  # type: ignore[call-arg]
        ("remove_by_regex", lambda: compat_store.remove_by_regex(pat="x")),  # type: ignore[call-arg]
        ("mount_segment", lambda: compat_store.mount_segment()),  # type: ignore[call-arg]
    ]
    for name, call in wrong:
        with pytest.raises(TypeError, match=rf"^MooncakeDistributedStore\.{name}\(\) "):
            call()
    for kind in (CompatStore, TransferEngine):
        for name, call in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("__"):
                assert call.__qualname__ == f"{kind.__name__}.{name}"


def test_non_integer_address_raises_type_error(compat_store: CompatStore):
    for wrong in (np.zeros(4, np.uint8), b"abc", 1.5, "x", None):
        with pytest.raises(TypeError, match=f"are integers.*, not {type(wrong).__name__}"):
            compat_store.put_from("k", wrong, 4)  # type: ignore[arg-type]
    assert compat_store.put_from("k", np.uint64(8), 4) < 0, "an integer of numpy is accepted"


def test_keys_without_a_list_raise_type_error(compat_store: CompatStore):
    for wrong in ("key", {"key": 1}, {"key"}):
        with pytest.raises(TypeError, match=f"a list of str or bytes, not {type(wrong).__name__}"):
            compat_store.batch_is_exist(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of str or bytes, not str"):
        compat_store.get_batch("key")  # type: ignore[arg-type]
    assert compat_store.batch_is_exist(("a", b"b")) == [0, 0], "any sequence is accepted"
