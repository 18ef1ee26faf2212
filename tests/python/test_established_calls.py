"""The copying and looking calls by the established names: right and wrong input."""

from __future__ import annotations

import inspect
import time

import numpy as np
import pytest

import mooncake
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore as Established, ReplicateConfig

INVALID, MISSING, LEASED, NO_SPACE = -600, -704, -706, -200


def config(**fields):
    made = ReplicateConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_put_keeps_an_object_that_is_there_and_upsert_replaces_it(established: Established):
    assert established.put("k", b"first") == 0
    assert established.put("k", b"second") == 0
    assert established.get("k") == b"first"
    assert established.upsert("k", b"another, longer") == 0
    assert established.get("k") == b"another, longer"


def test_text_and_bytes_name_the_same_object_and_any_bytes_are_a_key(established: Established):
    for key in ("k", "a\0b", "ключ", "x" * 10_000):
        assert established.put(key, key.encode()) == 0
        assert established.get(key.encode()) == key.encode()
    assert established.put(b"\xff\xfe", b"raw") == 0
    assert established.get(b"\xff\xfe") == b"raw"


def test_an_empty_key_or_value_is_refused(established: Established):
    assert established.put("", b"v") == INVALID
    assert established.upsert("", b"v") == INVALID
    assert established.put("k", b"") == INVALID
    assert established.put_from("", 4096, 8) == INVALID
    assert established.get("") == b""
    assert established.is_exist("") == 0
    assert established.get_size("") == MISSING
    assert established.remove("") == MISSING
    assert established.get_into("", 4096, 8) == MISSING


def test_an_empty_upsert_leaves_the_old_value(established: Established):
    assert established.put("k", b"old") == 0
    assert established.upsert("k", b"") == INVALID
    assert established.get("k") == b"old"


@pytest.mark.parametrize("wrong", [1, 1.5, None, ["k"]])
def test_a_key_of_a_wrong_type_raises(established: Established, wrong):
    for call in (established.get, established.is_exist, established.get_size, established.remove):
        with pytest.raises(TypeError):
            call(wrong)
    with pytest.raises(TypeError):
        established.put(wrong, b"v")


@pytest.mark.parametrize("wrong", ["text", 1, None, [], [b"a", b"b"], (b"a",)])
def test_a_value_without_bytes_raises(established: Established, wrong):
    for call in (established.put, established.upsert):
        with pytest.raises(TypeError):
            call("k", wrong)
    assert established.is_exist("k") == 0


def test_a_config_may_be_none_but_nothing_else(established: Established):
    assert established.put("k", b"v", None) == 0
    assert established.put("l", b"v", config=None) == 0
    with pytest.raises(TypeError, match="ReplicateConfig"):
        established.put("m", b"v", {"replica_num": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int32", "float64", "uint8", "complex64", "bool", "float16"])
def test_an_array_of_any_kind_is_stored_whole(established: Established, kind):
    array = np.arange(24).reshape(4, 6).astype(kind)
    assert established.put("a", array) == 0
    assert established.get_size("a") == array.nbytes
    assert np.array_equal(np.frombuffer(established.get("a"), kind).reshape(4, 6), array)


def test_an_array_with_gaps_is_stored_as_its_elements(established: Established):
    array = np.arange(100, dtype=np.int32)[::3]
    assert established.put("a", array) == 0
    assert established.get("a") == array.tobytes()
    transposed = np.arange(6, dtype=np.int16).reshape(2, 3).T
    assert established.put_batch(["b", "c"], [transposed, b"x"]) == 0
    assert established.get("b") == transposed.tobytes()


def test_any_bytes_like_object_is_a_value(established: Established):
    for i, value in enumerate([b"abc", bytearray(b"abc"), memoryview(b"xabcx")[1:4]]):
        assert established.put(f"k{i}", value) == 0
        assert established.get(f"k{i}") == b"abc"


def test_put_batch_stores_all_or_says_why_not(established: Established):
    assert established.put_batch(["a", "b"], [b"1", b"2"]) == 0
    assert established.get_batch(["a", "nope", "b"]) == [b"1", b"", b"2"]
    assert established.put_batch(("c",), (b"3",)) == 0
    assert established.put_batch([], []) == 0
    assert established.put_batch(["x", "y"], [b"1"]) == INVALID
    assert established.put_batch(["x", "y"], [b"1", b""]) == INVALID
    assert established.get("x") == b""
    assert established.put_batch(["a", "d"], [b"new", b"4"]) == 0
    assert established.get_batch(["a", "d"]) == [b"1", b"4"]
    assert established.put_batch(["twice", "twice"], [b"first", b"second"]) == 0
    assert established.get("twice") == b"first"


def test_upsert_batch_replaces(established: Established):
    assert established.upsert_batch(["a", "b"], [b"1", b"2"]) == 0
    assert established.upsert_batch(["a", "b"], [b"11", b"22"]) == 0
    assert established.get_batch(["a", "b"]) == [b"11", b"22"]
    assert established.upsert_batch([], []) == 0
    assert established.upsert_batch(["a"], []) == INVALID


def test_get_batch_of_nothing_is_one_empty_value(established: Established):
    assert established.get_batch([]) == [b""]
    assert established.batch_get_buffer([]) == []
    assert established.batch_is_exist([]) == []
    assert established.batch_remove([]) == []


def test_lists_are_sequences_and_nothing_else(established: Established):
    established.put("k", b"v")
    assert established.batch_is_exist(("k", "l")) == [1, 0]
    for wrong in ({"k"}, (key for key in "k"), "k"):
        with pytest.raises(TypeError):
            established.batch_is_exist(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            established.put_batch(["m"], wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            established.create_copy_task("k", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        established.put_batch(["m"], {b"v"})  # type: ignore[arg-type]
    assert established.is_exist("m") == 0


def test_put_parts_joins_parts(established: Established):
    assert established.put_parts("k", b"Hello, ", bytearray(b""), memoryview(b"World!")) == 0
    assert established.get("k") == b"Hello, World!"
    assert established.upsert_parts("k", b"Good", b"bye") == 0
    assert established.get("k") == b"Goodbye"
    assert established.put_parts("none") == 0
    assert established.put_parts("none", b"", b"") == 0
    assert established.is_exist("none") == 0
    assert established.upsert_parts("k", b"") == 0
    assert established.get("k") == b"Goodbye"
    assert established.put_parts("c", b"a", config=ReplicateConfig()) == 0


def test_put_parts_refuses_parts_that_are_no_bytes(established: Established):
    with pytest.raises(TypeError):
        established.put_parts("k", "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        established.put_parts("k", b"a", ReplicateConfig())  # type: ignore[arg-type]
    for wrong in (np.zeros(3, np.int32), np.zeros((2, 2), np.uint8)):
        with pytest.raises(RuntimeError, match="parts must be 1-D bytes-like"):
            established.put_parts("k", b"a", wrong)


def test_a_buffer_handle_owns_writable_memory(established: Established):
    assert established.put("k", b"abcd") == 0
    handle = established.get_buffer("k")
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
    assert established.get("k") == b"abcd", "it is a private copy"
    assert established.upsert("k", b"other") == 0
    assert established.close() == 0
    del handle
    assert bytes(view) == b"xbcd", "it outlives the store and its own name"


def test_batch_get_buffer_has_none_where_there_is_nothing(established: Established):
    assert established.put("k", b"v") == 0
    first, missing = established.batch_get_buffer(["k", "nope"])
    assert first is not None
    assert bytes(first) == b"v"
    assert missing is None
    assert established.get_buffer("nope") is None


def test_existence_and_size(established: Established):
    assert established.put("k", b"12345") == 0
    assert established.is_exist("k") == 1
    assert established.is_exist("nope") == 0
    assert established.batch_is_exist(["k", "nope", "k"]) == [1, 0, 1]
    assert established.get_size("k") == 5
    assert established.get_size("nope") == MISSING
    for number in (*established.batch_is_exist(["k", "nope"]), established.get_size("k")):
        assert type(number) is int


def test_remove_respects_the_lease_unless_forced(established: Established):
    assert established.put("k", b"v") == 0
    assert established.put("l", b"v") == 0
    assert established.remove("l") == 0, "a put leases nothing"
    assert established.get("k") == b"v"
    assert established.remove("k") == LEASED
    assert established.remove_all() == 0
    assert established.remove_by_regex("k") == 0
    assert established.remove("k", True) == 0
    assert established.remove("k") == MISSING


def test_batch_remove_answers_for_each_key(established: Established):
    established.put_batch(["a", "b"], [b"1", b"2"])
    assert established.batch_remove(["a", "nope", "", "a"]) == [0, MISSING, MISSING, MISSING]
    established.get("b")
    assert established.batch_remove(keys=["b"]) == [LEASED]
    assert established.batch_remove(["b"], force=True) == [0]


def test_removing_by_expression_searches_and_counts(established: Established):
    established.put_batch(["session_1", "session_2", "other"], [b"1", b"2", b"3"])
    assert established.remove_by_regex("^session_") == 2
    assert established.remove_by_regex(regex="o.her") == 1
    assert established.remove_by_regex(regex_pattern="nothing") == 0
    assert established.remove_by_regex("(") == INVALID
    with pytest.raises(TypeError):
        established.remove_by_regex()


def test_remove_all_counts(established: Established):
    established.put_batch(["a", "b", "c"], [b"1", b"2", b"3"])
    established.is_exist("a")
    assert established.remove_all() == 2
    assert established.remove_all(force=1) == 1  # as the established calls take it
    with pytest.raises(TypeError, match="force"):
        established.remove_all(force="yes")
    assert established.remove_all() == 0


def test_an_object_larger_than_the_pool_has_no_place(established: Established):
    assert established.put("k", bytes(65 << 20)) == NO_SPACE
    error = mooncake.last_error()
    assert isinstance(error, mooncake.NoSpaceError)
    assert error.remedy


def test_a_store_without_memory_in_the_pool_has_no_place():
    store = Established()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "embedded") == 0
    assert store.put("k", b"v") == NO_SPACE
    store.close()


def test_an_object_larger_than_the_local_buffer_is_stored_all_the_same(established: Established):
    value = np.random.default_rng(1).bytes(20 << 20)
    assert established.put("k", value) == 0
    assert established.get("k") == value


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"replica_num": 3}, 0),
        ({"replica_num": 0}, INVALID),
        ({"with_hard_pin": True}, 0),
        ({"with_soft_pin": True}, 0),
        ({"soft_pin_ttl_ms": 5}, INVALID),
        ({"preferred_segment": "nobody:1"}, 0),
        ({"preferred_segments": ["nobody:1"]}, 0),
        ({"prefer_alloc_in_same_node": True}, INVALID),
        ({"group_ids": ["g"]}, 0),
        ({"group_ids": ["g", "h"]}, INVALID),
        ({"group_ids": []}, INVALID),
        ({"dfs_replica_num": 1}, -1601),
        ({"dfs_replica_num": 2}, INVALID),
        ({"nof_replica_num": 1}, INVALID),
    ],
)
def test_a_config_decides_whether_a_put_is_possible(established: Established, fields, code):
    assert established.put("k", b"v", config(**fields)) == code
    assert established.is_exist("k") == int(code == 0)


def test_the_last_failure_of_each_thread_is_told_in_words(established: Established):
    import threading

    assert established.get_size("missing-one") == MISSING
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


def test_a_lease_ends_by_itself(master):
    store = Established()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 << 20, 0, "tcp", "", master.address) == 0
    try:
        assert store.put("k", b"v") == 0
        assert store.get("k") == b"v"
        assert store.remove("k") == LEASED
        deadline = time.monotonic() + 10
        while (code := store.remove("k")) == LEASED and time.monotonic() < deadline:
            time.sleep(0.02)
        assert code == 0
    finally:
        store.close()


def test_errors_name_the_class_that_users_know(established: Established):
    wrong = [
        ("put", lambda: established.put("k", b"v", cfg=1)),  # type: ignore[call-arg]
        ("remove_by_regex", lambda: established.remove_by_regex(pat="x")),  # type: ignore[call-arg]
        ("mount_segment", lambda: established.mount_segment()),  # type: ignore[call-arg]
    ]
    for name, call in wrong:
        with pytest.raises(TypeError, match=rf"^MooncakeDistributedStore\.{name}\(\) "):
            call()
    for kind in (Established, TransferEngine):
        for name, call in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("__"):
                assert call.__qualname__ == f"{kind.__name__}.{name}"


def test_an_address_that_is_none_is_refused_in_words(established: Established):
    for wrong in (np.zeros(4, np.uint8), b"abc", 1.5, "x", None):
        with pytest.raises(TypeError, match=f"are integers.*, not {type(wrong).__name__}"):
            established.put_from("k", wrong, 4)  # type: ignore[arg-type]
    assert established.put_from("k", np.uint64(8), 4) < 0, "a number of numpy is an integer"


def test_keys_that_are_no_list_are_refused_in_words(established: Established):
    for wrong in ("key", {"key": 1}, {"key"}):
        with pytest.raises(TypeError, match=f"a list of str or bytes, not {type(wrong).__name__}"):
            established.batch_is_exist(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of str or bytes, not str"):
        established.get_batch("key")  # type: ignore[arg-type]
    assert established.batch_is_exist(("a", b"b")) == [0, 0], "any sequence serves"
