"""Batches of columns: codecs, selections of fields and rows, stages, and references."""

from __future__ import annotations

import json
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
    MooncakeDataProtoRef,
    StructuredMemberSlice,
    export_dataproto_ref,
    import_dataproto_ref,
    is_dataproto_ref_handle,
)

# Both packages read every column but those of dtypes that numpy lacks, of which a put warns.
pytestmark = pytest.mark.filterwarnings("ignore:columns that upstream's package cannot read")

plain = structured_stores.plain
transfer = structured_stores.transfer
are_same = structured_columns.are_same
torch = structured_columns.torch

BATCH = {
    "batch": {"x": torch.arange(6).reshape(3, 2), "n": np.arange(3)},
    "non_tensor_batch": {
        "text": column(["a", "bb", None]),
        "weight": np.array([1.0, 2.0, 3.0]),
        "ids": column([[1], [2, 3], []]),
        "scores": column([torch.tensor([1]), torch.tensor([2, 3]), None]),
    },
    "meta_info": {"lr": 0.5, "epoch": 1},
}


def put_column(
    transfer: MooncakeBundleTransfer, rows: list[Any], schema: FieldSchema | None = None
):
    schemas = {"f": schema} if schema else None
    data = {"non_tensor_batch": {"f": column(rows)}}
    return transfer.put(data, field_schemas=schemas)


def rows_of(transfer: MooncakeBundleTransfer, ref: MooncakeDataProtoRef, rows: Any = None) -> list:
    return list(transfer.get(ref, rows=rows)["non_tensor_batch"]["f"])


@pytest.mark.parametrize(
    ("codec", "rows"), [each[1:] for each in structured_columns.EXACT], ids=lambda value: None
)
def test_column_comes_back_as_it_was(transfer: MooncakeBundleTransfer, codec: str, rows: list):
    ref = put_column(transfer, rows)
    assert ref.encoded_non_tensor["f"]["codec"] == codec
    assert are_same(rows_of(transfer, ref), rows)
    for chosen in ([len(rows) - 1, 0], [0, 0], [], [-1]):
        assert are_same(rows_of(transfer, ref, chosen), [rows[row] for row in chosen])
    assert are_same(rows_of(transfer, ref, slice(1, None)), rows[1:])


def test_tuples_come_back_as_lists(transfer: MooncakeBundleTransfer):
    assert rows_of(transfer, put_column(transfer, [(1, 2), (3,)])) == [[1, 2], [3]]
    assert rows_of(transfer, put_column(transfer, [("a", 1)])) == [["a", 1]]


@pytest.mark.parametrize(
    "rows",
    [
        [object()],
        [{1}],
        [2**70],
        [1j, 2],
        [np.arange(2), torch.ones(1)],
        [{1: torch.ones(1)}],
        [{(1, 2): 3}],
        [["x", {"a": {(): 1}}]],
        [{"a": np.datetime64("2020", "ns")}],
        [np.array([2**60 + 1]), np.array([1.5], "f4")],
        [np.array([2**63 + 1], "u8"), np.array([-1])],
        [np.array([2**60 + 1]), np.array([1.5]), [2.5]],
        [np.ma.masked_array([1, 2], [0, 1]), np.ones(1, int)],
        [{"a": [np.ma.masked_array([1, 2], [0, 1])]}],
        np.ma.masked_array([1, None], [0, 1], object),
    ],
    ids=[
        *("object", "set", "large", "complex", "array and tensor", "number as key"),
        *("tuple as key", "deep tuple as key", "time", "integers and floats", "signs", "three"),
        *("mask", "deep mask", "masked row"),
    ],
)
def test_column_without_a_codec_is_refused(plain: PlainStore, rows: list):
    with pytest.raises(ValueError, match=r"no codec matched|are not all str"):
        put_column(MooncakeBundleTransfer(plain, "p"), rows)
    assert plain.objects == {}


def test_arrays_get_a_common_dtype_that_keeps_them(transfer: MooncakeBundleTransfer):
    for rows, dtype in [
        ([np.array([2**60 + 1]), np.array([])], "int64"),
        ([np.array([]), np.array([], "i4")], "float64"),
        ([np.array([2**53]), np.array([1.5], "f4")], "float64"),
        ([np.array([255], "u1"), np.array([-1], "i1")], "int16"),
    ]:
        back = rows_of(transfer, put_column(transfer, rows))
        assert [each.tolist() for each in back] == [each.tolist() for each in rows]
        assert {str(each.dtype) for each in back} == {dtype}


def test_tensors_of_one_column_have_one_dtype(plain: PlainStore):
    rows = [torch.tensor([1]), torch.tensor([1.5])]
    with pytest.raises(ValueError, match=r"mixed tensor dtype: \['torch.float32', 'torch.int64'\]"):
        put_column(MooncakeBundleTransfer(plain, "p"), rows)


@pytest.mark.parametrize(
    ("codec", "rows"),
    [
        ("json_ragged", [{"a": 1}, None, "x"]),
        ("media_bytes", [b"ab", None]),
        ("media_list_ragged", [[b"a"], None]),
        ("typed_ragged", [1, 2]),
        ("structured_recursive", [{"a": 1}, None]),
        (
            "ragged_tensor_dict",
            [{"p": torch.ones(2), "q": torch.ones(1)}, None, {"p": torch.ones(1)}],
        ),
        ("auto", ["a"]),
        ("ndarray", [1, 2]),
    ],
)
def test_schema_chooses_the_codec(transfer: MooncakeBundleTransfer, codec: str, rows: list):
    ref = put_column(transfer, rows, FieldSchema(codec))
    if codec != "auto":
        assert ref.encoded_non_tensor["f"]["codec"] == codec
    assert are_same(rows_of(transfer, ref), rows)
    assert are_same(rows_of(transfer, ref, [0]), rows[:1])


def test_schema_that_does_not_fit_is_refused(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    for schema, rows, text in [
        (FieldSchema("utf8_ragged"), [b"a"], "FieldSchema codec 'utf8_ragged': a row is not str"),
        (FieldSchema("zz"), ["a"], "unsupported schema codec: 'zz'"),
        (FieldSchema("ndarray", nullable=False), [1, None], "is not nullable"),
        (FieldSchema("ragged_tensor_dict"), [{"a": 1}], "a row is no dense tensor"),
    ]:
        with pytest.raises(ValueError, match=text):
            put_column(transfer, rows, schema)


def test_schema_sets_the_dtype(transfer: MooncakeBundleTransfer):
    schema = FieldSchema("typed_ragged", metadata={"dtype": "int32"})
    ref = put_column(transfer, [[1, 2], [3]], schema)
    assert ref.encoded_non_tensor["f"]["metadata"]["dtype"] == "int32"
    assert rows_of(transfer, ref) == [[1, 2], [3]]


def test_batch_comes_back_as_it_was(transfer: MooncakeBundleTransfer):
    back = transfer.get(transfer.put(BATCH, namespace="n", partition="p", stage="s"))
    for section in ("batch", "non_tensor_batch"):
        assert list(back[section]) == list(BATCH[section])
        for name, value in BATCH[section].items():
            assert type(back[section][name]) is type(value)
            assert are_same(list(back[section][name]), list(value))
    assert back["meta_info"] == BATCH["meta_info"]


def test_rows_are_selected_in_every_field(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH)
    for rows, chosen in [
        (slice(0, 2), [0, 1]),
        (slice(None, None, 2), [0, 2]),
        (StructuredMemberSlice(0, 1, 3), [1, 2]),
        ([2, 0, -1], [2, 0, 2]),
        ([True, 0], [1, 0]),
        (np.array([1]), [1]),
        (slice(5, 9), []),
    ]:
        back = transfer.get(ref, rows=rows)
        for section in ("batch", "non_tensor_batch"):
            for name, value in BATCH[section].items():
                assert are_same(list(back[section][name]), [value[row] for row in chosen])


def test_wrong_rows_are_refused(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH)
    for rows, kind, text in [
        ([3], IndexError, "row index 3 out of range for 3 rows"),
        ("ab", TypeError, "rows must be a slice"),
        ([np.True_], TypeError, "row indices must be integers, not bool"),
        ([True, False, True], TypeError, "row indices must be integers, not bool"),
        (slice(None, None, -1), ValueError, "step must be positive"),
        (StructuredMemberSlice(1, 0, 1), ValueError, "axis=0 only"),
    ]:
        with pytest.raises(kind, match=text):
            transfer.get(ref, rows=rows)


def test_fields_and_metadata_are_selected(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH)
    back = transfer.get(ref, fields=["n", "text"], meta_info_keys=["lr", "zz"])
    assert (list(back["batch"]), list(back["non_tensor_batch"])) == (["n"], ["text"])
    assert back["meta_info"] == {"lr": 0.5}
    assert list(transfer.get(ref, batch_fields=["x"])["batch"]) == ["x"]
    with pytest.raises(KeyError, match=r"unknown DataProto fields: \['zz'\]"):
        transfer.get(ref, fields=["zz"])
    with pytest.raises(ValueError, match="cannot be combined"):
        transfer.get(ref, fields=["x"], batch_fields=["x"])


def test_fields_are_read_into_memory_of_the_caller(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH)
    numbers, tensor = np.empty(2, np.int64), torch.empty(2, 2, dtype=torch.int64)
    back = transfer.get(
        ref, fields=["n", "x"], rows=[2, 0], destinations={"n": numbers, "x": tensor}
    )
    assert back["batch"]["n"] is numbers
    assert back["batch"]["x"] is tensor
    assert (numbers.tolist(), tensor.tolist()) == ([2, 0], [[4, 5], [0, 1]])


def test_flat_dictionary_comes_back_as_it_was(transfer: MooncakeBundleTransfer):
    data = {"t": torch.ones(2, 3), "a": np.arange(2), "names": ["x", None], "step": 3, "tag": "run"}
    ref = transfer.put(data, type="dict")
    back = transfer.get(ref, type="dict")
    assert back.keys() == data.keys()
    assert all(are_same([back[name]], [data[name]]) for name in data)
    assert ref.meta_info == {"step": 3, "tag": "run"}
    with pytest.raises(ValueError, match=r"ambiguous batch sizes: \[2, 3\]"):
        transfer.put({"a": np.arange(2), "b": np.arange(3)}, type="dict")


def test_schema_sets_the_section_of_a_flat_field(transfer: MooncakeBundleTransfer):
    schemas = {
        "a": FieldSchema("auto", metadata={"section": "non_tensor_batch"}),
        "b": FieldSchema("auto", metadata={"section": "meta_info"}),
    }
    ref = transfer.put({"a": [1, 2], "b": [3, 4]}, type="dict", field_schemas=schemas)
    assert (list(ref.field_index), ref.meta_info) == (["a"], {"b": [3, 4]})


def test_objects_with_sections_are_batches(transfer: MooncakeBundleTransfer):
    class Batch:
        def __init__(self, batch: Any = None, non_tensor_batch: Any = None, meta_info: Any = None):
            self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    ref = transfer.put(Batch({"x": np.arange(2)}, None, {"a": 1}))
    back = transfer.get(ref, data_cls=Batch)
    assert isinstance(back, Batch)
    assert (back.batch["x"].tolist(), back.meta_info) == ([0, 1], {"a": 1})


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        ({"batch": {"a": np.arange(2), "b": np.arange(3)}}, ValueError, r"sizes: \[2, 3\]"),
        (
            {"batch": {"a": np.arange(2)}, "non_tensor_batch": {"a": np.arange(2)}},
            ValueError,
            r"fields overlap: \['a'\]",
        ),
        ({"batch": {"a": np.array(3)}}, ValueError, "has no rows"),
        ({"batch": {"a": [1, 2]}}, TypeError, "batch.a must be bytes-like, got list"),
        ({"batch": {"a/b": np.arange(2)}}, ValueError, "invalid bundle buffer name"),
        (3, TypeError, "a DataProto is an object or a dictionary"),
        ({"non_tensor_batch": {"a": np.array([[{}]])}}, ValueError, "one dimension, not 2"),
    ],
    ids=["sizes", "overlap", "scalar", "list", "name", "number", "dimensions"],
)
def test_wrong_batches_are_refused(plain: PlainStore, data: Any, kind: type, text: str):
    with pytest.raises(kind, match=text):
        MooncakeBundleTransfer(plain, "p").put(data)
    assert plain.objects == {}


def test_empty_batch_stores_nothing(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({})
    assert (ref.batch_size, ref.stage_refs, plain.objects) == (0, {}, {})
    assert transfer.get(ref) == {"batch": {}, "non_tensor_batch": {}, "meta_info": {}}
    with pytest.raises(ValueError, match="unsupported Mooncake payload type: 'zz'"):
        transfer.put({}, type="zz")


def test_batch_without_rows_comes_back(transfer: MooncakeBundleTransfer):
    data = {"batch": {"a": np.zeros((0, 2))}, "non_tensor_batch": {"b": column([])}}
    back = transfer.get(transfer.put(data))
    assert back["batch"]["a"].shape == (0, 2)
    assert len(back["non_tensor_batch"]["b"]) == 0


def test_appended_fields_are_read_with_the_others(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH, stage="rollout")
    data = {"batch": {"y": np.arange(3) * 2}, "meta_info": {"z": 1}}
    for stage in ("reward", "rollout"):
        appended = transfer.append_dataproto_fields(ref, data, stage=stage)
        back = transfer.get(appended, fields=["y", "n", "text"])
        assert back["batch"]["y"].tolist() == [0, 2, 4]
        assert back["meta_info"] == {**BATCH["meta_info"], "z": 1}
        assert "y" not in ref.field_index
        transfer.cleanup_dataproto_append(ref, appended)
        assert len(transfer.get(ref)["batch"]) == 2
        with pytest.raises(RuntimeError):
            transfer.get(appended, fields=["y"])


def test_append_checks_names_and_rows(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH)
    with pytest.raises(ValueError, match=r"DataProto fields already exist: \['n'\]"):
        transfer.append_dataproto_fields(ref, {"n": np.arange(3)}, stage="s")
    with pytest.raises(ValueError, match="batch size 4 does not match ref batch size 3"):
        transfer.append_dataproto_fields(ref, {"q": np.arange(4)}, stage="s")
    new = transfer.append_dataproto_fields(ref, {"text": np.arange(3)}, stage="s", overwrite=True)
    assert transfer.get(new, fields=["text"])["batch"]["text"].tolist() == [0, 1, 2]


def test_cleanup_removes_every_object(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put(BATCH)
    ref = transfer.append_dataproto_fields(ref, {"y": np.arange(3)}, stage="s")
    for _ in range(2):
        transfer.cleanup_dataproto(export_dataproto_ref(ref))
        assert plain.objects == {}


def test_reference_survives_json(transfer: MooncakeBundleTransfer):
    ref = transfer.put(BATCH)
    handle = json.loads(json.dumps(export_dataproto_ref(ref)))
    assert is_dataproto_ref_handle(handle)
    assert not is_dataproto_ref_handle(ref)
    assert list(transfer.get(handle)["non_tensor_batch"]["text"]) == ["a", "bb", None]
    assert export_dataproto_ref(import_dataproto_ref(handle)) == handle
    view = transfer.dataproto_manifest_view(handle)
    assert view["batch_fields"]["n"]["spec"]["dtype"] == "<i8"
    assert view["non_tensor_fields"]["ids"]["spec"]["codec"] == "typed_ragged"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"type": "x"}, "not a Mooncake DataProto ref handle"),
        ({"version": 9}, "version: 9"),
        ({"kind": "x"}, "kind: 'x'"),
        ({"stage_refs": 3}, "stage_refs must be a mapping"),
        ({"batch_size": -1}, "batch_size is not valid: -1"),
        ({"batch_size": "a"}, "batch_size is not valid: 'a'"),
        ({"field_index": {"x": 3}}, r"field_index\['x'\] must be a mapping"),
        ({"stage_refs": {}}, "references unknown stage 'default'"),
        ({"storage_group_id": 3}, "invalid storage_group_id"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_false_handles_are_refused(plain: PlainStore, change: dict, text: str):
    transfer = MooncakeBundleTransfer(plain, "p")
    handle = export_dataproto_ref(transfer.put(BATCH))
    with pytest.raises(ValueError, match=text):
        import_dataproto_ref({**handle, **change})
    with pytest.raises(TypeError, match="expected MooncakeDataProtoRef or DataProto handle"):
        transfer.get({"a": 1})


def test_handle_has_json_types_only(transfer: MooncakeBundleTransfer):
    plain = {1: np.float32(0.5), "a": (np.arange(2), [None, True])}
    ref = transfer.put({"batch": {"x": np.arange(3)}, "meta_info": plain})
    assert export_dataproto_ref(ref)["meta_info"] == {"1": 0.5, "a": [[0, 1], [None, True]]}
    for value in (torch.ones(2), b"x", {1}, object()):
        ref = transfer.put({"batch": {"x": np.arange(3)}, "meta_info": {"v": [value]}})
        kind = type(value).__name__
        with pytest.raises(TypeError, match=f"only JSON-safe values, got {kind}"):
            export_dataproto_ref(ref)


@pytest.mark.parametrize("stage", ["", None])
def test_stage_has_a_name(transfer: MooncakeBundleTransfer, stage: Any):
    ref = transfer.put({"x": np.arange(3)})
    with pytest.raises(ValueError, match="stage must be a non-empty string"):
        transfer.put({"x": np.arange(3)}, stage=stage)
    with pytest.raises(ValueError, match="stage must be a non-empty string"):
        transfer.append_dataproto_fields(ref, {"y": np.arange(3)}, stage=stage)


def test_description_names_the_manifest_of_each_stage(transfer: MooncakeBundleTransfer):
    ref = transfer.put({"x": np.arange(3)})
    key = ref.stage_refs["default"].manifest_key
    (stage,) = transfer.dataproto_manifest_view(ref)["stages"].values()
    assert (list(stage), stage["manifest_key"]) == (["manifest_key", "dataproto"], key)
    assert stage["dataproto"]["batch_size"] == 3
