"""Cases of `structured_observations.py` about configurations, handles, removal, rows and slices."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from structured_exchange import Store, column
from structured_stores import FullStore, PlainStore

from mooncake.structured_object_store import (
    BundleTransferPolicy,
    MooncakeBundleTransfer,
    export_dataproto_ref,
    import_dataproto_ref,
)

Case = Callable[[], Any]

ROWS = np.arange(3)


class Plain:
    """A configuration without groups."""


class Grouped:
    """A configuration with groups."""

    def __init__(self, group_ids: Any = None) -> None:
        self.group_ids = group_ids


class Uncopied:
    """A configuration that cannot be copied, as upstream's."""

    def __init__(self) -> None:
        self.group_ids: Any = None
        self.replica_num = 1
        self.other = 0

    def __copy__(self) -> None:
        raise TypeError("no copies")


class Unmade(Uncopied):
    """A configuration that can be neither copied nor made anew."""

    def __init__(self, replicas: int) -> None:
        super().__init__()
        self.replica_num = replicas


class Failing(Uncopied):
    """A configuration whose copy fails in another way."""

    def __copy__(self) -> None:
        raise RuntimeError("broken")


class Unfinished(PlainStore):
    """A store whose second put fails."""

    def put(self, key: str, value: object, *, config: object = None) -> int:
        if self.objects:
            raise KeyError("full")
        return super().put(key, value, config=config)


def transfer(store: Any = None) -> MooncakeBundleTransfer:
    return MooncakeBundleTransfer(Store({}) if store is None else store, "p")


def configured(config: Any, data: Any = None) -> Any:
    """Return what the puts of a batch get as their configuration, and the given one after it."""
    if hasattr(config, "replica_num"):
        config.replica_num, config.other = 3, 5
    store = PlainStore()
    transfer(store).put({"x": ROWS} if data is None else data, config=config)
    first = vars(store.configs[0]) if store.configs else {}
    groups = [each.split("-")[0] for each in first.get("group_ids", ())]
    return len(store.configs), groups, first.get("replica_num"), first.get("other"), vars(config)


def registered(code: Any) -> Any:
    """Return how often memory is unregistered that a store registers with a code."""
    store, ended = FullStore(), []
    register = store.register_buffer
    store.register_buffer = lambda *span: [register(*span), code][1]  # type: ignore
    store.unregister_buffer = lambda address: ended.append(address) or 0  # type: ignore
    one = transfer(store)
    found = one.get_object(one.put_object({"x": ROWS}))["x"]
    return bool(ended), found.tolist()


def read_by(store: FullStore, missing: str) -> Any:
    """Return the calls that read an array from a store without a call."""
    setattr(store, missing, None)
    one = transfer(store)
    ref = one.put_object({"x": ROWS})
    store.calls.clear()
    return one.get_object(ref)["x"].tolist(), store.calls


def rest_after(change: Callable[[Store, MooncakeBundleTransfer, Any], Any]) -> Any:
    """Return what a call returns, and how many objects it leaves of a bundle."""
    store = Store({})
    one = transfer(store)
    found = change(store, one, one.put_object({"x": ROWS, "y": ROWS}))
    return found, len(store.objects)


def failed_put(store: PlainStore) -> Any:
    try:
        transfer(store).put_object({"x": ROWS, "y": ROWS})
    except KeyError as error:
        return str(error), len(store.objects)
    return None


def two_appends() -> Any:
    one = transfer()
    handle = export_dataproto_ref(one.put({"x": ROWS}, config=Grouped("g")))
    refs = [one.append_dataproto_fields(handle, {name: ROWS}, stage=name) for name in "yz"]
    return [[list(ref.field_index), ref._storage_group_id, repr(one.get(ref))] for ref in refs]


def gets_of_append() -> int:
    """Return how many objects an append of a new stage to an imported handle reads."""
    one = transfer()
    ref = import_dataproto_ref(export_dataproto_ref(one.put({"x": ROWS})))
    count, get = [], one.store.get
    one.store.get = lambda key: [count.append(key), get(key)][1]
    one.append_dataproto_fields(ref, {"y": ROWS}, stage="s")
    return len(count)


def old_handle(config: Any) -> Any:
    """Return the groups of an append to a handle without one."""
    one = transfer()
    handle = export_dataproto_ref(one.put({"x": ROWS}))
    del handle["storage_group_id"]
    one.store.groups.clear()
    ref = one.append_dataproto_fields(handle, {"y": ROWS}, stage="s", config=config)
    return ref._storage_group_id, list(one.store.groups.values())


def spoiled_encoding() -> Any:
    one = transfer()
    ref = one.put_object({"x": ROWS})
    key = ref.manifest["meta"]["key"]
    meta = json.loads(one.store.objects[key])
    meta["__mooncake_structured_fields__"]["x"]["encoding"] = "other"
    data = one.store.objects[key] = json.dumps(meta).encode()
    spec = ref.manifest["meta"]
    spec["bytes"] = spec["chunks"][0]["bytes"] = len(data)
    return one.get_object(ref)


def sliced(value: Any, *bounds: Any) -> Any:
    one = transfer(FullStore())
    policy = BundleTransferPolicy(copy_mode="copy")
    ref = one.put_object({"x": value}, policy=policy)
    spec = one.read_spec(ref).slice_member("x", *bounds)
    return one.materialize(spec).objects["x"].tolist()


def into(value: Any, destination: Any) -> Any:
    one = transfer(FullStore())
    spec = one.read_spec(one.put_object({"x": value}))
    found = one.materialize_into(spec, {"x": destination}).objects["x"]
    return found is destination, found.tolist()


def read_only() -> Any:
    array = np.zeros(3, dtype=np.int64)
    array.flags.writeable = False
    return array


def selected(names: Any) -> Any:
    one = transfer()
    ref = one.put_object({"x": ROWS, "y": ROWS})
    return sorted(one.materialize(one.read_spec(ref).select_members(names)).objects)


def cases_of_options() -> dict[str, Case]:
    """Return the cases by name."""
    found: dict[str, Case] = {}
    configs = (Plain, Grouped, Uncopied, Failing, lambda: Unmade(2), lambda: Grouped(["g"]))
    for at, make in enumerate(configs):
        found[f"configuration {at}"] = lambda make=make: configured(make())
        found[f"configuration {at} of metadata"] = lambda make=make: configured(
            make(), {"meta_info": {"a": 1}}
        )
    for code in (0, -600, -1, 5):
        found[f"registration with {code}"] = lambda code=code: registered(code)
    for name in ("register_buffer", "unregister_buffer"):
        found[f"array read without {name}"] = lambda name=name: read_by(FullStore(), name)
    for code in (None, 0, -704, -1, 1, "x"):
        found[f"removal with {code!r}"] = lambda code=code: rest_after(
            lambda store, one, ref: [
                setattr(store, "remove", lambda key, force=False: code),
                one.remove_bundle(ref),
            ][1]
        )
    for code in (0, 1, -1, None, 2):
        found[f"removal where is_exist answers {code!r}"] = lambda code=code: rest_after(
            lambda store, one, ref: [
                setattr(store, "is_exist", lambda key: code),
                one.remove_bundle({"manifest_key": ref.manifest_key}),
            ][1]
        )
    found |= {
        "removal twice": lambda: rest_after(
            lambda store, one, ref: [one.remove_bundle(ref), one.remove_bundle(ref)]
        ),
        "read by a manifest": lambda: rest_after(
            lambda store, one, ref: sorted(
                one.materialize(one.read_spec({"manifest": ref.manifest})).objects
            )
        ),
        "read by another prefix": lambda: rest_after(
            lambda store, one, ref: MooncakeBundleTransfer(store, "q").get_object(
                {"manifest_key": ref.manifest_key}
            )
        ),
        "put that fails": lambda: failed_put(Unfinished()),
        "two appends to one handle": two_appends,
        "reads of an append": gets_of_append,
        "append to an old handle": lambda: old_handle(None),
        "append to an old handle with a group": lambda: old_handle(Grouped(["z"])),
        "unknown encoding": spoiled_encoding,
    }
    for given in ({}, {"manifest": None}, {"manifest_key": ""}, {"manifest_key": 5}, None, 5, []):
        found[f"handle of a bundle {given!r}"] = lambda given=given: transfer().read_spec(given)
    values = torch.arange(6.0).reshape(3, 2), np.arange(6).reshape(3, 2), b"abc"
    for value in values:
        for bounds in ((0, 1, 3), (0, 0, 0), (0, 2, 9), (0, -2, 3), (1, 0, 1), (0, None, None)):
            name = f"slice {bounds} of {type(value).__name__}"
            found[name] = lambda value=value, bounds=bounds: sliced(value, *bounds)
    for name, make in {
        "array": lambda: np.zeros(3, dtype=np.int64),
        "read-only array": read_only,
        "short array": lambda: np.zeros(2, dtype=np.int64),
        "array of another dtype": lambda: np.zeros(3, dtype=np.int32),
        "bytearray": lambda: bytearray(24),
        "list": lambda: [0, 0, 0],
    }.items():
        for value in (ROWS, bytes(24), torch.arange(3)):
            found[f"{type(value).__name__} into {name}"] = lambda value=value, make=make: into(
                value, make()
            )
    for names in ([], None, ["x"], ["q"], ["x", "x"], "x", 3):
        found[f"selection {names!r}"] = lambda names=names: selected(names)
    for rows in (slice(0, 0), slice(2, None), [2, 0], (1,), [-1], [3], ["0"], [None], [1.0], 5):
        found[f"rows {rows!r} of texts"] = lambda rows=rows: repr(of_texts(rows))
    return found


def of_texts(rows: Any) -> Any:
    one = transfer(FullStore())
    ref = one.put({"non_tensor_batch": {"y": column(["a", None, "c"])}})
    return one.get(ref, rows=rows)
