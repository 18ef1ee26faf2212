"""Manifests that name objects of other bundles are neither read nor removed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import structured_stores
from structured_stores import PlainStore

from mooncake.structured_object_store import (
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
)

plain = structured_stores.plain

Manifest = dict[str, Any]


def put(store: PlainStore) -> RemoteBundleRef:
    transfer = MooncakeBundleTransfer(store, "p", default_chunk_bytes=4)
    return transfer.put_structured_object(
        StructuredObjectPayload({"step": 1}, {"x": b"abcdef", "y": b"gh"})
    )


def doubled(manifest: Manifest) -> None:
    entry = manifest["buffers"]["x"]
    entry["chunks"].append(entry["chunks"][0])
    entry["bytes"] += entry["chunks"][0]["bytes"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda own, other: own.update(meta=other["meta"]), "namespace"),
        (lambda own, other: own["buffers"].update(y=other["buffers"]["y"]), "namespace"),
        (
            lambda own, other: own["buffers"]["y"].update(chunks=other["buffers"]["y"]["chunks"]),
            "namespace",
        ),
        (
            lambda own, other: own["buffers"]["y"]["chunks"][0].update(
                key=own["buffers"]["x"]["chunks"][1]["key"]
            ),
            "namespace",
        ),
        (lambda own, other: doubled(own), "unique"),
        (lambda own, other: own["buffers"]["y"].update(bytes=3), "do not add up"),
        (lambda own, other: own.update(object_id=other["object_id"]), "namespace"),
        (lambda own, other: own.update(object_id=7), "object_id"),
        (lambda own, other: own.update(version=2), "version"),
        (lambda own, other: own.update(layout="other"), "layout"),
        (lambda own, other: own.update(buffers=[]), "buffers"),
        (lambda own, other: own.update(buffer_object_ids="id"), "buffer_object_ids"),
        (lambda own, other: own.update(buffer_object_ids=[1]), "buffer_object_ids"),
        (lambda own, other: own.update(buffer_object_ids=None), "buffer_object_ids"),
        (lambda own, other: own.update(buffer_object_ids=["default/x"]), "namespace"),
        (lambda own, other: own.update(cleanup_keys=["other/x"]), "cleanup_keys"),
        (lambda own, other: own.update(cleanup_keys=[other["meta"]["key"]]), "cleanup_keys"),
        (lambda own, other: own.update(cleanup_keys="x"), "cleanup_keys"),
    ],
)
def test_false_manifest_is_refused(
    plain: PlainStore, change: Callable[[Manifest, Manifest], Any], text: str
):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref, other = put(plain), put(plain)
    manifest = copy.deepcopy(ref.manifest)
    change(manifest, other.manifest)
    plain.objects[ref.manifest_key] = json.dumps(manifest).encode()
    before = dict(plain.objects)
    handle = {"manifest_key": ref.manifest_key}
    for each in (RemoteBundleRef(ref.manifest_key, manifest), handle):
        for call in (
            lambda ref: transfer.materialize(transfer.read_spec(ref)),
            transfer.remove_bundle,
        ):
            with pytest.raises(ValueError, match=text):
                call(each)
    assert plain.objects == before


def test_key_must_be_that_of_the_manifest(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref, other = put(plain), put(plain)
    with pytest.raises(ValueError, match="manifest_key"):
        transfer.remove_bundle(RemoteBundleRef(other.manifest_key, ref.manifest))
    plain.objects[other.manifest_key] = plain.objects[ref.manifest_key]
    with pytest.raises(ValueError, match="manifest_key"):
        transfer.remove_bundle({"manifest_key": other.manifest_key})


def test_bundle_of_another_prefix_is_foreign(plain: PlainStore):
    other = MooncakeBundleTransfer(plain, "other")
    handle = {"manifest_key": put(plain).manifest_key}
    for call in (lambda ref: other.materialize(other.read_spec(ref)), other.remove_bundle):
        with pytest.raises(ValueError, match="namespace"):
            call(handle)


def test_manifest_may_come_with_the_handle(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = put(plain)
    for handle in ({"manifest": ref.manifest}, {"manifest": ref.manifest, "manifest_key": "x"}):
        result = transfer.materialize(transfer.read_spec(handle))
        assert result.objects == {"x": b"abcdef", "y": b"gh"}
    with pytest.raises(ValueError, match="manifest_key"):
        transfer.materialize(transfer.read_spec({}))
    transfer.remove_bundle({"manifest": ref.manifest})
    assert plain.objects == {}
