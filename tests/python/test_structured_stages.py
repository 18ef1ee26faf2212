"""Later fields, replaced stages and removal: nothing stays behind, old batches stay readable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structured_stores
from structured_stores import PlainStore, column

from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import (
    MooncakeBundleTransfer,
    MooncakeDataProtoRef,
    export_dataproto_ref,
)

plain = structured_stores.plain
transfer = structured_stores.transfer

ROWS = np.arange(3)
# A batch with two later fields in one stage, as the first version of this package stored it.
OLD = Path(__file__).with_name("structured_first_version.json")


def append(
    transfer: MooncakeBundleTransfer, ref: Any, stage: str = "default", **fields: Any
) -> MooncakeDataProtoRef:
    return transfer.append_dataproto_fields(ref, fields, stage=stage)


def replace(transfer: MooncakeBundleTransfer, ref: Any, **fields: Any) -> MooncakeDataProtoRef:
    return transfer.append_dataproto_fields(ref, fields, stage="default", overwrite=True)


def manifest_of(store: PlainStore, ref: MooncakeDataProtoRef) -> dict[str, Any]:
    return json.loads(store.objects[ref.stage_refs["default"].manifest_key])


def test_merged_manifest_names_what_it_was_merged_from(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    first = transfer.put({"x": ROWS})
    second = append(transfer, first, y=ROWS)
    assert len(plain.objects) == 6
    manifest = manifest_of(plain, second)
    bases = {name: spec["key"].split("/buffer/")[0] for name, spec in manifest["buffers"].items()}
    assert manifest["buffer_object_ids"] == sorted(
        base.removeprefix("p/") for base in bases.values()
    )
    old, added = bases["batch.x"], bases["batch.y"]
    assert manifest["cleanup_keys"] == [
        f"{base}/{name}" for base in (old, added) for name in ("manifest", "meta")
    ]
    assert manifest["object_id"] not in manifest["buffer_object_ids"]
    assert "buffer_object_ids" not in manifest_of(plain, first)


class CountedStore:
    """A store of this package that notes the names of the calls made."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found) or name.startswith("_"):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            return found(*arguments, **options)

        return call


def test_append_to_a_stage_of_our_store_is_one_put(compat_store: MooncakeDistributedStore):
    store = CountedStore(compat_store)
    transfer = MooncakeBundleTransfer(store, "p")
    first = transfer.put({"x": ROWS})
    store.calls.clear()
    second = append(transfer, first, y=ROWS)
    # The members with the metadata, then the manifest.
    assert store.calls == ["get_batch", *["batch_put_from_multi_buffers"] * 2]
    manifest, old = (ref.stage_refs["default"].manifest for ref in (second, first))
    assert manifest["buffer_object_ids"] == sorted([manifest["object_id"], old["object_id"]])
    assert manifest["cleanup_keys"] == [
        first.stage_refs["default"].manifest_key,
        old["meta"]["key"],
    ]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_cleanup_after_appends_to_one_stage_leaves_nothing(plain: PlainStore, count: int):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    for number in range(count):
        ref = append(transfer, ref, **{f"y{number}": ROWS + number})
    back = transfer.get(export_dataproto_ref(ref))
    assert [each.tolist() for each in back["batch"].values()][1:] == [
        (ROWS + number).tolist() for number in range(count)
    ]
    for _ in range(2):
        transfer.cleanup_dataproto(export_dataproto_ref(ref))
    assert plain.objects == {}


def test_undone_append_keeps_the_batch_before(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    first = transfer.put({"x": ROWS})
    second = append(transfer, first, y=ROWS)
    before = dict(plain.objects)
    third = append(transfer, second, z=ROWS)
    transfer.cleanup_dataproto_append(second, third)
    assert plain.objects == before
    transfer.cleanup_dataproto_append(first, second)
    assert len(plain.objects) == 3
    assert transfer.get(first)["batch"]["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("puts", range(5))
def test_failed_append_leaves_the_batch_as_it_was(plain: PlainStore, puts: int):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    before = dict(plain.objects)
    plain.puts_until_failure = puts
    with pytest.raises(RuntimeError, match="put failed"):
        append(transfer, ref, y=ROWS)
    assert plain.objects == before


@pytest.mark.parametrize(
    ("first", "more"),
    [
        ({"a": column(["x", "y", "z"])}, {"a.data": ROWS}),
        ({"a.data": ROWS}, {"a": column(["x", "y", "z"])}),
        ({3: ROWS}, {"3": ROWS}),
    ],
)
def test_later_fields_do_not_take_members_of_others(transfer, first: Any, more: Any):
    ref = transfer.put({"non_tensor_batch": first})
    before = transfer.get(ref)["non_tensor_batch"]
    with pytest.raises(ValueError, match=r"structured members already exist: ..non_tensor_batch"):
        transfer.append_dataproto_fields(ref, {"non_tensor_batch": more}, stage="default")
    after = transfer.get(ref)["non_tensor_batch"]
    assert [each.tolist() for each in after.values()] == [each.tolist() for each in before.values()]
    transfer.cleanup_dataproto(ref)
    if isinstance(transfer.store, PlainStore):
        assert transfer.store.objects == {}


def test_replaced_stage_is_removed(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    for number in range(3):
        ref = replace(transfer, ref, x=ROWS + number)
    assert len(plain.objects) == 3
    assert transfer.get(ref)["batch"]["x"].tolist() == [2, 3, 4]
    ref = replace(transfer, ref, x=ROWS, y=ROWS)
    ref = append(transfer, ref, z=ROWS)
    ref = replace(transfer, ref, x=ROWS, y=ROWS, z=ROWS)
    assert len(plain.objects) == 5
    transfer.cleanup_dataproto(ref)
    assert plain.objects == {}


def test_partial_replacement_is_refused(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"c": ROWS, "a": ROWS, "b": ROWS})
    before = dict(plain.objects)
    with pytest.raises(ValueError, match=r"must include existing fields: \['a', 'c'\]"):
        replace(transfer, ref, b=ROWS, new=ROWS)
    assert plain.objects == before


def test_field_of_another_stage_moves(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    old = transfer.put({"non_tensor_batch": {"x": column(["a", "b", "c"])}})
    new = transfer.append_dataproto_fields(old, {"x": ROWS}, stage="s", overwrite=True)
    assert (new.field_index["x"].stage, new.encoded_non_tensor) == ("s", {})
    assert transfer.get(new)["batch"]["x"].tolist() == [0, 1, 2]
    assert list(transfer.get(old)["non_tensor_batch"]["x"]) == ["a", "b", "c"]


def test_stage_that_cannot_be_removed_is_named(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    remove = plain.remove
    plain.remove = lambda key, force=False: -706 if "/buffer/" in key else remove(key)
    with pytest.raises(RuntimeError, match=r"failed to remove 1 Mooncake keys.*-706") as caught:
        replace(transfer, ref, x=ROWS + 1)
    # The manifest of the old stage still names what is left of it.
    assert ref.stage_refs["default"].manifest_key in plain.objects
    new = caught.value.__notes__[0].split("'")[1]
    plain.remove = remove
    transfer.cleanup_dataproto(ref)
    transfer.remove_bundle({"manifest_key": new})
    assert plain.objects == {}


@pytest.mark.parametrize("overwrite", [False, True])
def test_append_has_the_rows_of_the_batch(plain: PlainStore, overwrite: bool):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    for data in ({"y": np.arange(4)}, {"meta_info": {"a": 1}}):
        with pytest.raises(ValueError, match="does not match ref batch size 3"):
            transfer.append_dataproto_fields(ref, data, stage="s", overwrite=overwrite)


# 1000 rounds take a minute.
ROUNDS = 1000 if os.environ.get("MOONCAKE_LONG_TESTS") else 20


@pytest.mark.timeout(600)
def test_rounds_leave_nothing(transfer: MooncakeBundleTransfer):
    """Put, get, append, overwrite and cleanup."""
    store = transfer.store
    texts = column(["a", None, "c"])
    for number in range(ROUNDS):
        ref = transfer.put({"batch": {"x": ROWS + number}, "non_tensor_batch": {"t": texts}})
        ref = append(transfer, export_dataproto_ref(ref), y=ROWS)
        ref = append(transfer, ref, stage="other", z=ROWS)
        data = {"batch": {"x": ROWS, "y": ROWS}, "non_tensor_batch": {"t": texts}}
        ref = transfer.append_dataproto_fields(ref, data, stage="default", overwrite=True)
        again = append(transfer, ref, w=ROWS)
        assert sorted(transfer.get(again)["batch"]) == ["w", "x", "y", "z"]
        transfer.cleanup_dataproto_append(ref, again)
        assert list(transfer.get(ref)["non_tensor_batch"]["t"]) == ["a", None, "c"]
        transfer.cleanup_dataproto(ref)
    if isinstance(store, PlainStore):
        assert store.objects == {}
    else:
        assert store.remove_by_regex("^test/", True) == 0


def old_batch(store: PlainStore) -> dict[str, Any]:
    stored = json.loads(OLD.read_text())
    store.objects.update({key: each.encode("latin1") for key, each in stored["objects"].items()})
    return stored["handle"]


def test_batches_of_the_first_version_are_read_and_removed(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    handle = old_batch(plain)
    batch = transfer.get(handle)["batch"]
    assert {name: each.tolist() for name, each in batch.items()} == {
        "x": [0, 1],
        "y": [0, 2],
        "z": [0, 3],
    }
    assert transfer.orphaned_keys(plain.objects) == []
    more = append(transfer, handle, w=np.arange(2, dtype=np.int32))
    transfer.cleanup_dataproto_append(handle, more)
    assert transfer.get(handle)["batch"]["z"].tolist() == [0, 3]
    transfer.cleanup_dataproto(handle)
    assert plain.objects == {}


def test_old_manifest_cannot_claim_payloads_of_others(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    handle = old_batch(plain)
    victim = transfer.put({"x": np.arange(2), "other": np.arange(2)}, partition="old")
    key = handle["stage_refs"]["default"]["manifest_key"]
    manifest = json.loads(plain.objects[key])
    manifest["buffers"]["batch.x"] = victim.stage_refs["default"].manifest["buffers"]["batch.x"]
    plain.objects[key] = json.dumps(manifest).encode()
    for call in (transfer.get, transfer.cleanup_dataproto):
        with pytest.raises(ValueError, match="namespace"):
            call(handle)
