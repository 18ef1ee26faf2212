"""The calls of stores that are not of this package: which are used, and what is left to `get`."""

from __future__ import annotations

import ctypes
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import structured_stores
from structured_stores import Config, FullStore, PlainStore, Pool, column

from mooncake.structured.bundle_store import Objects
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    raw_destination,
    tensor_object_buffer,
)

torch = pytest.importorskip("torch")

plain = structured_stores.plain

ROWS = np.arange(6, dtype=np.int32).reshape(3, 2)
OPTIONAL = (
    "batch_put_from",
    "batch_get_into",
    "get_into",
    "get_into_ranges",
    "register_buffer",
    "unregister_buffer",
    "put_tensor",
    "pub_tensor",
    "get_tensor",
    "get_tensor_into",
    "put_tensor_from",
    "put_from",
    "batch_remove",
    "is_exist",
)


@pytest.fixture
def full() -> FullStore:
    return FullStore()


def put(transfer: MooncakeBundleTransfer, **members: Any) -> RemoteBundleRef:
    return transfer.put_structured_object(StructuredObjectPayload({}, members))


def read(transfer: MooncakeBundleTransfer, ref: RemoteBundleRef, **into: Any) -> dict[str, Any]:
    return transfer.materialize_into(transfer.read_spec(ref), into).objects


def spec_of(ref: RemoteBundleRef, name: str) -> dict[str, Any]:
    """Return the entry of a payload in a manifest, without its keys."""
    spec = dict(ref.manifest["buffers"][name])
    assert [chunk["key"] for chunk in spec.pop("chunks")] == [spec.pop("key")]
    return spec


def memory(content: bytes) -> tuple[Any, int]:
    """Return memory with some content, and its address."""
    held = ctypes.create_string_buffer(content, len(content))
    return held, ctypes.addressof(held)


def test_attributes_are_public(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "/a/b/", 99)
    given = (transfer.store, transfer.key_prefix, transfer.default_chunk_bytes)
    assert given == (plain, "a/b", 99)


@pytest.mark.parametrize("name", ["", "a/b", "a\n"])
def test_names_without_text_or_with_control_characters_are_refused(plain: PlainStore, name: str):
    transfer = MooncakeBundleTransfer(plain, "p")
    with pytest.raises(ValueError, match="invalid bundle partition"):
        transfer.put_bundle(b"", {}, partition=name)
    with pytest.raises(ValueError, match="invalid bundle buffer name"):
        transfer.put_bundle(b"", {name: b""})
    if "/" not in name:
        with pytest.raises(ValueError, match="key_prefix must be a non-empty key prefix"):
            MooncakeBundleTransfer(plain, name)


def test_calls_that_are_none_are_absent(full: FullStore):
    for name in OPTIONAL:
        setattr(full, name, None)
    transfer = MooncakeBundleTransfer(full, "p", buffer_pool=Pool(full))
    ref = transfer.put({"batch": {"x": ROWS, "t": torch.ones(3)}})
    for rows in (None, slice(1, 2), [2, 0]):
        assert transfer.get(ref, rows=rows)["batch"]["t"].sum() in (3, 2, 1)
    transfer.cleanup_dataproto(ref)
    transfer.cleanup_dataproto({**structured_handle(ref)})
    assert (full.objects, full.calls) == ({}, [])


def structured_handle(ref: Any) -> dict[str, Any]:
    from mooncake.structured_object_store import export_dataproto_ref

    return export_dataproto_ref(ref)


@pytest.mark.parametrize("missing", ["register_buffer", "unregister_buffer"])
def test_memory_that_cannot_be_registered_is_not_read_into(full: FullStore, missing: str):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, x=ROWS)
    setattr(full, missing, None)
    assert (read(transfer, ref)["x"] == ROWS).all()
    assert full.calls == []


def test_memory_is_registered_for_the_read_only(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, x=ROWS)
    assert (read(transfer, ref)["x"] == ROWS).all()
    rows = transfer.read_spec(ref).slice_member("x", 0, 1, 3)
    assert (transfer.materialize(rows).objects["x"] == ROWS[1:]).all()
    # The metadata of the object is read by the first call of each read.
    calls = ["batch_get_into", "get_into_ranges"] * 2
    assert (full.calls, full.registered) == (calls, {})


def test_memory_that_is_registered_already_stays_registered(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, x=ROWS)
    into = np.empty_like(ROWS)
    register = full.register_buffer
    full.registered[into.ctypes.data] = into.nbytes
    full.register_buffer = lambda address, size: (
        -600 if address in full.registered else register(address, size)
    )
    read(transfer, ref, x=into)
    assert ((into == ROWS).all(), list(full.registered)) == (True, [into.ctypes.data])
    full.register_buffer = lambda address, size: -1
    with pytest.raises(RuntimeError, match="register_buffer failed"):
        read(transfer, ref, x=into)


def test_registered_destinations_need_no_registration(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, x=ROWS)
    into = np.zeros_like(ROWS)
    full.registered[into.ctypes.data] = into.nbytes
    full.register_buffer = full.unregister_buffer = None
    raw = raw_destination(into.ctypes.data, into.nbytes, into, pre_registered=True)
    result = read(transfer, ref, x=raw)["x"]
    assert full.calls == ["get_into_ranges"]
    assert (result == ROWS).all()
    result[0, 0] = 9
    assert into[0, 0] == 9


# Tensors


def test_tensors_are_put_by_the_calls_for_them(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    tensor = torch.arange(6).reshape(3, 2)
    ref = put(transfer, t=tensor, s=torch.tensor(2.5))
    assert full.calls == ["put_tensor", "put_tensor"]
    assert spec_of(ref, "t") == {
        "kind": "tensor",
        "bytes": 304 + 48,
        "dtype": "torch.int64",
        "shape": [3, 2],
        "metadata_bytes": 304,
    }
    back = read(transfer, ref)
    assert torch.equal(back["t"], tensor)
    assert back["s"].shape == ()
    # The bytes under the key are not those of a tensor.
    part = transfer.read_spec(ref).slice_member("t", 0, 1, 3)
    assert torch.equal(transfer.materialize(part).objects["t"], tensor[1:])
    into = torch.empty_like(tensor)
    assert read(transfer, ref, t=into)["t"] is into
    assert torch.equal(into, tensor)


def test_config_goes_with_the_call_for_it(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = transfer.put({"t": torch.ones(3)})
    assert full.calls == ["pub_tensor"]
    assert {tuple(each.group_ids) for each in full.configs} == {(ref._storage_group_id,)}
    full.pub_tensor = None
    ref = transfer.put({"t": torch.ones(3)})
    assert full.calls == ["pub_tensor"]
    assert set(spec_of(ref.stage_refs["default"], "batch.t")) == {"bytes", "metadata_bytes"}
    assert transfer.get(ref)["batch"]["t"].tolist() == [1, 1, 1]


def test_stored_tensor_needs_the_call_for_it(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, t=torch.ones(2))
    full.get_tensor = None
    with pytest.raises(RuntimeError, match="does not support get_tensor"):
        read(transfer, ref)
    full.get_tensor = lambda key: None
    with pytest.raises(RuntimeError, match="get_tensor failed"):
        read(transfer, ref)


@pytest.mark.parametrize("store", [PlainStore(), FullStore()], ids=["plain", "full"])
def test_copied_tensors_are_bytes_of_one_object(store: PlainStore):
    transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=16)
    policy = BundleTransferPolicy(copy_mode="copy")
    tensor = torch.arange(40).reshape(4, 10)
    payload = StructuredObjectPayload({}, {"t": tensor, "s": torch.tensor(7)})
    ref = transfer.put_structured_object(payload, policy=policy)
    assert spec_of(ref, "t") == {"bytes": 304 + 320, "metadata_bytes": 304}
    assert spec_of(ref, "s")["format"] == "torch_save"
    back = read(transfer, ref)
    assert torch.equal(back["t"], tensor)
    assert (back["s"].shape, back["s"].dtype, int(back["s"])) == ((), torch.int64, 7)
    part = transfer.read_spec(ref).slice_member("s", 0, 0, 1)
    with pytest.raises(ValueError, match="at least one dimension"):
        transfer.materialize(part)


def test_pickles_of_anything_but_a_tensor_are_refused(plain: PlainStore):
    import pickle

    transfer = MooncakeBundleTransfer(plain, "p")
    ref = put(transfer, s=torch.tensor(7))
    evil = pickle.dumps(print)
    spec = ref.manifest["buffers"]["s"]
    plain.objects[spec["key"]] = evil
    spec["bytes"] = spec["chunks"][0]["bytes"] = len(evil)
    with pytest.raises(ValueError, match="cannot be loaded"):
        read(transfer, ref)


@pytest.mark.parametrize("mode", ["auto", "copy", "zero_copy"])
def test_memory_of_a_tensor_is_put_as_it_is(full: FullStore, mode: str):
    transfer = MooncakeBundleTransfer(full, "p")
    policy = BundleTransferPolicy(copy_mode=mode)
    held, address = memory(b"fifteen bytes..")
    payload = StructuredObjectPayload({}, {"t": tensor_object_buffer(address, 15, held)})
    ref = transfer.put_structured_object(payload, policy=policy)
    transfer.put_structured_object(payload, policy=policy, config=Config("g"))
    assert full.calls == ["put_tensor_from", "put_from"]
    assert spec_of(ref, "t") == {"bytes": 15}
    into, to = memory(bytes(15))
    full.registered[to] = 15
    destination = tensor_object_buffer(to, 15, into)
    assert read(transfer, ref, t=destination)["t"] is destination
    assert into.raw == held.raw
    with pytest.raises(ValueError, match="at least 15"):
        read(transfer, ref, t=tensor_object_buffer(to, 14, into))
    full.put_from = full.put_tensor_from = None
    with pytest.raises(RuntimeError, match="put_from"):
        transfer.put_structured_object(payload, policy=policy)


@pytest.mark.parametrize("is_registered", [True, False])
def test_rows_of_a_tensor_are_read_into_memory_of_the_caller(full: FullStore, is_registered: bool):
    transfer = MooncakeBundleTransfer(full, "p")
    tensor = torch.arange(6, dtype=torch.float32).reshape(3, 2)
    policy = BundleTransferPolicy(copy_mode="copy")
    payload = StructuredObjectPayload({}, {"t": tensor})
    ref = transfer.put_structured_object(payload, policy=policy)
    held, address = memory(bytes(400))
    if is_registered:
        # The elements are behind the metadata, and the store knows no address in between.
        full.registered[address] = 400
    part = transfer.read_spec(ref).slice_member("t", 0, 1, 3)
    destination = tensor_object_buffer(address, 400, held)
    assert transfer.materialize_into(part, {"t": destination}).objects["t"] is destination
    assert torch.frombuffer(held, dtype=torch.float32)[76:80].tolist() == [2, 3, 4, 5]
    stored = StructuredObjectPayload({}, {"t": tensor_object_buffer(address, 304 + 16, held)})
    full.registered[address] = 400
    again = transfer.put_structured_object(stored)
    assert full.objects[again.manifest["buffers"]["t"]["key"]] == held.raw[:320]
    assert read(transfer, again)["t"].tolist() == [[2, 3], [4, 5]]


def test_empty_memory_of_a_tensor_is_one_object(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    payload = StructuredObjectPayload({}, {"t": tensor_object_buffer(0, 0)})
    ref = transfer.put_structured_object(payload)
    transfer.put_structured_object(payload, config=Config("g"))
    assert full.calls == ["put_tensor_from", "put_from"]
    assert [chunk["bytes"] for chunk in ref.manifest["buffers"]["t"]["chunks"]] == [0]
    transfer.remove_bundle(RemoteBundleRef(ref.manifest_key, {}))
    assert sorted(key.split("/")[-1] for key in full.objects) == ["manifest", "meta", "t"]


def test_empty_memory_of_a_tensor_is_put_as_by_upstream(compat_store: Any):
    transfer = MooncakeBundleTransfer(compat_store, "p")
    field = tensor_object_buffer(0, 0, batch_size=3)
    ref = transfer.put({"t": field})
    assert ref.batch_size == 3
    transfer.cleanup_dataproto(ref)
    with pytest.raises(RuntimeError, match="put_tensor_from failed"):
        transfer.put_structured_object(StructuredObjectPayload({}, {"t": field}))


def test_memory_of_a_tensor_has_rows_only_by_its_batch_size(full: FullStore):
    held, address = memory(bytes(8))
    buffer = tensor_object_buffer(address, 8, held)
    assert (buffer.ptr, buffer.size, buffer.owner, buffer.batch_size) == (address, 8, held, None)
    with pytest.raises(TypeError, match="batch_size"):
        len(buffer)
    transfer = MooncakeBundleTransfer(full, "p")
    with pytest.raises(TypeError, match="batch_size"):
        transfer.put({"t": buffer})
    assert transfer.put({"t": tensor_object_buffer(address, 8, held, 3)}).batch_size == 3


def test_tensor_in_memory_of_the_caller_is_the_result(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, t=torch.arange(4))
    made = torch.arange(4)
    full.get_tensor_into = lambda key, address, size: made
    held, address = memory(bytes(304 + 32))
    assert read(transfer, ref, t=tensor_object_buffer(address, 336, held))["t"] is made


def test_tensor_in_memory_of_the_caller_shares_it(compat_store: Any):
    transfer = MooncakeBundleTransfer(compat_store, "p")
    ref = put(transfer, t=torch.arange(4))
    assert spec_of(ref, "t")["kind"] == "tensor"
    assert torch.equal(
        compat_store.get_tensor(ref.manifest["buffers"]["t"]["key"]), torch.arange(4)
    )
    held, address = memory(bytes(304 + 32))
    result = read(transfer, ref, t=tensor_object_buffer(address, 336, held))["t"]
    assert (result.tolist(), result.data_ptr()) == ([0, 1, 2, 3], address + 304)
    with pytest.raises(ValueError, match="at least 336"):
        read(transfer, ref, t=tensor_object_buffer(address, 300, held))


# Pools


def test_pool_of_the_caller_lends_memory_of_results(full: FullStore):
    pool = Pool(full)
    transfer = MooncakeBundleTransfer(full, "p", buffer_pool=pool)
    ref = put(transfer, x=ROWS, b=b"abc", empty=b"")
    pool.leases.clear()
    full.calls.clear()
    full.register_buffer = full.unregister_buffer = None
    result = transfer.materialize(transfer.read_spec(ref))
    assert [lease.size for lease in pool.leases] == [ROWS.nbytes, 3]
    assert set(full.calls) == {"get_into_ranges"}
    assert (result.objects["x"] == ROWS).all()
    assert result.objects["b"] == b"abc"
    for _ in range(2):
        transfer.release_result(result.objects)
    assert [lease.releases for lease in pool.leases] == [1, 1]
    assert list(result.objects) == ["x", "b", "empty"]


def test_leases_end_with_the_arrays(full: FullStore):
    pool = Pool(full)
    transfer = MooncakeBundleTransfer(full, "p", buffer_pool=pool)
    rows = column([np.arange(2), np.arange(3), None])
    ref = transfer.put({"batch": {"x": ROWS}, "non_tensor_batch": {"rows": rows}})
    pool.leases.clear()
    result = transfer.get(ref)
    assert any(lease.releases == 0 for lease in pool.leases)
    assert [
        None if row is None else row.tolist() for row in result["non_tensor_batch"]["rows"]
    ] == [
        [0, 1],
        [0, 1, 2],
        None,
    ]
    del result
    assert {lease.releases for lease in pool.leases} == {1}
    result = transfer.get(ref)
    transfer.release_result(result)
    assert {lease.releases for lease in pool.leases} == {1}


def test_pool_of_the_caller_stages_puts(full: FullStore):
    pool = Pool(full)
    transfer = MooncakeBundleTransfer(full, "p", default_chunk_bytes=16, buffer_pool=pool)
    ref = put(transfer, x=ROWS)
    assert [lease.size for lease in pool.leases] == [16, 8]
    assert ({lease.releases for lease in pool.leases}, full.calls) == ({1}, ["batch_put_from"] * 2)
    pool.is_exhausted = True
    again = put(transfer, x=ROWS)
    for each in (ref, again):
        assert (read(transfer, each)["x"] == ROWS).all()


def test_results_with_the_sections_of_a_batch_are_released(full: FullStore):
    class Batch:
        def __init__(self, batch: Any, non_tensor_batch: Any, meta_info: Any) -> None:
            self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    pool = Pool(full)
    transfer = MooncakeBundleTransfer(full, "p", buffer_pool=pool)
    ref = transfer.put({"x": ROWS})
    pool.leases.clear()
    result = transfer.get(ref, data_cls=Batch)
    transfer.release_result([(result, {"again": result})])
    assert [lease.releases for lease in pool.leases] == [1]


# Removal


def test_keys_that_a_batch_leaves_are_removed_one_by_one(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    ref = put(transfer, x=ROWS, y=ROWS)
    full.refused = {ref.manifest["buffers"]["x"]["key"]: -706}
    transfer.remove_bundle(ref)
    assert full.objects == {}
    ref = put(transfer, x=ROWS, y=ROWS)
    full.refused = {ref.manifest["buffers"]["x"]["key"]: -706}
    full.remove = lambda key, force=False: -706
    with pytest.raises(RuntimeError, match=r"failed to remove \d Mooncake keys.*-706"):
        transfer.remove_bundle(ref)
    assert ref.manifest_key in full.objects


def test_removal_copes_with_what_stores_answer(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    remove = full.remove
    ref = put(transfer, x=ROWS)

    def only_keys(keys: list[str]) -> list[Any]:
        return [None if remove(key) == 0 else -704 for key in keys]

    full.batch_remove = only_keys
    transfer.remove_bundle(ref)
    assert full.objects == {}

    def unknown(key: str, force: bool = False) -> int:
        raise KeyError(key)

    full.batch_remove = lambda keys, force: [-1] * len(keys)
    full.remove = unknown
    transfer.remove_bundle(ref)
    full.batch_remove = lambda keys, force: []
    with pytest.raises(RuntimeError, match="0 results"):
        transfer.remove_bundle(ref)


def test_store_that_cannot_tell_whether_a_bundle_exists_is_an_error(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = put(transfer, x=ROWS)
    handle = {"manifest_key": ref.manifest_key}
    plain.is_exist = lambda key: -900
    with pytest.raises(RuntimeError, match="-900"):
        transfer.remove_bundle(handle)
    plain.is_exist = lambda key: 0
    transfer.remove_bundle(handle)
    assert len(plain.objects) == 3


def test_failed_put_raises_its_own_error(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")

    def fail(keys: list[str], force: bool = False) -> list[int]:
        raise OSError("removal fails, too")

    full.batch_remove = fail
    full.puts_until_failure = 2
    with pytest.raises(RuntimeError, match=r"put failed .* -200"):
        put(transfer, x=ROWS, y=ROWS)
    assert full.objects == {}


# Objects


def test_payload_has_members_and_a_mapping_of_metadata(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    with pytest.raises(TypeError, match="requires buffers"):
        StructuredObjectPayload({"step": 1})
    for metadata, text in (([1], "mapping"), ({"a": object()}, "JSON-serializable")):
        with pytest.raises(TypeError, match=text):
            transfer.put_structured_object(StructuredObjectPayload(metadata, {"x": b"1"}))
    assert plain.objects == {}


def test_empty_selection_is_refused_before_any_read(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    spec = transfer.read_spec({"manifest_key": "p/default/none/manifest"}).select_members([])
    with pytest.raises(ValueError, match="structured read spec selected no members"):
        transfer.materialize(spec)


def test_read_only_destination_is_refused(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    into = np.zeros_like(ROWS)
    into.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        read(transfer, put(transfer, x=ROWS), x=into)


# Stores of tests


def test_store_that_has_any_attribute_is_not_one_of_this_package():
    """A mock answers every call, so only those that upstream's package makes may be made."""
    objects: dict[str, bytes] = {}
    store = MagicMock()
    store.put.side_effect = lambda key, value, **config: objects.update({key: bytes(value)}) or 0
    store.get.side_effect = objects.get
    store.batch_remove.side_effect = lambda keys, force: [objects.pop(key) and 0 for key in keys]
    transfer = MooncakeBundleTransfer(store, "p")
    ref = transfer.put_bundle(b"meta", {"x": b"12", "y": ROWS})
    assert list(objects) == [
        ref.manifest["meta"]["key"],
        *(each["key"] for each in ref.manifest["buffers"].values()),
        ref.manifest_key,
    ]
    transfer.remove_bundle(ref)
    assert (objects, store.batch_put_from_multi_buffers.called) == ({}, False)
    store.put.side_effect = None
    store.put.return_value = -1
    with pytest.raises(RuntimeError, match=r"put failed for p/default/.*/meta: -1"):
        transfer.put_bundle(b"meta", {"x": b"12"})


def test_wrapper_of_a_store_reads_memory_in_place(compat_store: Any):
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return getattr(compat_store, name)

    assert Objects(Wrapper()).is_native
    assert Objects(compat_store).is_native
    assert not Objects(MagicMock()).is_native
    assert not Objects(PlainStore()).is_native


def test_members_are_put_in_their_order(full: FullStore):
    transfer = MooncakeBundleTransfer(full, "p")
    put(transfer, t=torch.ones(2), x=ROWS, u=torch.ones(2))
    names = [key.split("/", 3)[-1] for key in full.objects]
    assert names == ["meta", "buffer/t", "buffer/x", "buffer/u", "manifest"]


@pytest.mark.parametrize("has_pool", [False, True])
def test_rows_are_read_into_one_buffer(full: FullStore, has_pool: bool):
    pool = Pool(full) if has_pool else None
    transfer = MooncakeBundleTransfer(full, "p", default_chunk_bytes=8, buffer_pool=pool)
    texts = column(["a", "bc", "def"])
    ref = transfer.put({"batch": {"x": ROWS}, "non_tensor_batch": {"t": texts}})
    register = full.register_buffer
    spans: list[int] = []
    full.register_buffer = lambda address, size: spans.append(size) or register(address, size)
    full.calls.clear()
    batch = transfer.get(ref, fields=["x"], rows=[2, 0])["batch"]
    assert (batch["x"] == ROWS[[2, 0]]).all()
    assert full.calls == ["batch_get_into", "get_into_ranges"]
    # A lease is registered already. The other memory is that of the metadata.
    assert spans[1:] == ([] if has_pool else [16])
    back = transfer.get(ref, fields=["t"], rows=[2, 0])["non_tensor_batch"]
    assert list(back["t"]) == ["def", "a"]
