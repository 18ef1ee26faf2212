"""Observes what a package does in many small cases: run by the interpreter that has the package.

    python structured_observations.py    # prints the outcome of each case as JSON

Cases need no more than a store in memory, so that both packages can be observed in a second.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from structured_exchange import Store, column
from structured_options import cases_of_options
from structured_stores import FullStore, PlainStore

from mooncake._fast_copy import concat_arrays_into
from mooncake.structured_object_store import (
    BundleTransferPolicy,
    FieldSchema,
    MooncakeBundleTransfer,
    RemoteBundleRef,
    StructuredObjectPayload,
    export_dataproto_ref,
    import_dataproto_ref,
    infer_structure,
    tensor_object_buffer,
)

Case = Callable[[], Any]

ROWS = np.arange(3)
T = torch.tensor


class Config:
    """A configuration with groups."""

    def __init__(self, group_ids: Any = None) -> None:
        self.group_ids = group_ids


def transfer(store: Any = None) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(Store({}) if store is None else store, "p")


def group_of(call: Callable[[MooncakeBundleTransfer], Any]) -> Any:
    """Return the groups of the puts of a call, without the ids of new ones."""
    store = Store({})
    store.put = lambda key, value, config=None: groups.append(config) or 0  # type: ignore
    groups: list[Any] = []
    call(transfer(store))
    ids = [each if each is None else each.group_ids for each in groups]
    return [
        [name.split("-")[0] for name in each] if isinstance(each, list) else each for each in ids
    ]


def appended(group: Any, config: Any) -> Any:
    """Return the group of a batch after an append, and those of the puts of the append."""
    one = transfer()
    ref = one.put({"x": ROWS}, config=Config(group))
    one.store.groups.clear()
    more = one.append_dataproto_fields(ref, {"y": ROWS}, stage="s", config=config)
    given = [each for each in one.store.groups.values() if each is not None]
    return more._storage_group_id, sorted(map(str, given))


def forged(change: Callable[[Any, Any], Any], is_read: bool) -> Any:
    """Return what a read or a removal of a manifest that was changed does."""
    one = transfer()
    payload = StructuredObjectPayload({"a": 1}, {"x": b"abcdef", "y": b"gh"})
    ref = one.put_structured_object(payload, chunk_bytes=4)
    other = one.put_structured_object(payload)
    manifest = copy.deepcopy(ref.manifest)
    change(manifest, other.manifest)
    false = RemoteBundleRef(ref.manifest_key, manifest)
    if is_read:
        return sorted(one.materialize(one.read_spec(false)).objects)
    return one.remove_bundle(false)


def encoded(of: FieldSchema, rows: list[Any]) -> Any:
    """Return the codec and the rows of a column by a schema."""
    one = transfer()
    ref = one.put({"non_tensor_batch": {"f": column(rows)}}, field_schemas={"f": of})
    found = one.get(ref)["non_tensor_batch"]["f"].tolist()
    return ref.encoded_non_tensor["f"]["codec"], repr(found)


def structure(rows: list[Any]) -> Any:
    leaves: list[Any] = []
    nodes: list[Any] = []
    infer_structure("f", rows, leaves, nodes)
    decisions = [vars(leaf.decision) for leaf in leaves]
    values = [(leaf.path, repr(leaf.values)) for leaf in leaves]
    parts = [(n.path, n.node_type, n.children, n.lengths, n.row_mask) for n in nodes]
    return decisions, values, parts


def imported(**changes: Any) -> Any:
    one = transfer()
    handle = export_dataproto_ref(one.put({"x": ROWS}, config=Config("g")))
    changed = {name: each for name, each in {**handle, **changes}.items() if each != "absent"}
    again = export_dataproto_ref(import_dataproto_ref(changed))
    again.pop("stage_refs")
    return list(again), again


def removed(**calls: Any) -> Any:
    """Return how many objects are left after a removal by a store with other calls."""
    store = Store({})
    one = transfer(store)
    ref = one.put_object({"x": ROWS, "y": ROWS})
    for name, call in calls.items():
        setattr(store, name, call)
    handle: Any = {"manifest_key": ref.manifest_key} if "is_exist" in calls else ref
    with contextlib.suppress(KeyError):
        one.remove_bundle(handle)
    return len(store.objects)


def raising(error: Exception) -> Callable[..., Any]:
    def call(*_given: Any) -> Any:
        raise error

    return call


def schema(codec: str, nullable: bool = True, **metadata: Any) -> FieldSchema:
    return FieldSchema(codec, nullable, metadata)


def put(data: Any, **options: Any) -> Any:
    ref = transfer().put(data, **options)
    return ref.batch_size, sorted(ref.field_index), repr(ref.meta_info)


def got(**options: Any) -> Any:
    one = transfer(FullStore())
    data = {"batch": {"x": ROWS}, "non_tensor_batch": {"y": column(["a", "b", "c"])}}
    ref = one.put({**data, "meta_info": {"x": 1, "z": 2}})
    return repr(one.get(ref, **options))


def append_to_x(data: Any, **options: Any) -> Any:
    one = transfer()
    ref = one.put({"x": ROWS, "z": ROWS})
    return one.append_dataproto_fields(ref, data, stage="default", **options)


def named(name: Any, section: str) -> Any:
    """Return what is known and read of a field with an unusual name."""
    rows = ROWS if section == "batch" else column(["a", None, "c"])
    one = transfer()
    ref = one.put({section: {name: rows}})
    view = one.dataproto_manifest_view(ref)
    found = [one.get(ref), one.get(ref, fields=[name]), one.get(ref, type="dict")]
    handle = export_dataproto_ref(ref)
    locations = [(repr(each), place) for each, place in handle["field_index"].items()]
    again = one.append_dataproto_fields(ref, {section: {name: rows}}, stage="s", overwrite=True)
    fields = [list(view[each]) for each in ("batch_fields", "non_tensor_fields")]
    return repr(found), locations, list(again.field_index), fields


def handle_of_named(name: Any) -> Any:
    """Return the fields of a batch by its handle, before and after a way as JSON."""
    one = transfer()
    handle = export_dataproto_ref(one.put({name: ROWS}))
    as_json = json.loads(json.dumps(handle))
    by_handle = repr(one.get(as_json)) if name != "" else None
    return by_handle, list(import_dataproto_ref(handle).field_index)


def later(first: dict[str, Any], more: dict[str, Any]) -> Any:
    """Return what is read of a batch after an append to its stage."""
    one = transfer()
    ref = one.put(first)
    return repr(one.get(one.append_dataproto_fields(ref, more, stage="default")))


def described_stages() -> Any:
    one = transfer()
    view = one.dataproto_manifest_view(one.put({"x": ROWS}, config=Config("g")))
    return sorted(view), [list(stage) for stage in view["stages"].values()]


def exported(meta_info: dict[Any, Any]) -> Any:
    ref = transfer().put({"batch": {"x": ROWS}, "meta_info": meta_info})
    return export_dataproto_ref(ref)["meta_info"]


def order_of_puts() -> Any:
    one = transfer()
    one.put_object({"y": ROWS, "t": T([1]), "x": b"1"})
    return [key.split("/", 3)[-1] for key in one.store.objects]


# Arguments of which two are wrong: the first that is checked is named.
CHECKS: list[dict[str, Any]] = [
    {"partition": "a/b", "meta": None},
    {"meta": None, "chunk_bytes": 0},
    {"chunk_bytes": 0, "value": None},
    {"chunk_bytes": 0, "name": "a/b"},
    {"max_inflight_put": 0, "value": None},
    {"name": "a/b", "value": None},
]
GROUPS: list[Any] = [None, [], (), "g", ["g"], ("g",), "h", [""], "", ["a", "b"]]
CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda own, other: None,
    "meta": lambda own, other: own.update(meta=other["meta"]),
    "payload": lambda own, other: own["buffers"].update(y=other["buffers"]["y"]),
    "chunk": lambda own, other: own["buffers"]["y"]["chunks"][0].update(key="elsewhere"),
    "bytes": lambda own, other: own["buffers"]["y"].update(bytes=9),
    "version": lambda own, other: own.update(version=2),
    "layout": lambda own, other: own.update(layout="x"),
    "object_id": lambda own, other: own.update(object_id=other["object_id"]),
    "number as object_id": lambda own, other: own.update(object_id=3),
    "buffers": lambda own, other: own.update(buffers=[]),
    "ids": lambda own, other: own.update(buffer_object_ids=["default/x"]),
    "text as ids": lambda own, other: own.update(buffer_object_ids="x"),
    "no ids": lambda own, other: own.update(buffer_object_ids=None),
    "cleanup": lambda own, other: own.update(cleanup_keys=[other["meta"]["key"]]),
}
SCHEMAS: list[tuple[FieldSchema, list[Any]]] = [
    (schema("utf8_ragged"), [b"a"]),
    (schema("bytes_ragged"), ["a"]),
    (schema("json_ragged"), [{1, 2}]),
    (schema("zz"), ["a"]),
    (schema("auto", nullable=False), ["a", None]),
    (schema("typed_ragged", dtype="zz"), [[1]]),
    (schema("typed_ragged", dtype="U3"), [[1]]),
    (schema("typed_ragged"), [[1, 2], [3.5], None]),
    (schema("typed_ragged"), [np.arange(2), np.ones(1)]),
    (schema("typed_ragged"), ["a", None, "c"]),
    (schema("typed_ragged"), [["a", "bb"], ["c"]]),
    (schema("typed_ragged"), [[b"a"], [b"bb"]]),
    (schema("typed_ragged"), [np.array(["a"]), np.array(["bbb", "c"])]),
    (schema("ragged_tensor"), [np.arange(2), None, np.ones((1, 2), dtype="i8")]),
    (schema("media_bytes"), [np.arange(3, dtype="u1"), None]),
    (schema("bytes_ragged"), [np.arange(3, dtype="i2"), bytearray(b"a"), b"bc"]),
    (schema("media_list_ragged"), [[np.arange(3, dtype="u1"), b"a"]]),
    (schema("ndarray", dtype="int8"), [1, None]),
    (schema("ndarray", dtype="O"), [1]),
    (schema("ragged_tensor_dict"), [{"b": T([1]), "a": T([1])}, None, {}]),
    (schema("ragged_tensor_dict"), [{"a": T([1]), "b": None}]),
    (schema("ragged_tensor_dict"), [{"a.b": T([1])}]),
    (schema("ragged_tensor_dict"), [{"a\\b": T([1])}]),
    (schema("ragged_tensor_dict"), [{"": T([1])}]),
    (schema("ragged_tensor_dict"), [{1: T([1])}]),
    (schema("ragged_tensor_dict", keys=["b", "a"]), [{"a": T([1])}]),
    (schema("ragged_tensor_dict", keys=["a", "a"]), [None]),
    (schema("ragged_tensor_dict", keys=["a"]), [{"z": T([1])}]),
    (schema("ragged_tensor_dict"), [3]),
    (schema("auto", section="batch"), ["a"]),
    (schema("auto", section="zz"), ["a"]),
]
STRUCTURES: list[list[Any]] = [
    [{"a": 1, "b": "x"}, None, {"a": 2}],
    [[{"k": 1}], []],
    [[None]],
    [[1, 2]],
    [[b"a"], []],
    [{}],
    [[]],
    [None],
    [],
    [T([1]), T([[2]])],
    [T([1]), T([1.0])],
    [np.arange(2), None],
    [[1, 2], [3.5]],
    [[1], ["a"]],
    [1, 2.5, True],
    [("a",)],
    [[[1, 2], [3]]],
    [{"x.y[0]\\": 1}],
    [{1: 2}],
    [{str(at): at for at in range(65)}],
    [[{}] * 9],
    [1, "a"],
    [np.array(["a"])],
    [1j],
    [[True]],
]
DATA: dict[str, Any] = {
    "field called batch": {"batch": ROWS},
    "fields called as sections": {"meta_info": ROWS, "x": ROWS},
    "no section": {"batch": None},
    "section with items": {"batch": SimpleNamespace(items=lambda: [("x", ROWS)])},
    "key beside sections": {"batch": {"x": ROWS}, "extra": ROWS},
    "nothing": {},
    "metadata": {"meta_info": {"a": 1}},
    "overlap": {"batch": {"x": ROWS}, "non_tensor_batch": {"x": ROWS}},
    "sizes": {"x": ROWS, "y": np.arange(2)},
    "number": {"x": ROWS, "y": 3},
    "number of numpy": {"batch": {"y": np.float32(2)}},
    "None": {"x": None},
    "tensor without dimensions": {"x": T(1.5)},
    "array without dimensions": {"x": np.array(3)},
    "sections, one of which has no items": {"batch": {"x": ROWS}, "meta_info": 3},
}

# Values that `release_result` takes; none of them changes.
RELEASED: list[Any] = [
    None,
    3,
    "text",
    {"tokens": [1, 2], "nested": {"x": (1, b"2")}},
    [ROWS, {"x": ROWS}],
    column([{"x": 1}, None, [ROWS]]),
    SimpleNamespace(batch={"x": ROWS}, non_tensor_batch={"y": [1]}, meta_info={"z": 1}),
    SimpleNamespace(batch={"x": ROWS}),
]
# Arguments of `concat_arrays_into` for memory of 16 bytes.
CONCATENATED: list[tuple[Any, ...]] = [
    ([np.arange(8, dtype="u1"), np.arange(4, dtype="u2")],),
    ([],),
    ([np.array(7, dtype="u4"), np.zeros((0, 2))],),
    ([np.arange(3, dtype="u1")] * 4, 1, 2),
    ([np.arange(3, dtype="u1")] * 4, 2, 9),
    ([np.arange(3, dtype="u1")] * 4, 2, -3),
    ([np.arange(3, dtype="u1")] * 4, -2, 1),
    ([np.arange(3, dtype="u1")] * 4, 9),
    ([np.arange(3, dtype="u1")], 0, 0),
    ([np.arange(17, dtype="u1")],),
    ([np.arange(8, dtype="u1")[::2]],),
    ([np.zeros((2, 2), dtype="u1", order="F")],),
    ((np.arange(3),),),
    ([b"abc"],),
    ([None],),
]


def released(value: Any) -> Any:
    """Return what `release_result` returns and what it leaves, of the second call, too."""
    one = transfer()
    answers = [one.release_result(value), one.release_result(value)]
    return answers, repr(value)


def concatenated(arrays: Any, *range_: int) -> Any:
    memory = np.zeros(16, dtype="u1")
    count = concat_arrays_into(arrays, memory.ctypes.data, memory.nbytes, *range_)
    return count, memory.tolist()


MEMBERS: dict[str, Any] = {
    "array": np.arange(5),
    "empty array": np.zeros((0, 3)),
    "bytes": b"abc",
    "tensor": T([[1.0, 2], [3, 4]]),
    "tensor without dimensions": T(3),
    "tensor of bfloat16": T([1.0, 2]).bfloat16(),
    "transposed tensor": T([[1, 2], [3, 4]]).t(),
}
OPTIONAL_CALLS = (
    "batch_get_into",
    "batch_put_from",
    "batch_remove",
    "get_into_ranges",
    "get_tensor",
    "is_exist",
    "pub_tensor",
    "put_from",
    "put_tensor",
    "register_buffer",
    "unregister_buffer",
)


def without_keys(spec: Any) -> Any:
    """Return the description of a payload without its keys, which have new ids."""
    if isinstance(spec, dict):
        return {name: without_keys(each) for name, each in spec.items() if name != "key"}
    return [without_keys(each) for each in spec] if isinstance(spec, list) else spec


def exchanged(store: PlainStore, value: Any, **options: Any) -> Any:
    """Return how a member is described, by which calls it is put, and what is read."""
    one = transfer(store)
    ref = one.put_object({"x": value}, **options)
    calls = list(getattr(store, "calls", []))
    found = one.materialize(one.read_spec(ref)).objects["x"]
    as_list = found.tolist() if hasattr(found, "tolist") else found
    one.remove_bundle(ref)
    left = len(store.objects)
    return without_keys(ref.manifest["buffers"]["x"]), calls, type(found).__name__, as_list, left


def read_without(store: PlainStore, call: str) -> Any:
    """Return what comes back of a store in which a call is None."""
    setattr(store, call, None)
    one = transfer(store)
    ref = one.put_object({"x": T([1, 2]), "y": ROWS})
    found = one.materialize(one.read_spec(ref)).objects
    one.remove_bundle(ref)
    return [found[name].tolist() for name in ("x", "y")], len(store.objects)


def memory_put(store: PlainStore, size: int, **options: Any) -> Any:
    """Return how memory of the caller is described, and by which calls it is put."""
    memory = np.zeros(400, dtype=np.uint8)
    address = memory.ctypes.data
    if isinstance(store, FullStore):
        store.register_buffer(address, memory.nbytes)
    one = transfer(store)
    ref = one.put_object({"x": tensor_object_buffer(address, size, memory)}, **options)
    return without_keys(ref.manifest["buffers"]["x"]), getattr(store, "calls", [])


def objects_after(appends: list[dict[str, Any]]) -> list[int]:
    """Return the number of objects after a put, after each append, and after the cleanup."""
    store = PlainStore()
    one = transfer(store)
    ref = one.put({"x": ROWS})
    counts = [len(store.objects)]
    for number, options in enumerate(appends):
        data = {"x" if options.get("overwrite") else f"y{number}": ROWS}
        ref = one.append_dataproto_fields(ref, data, **options)
        counts.append(len(store.objects))
    one.cleanup_dataproto(ref)
    return [*counts, len(store.objects)]


def cases_of_stores() -> dict[str, Case]:
    """Return the cases that depend on the calls that a store has."""
    found: dict[str, Case] = {}
    for kind in (PlainStore, FullStore):
        for mode in ("auto", "copy", "zero_copy"):
            policy = BundleTransferPolicy(copy_mode=mode)
            for config in (None, Config()):
                options = {"policy": policy} | ({"config": config} if config else {})
                where = f"{kind.__name__} by {mode}{' with a configuration' if config else ''}"
                for name, value in MEMBERS.items():
                    found[f"{name} in {where}"] = lambda kind=kind, value=value, options=options: (
                        exchanged(kind(), value, **options)
                    )
                for size in (0, 15, 400):
                    found[f"memory of {size} bytes in {where}"] = (
                        lambda kind=kind, size=size, options=options: memory_put(
                            kind(), size, **options
                        )
                    )
        for call in OPTIONAL_CALLS:
            found[f"{kind.__name__} without {call}"] = lambda kind=kind, call=call: read_without(
                kind(), call
            )
    for options in (
        {"stage": "default"},
        {"stage": "more"},
        {"stage": "default", "overwrite": True},
        {"stage": "more", "overwrite": True},
    ):
        found[f"objects after appends with {options}"] = lambda options=options: objects_after(
            [options] * (1 if options["stage"] == "more" else 3)
        )
    return found


def cases() -> dict[str, Case]:
    """Return the cases by name."""
    found = cases_of_stores() | cases_of_options()
    for ids in GROUPS:
        config = Config(ids)
        found[f"group of a batch {ids!r}"] = lambda config=config: group_of(
            lambda one: one.put({"x": ROWS}, config=config)
        )
        found[f"group of a bundle {ids!r}"] = lambda config=config: [
            each if each is None else list(each)
            for each in group_of(lambda one: one.put_bundle(b"m", {"x": b"1"}, config=config))
        ]
        for group in ("g", ""):
            found[f"append {ids!r} to group {group!r}"] = lambda group=group, config=config: (
                appended(group, config)
            )
    found["group of a batch by default"] = lambda: group_of(lambda one: one.put({"x": ROWS}))
    found["group of a bundle by default"] = lambda: group_of(lambda one: one.put_object(b"x"))
    for name, change in CHANGES.items():
        for is_read in (True, False):
            found[f"{'read' if is_read else 'removal'} of changed {name}"] = (
                lambda change=change, is_read=is_read: forged(change, is_read)
            )
    for of, rows in SCHEMAS:
        found[f"{of.codec} {of.nullable} {of.metadata} {rows!r}"] = lambda of=of, rows=rows: (
            encoded(of, rows)
        )
    for rows in STRUCTURES:
        found[f"structure of {str(rows)[:60]}"] = lambda rows=rows: structure(rows)
    for name, data in DATA.items():
        found[f"put of {name}"] = lambda data=data: put(data)
    for change in (
        *({"version": each} for each in (1, "1", 2, 999, "absent")),
        *({"storage_group_id": each} for each in (None, "", 3, "absent")),
        *({"namespace": each} for each in (3, "absent")),
        *({"partition": each} for each in (3, "absent")),
        *({"meta_info": each} for each in (None, "absent")),
        *({"global_indexes": each} for each in (None, [1], "absent")),
        {"encoded_non_tensor": "absent"},
        *({"version": each} for each in (None, 1.9, "x", [])),
        *({"batch_size": each} for each in ("3", 1.7, None, "x", [])),
        {"more": 1},
        *({"global_indexes": each} for each in (3, ["a"])),
    ):
        found[f"handle with {change}"] = lambda change=change: imported(**change)
    for name in ("", 3, None, 1.5, True, b"x", ("a",), "a/b", "\n"):
        for section in ("batch", "non_tensor_batch"):
            found[f"{section} field named {name!r}"] = lambda name=name, section=section: named(
                name, section
            )
        found[f"handle with a field named {name!r}"] = lambda name=name: handle_of_named(name)
    words = column(["x", "y", "z"])
    for given in (
        ({3: ROWS}, {3: ROWS}),
        ({"a": ROWS}, {"a.b": ROWS}),
        ({"non_tensor_batch": {"a": words}}, {"non_tensor_batch": {"a.data": ROWS}}),
        ({"non_tensor_batch": {"a.data": ROWS}}, {"non_tensor_batch": {"a": words}}),
    ):
        found[f"append to a stage {given}"] = lambda given=given: later(*given)
    for options in (
        {"type": "dict"},
        {"type": "dict", "fields": ["y"], "meta_info_keys": ["z"]},
        {"data_cls": 3},
        {"rows": [0.5]},
        *({"rows": each} for each in ([], (1,), [-1], [-4], [0, 0], slice(5, 9), range(2), {0})),
        *({"fields": each} for each in ([], ["y", "x"], ["x", "x"], "x", [3])),
        {"batch_fields": ["y"]},
        {"meta_info_keys": ["q"]},
        {"rows": [3]},
        {"rows": slice(None, None, -1)},
        {"fields": ["q"]},
        {"fields": ["q"], "batch_fields": []},
        {"rows": [True], "fields": []},
        {"rows": [np.True_], "fields": []},
        {"rows": [3], "fields": ["q"]},
        {"rows": 3, "fields": ["q"]},
        {"rows": slice(0, 3, -1), "fields": ["x"], "batch_fields": ["x"]},
        {"rows": "ab", "type": "dict"},
    ):
        found[f"get with {options}"] = lambda options=options: got(**options)
    for value in RELEASED:
        found[f"release of {value!r}"] = lambda value=value: released(value)
    for given in CONCATENATED:
        found[f"concatenation of {given}"] = lambda given=given: concatenated(*given)
    found |= {
        "removal with batch_remove": lambda: removed(batch_remove=lambda keys, _: [0] * len(keys)),
        "removal with failing batch_remove": lambda: removed(
            batch_remove=lambda keys, _: [-1] * len(keys)
        ),
        "removal of what is gone": lambda: removed(
            batch_remove=lambda keys, _: [-1] * len(keys), remove=raising(KeyError("x"))
        ),
        "removal with too few results": lambda: removed(batch_remove=lambda keys, _: []),
        "removal with batch_remove of one argument": lambda: removed(
            batch_remove=lambda keys: [-704] * len(keys)
        ),
        "removal with an exception": lambda: removed(batch_remove=raising(OSError("x"))),
        "removal that fails": lambda: removed(remove=lambda key, force=False: -706),
        "removal of nothing": lambda: removed(is_exist=lambda key: 0),
        "removal without an answer": lambda: removed(is_exist=lambda key: -900),
        "description": lambda: described_stages(),
        **{
            f"fields before options: {', '.join(data)}; {', '.join(options)}": (
                lambda data=data, options=options: transfer().put(data, **options)
            )
            for data in ({"x": ROWS, "y": np.arange(2)}, {"batch": {"x": ROWS}})
            for options in (
                {"partition": "a/b"},
                {"chunk_bytes": 0},
                {"config": Config(["a", "b"])},
                {"policy": BundleTransferPolicy(0), "chunk_bytes": 0},
                {"field_schemas": {"x": schema("auto", section="meta_info")}, "partition": "/"},
            )
        },
        **{
            f"append of {data} {overwrite}": lambda data=data, overwrite=overwrite: append_to_x(
                data, overwrite=overwrite, policy=BundleTransferPolicy(0)
            )
            for data in ({"x": np.arange(2)}, {"x": ROWS}, {"y": ROWS}, {"y": np.arange(2)})
            for overwrite in (False, True)
        },
        "metadata of a handle": lambda: exported({1: np.arange(2), "a": (None, np.True_)}),
        "tensor in a handle": lambda: exported({"a": T([1])}),
        "set in a handle": lambda: exported({"a": {1}}),
        "order of puts": lambda: order_of_puts(),
        "raw bytes": lambda: transfer().put_object(np.zeros(2, dtype="V4")).manifest["version"],
        **{
            f"checks of {sorted(options)}": lambda options=options: transfer().put_bundle(
                options.get("meta", b""),
                {options.get("name", "x"): options.get("value", b"1")},
                partition=options.get("partition", "default"),
                chunk_bytes=options.get("chunk_bytes"),
                max_inflight_put=options.get("max_inflight_put"),
                config=options.get("config"),
            )
            for options in CHECKS
        },
        "prefix": lambda: MooncakeBundleTransfer(Store({}), "a\n"),
        "attributes": lambda: [
            MooncakeBundleTransfer(Store({}), "/a/", 5).key_prefix,
            MooncakeBundleTransfer(Store({}), "/a/", 5).default_chunk_bytes,
        ],
        "partition": lambda: transfer().put_bundle(b"", {}, partition="a\n"),
        "buffer": lambda: transfer().put_bundle(b"", {"a\n": b""}),
        "payload without buffers": lambda: StructuredObjectPayload({}),
        "metadata that is no mapping": lambda: transfer().put_structured_object(
            StructuredObjectPayload([1], {})
        ),
        "metadata without JSON": lambda: transfer().put_structured_object(
            StructuredObjectPayload({"a": object()}, {})
        ),
        "zero copy of bytes": lambda: transfer().put_object(
            {"x": b"1"}, policy=BundleTransferPolicy(copy_mode="zero_copy")
        ),
        "zero copy of a tensor": lambda: transfer().put_object(
            {"x": T([1])}, policy=BundleTransferPolicy(copy_mode="zero_copy")
        ),
        "empty selection": lambda: transfer().materialize(
            transfer().read_spec({"manifest_key": "p/x/y/manifest"}).select_members([])
        ),
    }
    return found


def observe() -> dict[str, Any]:
    """Return the outcome of each case: a value, or the classes of an error and its text."""
    outcomes: dict[str, Any] = {}
    for name, case in cases().items():
        try:
            outcomes[name] = {"value": case()}
        except Exception as error:  # noqa: BLE001 # the test compares what is raised
            classes = [each.__name__ for each in type(error).__mro__]
            outcomes[name] = {"classes": classes, "text": str(error)}
    return json.loads(json.dumps(outcomes, default=str))


if __name__ == "__main__":
    print(json.dumps(observe()))
