"""What callers pass as a batch: sections or fields, schemas of fields, and the parts of columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structured_stores
from structured_stores import PlainStore, column

torch = pytest.importorskip("torch")
pytest.importorskip("msgpack")

from mooncake.structured_object_store import (  # noqa: E402
    MISSING,
    FieldSchema,
    MooncakeBundleTransfer,
    infer_structure,
)

plain = structured_stores.plain

ROWS = np.arange(2)
T = torch.tensor


def schema(codec: str, **metadata: Any) -> FieldSchema:
    return FieldSchema(codec, metadata=metadata)


def put_rows(store: PlainStore, rows: list[Any], of: FieldSchema | None) -> list[Any]:
    transfer = MooncakeBundleTransfer(store, "p")
    data = {"non_tensor_batch": {"f": column(rows)}}
    ref = transfer.put(data, field_schemas={"f": of} if of else None)
    return list(transfer.get(ref)["non_tensor_batch"]["f"])


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        ({"batch": ROWS}, ["batch"]),
        ({"meta_info": ROWS, "x": ROWS}, ["meta_info", "x"]),
        ({"batch": {"x": ROWS}, "meta_info": None}, ["x"]),
        ({"batch": SimpleNamespace(items=lambda: [("x", ROWS)])}, ["x"]),
    ],
)
def test_sections_are_told_from_fields(plain: PlainStore, data: Any, fields: list[str]):
    ref = MooncakeBundleTransfer(plain, "p").put(data)
    assert list(ref.field_index) == fields


def test_key_beside_the_sections_is_not_dropped(plain: PlainStore):
    with pytest.raises(ValueError, match="'batch' is a dictionary, which is no field"):
        MooncakeBundleTransfer(plain, "p").put({"batch": {"x": ROWS}, "extra": ROWS})
    assert plain.objects == {}


@pytest.mark.parametrize(
    "data",
    [
        {"obs": {"a": T([1, 2]), "b": [ROWS]}},
        {"x": ROWS, "obs": {"a": ROWS}},
        {"x": ROWS, "steps": [T([1])]},
        {"batch": {"x": ROWS}},
    ],
)
def test_flat_dictionary_keeps_no_arrays_in_the_reference(plain: PlainStore, data: Any):
    with pytest.raises(ValueError, match="would not be stored"):
        MooncakeBundleTransfer(plain, "p").put(data, type="dict")
    assert plain.objects == {}


def test_flat_dictionary_keeps_plain_values_in_the_reference(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    data = {"x": [1, 2], "config": {"lr": [0.1], "names": {"a": b"1"}}, "loss": T(1.5)}
    assert transfer.get(transfer.put(data, type="dict"), type="dict") == data


def test_name_in_two_sections_is_not_lost(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    data = {"batch": {"b": ROWS}, "non_tensor_batch": {"a": column(["x", "y"])}}
    ref = transfer.put({**data, "meta_info": {"b": 1, "a": 2, "c": 3}})
    with pytest.raises(ValueError, match=r"Duplicate keys.*\['a', 'b'\]"):
        transfer.get(ref, type="dict")
    assert transfer.get(ref, type="dict", fields=["a"], meta_info_keys=["c"]) == {
        "a": ["x", "y"],
        "c": 3,
    }


def test_class_that_cannot_be_made_is_named(plain: PlainStore):
    class Batch:
        @classmethod
        def from_dict(cls, batch: Any) -> None:
            pass

    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    for data_cls in (Batch, 3):
        with pytest.raises(TypeError, match="cannot be constructed") as caught:
            transfer.get(ref, data_cls=data_cls)
        assert isinstance(caught.value.__cause__, TypeError)


def test_rows_are_integers(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"x": ROWS})
    assert transfer.get(ref, rows=[np.int16(1)])["batch"]["x"].tolist() == [1]
    for rows in ([0.5], ["0"], [None]):
        with pytest.raises(TypeError, match="row indices"):
            transfer.get(ref, rows=rows)


# Schemas


def test_schema_is_for_the_section_that_it_declares(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    declared = {"x": schema("utf8_ragged", section="non_tensor_batch")}
    for data in ({"batch": {"x": ROWS}}, {"meta_info": {"x": 1}}):
        with pytest.raises(ValueError, match="declares section 'non_tensor_batch'"):
            transfer.put(data, field_schemas=declared)
    assert plain.objects == {}
    transfer.put({"batch": {"y": ROWS}}, field_schemas=declared)
    texts = {"x": column(["a", "b"])}
    ref = transfer.put({"non_tensor_batch": texts, "meta_info": {"x": 1}}, field_schemas=declared)
    assert ref.encoded_non_tensor["x"]["codec"] == "utf8_ragged"
    with pytest.raises(ValueError, match="declares section"):
        transfer.append_dataproto_fields(
            ref, {"batch": {"x": ROWS}}, stage="s", overwrite=True, field_schemas=declared
        )


@pytest.mark.parametrize(
    ("of", "rows", "kind", "text"),
    [
        (schema("utf8_ragged"), [b"a"], AttributeError, "str"),
        (schema("bytes_ragged"), ["a"], TypeError, "str"),
        (schema("json_ragged"), [object()], TypeError, "JSON"),
        (schema("zz"), ["a"], ValueError, "unsupported schema codec"),
        (FieldSchema("auto", nullable=False), ["a", None], ValueError, "not nullable"),
        (schema("typed_ragged", dtype="zz"), [[1]], ValueError, "dtype"),
        (schema("ndarray", dtype="U3"), [1], ValueError, "numeric or bool"),
        (schema("ragged_tensor_dict"), [{"a": T([1]), "b": None}], TypeError, "explicit None"),
        (schema("ragged_tensor_dict"), [{"a.b": T([1])}], ValueError, "must not contain"),
        (schema("ragged_tensor_dict"), [{"a/b": T([1])}], ValueError, "must not contain"),
        (schema("ragged_tensor_dict"), [{"a\\b": T([1])}], ValueError, "must not contain"),
        (schema("ragged_tensor_dict"), [{"": T([1])}], ValueError, "must not be empty"),
        (schema("ragged_tensor_dict"), [{1: T([1])}], TypeError, "must be strings"),
        (schema("ragged_tensor_dict", keys=["a", "a"]), [], ValueError, "duplicate"),
        (schema("ragged_tensor_dict", keys=["a.b"]), [3], ValueError, "must not"),
        (
            schema("ragged_tensor_dict", keys=["a"]),
            [{"z": T([1])}],
            ValueError,
            "keys not declared",
        ),
        (schema("ragged_tensor_dict"), [3], TypeError, "mappings or None"),
        (schema("typed_ragged"), [[2**60 + 1], [1.5]], ValueError, "would be another number"),
        (schema("typed_ragged"), [[2**60 + 1, 1.5]], ValueError, "would be another number"),
        (schema("msgpack_ragged"), [{(1,): 2}], ValueError, "unhashable"),
        (schema("bytes_ragged"), [np.ma.masked_array([1], [1])], ValueError, "masked array"),
        (schema("ragged_tensor"), [np.ma.masked_array([1], [1])], ValueError, "masked array"),
    ],
)
def test_rows_that_do_not_fit_a_schema_are_refused(
    plain: PlainStore, of: FieldSchema, rows: list[Any], kind: type, text: str
):
    with pytest.raises(kind, match=rf"failed to encode .*'f' .*'{of.codec}'.*{text}"):
        put_rows(plain, rows, of)
    assert plain.objects == {}


def test_keys_of_dictionaries_of_tensors_are_sorted(plain: PlainStore):
    rows = [{"b": T([1]), "a": T([2])}, None]
    assert list(put_rows(plain, rows, schema("ragged_tensor_dict"))[0]) == ["a", "b"]
    found = put_rows(plain, rows, schema("ragged_tensor_dict", keys=["b", "a"]))
    assert list(found[0]) == ["b", "a"]


def test_lists_by_schema_get_a_common_dtype(plain: PlainStore):
    typed = schema("typed_ragged")
    assert put_rows(plain, [[1, 2], [3.5], None], typed) == [[1.0, 2.0], [3.5], None]
    assert [type(each) for each in put_rows(plain, [[1, 2], []], typed)[0]] == [int, int]
    assert put_rows(plain, [[1, 2], [3.5]], None) == [[1, 2], [3.5]]


def test_parts_of_nested_rows_are_sorted(plain: PlainStore):
    back = put_rows(plain, [{"b": T([1]), "a": {"d": 1, "c": T([2])}}], None)
    assert (list(back[0]), list(back[0]["a"])) == (["a", "b"], ["c", "d"])


def test_columns_that_only_this_package_reads_are_named(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    half = torch.ones(1, dtype=torch.bfloat16)
    fields = {
        "plain": column([T([1])]),
        "short": column([half]),
        "nested": column([{"a": half}]),
        "keyed": column([{"k": half}]),
    }
    with pytest.warns(UserWarning, match="upstream's package cannot read") as caught:
        transfer.put(
            {"non_tensor_batch": fields}, field_schemas={"keyed": schema("ragged_tensor_dict")}
        )
    (message,) = (str(each.message) for each in caught)
    assert all(f"{name} (torch.bfloat16)" in message for name in ("short", "nested", "keyed"))
    assert "plain" not in message


# Structure

DEEP: Any = 1
for _ in range(40):
    DEEP = {"a": DEEP}


def split(rows: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the nodes and the leaves of rows by their paths."""
    leaves: list[Any] = []
    nodes: list[Any] = []
    assert infer_structure("f", rows, leaves, nodes) is None
    return {node.path: node for node in nodes}, {leaf.path: leaf for leaf in leaves}


def test_dictionaries_and_lists_are_split():
    nodes, leaves = split([{"b": [{"k": 1}, None], "a": "x"}, None, {"b": []}])
    shapes = {
        path: (node.node_type, node.children, node.lengths, node.row_mask)
        for path, node in nodes.items()
    }
    assert shapes == {
        "f": ("dict", ["a", "b"], None, [True, False, True]),
        "f.b": ("list", [0, 1], [2, 0, 0], [True, False, True]),
        "f.b[0]": ("dict", ["k"], None, [True, False, False]),
    }
    assert leaves["f.a"].values == ["x", None, MISSING]
    assert leaves["f.b[0].k"].values == [1, None, None]
    assert repr(MISSING) == "<MISSING>"
    assert leaves["f.b[1]"].decision.accepted is False


def test_empty_containers_are_nodes_without_children():
    nodes, leaves = split([[{}, []]])
    assert (nodes["f[0]"].children, nodes["f[1]"].lengths, leaves) == ([], [0], {})


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2]],
        [[b"a"]],
        [[{}] * 9],
        [{str(number): 1 for number in range(65)}],
        [{1: 2}],
        [{"a": 1}, 3],
        [None],
        [],
    ],
)
def test_other_rows_are_one_leaf(rows: list[Any]):
    nodes, leaves = split(rows)
    assert (nodes, list(leaves)) == ({}, ["f"])


def test_signs_in_keys_are_escaped():
    assert list(split([{"x.y[0]\\": 1}])[1]) == ["f.x\\.y\\[0]\\\\"]


def test_rows_that_are_too_deep_are_refused():
    with pytest.raises(ValueError, match="max depth 32"):
        split([DEEP])


@pytest.mark.parametrize(
    ("rows", "accepted", "codec", "metadata"),
    [
        ([T([1]), None, T([[2]])], True, "ragged_tensor", {"dtype": "torch.int64"}),
        ([T([1]), T([1.0])], False, "ragged_tensor", {}),
        ([[b"a"], []], True, "media_list_ragged", {}),
        ([np.arange(2)], True, "typed_ragged", {"recursive_source": "ndarray"}),
        ([[1, 2], [3.5]], True, "typed_ragged", {"dtype": "float64"}),
        ([1, 2.5, True], True, "ndarray", {"dtype": "float64"}),
        ([True], True, "ndarray", {"dtype": "bool"}),
        ([b"a"], True, "bytes_ragged", {}),
        (["a"], True, "utf8_ragged", {}),
        ([("a",)], True, "msgpack_ragged", {}),
        ([[True]], True, "msgpack_ragged", {}),
        ([object()], False, "msgpack_ragged", {}),
        ([1, "a"], False, "msgpack_ragged", {}),
        ([1j], False, "msgpack_ragged", {}),
        ([np.array(["a"])], False, "msgpack_ragged", {}),
        ([None], False, "msgpack_ragged", {}),
    ],
)
def test_leaf_has_the_codec_of_upstream(rows: list, accepted: bool, codec: str, metadata: dict):
    decision = split(rows)[1]["f"].decision
    assert (decision.accepted, decision.codec, decision.metadata) == (accepted, codec, metadata)
    assert isinstance(decision.reason, str)
    assert isinstance(decision.normalized_type, str)


@pytest.mark.parametrize("rows", [[[1], ["a"]], [[b"a\0"]], ["a\0"]])
def test_texts_that_would_change_are_refused(plain: PlainStore, rows: list[Any]):
    with pytest.raises(ValueError, match="would not come back"):
        put_rows(plain, rows, schema("typed_ragged"))
    assert plain.objects == {}
