"""Writes and reads batches with either package: run by the interpreter that has the package.

    python structured_exchange.py write    # prints batches as JSON
    python structured_exchange.py read     # reads such JSON, prints what the package makes of it

The store is a dictionary, so that nothing but the layout is exchanged.
"""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import numpy as np
import torch
from structured_columns import EXACT

from mooncake.structured_object_store import (
    BundleTransferPolicy,
    FieldSchema,
    MooncakeBundleTransfer,
    StructuredObjectPayload,
    export_dataproto_ref,
    import_dataproto_ref,
)

# Columns that need a schema.
SCHEMAS: dict[str, tuple[FieldSchema, list[Any]]] = {
    "json": (FieldSchema("json_ragged"), [{"a": 1}, None, "x"]),
    "media": (FieldSchema("media_bytes"), [b"ab", None]),
    "dicts by schema": (
        FieldSchema("ragged_tensor_dict"),
        [{"p": torch.ones(2), "q": torch.ones(1, 2)}, None, {"p": torch.ones(1)}],
    ),
}
MEMBERS: dict[str, Any] = {
    "array": np.arange(6, dtype=np.int32).reshape(3, 2),
    "text": np.array(["ab", "c"]),
    "bytes": b"xyz",
    "nothing": b"",
    "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "number": torch.tensor(2.5),
    "jagged": torch.nested.nested_tensor(
        [torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged
    ),
}


# What is done to a batch after it was put, by either package.
STEPS: dict[str, list[tuple[str, dict[str, Any], bool]]] = {
    "one later field": [("default", {"b": np.arange(3)}, False)],
    "later fields in one stage": [
        ("default", {"b": np.arange(3)}, False),
        ("default", {"c": torch.arange(3)}, False),
    ],
    "later stage": [("other", {"b": np.arange(3)}, False)],
    "replaced stage": [("default", {"a": np.arange(3) + 5, "b": np.arange(3)}, True)],
    "replaced after later fields": [
        ("default", {"b": np.arange(3)}, False),
        ("default", {"a": np.arange(3) + 5, "b": np.arange(3) + 6}, True),
    ],
    "field of another stage": [("other", {"a": np.arange(3) + 7}, True)],
}


class Store:
    """A store in memory, which notes the group of each object."""

    def __init__(self, objects: dict[str, str]) -> None:
        self.objects = {key: base64.b64decode(value) for key, value in objects.items()}
        self.groups: dict[str, Any] = {}

    def put(self, key: str, value: Any, config: Any = None) -> int:
        self.objects[key] = bytes(value)
        self.groups[key] = None if config is None else list(config.group_ids)
        return 0

    def get(self, key: str) -> bytes:
        return self.objects.get(key, b"")

    def remove(self, key: str, force: bool = False) -> int:
        return 0 if self.objects.pop(key, None) is not None else -704

    def is_exist(self, key: str) -> int:
        return int(key in self.objects)

    def encoded(self) -> dict[str, str]:
        return {key: base64.b64encode(value).decode() for key, value in self.objects.items()}


def described(value: Any) -> Any:
    """Return a value in a form of JSON that tells types apart."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return ["jagged", [described(row) for row in value.unbind()]]
        return ["tensor", str(value.dtype), list(value.shape), value.double().tolist()]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), value.tolist()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, dict):
        return ["dict", sorted((key, described(each)) for key, each in value.items())]
    if isinstance(value, list):
        return ["list", [described(each) for each in value]]
    return [type(value).__name__, value]


def column(rows: list[Any]) -> np.ndarray:
    array = np.empty(len(rows), dtype=object)
    for at, row in enumerate(rows):
        array[at] = row
    return array


def columns() -> dict[str, tuple[FieldSchema | None, list[Any]]]:
    """Return the columns of all codecs by name."""
    return {**{name: (None, rows) for name, _, rows in EXACT}, **SCHEMAS}


def write() -> dict[str, Any]:
    store = Store({})
    transfer = MooncakeBundleTransfer(store, "exchange", default_chunk_bytes=32)
    handles: dict[str, Any] = {}
    for name, (schema, rows) in columns().items():
        data = {"batch": {"n": np.arange(len(rows))}, "non_tensor_batch": {"f": column(rows)}}
        try:
            ref = transfer.put(data, field_schemas={"f": schema} if schema else None)
        except Exception as error:  # noqa: BLE001 # a package may refuse what the other stores
            handles[name] = {"error": repr(error)}
        else:
            handles[name] = export_dataproto_ref(ref)
    payload = StructuredObjectPayload({"step": 7}, MEMBERS)
    key = transfer.put_structured_object(payload).manifest_key
    batches = {name: export_dataproto_ref(ref) for name, ref in unfinished(transfer).items()}
    return {"objects": store.encoded(), "handles": handles, "members": key, "batches": batches}


def write_batches(store: Any) -> dict[str, Any]:
    """Return batches in a store of this package, whose tensors are bytes, with their objects."""
    transfer = MooncakeBundleTransfer(store, "exchange")
    refs = unfinished(transfer, BundleTransferPolicy(copy_mode="copy"))
    objects: dict[str, str] = {}
    for ref in refs.values():
        for stage in ref.stage_refs.values():
            specs = [stage.manifest["meta"], *stage.manifest["buffers"].values()]
            keys = [stage.manifest_key, *(each["key"] for spec in specs for each in spec["chunks"])]
            for key in (*keys, *stage.manifest.get("cleanup_keys", ())):
                objects[key] = base64.b64encode(store.get(key)).decode()
    return {
        "objects": objects,
        "batches": {f"store/{name}": export_dataproto_ref(ref) for name, ref in refs.items()},
    }


def unfinished(transfer: MooncakeBundleTransfer, policy: Any = None) -> dict[str, Any]:
    """Put batches, some of which the other package continues where this one stops."""
    batches = {}
    for name, steps in STEPS.items():
        for done in range(len(steps) + 1):
            first = {"a": np.arange(3), "t": torch.tensor([[1.0], [2], [3]])}
            ref = transfer.put(first, stage="t", policy=policy)
            for step in [("default", {"a": np.arange(3)}, True), *steps[:done]]:
                ref = append(transfer, ref, step, policy)
            batches[f"{name} {done}"] = ref
    return batches


def append(
    transfer: MooncakeBundleTransfer,
    ref: Any,
    step: tuple[str, dict[str, Any], bool],
    policy: Any = None,
) -> Any:
    stage, fields, overwrite = step
    return transfer.append_dataproto_fields(
        ref, fields, stage=stage, overwrite=overwrite, policy=policy
    )


def continued(store: Store, transfer: MooncakeBundleTransfer, batches: dict[str, Any]) -> Any:
    """Read batches, do the steps that are left, some of them twice, and read again."""
    found: dict[str, Any] = {}
    for name, handle in batches.items():
        words, done = name.removeprefix("store/").rsplit(" ", 1)
        group = import_dataproto_ref(handle)._storage_group_id
        first = described(transfer.get(handle)["batch"])
        ref = handle
        store.groups.clear()
        for step in STEPS[words][int(done) :]:
            longer = append(transfer, ref, step)
            if not step[2]:
                transfer.cleanup_dataproto_append(ref, longer)
                longer = append(transfer, ref, step)
            ref = longer
        found[name] = {
            "first": first,
            "last": described(transfer.get(ref)["batch"]),
            "has one group": all(each == [group] for each in store.groups.values()),
        }
        transfer.cleanup_dataproto(ref)
    return found


def read(written: dict[str, Any]) -> dict[str, Any]:
    store = Store(written["objects"])
    transfer = MooncakeBundleTransfer(store, "exchange")
    handles = {name: each for name, each in written["handles"].items() if "error" not in each}
    found: dict[str, Any] = {}
    for name, handle in handles.items():
        found[name] = {}
        for part, rows in (("all", None), ("rest", slice(1, None))):
            try:
                batch = transfer.get(handle, rows=rows)
            except Exception as error:  # noqa: BLE001 # the test tells which may fail
                found[name][part] = repr(error)
            else:
                found[name][part] = [described(row) for row in batch["non_tensor_batch"]["f"]]
                found[name][f"{part} numbers"] = batch["batch"]["n"].tolist()
    result = transfer.materialize(transfer.read_spec({"manifest_key": written["members"]}))
    members = {name: described(value) for name, value in result.objects.items()}
    batches = continued(store, transfer, written["batches"])
    for handle in handles.values():
        transfer.cleanup_dataproto(handle)
    transfer.remove_bundle({"manifest_key": written["members"]})
    return {
        "columns": found,
        "batches": batches,
        "members": members,
        "step": result.metadata["step"],
        "left": list(store.objects),
    }


if __name__ == "__main__":
    if sys.argv[1] == "write":
        print(json.dumps(write()))
    else:
        print(json.dumps(read(json.load(sys.stdin))))
