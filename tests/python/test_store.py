"""`mooncake.Store`: valid and invalid use."""

from __future__ import annotations

import array
import asyncio
import copy
import ctypes
import pickle
import threading
import time

import numpy as np
import pytest
from conftest import MIB, run_script, start_master

import mooncake
from mooncake import PutOptions, Store, StoreConfig


def test_put_returns_whether_it_stored(store: Store):
    assert store.put("k", b"first") is True
    assert store.put("k", b"second") is False
    assert store.get("k") == b"first"
    assert store.put("k", b"second", overwrite=True) is True
    assert store.get("k") == b"second"


def test_missing_object_raises_key_error_or_default(store: Store):
    with pytest.raises(mooncake.NotFoundError, match="nope") as caught:
        store.get("nope")
    assert isinstance(caught.value, KeyError)
    assert caught.value.key == "nope"
    assert caught.value.remedy in caught.value.__notes__
    assert store.get("nope", None) is None
    assert store.get("nope", default=7) == 7


def test_oversized_object_error_names_both_sizes(store: Store):
    words = "larger than any segment bytes=67108865 largest_segment=67108864"
    with pytest.raises(mooncake.NoSpaceError, match=words) as caught:
        store.put("huge", bytes(64 * MIB + 1))
    assert caught.value.code == -200
    assert "huge" not in store
    assert store.put("huge", bytes(MIB)) is True


def test_store_supports_the_mapping_protocol(store: Store):
    store["k"] = b"v"
    store["k"] = b"w"
    assert store["k"] == b"w"
    assert "k" in store
    assert "nope" not in store
    assert 5 not in store
    with pytest.raises(KeyError):
        store["nope"]


def test_delete_of_leased_object_raises_busy(store: Store):
    store.put("k", b"v")
    with store.lease("k"), pytest.raises(mooncake.BusyError):
        store.delete("k")
    store.delete("k", force=True)
    with pytest.raises(mooncake.NotFoundError):
        store.delete("k")
    store.delete("k", missing_ok=True)


def test_queries_take_no_lease(store: Store):
    store.put("k", b"v")
    assert store.exists("k")
    assert store.exists_many(["k", "nope"]) == [True, False]
    assert store.size("k") == 1
    assert store.info("k").size == 1
    assert [each and each.size for each in store.info_many(["k", "nope"])] == [1, None]
    store.delete("k")


def test_put_many_and_get_many_round_trip(store: Store):
    values = {f"k{i}": bytes([i]) * 10 for i in range(1, 100)}
    assert store.put_many(values) == [True] * 99
    assert store.put_many([("k1", b"x"), (b"new", b"y")]) == [False, True]
    got = store.get_many([*values, "nope"])
    assert got == [*values.values(), None]
    assert store.get_many(["nope"], default=b"-") == [b"-"]


def test_batch_tries_all_then_raises_the_first_error(store: Store):
    with pytest.raises(mooncake.InvalidArgumentError) as caught:
        store.put_many({"a": b"1", "": b"2", "b": b""})
    assert "2 of 3 items failed" in caught.value.__notes__
    assert store.get("a") == b"1"


def test_buffers_are_zero_copy(store: Store):
    numbers = np.arange(1000, dtype=np.float32)
    store.put("a", numbers)
    buffer = store.get_buffer("a")
    assert np.array_equal(np.frombuffer(buffer, np.float32), numbers)
    assert np.frombuffer(buffer, np.uint8).ctypes.data == buffer.ptr()
    assert memoryview(buffer).format == "B"
    assert buffer[:4] == numbers[:1].tobytes()
    assert np.from_dlpack(buffer).ctypes.data == buffer.ptr()
    with pytest.raises(mooncake.NotFoundError):
        store.get_buffer("nope")


def test_buffer_is_a_sequence_of_bytes(store: Store):
    store.put("k", b"bytes")
    buffer, same = store.get_buffer("k"), store.get_buffer("k")
    assert (buffer[0], buffer[-1], list(buffer)) == (ord("b"), ord("s"), list(b"bytes"))
    assert bytes(buffer[1:3]) == b"yt"
    with pytest.raises(IndexError):
        buffer[5]
    assert buffer == b"bytes"
    assert b"bytes" == buffer  # noqa: SIM300 - the buffer is at the right
    assert buffer == same == bytearray(b"bytes")
    assert buffer == memoryview(b"bytes")
    assert buffer != b"other"
    assert buffer != "bytes"
    assert {buffer: "handle"}[buffer] == "handle"
    buffer[0] = ord("B")
    buffer[1:3] = b"YT"
    assert (buffer, same) == (b"BYTes", b"bytes")
    with pytest.raises(ValueError, match="invalid value"):
        buffer[0] = 256


def test_get_into_fills_the_callers_memory(store: Store):
    store.put("k", b"0123456789")
    for target in (bytearray(12), array.array("i", [0] * 3), np.zeros((3, 4), np.uint8)):
        assert store.get_into("k", target) == 10
        assert bytes(target)[:10] == b"0123456789"
    with pytest.raises(mooncake.InvalidArgumentError, match="smaller"):
        store.get_into("k", bytearray(9))
    with pytest.raises(BufferError):
        store.get_into("k", b"0" * 10)
    with pytest.raises(BufferError):
        store.get_into("k", np.zeros((4, 4), np.uint8)[:, ::2])


def test_rejects_strided_value_with_advice(store: Store):
    with pytest.raises(BufferError, match="ascontiguousarray"):
        store.put("a", np.arange(10)[::2])
    with pytest.raises(TypeError, match="encode"):
        store.put("a", "text")  # type: ignore[arg-type]
    with pytest.raises(mooncake.InvalidArgumentError, match="empty"):
        store.put("a", b"")


def test_lists_keys_in_order_and_by_prefix(store: Store):
    store.put_many({"b/2": b"22", "a": b"1", "b/1": b"1", b"\xff": b"r"})
    assert list(store.keys()) == ["a", "b/1", "b/2", "\udcff"]
    found = list(store.objects("b/"))
    assert [(each.key, each.size, each.is_complete) for each in found] == [
        ("b/1", 1, True),
        ("b/2", 2, True),
    ]
    assert store.clear("b/") == 2
    assert list(store.keys()) == ["a", "\udcff"]
    assert store.clear() == 2


def test_stats_count_operations_by_transport(store: Store):
    store.put("k", bytes(100))
    store.get("k")
    stats = store.stats()
    assert stats["pool"]["keys"] == 1
    assert stats["store"]["hits"] == 1
    assert sum(count["bytes"] for count in stats["store"]["by_transport"].values()) >= 200
    (segment,) = store.segments()
    assert segment.capacity_bytes == 64 << 20
    assert segment.used_bytes >= 100
    assert segment.name == store.name


def test_valid_options_are_not_shown_as_text():
    class Replicas(int):
        def __repr__(self) -> str:
            raise AssertionError("it is shown")

    assert PutOptions(replicas=Replicas(2)).replicas == 2


def test_options_are_validated_at_construction():
    options = PutOptions(replicas=2, groups=["g"])
    assert options == PutOptions(replicas=2, groups=["g"])
    assert repr(options) == 'PutOptions(replicas=2, soft_pin="preserve", groups=["g"])'
    for wrong in ({"replicas": 0}, {"soft_pin": "maybe"}, {"soft_pin_ttl_ms": 5}):
        with pytest.raises(mooncake.InvalidArgumentError):
            PutOptions(**wrong)
    with pytest.raises(AttributeError):
        options.replicas = 3  # type: ignore[misc]


def test_options_apply_to_put(store: Store):
    assert store.put("k", b"v", options=PutOptions(replicas=3, is_hard_pinned=True))
    with pytest.raises(mooncake.InvalidArgumentError, match="groups"):
        store.put("l", b"v", options=PutOptions(groups=["a", "b"]))


def test_fewer_copies_than_asked_are_logged_once():
    script = """if True:
    from mooncake import PutOptions, Store
    with Store() as store:
        store.put("one", b"v", options=PutOptions(replicas=1))
        store.put_many({"a": b"v", "b": b"v"}, options=PutOptions(replicas=3))
        store.put("c", b"v", options=PutOptions(replicas=2))
    """
    done = run_script(script)
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if "WARN" in line]
    assert "objects have fewer copies than asked" in line
    assert "objects=2" in line
    assert "asked=3" in line
    assert "made=1" in line


def test_closed_store_raises_closed_error():
    store = Store(config=StoreConfig(segment_bytes="16mb"))
    assert "embedded" in repr(store)
    store.close()
    store.close()
    assert store.is_closed
    assert "closed" in repr(store)
    for call in (lambda: store.get("k"), lambda: store.put("k", b"v"), store.check, store.stats):
        with pytest.raises(mooncake.ClosedError, match="closed"):
            call()


def test_closed_store_is_not_entered_again():
    with Store(config=StoreConfig(segment_bytes="16mb")) as store:
        pass
    with pytest.raises(mooncake.ClosedError, match="make a new one"), store:
        raise AssertionError("the block must not run")


def test_unclosed_store_warns():
    store = Store(config=StoreConfig(segment_bytes=0))
    with pytest.warns(ResourceWarning, match=r"unclosed <mooncake\.Store"):
        del store


def test_errors_name_the_invalid_setting():
    with pytest.raises(ValueError, match="not a size"):
        Store(config=StoreConfig(segment_bytes="lots"))
    with pytest.raises(mooncake.InvalidArgumentError, match="rpc_timeout_s"):
        Store(config=StoreConfig(rpc_timeout_s=-1.0))
    with pytest.raises(mooncake.MooncakeError, match="nonsense"):
        Store("nonsense with spaces")


def test_ignored_tenant_is_refused():
    master = start_master()
    try:
        config = StoreConfig(tenant="team-a")
        with pytest.raises(mooncake.NotSupportedError, match="--enable_multi_tenants") as refused:
            Store(master.address, config)
        assert refused.value.context["tenant"] == "team-a"

        async def join():
            async with mooncake.AsyncStore(master.address, config):
                pass

        with pytest.raises(mooncake.NotSupportedError, match="--enable_multi_tenants"):
            asyncio.run(join())
        with pytest.raises(mooncake.NotSupportedError, match="--enable_multi_tenants"):
            Store(config=config)
        with Store(master.address) as store:
            assert store._native.status()["clients"] == 1, "the refused clients are gone"
    finally:
        master.stop()


def arrays_of_objects():
    pair = np.dtype([("size", "i4"), ("name", "O")])
    return {
        "objects": np.array([object(), "x"], dtype=object),
        "one": np.array("x", dtype=object),
        "strided": np.array(["x"] * 10, dtype=object)[::2],
        "structured": np.zeros(3, pair),
        "nested": np.zeros(3, [("Other", "i4"), ("pair", pair)]),
        "subarray": np.zeros(3, [("pair", pair, (2, 2))]),
        "with time": np.zeros(3, [("at", "M8[s]"), ("name", "O")]),
        "memoryview": memoryview(np.array(["x"], dtype=object)),
        "ctypes": (ctypes.py_object * 2)("x", "y"),
    }


@pytest.mark.parametrize("name", arrays_of_objects())
def test_python_objects_are_no_value(store: Store, compat_store, name):
    value = arrays_of_objects()[name]
    for put in (
        lambda: store.put("k", value),
        lambda: store.put("k", value, overwrite=True),
        lambda: store.put_many({"k": value, "other": b"x"}),
        lambda: store.put_many([("k", b"x"), ("k2", value)]),
    ):
        with pytest.raises((TypeError, ValueError, BufferError)):
            put()
        assert not store.exists("k")

    async def put_async():
        async with mooncake.AsyncStore(store.master_address) as other:
            with pytest.raises((TypeError, ValueError, BufferError)):
                await other.put("k", value)

    asyncio.run(put_async())
    compat = compat_store
    assert compat.put("k", value) == -600
    assert "Python objects" in str(mooncake.last_error())
    assert compat.upsert("k", value) == -600
    assert compat.put_batch(["k", "l"], [value, b"x"]) == -600
    assert compat.upsert_batch(["l", "k"], [b"x", value]) == -600
    for put_parts in (compat.put_parts, compat.upsert_parts):
        with pytest.raises((RuntimeError, ValueError)):
            put_parts("k", b"x", value)
    assert compat.batch_is_exist(["k", "l"]) == [0, 0]


def test_objects_are_not_overwritten_by_a_get(store: Store):
    store.put("k", b"x" * 16)
    names = np.array(["a", "b"], dtype=object)
    with pytest.raises(TypeError, match="Python objects"):
        store.get_into("k", names)
    assert list(names) == ["a", "b"]


def test_structures_whose_names_have_an_o_are_stored(store: Store):
    value = np.ones(3, [("Offset", "i4"), ("O", "f8", (2,))])
    assert store.put("k", value)
    assert store.get("k") == value.tobytes()


def test_errors_survive_pickling(store: Store):
    with pytest.raises(mooncake.NotFoundError) as caught:
        store.get("nope")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is mooncake.NotFoundError
    assert (str(copy), copy.code, copy.key) == (str(caught.value), -704, "nope")


def test_unnamed_store_is_named_by_its_endpoint():
    config = StoreConfig(segment_bytes="16MB")
    with Store(config=config) as first, Store(first.master_address, config) as second:
        segments = second.segments()
        assert len({segment.name for segment in segments}) == 2
        assert all(segment.name == segment.endpoint for segment in segments)
        assert all(segment.name.startswith("127.0.0.1:") for segment in segments)


def test_long_batch_reports_progress(store: mooncake.Store):
    reports: list[tuple[int, int]] = []
    items = {f"{i:03}": bytes([i]) for i in range(150)}
    assert store.put_many(items, progress=lambda *seen: reports.append(seen)) == [True] * 150
    assert reports == [(64, 150), (128, 150), (150, 150)]
    reports.clear()
    keys = [*items, "nope"]
    got = store.get_many(keys, progress=lambda *seen: reports.append(seen))
    assert got == [*items.values(), None]
    assert reports[-1] == (151, 151)
    reports.clear()
    assert store.put_many({}, progress=lambda *seen: reports.append(seen)) == []
    assert reports == []
    options = mooncake.PutOptions(groups=[str(i // 2) for i in range(100)])
    grouped = [(f"g{i}", b"v") for i in range(100)]
    assert all(store.put_many(grouped, options=options, progress=lambda *_: None))


def test_progress_callback_errors_propagate(store: mooncake.Store):
    def stop(done: int, _total: int) -> None:
        raise RuntimeError(f"stop at {done}")

    with pytest.raises(RuntimeError, match="stop at 64"):
        store.put_many({str(i): b"v" for i in range(100)}, progress=stop)
    assert len(list(store.keys())) == 64


def test_lease_is_renewed_beyond_master_ttl():
    master = start_master("--default_kv_lease_ttl=1500ms")
    config = mooncake.StoreConfig(segment_bytes=64 * MIB)
    with mooncake.Store(master.address, config) as store:
        store.put("kept", b"v")
        with store.lease("kept", every_s=0.1) as lease:
            assert lease.keys == ("kept",)
            until = time.monotonic() + 3
            while time.monotonic() < until:
                with pytest.raises(mooncake.BusyError):
                    store.delete("kept")
                time.sleep(0.05)
            assert lease.is_held
            assert repr(lease) == "<mooncake.Lease keys=1 held>"
        assert not lease.is_held
        assert repr(lease) == "<mooncake.Lease keys=1 not held>"
        store.delete("kept", force=True)
        with pytest.raises(mooncake.NotFoundError), store.lease("kept"):
            raise AssertionError("the block must not run")
    assert master.stop() == 0


def test_lease_ends_when_its_object_is_deleted(store: mooncake.Store):
    with pytest.raises(mooncake.LeaseLostError, match="the lease was lost: no object") as lost:
        lose_lease(store)
    assert (lost.value.key, lost.value.code_name) == ("k", "OBJECT_NOT_FOUND")
    assert isinstance(lost.value.__cause__, mooncake.NotFoundError)
    assert "read them again" in lost.value.remedy
    with pytest.raises(ValueError, match="every_s"):
        store.lease("k", every_s=0)


def test_lost_lease_is_a_note_of_another_exception(store: mooncake.Store):
    with pytest.raises(RuntimeError, match="of the block") as raised:
        lose_lease(store, RuntimeError("of the block"))
    assert any("the lease was lost" in note for note in raised.value.__notes__)


def test_lost_lease_calls_back_once_instead_of_raising(store: mooncake.Store):
    store.put_many({"k": b"v", "stays": b"v"})
    losses: list[mooncake.LeaseLostError] = []
    told = threading.Event()

    def on_lost(loss: mooncake.LeaseLostError) -> None:
        losses.append(loss)
        told.set()
        raise RuntimeError("is logged")

    with store.lease("stays", "k", every_s=0.01, on_lost=on_lost) as lease:
        store.delete("k", force=True)
        assert told.wait(20)
        assert not lease.is_held
    assert [loss.key for loss in losses] == ["k"]


def lose_lease(store: mooncake.Store, error: Exception | None = None) -> None:
    store.put("k", b"v")
    with store.lease("k", every_s=0.01) as lease:
        store.delete("k", force=True)
        deadline = time.monotonic() + 20
        while lease.is_held:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(mooncake.NotFoundError):
            lease.renew()
        if error is not None:
            raise error


def test_more_memory_than_the_machine_has_cannot_be_lent():
    with pytest.raises(mooncake.InvalidArgumentError, match="less memory than is to be lent") as no:
        Store(config=StoreConfig(segment_bytes="99TB"))
    assert int(no.value.context["bytes"]) == 99 * 1024**4
    assert 0 < int(no.value.context["limit"]) < 99 * 1024**4
    assert "mooncake doctor" in no.value.remedy


def test_context_has_the_values_that_the_master_names(store: mooncake.Store):
    with pytest.raises(mooncake.NotFoundError) as missing:
        store.delete("missing")
    with pytest.raises(mooncake.NoSpaceError) as full:
        store.put("big", bytes(2 * 64 * MIB))
    with pytest.raises(mooncake.NotFoundError) as uncopied:
        store.copy("missing", "nowhere")
    for failure in (missing.value, full.value, uncopied.value):
        assert failure.context
        for name, value in failure.context.items():
            shown = f'"{value}"' if name == "key" else value
            assert str(failure).count(f"{name}={shown}") == 1
    assert missing.value.context["key"] == missing.value.key == "missing"
    assert "larger than the object" in full.value.remedy
    assert full.value.context["bytes"] == str(2 * 64 * MIB)
    assert (missing.value.key, uncopied.value.key) == ("missing", "missing")


def test_remedy_for_a_metadata_server_names_metadata_servers():
    config = StoreConfig(metadata="http://127.0.0.1:1/metadata")
    with pytest.raises(mooncake.UnavailableError) as unreachable:
        Store(config=config)
    assert "P2PHANDSHAKE" in unreachable.value.remedy


def test_get_buffers_returns_several_objects(store: mooncake.Store):
    store.put_many({"a": b"1", "b": b"22"})
    first, missing, second = store.get_buffers(["a", "nope", "b"])
    assert missing is None
    assert (bytes(first), bytes(second)) == (b"1", b"22")


def test_rejects_arguments_of_ambiguous_type(store: mooncake.Store):
    store.put("k", b"v")
    for wrong in ([b"a", b"b"], (b"a",), "text", None):
        with pytest.raises(TypeError):
            store.put("x", wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            store.put_many({"x": wrong})  # type: ignore[dict-item]
    assert not store.exists("x")
    for many in (store.get_many, store.get_buffers, store.exists_many):
        with pytest.raises(TypeError, match="iterable of keys"):
            many("key")
    # An empty value must not count as the empty prefix, which every key has.
    for nothing in (None, [], {}, False, 0):
        with pytest.raises(TypeError):
            store.clear(nothing, force=True)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            list(store.objects(nothing))  # type: ignore[arg-type]
    assert store.get("k") == b"v"
    for wrong_id in (None, 7, "ab", (1, "b")):
        with pytest.raises(TypeError, match="id"):
            store.task(wrong_id)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_s"):
        store.lease("k", every_s=float("nan"))
    for call in (
        lambda: store.put("k", b"w", if_version=True),
        lambda: store.delete("k", if_version=True),
    ):
        with pytest.raises(TypeError, match="if_version is a number, not bool"):
            call()
    assert store.get("k") == b"v"


def test_range_errors_name_the_argument():
    options = {
        "replicas": -1,
        "soft_pin_ttl_ms": -1,
        "data_type": 1 << 40,
        "ttl_ms": 1 << 64,
        "if_versions": [-1],
    }
    for name, wrong in options.items():
        with pytest.raises(mooncake.InvalidArgumentError) as caught:
            mooncake.PutOptions(**{name: wrong})
        assert name in str(caught.value)
        assert name in caught.value.context
        with pytest.raises(TypeError):
            mooncake.PutOptions(**{name: "1"})
    for name, wrong in {"http_port": 70_000, "segment_bytes": 1 << 64}.items():
        with pytest.raises(mooncake.InvalidArgumentError) as caught:
            mooncake.Store(config=mooncake.StoreConfig(**{name: wrong}))
        assert f"{name}={wrong}" in str(caught.value)
        assert caught.value.context == {name: str(wrong)}


def test_every_error_has_a_context():
    assert mooncake.NotFoundError("x").context == {}
    error = mooncake.BusyError("x")
    error.context["key"] = "k"
    assert (error.context, mooncake.BusyError("y").context) == ({"key": "k"}, {})
    assert pickle.loads(pickle.dumps(error)).context == {"key": "k"}


def test_options_are_pickled_and_copied():
    options = mooncake.PutOptions(
        replicas=2,
        soft_pin="enable",
        soft_pin_ttl_ms=3,
        is_hard_pinned=True,
        preferred_segments=["a:1"],
        prefers_own_segments=True,
        data_type=4,
        groups=["g"],
        ttl_ms=5,
        tags={"a": "b"},
        if_versions=[6],
    )
    for same in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options)):
        assert same == options
        assert repr(same) == repr(options)


def test_error_about_a_missing_tensor_names_its_key(store: Store):
    for call in (store.info, store.get_array, store.delete_tensor):
        with pytest.raises(mooncake.NotFoundError, match='key="nope"') as caught:
            call("nope")
        assert caught.value.key == "nope"


def test_remedy_says_more_than_the_message(store: Store):
    for call in (lambda: store.put("k", b""), lambda: store.put("k", b"v", ttl_s=0)):
        with pytest.raises(mooncake.InvalidArgumentError) as caught:
            call()
        assert caught.value.remedy == ""
        assert not hasattr(caught.value, "__notes__")


def test_keys_that_are_not_utf8_survive_a_listing(store: Store):
    store.put(b"odd/\xff\x01", b"1")
    assert list(store.keys("odd/")) == ["odd/\udcff\x01"]
    assert list(store.keys("odd/", as_bytes=True)) == [b"odd/\xff\x01"]
    (found,) = store.objects(b"odd/\xff")
    assert found.key_bytes == b"odd/\xff\x01"
    assert store.get(found.key) == b"1"
    store.delete(found.key, force=True)
    assert not store.exists(b"odd/\xff\x01")


def test_put_takes_arrays_without_buffer_protocol(store: Store):
    dates = np.array(["2024-01-01", "2024-01-02"], dtype="datetime64[D]")
    assert store.put("dates", dates)
    assert store.get("dates") == dates.tobytes()
    target = np.zeros(2, dtype="datetime64[D]")
    assert store.get_into("dates", target) == target.nbytes
    assert (target == dates).all()
    with pytest.raises(BufferError, match="ascontiguousarray"):
        store.put("x", dates[::-1])


@pytest.mark.parametrize(
    "value",
    [np.array(5.0), np.float64(5), ctypes.c_uint64(5), (ctypes.c_uint16 * 3)(1, 2, 3)],
    ids=["array", "scalar", "number of ctypes", "array of ctypes"],
)
def test_memory_without_shape_or_strides_is_taken(store: Store, value):
    content = bytes(memoryview(value))
    assert store.put("a", value)
    assert store.put_many({"b": value}) == [True]
    assert store.get_many(["a", "b"]) == [content, content]
    record = np.ones((), [("Other", "i4")])
    assert store.put("record", record)
    assert store.get("record") == record.tobytes()
    for wrong in (np.zeros((), [("other", "O")]), ctypes.py_object("x")):
        with pytest.raises(TypeError, match="Python object"):
            store.put("wrong", wrong)
    if not memoryview(value).readonly:
        store.put("c", b"\1" * len(content))
        assert store.get_into("c", value) == len(content)
        assert bytes(memoryview(value)) == b"\1" * len(content)
        assert store.get_range_into("a", 0, value) == len(content)
        assert bytes(memoryview(value)) == content


class DLPackArray:
    """An array that only offers DLPack."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return (self._device, 0)


def test_put_takes_dlpack_in_host_memory_only(store: Store):
    array = np.arange(5, dtype=np.int32)
    assert store.put("dlpack", DLPackArray(array))
    assert store.get("dlpack") == array.tobytes()
    with pytest.raises(TypeError, match=r"device .type 2"):
        store.put("x", DLPackArray(array, device=2))
