"""Structured objects and bundles: members, slices, destinations, rollback and removal."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import structured_stores
from structured_stores import PlainStore, key_names

from mooncake.store import BufferPool, MooncakeDistributedStore, ReplicateConfig
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    raw_destination,
    tensor_object_buffer,
)

plain = structured_stores.plain
transfer = structured_stores.transfer

TOKENS = np.arange(24, dtype=np.int32).reshape(6, 4)


def put(transfer: MooncakeBundleTransfer, **members: object) -> RemoteBundleRef:
    return transfer.put_structured_object(StructuredObjectPayload({"step": 7}, members))


def read(transfer: MooncakeBundleTransfer, ref: RemoteBundleRef) -> dict[str, object]:
    return transfer.materialize(transfer.read_spec(ref)).objects


def test_documented_example_runs(compat_store: MooncakeDistributedStore):
    store = compat_store
    transfer = MooncakeBundleTransfer(store, key_prefix="demo/structured")
    payload = StructuredObjectPayload(
        metadata={"step": 7, "layout": "rollout"},
        buffers={
            "tokens": np.array(range(24), dtype=np.int32).reshape(6, 4),
            "mask": np.ones((6, 4), dtype=np.int8),
            "prompt_ids": b"sample-ids",
        },
    )
    ref = transfer.put_structured_object(payload)
    result = transfer.materialize(transfer.read_spec(ref))
    assert result.objects["prompt_ids"] == b"sample-ids"
    assert result.metadata["layout"] == "rollout"
    assert (result.objects["tokens"] == TOKENS).all()

    spec = (
        transfer.read_spec(ref)
        .select_members(["tokens"])
        .slice_member("tokens", axis=0, start=2, end=5)
    )
    assert list(transfer.materialize(spec).objects) == ["tokens"]
    destination = np.empty((3, 4), dtype=np.int32)
    result = transfer.materialize_into(spec, {"tokens": destination})
    assert result.objects["tokens"] is destination
    assert (destination == TOKENS[2:5]).all()


@pytest.mark.parametrize(
    "array",
    [
        TOKENS,
        np.zeros((0, 3)),
        np.array(5.0),
        np.array(["ab", "c"]),
        np.array(["2020-01-01"], dtype="M8[D]"),
        np.asfortranarray(TOKENS),
        TOKENS[::2, ::-1],
        np.array([1], dtype=">i4"),
        np.array([True, False]),
        np.array([1j]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_array_comes_back_as_it_was(transfer: MooncakeBundleTransfer, array: np.ndarray):
    back = read(transfer, put(transfer, x=array))["x"]
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert (back == array).all()


def test_tensors_come_back_with_dtype_and_shape(transfer: MooncakeBundleTransfer):
    torch = pytest.importorskip("torch")
    tensors = {
        "a": torch.arange(6).reshape(2, 3).t(),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(2.5),
        "d": torch.zeros(0, 3),
        "e": torch.ones(2, requires_grad=True),
        "f": torch.ones(2, dtype=torch.complex64),
    }
    back = read(transfer, put(transfer, **tensors))
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor.detach())


def test_jagged_tensors_come_back(transfer: MooncakeBundleTransfer):
    torch = pytest.importorskip("torch")
    rows = [torch.tensor([1, 2], dtype=torch.int8), torch.tensor([3], dtype=torch.int8)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    back = read(transfer, put(transfer, x=nested))["x"]
    assert [row.tolist() for row in back.unbind()] == [[1, 2], [3]]


def test_long_payloads_are_cut_into_chunks(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p", default_chunk_bytes=16)
    ref = transfer.put_bundle(b"", {"x": TOKENS, "y": b"", "z": bytes(16)})
    assert key_names(plain) == [
        *(f"buffer/x/chunk/{at}" for at in range(6)),
        "buffer/z",
        "manifest",
    ]
    assert ref.manifest["buffers"]["y"]["chunks"] == []


@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(2, 5, 1), (0, 6, 2), (-2, 99, 1), (4, 2, 1), (0, 0, 1), (1, 6, 3)],
)
def test_slices_follow_the_rules_of_python(
    transfer: MooncakeBundleTransfer, start: int, end: int, step: int
):
    torch = pytest.importorskip("torch")
    # Chunks of 20 bytes end in the middle of rows of 16 bytes.
    payload = StructuredObjectPayload({}, {"x": TOKENS, "t": torch.from_numpy(TOKENS)})
    ref = transfer.put_structured_object(payload, chunk_bytes=20)
    spec = transfer.read_spec(ref)
    spec = spec.slice_member("x", 0, start, end, step).slice_member("t", 0, start, end, step)
    objects = transfer.materialize(spec).objects
    assert (objects["x"] == TOKENS[start:end:step]).all()
    assert objects["x"].shape == TOKENS[start:end:step].shape
    assert (objects["t"].numpy() == TOKENS[start:end:step]).all()


def test_many_short_runs_of_rows_are_read(transfer: MooncakeBundleTransfer):
    array = np.arange(4000, dtype=np.int16)
    ref = put(transfer, x=array)
    destination = np.empty(2000, dtype=np.int16)
    spec = transfer.read_spec(ref).slice_member("x", 0, 0, 4000, 2)
    transfer.materialize_into(spec, {"x": destination})
    assert (destination == array[::2]).all()


def test_wrong_slices_and_selections_are_refused(transfer: MooncakeBundleTransfer):
    spec = transfer.read_spec(put(transfer, x=TOKENS, b=b"abc"))
    for wrong, text in [
        (spec.slice_member("x", 1, 0, 1), "structured ndarray slicing .* axis=0 only"),
        (spec.slice_member("b", 0, 0, 1), "structured bytes member b does not support slicing"),
        (spec.select_members([]), "structured read spec selected no members"),
    ]:
        with pytest.raises(ValueError, match=text):
            transfer.materialize(wrong)
    with pytest.raises(KeyError, match=r"unknown bundle buffers: \['zzz'\]"):
        transfer.materialize(spec.select_members(["zzz"]))
    assert spec.select_members(None).member_names is None
    assert "x" in transfer.materialize(spec.slice_member("zzz", 0, 0, 1)).objects


def test_destinations_must_fit(transfer: MooncakeBundleTransfer):
    spec = transfer.read_spec(put(transfer, x=TOKENS))
    for wrong, kind, text in [
        (np.empty((2, 4), np.int32), ValueError, r"expected \(6, 4\), got \(2, 4\)"),
        (np.empty((6, 4), np.int64), ValueError, "dtype mismatch: expected <i4, got <i8"),
        (np.empty((4, 6), np.int32).T, ValueError, "must be C-contiguous"),
        (bytearray(96), TypeError, "must be a numpy.ndarray or raw_destination"),
    ]:
        with pytest.raises(kind, match=text):
            transfer.materialize_into(spec, {"x": wrong})
    with pytest.raises(KeyError, match=r"unknown structured members: \['zz'\]"):
        transfer.materialize_into(spec, {"zz": np.empty((6, 4), np.int32)})


def test_raw_memory_is_a_destination(transfer: MooncakeBundleTransfer):
    spec = transfer.read_spec(put(transfer, x=TOKENS))
    memory = np.zeros((6, 4), np.int32)
    transfer.materialize_into(spec, {"x": raw_destination(memory.ctypes.data, memory.nbytes)})
    assert (memory == TOKENS).all()
    with pytest.raises(ValueError, match="the destination has 5 bytes, expected at least 96"):
        transfer.materialize_into(spec, {"x": raw_destination(memory.ctypes.data, 5)})


def test_tensor_memory_is_source_and_destination(compat_store: MooncakeDistributedStore):
    transfer = MooncakeBundleTransfer(compat_store, "test")
    torch = pytest.importorskip("torch")
    memory = pytest.importorskip("mooncake.tensor.memory")
    values = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    source = bytearray(memory.of(values).metadata().encode() + values.numpy().tobytes())
    address = ctypes.addressof(ctypes.c_char.from_buffer(source))
    ref = put(transfer, t=tensor_object_buffer(address, len(source), source))
    assert torch.equal(read(transfer, ref)["t"], values)

    copy = bytearray(len(source))
    address = ctypes.addressof(ctypes.c_char.from_buffer(copy))
    into = tensor_object_buffer(address, len(copy), copy)
    transfer.materialize_into(transfer.read_spec(ref), {"t": into})
    assert copy == source

    tensor = torch.empty(1, 3, dtype=torch.int16)
    spec = transfer.read_spec(ref).slice_member("t", 0, 1, 2)
    assert transfer.materialize_into(spec, {"t": tensor}).objects["t"] is tensor
    assert tensor.tolist() == [[3, 4, 5]]


def test_values_that_cannot_be_stored_are_refused(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    for wrong, text in [
        ("text", "x must be bytes-like, got str"),
        (None, "x must be bytes-like, got NoneType"),
        ([1], "x must be bytes-like, got list"),
        (np.array([{}], dtype=object), "holds Python objects"),
        (np.zeros(1, dtype=[("a", "i4")]), "store each of its fields"),
        (np.ma.masked_array([1, 2], [0, 1]), r"masked array.*store array\.filled"),
    ]:
        with pytest.raises(TypeError, match=text):
            put(transfer, x=wrong)
    with pytest.raises(TypeError, match="structured metadata must be JSON-serializable"):
        transfer.put_structured_object(StructuredObjectPayload({"x": object()}, {}))
    assert plain.objects == {}


def test_names_and_options_are_checked(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "/p/")
    for call, text in [
        (lambda: put(transfer, **{"a/b": b""}), "invalid bundle buffer name: 'a/b'"),
        (lambda: transfer.put_bundle(b"", {}, "a/b"), "invalid bundle partition: 'a/b'"),
        (lambda: MooncakeBundleTransfer(plain, "//"), "key_prefix must be a non-empty"),
        (lambda: transfer.put_bundle(b"", {}, chunk_bytes=0), "chunk_bytes must be positive"),
        (
            lambda: transfer.put_bundle(b"", {}, policy=BundleTransferPolicy(put_mode="zz")),
            "unsupported put_mode: zz",
        ),
        (
            lambda: transfer.put_structured_object(
                StructuredObjectPayload({"__mooncake_structured_fields__": 1}, {})
            ),
            "is reserved",
        ),
    ]:
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("puts", range(4))
def test_failed_put_leaves_nothing_behind(plain: PlainStore, puts: int):
    plain.puts_until_failure = puts
    with pytest.raises(RuntimeError, match=r"put failed for .*: -200"):
        put(MooncakeBundleTransfer(plain, "p"), a=b"1", b=b"2")
    assert plain.objects == {}


def test_full_pool_rolls_the_put_back(compat_store: MooncakeDistributedStore):
    transfer = MooncakeBundleTransfer(compat_store, "p", default_chunk_bytes=8 << 20)
    with pytest.raises(RuntimeError, match="batch_put_from_multi_buffers failed"):
        put(transfer, x=np.ones(1 << 27, dtype=np.uint8))
    assert compat_store.remove_by_regex("^p/", True) == 0


def test_closed_store_is_named(compat_store: MooncakeDistributedStore):
    transfer = MooncakeBundleTransfer(compat_store, "p")
    ref = put(transfer, x=TOKENS)
    compat_store.close()
    with pytest.raises(RuntimeError, match="check that the store is set up and not closed"):
        put(transfer, x=TOKENS)
    with pytest.raises(RuntimeError, match=r"get failed for .*/meta"):
        read(transfer, ref)


def test_manifest_is_written_last(plain: PlainStore):
    put(MooncakeBundleTransfer(plain, "p"), a=b"1")
    assert key_names(plain) == ["meta", "buffer/a", "manifest"]


def test_removal_is_idempotent(transfer: MooncakeBundleTransfer):
    ref = put(transfer, x=TOKENS)
    read(transfer, ref)
    for _ in range(2):
        transfer.remove_bundle({"manifest_key": ref.manifest_key})
        transfer.remove_bundle(ref)
    with pytest.raises(RuntimeError, match=r"get failed for .*/meta: expected \d+ bytes, got 0"):
        read(transfer, ref)
    with pytest.raises(json.JSONDecodeError, match="there is no bundle manifest under the key"):
        transfer.materialize(transfer.read_spec({"manifest_key": ref.manifest_key}))


def test_removal_spares_objects_of_others(plain: PlainStore):
    plain.put("other/secret", b"1")
    ref = put(MooncakeBundleTransfer(plain, "p"), a=b"1")
    ref.manifest["buffers"]["a"] = {
        "key": "other/secret",
        "bytes": 1,
        "chunks": [{"key": "other/secret", "bytes": 1}],
    }
    with pytest.raises(ValueError, match="outside the bundle namespace: 'other/secret'"):
        MooncakeBundleTransfer(plain, "p").remove_bundle(ref)
    assert plain.get("other/secret") == b"1"


def test_orphaned_payloads_are_found_and_removed(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    kept = put(transfer, a=b"1")
    lost = put(transfer, a=b"2", b=b"3")
    plain.put("other/x", b"4")
    # As after a process that ended before it wrote the manifest.
    plain.remove(lost.manifest_key)
    orphans = transfer.orphaned_keys(plain.objects)
    assert sorted(key.rsplit("/", 1)[-1] for key in orphans) == ["a", "b", "meta"]
    assert transfer.remove_orphans(list(plain.objects), []) == []
    assert transfer.remove_orphans(list(plain.objects), orphans) == orphans
    assert transfer.orphaned_keys(plain.objects) == []
    assert read(transfer, kept) == {"a": b"1"}
    assert plain.get("other/x") == b"4"


def test_objects_are_mappings_or_single_values(transfer: MooncakeBundleTransfer):
    assert transfer.get_object(transfer.put_object(b"abc")) == b"abc"
    assert (transfer.get_object(transfer.put_object(TOKENS)) == TOKENS).all()
    back = transfer.get_object(transfer.put_object({"a": b"1", "b": TOKENS}))
    assert back["a"] == b"1"
    assert (back["b"] == TOKENS).all()


@pytest.mark.parametrize("mode", ["auto", "batch", "parallel"])
@pytest.mark.parametrize("copy", ["auto", "copy"])
def test_all_policies_store_the_same_bytes(transfer: MooncakeBundleTransfer, mode: str, copy: str):
    policy = BundleTransferPolicy(3, mode, copy)
    payload = StructuredObjectPayload({}, {"x": TOKENS, "y": b"abc"})
    ref = transfer.put_structured_object(payload, chunk_bytes=10, policy=policy)
    objects = read(transfer, ref)
    assert (objects["x"] == TOKENS).all()
    assert objects["y"] == b"abc"


def test_zero_copy_takes_only_memory_of_the_caller(transfer: MooncakeBundleTransfer):
    torch = pytest.importorskip("torch")
    policy = BundleTransferPolicy(copy_mode="zero_copy")
    for value, kind, text in [
        (b"1", RuntimeError, "zero-copy put"),
        (TOKENS, RuntimeError, "zero-copy put"),
        (torch.ones(2), ValueError, "BufferPool tensor-object buffer"),
    ]:
        with pytest.raises(kind, match=text):
            transfer.put_object({"x": value}, policy=policy)
    # Without bytes there is nothing to copy.
    ref = transfer.put_object({"x": TOKENS[:0]}, policy=policy)
    found = transfer.get_object(ref)["x"]
    assert (found.shape, found.dtype) == (TOKENS[:0].shape, TOKENS.dtype)


def test_config_has_one_group_for_all_keys(compat_store: MooncakeDistributedStore):
    transfer = MooncakeBundleTransfer(compat_store, "p")
    config = ReplicateConfig()
    config.group_ids = ["a", "b"]
    with pytest.raises(ValueError, match="exactly one logical group id"):
        transfer.put_bundle(b"", {"x": b"1", "y": b"2"}, config=config)
    config.group_ids = ["a"]
    ref = transfer.put_bundle(b"", {"x": b"1", "y": b"2"}, config=config)
    assert config.group_ids == ["a"]
    assert compat_store.is_exist(ref.manifest_key) == 1


def leased_bytes(pool: BufferPool) -> int:
    return pool._used


def test_results_return_their_memory_to_the_pool(compat_store: MooncakeDistributedStore):
    pool = BufferPool(compat_store)
    transfer = MooncakeBundleTransfer(compat_store, "p", buffer_pool=pool)
    ref = put(transfer, x=np.arange(1 << 18))
    result = transfer.materialize(transfer.read_spec(ref))
    assert leased_bytes(pool) == 1 << 21
    del result
    gc.collect()
    assert leased_bytes(pool) == 0
    pool.close()


def test_memory_without_arrays_is_lent_again(compat_store: MooncakeDistributedStore):
    transfer = MooncakeBundleTransfer(compat_store, "p")
    ref = put(transfer, x=np.arange(1 << 18))
    addresses = set()
    for _ in range(3):
        result = transfer.materialize(transfer.read_spec(ref))
        addresses.add(result.objects["x"].ctypes.data)
        transfer.release_result(result)
        del result
    assert len(addresses) == 1


def test_release_changes_nothing(transfer: MooncakeBundleTransfer):
    settings = {"batch": {"size": 2}, "non_tensor_batch": {"names": ["a"]}}
    ref = transfer.put({"x": np.arange(2), "settings": settings}, type="dict")
    for kind in ("dict", "dataproto"):
        result = transfer.get(ref, type=kind)
        keys = list(result)
        transfer.release_result(result)
        assert list(result) == keys
    own = {"tokens": [1, 2], "batch": {"x": np.arange(2)}}
    for value in (None, 3, "text", [own], own, (own, own)):
        assert transfer.release_result(value) is None
    assert (own["tokens"], own["batch"]["x"].tolist()) == ([1, 2], [0, 1])
    assert settings == {"batch": {"size": 2}, "non_tensor_batch": {"names": ["a"]}}


def test_released_arrays_stay_valid(compat_store: MooncakeDistributedStore):
    torch = pytest.importorskip("torch")
    pool = BufferPool(compat_store)
    transfer = MooncakeBundleTransfer(compat_store, "p", buffer_pool=pool)
    ref = put(transfer, x=np.arange(1 << 18), t=torch.arange(1 << 18))
    result = transfer.materialize(transfer.read_spec(ref))
    array, part = result.objects["x"], result.objects["t"][5:]
    for _ in range(2):
        transfer.release_result(result)
    assert leased_bytes(pool) == 0
    pool.close()
    del result
    # The pool must not lend the memory again while the arrays exist.
    again = MooncakeBundleTransfer(compat_store, "p", buffer_pool=BufferPool(compat_store))
    other = again.materialize(again.read_spec(put(again, x=np.zeros(1 << 18))))
    assert (other.objects["x"] == 0).all()
    assert (array == np.arange(1 << 18)).all()
    assert torch.equal(part, torch.arange(5, 1 << 18))


def test_exhausted_pool_does_not_fail_a_read(compat_store: MooncakeDistributedStore):
    pool = BufferPool(compat_store, max_regions=1)
    transfer = MooncakeBundleTransfer(compat_store, "p", buffer_pool=pool)
    ref = put(transfer, x=np.arange(1 << 18), y=np.arange(1 << 18))
    objects = read(transfer, ref)
    assert (objects["x"] == objects["y"]).all()


def test_interpreter_ends_with_results_in_use():
    script = """
import numpy as np
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import MooncakeBundleTransfer
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 64 << 20, 64 << 20, "tcp", "", "embedded") == 0
transfer = MooncakeBundleTransfer(store)
result = transfer.get(transfer.put({"x": np.ones(1 << 20)}))
print(int(result["batch"]["x"].sum()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{1 << 20}\n", "")


def test_forked_child_is_told_to_make_its_own_store(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = put(transfer, x=b"1")
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            read(transfer, ref)
        except RuntimeError as error:
            os.write(writable, str(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        assert "the store belongs to another process" in pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert read(transfer, ref) == {"x": b"1"}


def test_arrays_of_raw_bytes_come_back(plain: PlainStore):
    raw = np.frombuffer(b"abcdefgh", dtype="V4")
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = put(transfer, x=raw)
    assert read(transfer, ref)["x"].tobytes() == b"abcdefgh"
    assert transfer.get(transfer.put({"x": raw}), rows=[1])["batch"]["x"].tobytes() == b"efgh"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partition": "a/b", "meta": None, "chunk_bytes": 0}, "invalid bundle partition"),
        ({"chunk_bytes": 0, "x": None}, "chunk_bytes must be positive"),
        ({"max_inflight_put": 0, "x": None}, "max_inflight_put must be positive"),
        ({"name": "a/b", "x": None}, "invalid bundle buffer name"),
    ],
)
def test_options_are_checked_before_payloads(plain: PlainStore, options: Any, text: str):
    transfer = MooncakeBundleTransfer(plain, "p")
    given = {"meta": b"m", "name": "x", "x": b"1", **options}
    meta, buffers = given.pop("meta"), {given.pop("name"): given.pop("x")}
    with pytest.raises(ValueError, match=text):
        transfer.put_bundle(meta, buffers, **given)
    assert plain.objects == {}
