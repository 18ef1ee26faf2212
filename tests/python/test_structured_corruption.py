"""Stored objects that contradict themselves are refused, without a crash or a large allocation."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import structured_stores
from structured_stores import PlainStore, column

structured_columns = pytest.importorskip("structured_columns")
pytest.importorskip("msgpack")

from mooncake.structured_object_store import (  # noqa: E402
    FieldSchema,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    export_dataproto_ref,
)

# Both packages read every column but those of dtypes that numpy lacks, of which a put warns.
pytestmark = pytest.mark.filterwarnings("ignore:columns that upstream's package cannot read")

plain = structured_stores.plain
torch = structured_columns.torch

COLUMNS = {
    **{name: (None, rows) for name, _, rows in structured_columns.EXACT},
    "json": (FieldSchema("json_ragged"), [{"a": 1}, None]),
    "dicts by schema": (
        FieldSchema("ragged_tensor_dict"),
        [{"p": torch.ones(2), "q": torch.ones(1)}, None],
    ),
}
# What a caller may see for a damaged object; anything else is a defect.
REFUSALS = (ValueError, KeyError, RuntimeError)


def put_column(store: PlainStore, name: str) -> dict[str, Any]:
    schema, rows = COLUMNS[name]
    ref = MooncakeBundleTransfer(store, "p").put(
        {"non_tensor_batch": {"f": column(rows)}}, field_schemas={"f": schema} if schema else None
    )
    return export_dataproto_ref(ref)


def read(store: PlainStore, handle: dict[str, Any], rows: Any = None) -> list[Any]:
    batch = MooncakeBundleTransfer(store, "p").get(handle, rows=rows)
    return list(batch["non_tensor_batch"]["f"])


def key_of(store: PlainStore, suffix: str) -> str:
    return next(key for key in store.objects if key.endswith(suffix))


@pytest.mark.parametrize(
    ("name", "payload", "array", "text"),
    [
        ("lists", "offsets", [0, 3, 2, 3], "does not rise from 0"),
        ("lists", "offsets", [1, 2, 3, 3], "does not rise from 0"),
        ("lists", "offsets", [0, 2, 3, 4], "ends at 4, but the data has 3 items"),
        ("lists", "offsets", [0, -1, 3, 3], "does not rise from 0"),
        ("lists", "shapes", [3, 1, 0], "the shape of row 0 does not match its 2 items"),
        ("lists", "shapes", [-1, 1, 0], "out of range"),
        ("nested lists", "shapes", [1 << 40, 1 << 40, 1, 2], "does not match its 4 items"),
        ("text", "offsets", [0, 9, 9, 9, 9], "ends at 9, but the data has 6 items"),
        ("tensors", "offsets", [0, 3, 2, 3], "does not rise from 0"),
    ],
)
def test_payload_that_lies_is_refused(
    plain: PlainStore, name: str, payload: str, array: list[int], text: str
):
    handle = put_column(plain, name)
    key = key_of(plain, f".f.{payload}")
    assert len(plain.objects[key]) == 8 * len(array)
    plain.objects[key] = np.array(array, dtype=np.int64).tobytes()
    with pytest.raises(ValueError, match=text):
        read(plain, handle)


def test_nulls_of_a_wrong_length_are_refused(plain: PlainStore):
    handle = put_column(plain, "text")
    handle["encoded_non_tensor"]["f"]["payload_members"]["nulls"] = "non_tensor_batch.f.offsets"
    with pytest.raises(ValueError, match=r"the payload nulls has shape \(5,\), expected \(4,\)"):
        read(plain, handle)


def test_manifest_cannot_ask_for_more_memory_than_there_is(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    payload = StructuredObjectPayload({}, {"x": np.zeros(4, dtype=np.int64)})
    ref = transfer.put_structured_object(payload)
    # Unlike a plain store, this one tells the size of an object.
    plain.get_size = lambda key: len(plain.objects.get(key, b""))
    manifest = copy.deepcopy(ref.manifest)
    length = 1 << 48
    for entry in (manifest["buffers"]["x"], manifest["buffers"]["x"]["chunks"][0]):
        entry["bytes"] = length
    meta = plain.objects[manifest["meta"]["key"]].replace(
        b'"shape":[4]', b'"shape":[35184372088832]'
    )
    plain.objects[manifest["meta"]["key"]] = meta
    for entry in (manifest["meta"], manifest["meta"]["chunks"][0]):
        entry["bytes"] = len(meta)
    with pytest.raises(RuntimeError, match=f"expected {length}, got 32"):
        transfer.materialize(transfer.read_spec(RemoteBundleRef(ref.manifest_key, manifest)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda raw: raw.update(version=9), "unsupported bundle manifest version: 9"),
        (lambda raw: raw.update(layout="x"), "it has no layout 'bundle'"),
        (lambda raw: raw.update(buffers=[]), "buffers must be a mapping"),
        (lambda raw: raw["buffers"]["x"].update(bytes=7), "the chunks do not add up to bytes=7"),
        (lambda raw: raw["buffers"]["x"].update(bytes=-1), "expected a length from 0"),
        (lambda raw: raw["buffers"]["x"].pop("chunks"), "payload 'x': 'chunks'"),
        (lambda raw: raw["buffers"]["x"].update(key=3), "expected a key, got 3"),
    ],
)
def test_false_manifests_are_refused(
    plain: PlainStore, change: Callable[[dict[str, Any]], Any], text: str
):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put_bundle(b"", {"x": b"abc"})
    raw = json.loads(plain.objects[ref.manifest_key])
    change(raw)
    plain.objects[ref.manifest_key] = json.dumps(raw).encode()
    with pytest.raises(ValueError, match=text):
        transfer.materialize(transfer.read_spec({"manifest_key": ref.manifest_key}))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"encoding": "pickle"}, "unsupported structured field encoding 'pickle'"),
        ({"encoding": "ndarray", "dtype": "O", "shape": [3]}, "invalid dtype 'O'"),
        ({"encoding": "ndarray", "dtype": "i4,f8", "shape": [1]}, "invalid dtype"),
        ({"encoding": "ndarray", "dtype": "<i8", "shape": [3]}, "do not match bytes=3"),
        ({"encoding": "ndarray", "dtype": "|u1", "shape": [-3]}, "invalid shape"),
        ({"encoding": "ndarray", "dtype": "|u1"}, "invalid shape None"),
        ({"encoding": "torch_tensor", "nested": True, "format": "torch_save"}, "are not read"),
        ({"encoding": "torch_tensor", "dtype": "torch.int8", "shape": [3]}, "do not match"),
    ],
)
def test_false_descriptions_are_refused(plain: PlainStore, field: dict[str, Any], text: str):
    transfer = MooncakeBundleTransfer(plain, "p")
    meta = json.dumps({"__mooncake_structured_fields__": {"x": field}}).encode()
    ref = transfer.put_bundle(meta, {"x": b"abc"})
    with pytest.raises(ValueError, match=text):
        transfer.materialize(transfer.read_spec(ref))


def damaged(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one part replaced."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        name = chance.choice(sorted(value))
        return {**value, name: damaged(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], damaged(value[at], chance), *value[at + 1 :]]
    return chance.choice([None, -1, 0, 1, 2, 3, 1 << 62, "", "x", "data", [], [1], {}, True, 1.5])


@pytest.mark.parametrize("name", sorted(COLUMNS))
def test_damaged_columns_never_crash(name: str):
    whole = PlainStore()
    handle = put_column(whole, name)
    for seed in range(60):
        chance = random.Random(f"{name} {seed}")
        store, changed = PlainStore(), handle
        store.objects = dict(whole.objects)
        if seed % 3:
            key = chance.choice([key for key in store.objects if "/buffer/" in key])
            data = bytearray(store.objects[key])
            for _ in range(chance.randint(1, 3)):
                data[chance.randrange(len(data))] = chance.choice([0, 1, 2, 127, 128, 255])
            store.objects[key] = bytes(data)
        else:
            encoded = damaged(handle["encoded_non_tensor"], chance)
            changed = {**handle, "encoded_non_tensor": encoded}
        for rows in (None, [0], slice(1, None)):
            # Any other exception, such as a MemoryError, fails the test.
            with contextlib.suppress(*REFUSALS):
                read(store, changed, rows)


def test_bfloat16_columns_do_not_depend_on_ml_dtypes():
    pytest.importorskip("ml_dtypes", reason="needs ml_dtypes: pip install ml_dtypes")
    store = PlainStore()
    values = read(store, put_column(store, "bfloat16"))
    assert {str(value.dtype) for value in values if value is not None} == {"torch.bfloat16"}
