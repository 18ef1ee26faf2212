"""Storage groups: the store evicts the keys of a batch together, and later fields with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import structured_stores
from structured_stores import Config, PlainStore

from mooncake.store import ReplicateConfig
from mooncake.structured_object_store import (
    STORAGE_GROUP_ID,
    MooncakeBundleTransfer,
    MooncakeDataProtoRef,
    export_dataproto_ref,
    import_dataproto_ref,
)

plain = structured_stores.plain

ROWS = np.arange(3)


def groups(store: PlainStore) -> set[Any]:
    """Return the groups that the puts since the last call had; None is a put without a config."""
    found = {None if each is None else repr(each.group_ids) for each in store.configs}
    store.configs.clear()
    return found


def put(store: PlainStore, group_ids: Any) -> MooncakeDataProtoRef:
    return MooncakeBundleTransfer(store, "p").put({"x": ROWS}, config=Config(group_ids))


def test_bundles_have_no_group_of_their_own(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    transfer.put_bundle(b"m", {"x": b"1"})
    transfer.put_object({"x": b"1"})
    assert groups(plain) == {None}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, "None"), ([], "None"), ((), "None"), ("g", "['g']"), (["g"], "['g']"), ("", "['']")],
)
def test_bundles_have_the_group_of_the_caller(plain: PlainStore, given: Any, expected: str):
    config = Config(given)
    MooncakeBundleTransfer(plain, "p").put_bundle(b"m", {"x": b"1"}, config=config)
    assert groups(plain) == {expected}
    assert config.group_ids == given


@pytest.mark.parametrize("config", [None, Config(), Config([]), ReplicateConfig()])
def test_batch_gets_a_new_group(plain: PlainStore, config: Any):
    ref = MooncakeBundleTransfer(plain, "p").put({"x": ROWS}, config=config)
    group = export_dataproto_ref(ref)[STORAGE_GROUP_ID]
    assert group.startswith("structured-")
    assert len(group) == len("structured-") + 32
    kind = ReplicateConfig if config is None else type(config)
    assert all(isinstance(each, kind) for each in plain.configs)
    assert groups(plain) == {f"['{group}']"}


def test_class_without_groups_gets_them_on_the_copy(plain: PlainStore):
    class Bare:
        pass

    config = Bare()
    MooncakeBundleTransfer(plain, "p").put({"x": ROWS}, config=config)
    assert all(isinstance(each, Bare) for each in plain.configs)
    assert not hasattr(config, "group_ids")


@pytest.mark.parametrize("given", ["g", ["g"], ("g",)])
def test_batch_has_the_group_of_the_caller(plain: PlainStore, given: Any):
    handle = export_dataproto_ref(put(plain, given))
    assert (handle[STORAGE_GROUP_ID], groups(plain)) == ("g", {"['g']"})
    assert list(handle)[-1] == STORAGE_GROUP_ID


@pytest.mark.parametrize("given", ["", [""]])
def test_batch_may_have_no_group(plain: PlainStore, given: Any):
    handle = export_dataproto_ref(put(plain, given))
    assert STORAGE_GROUP_ID not in handle
    assert import_dataproto_ref(handle)._storage_group_id is None
    assert groups(plain) == {"['']"}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["a", "b"], "exactly one logical group id"),
        ([1], "must contain strings"),
        (5, "must contain strings"),
    ],
)
def test_wrong_groups_are_refused_before_any_put(plain: PlainStore, given: Any, text: str):
    transfer = MooncakeBundleTransfer(plain, "p")
    for call in (
        lambda: put(plain, given),
        lambda: transfer.put_bundle(b"", {"x": b"1"}, config=Config(given)),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert plain.configs == []


def test_metadata_alone_has_a_group_and_no_object(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    ref = transfer.put({"meta_info": {"a": 1}}, config=Config("g"))
    again = transfer.append_dataproto_fields(ref, {"meta_info": {"b": 2}}, stage="s")
    assert (ref._storage_group_id, again._storage_group_id) == ("g", "g")
    assert (again.meta_info, again.stage_refs, plain.configs) == ({"a": 1, "b": 2}, {}, [])


@pytest.mark.parametrize("config", [None, Config(), Config([]), Config([""]), Config("g")])
@pytest.mark.parametrize("stage", ["s", "default"])
def test_later_fields_have_the_group_of_the_batch(plain: PlainStore, config: Any, stage: str):
    transfer = MooncakeBundleTransfer(plain, "p")
    handle = export_dataproto_ref(put(plain, "g"))
    groups(plain)
    more = transfer.append_dataproto_fields(handle, {"y": ROWS}, stage=stage, config=config)
    if config is not None:
        assert {each.replica_num for each in plain.configs} == {2}
    assert groups(plain) == {"['g']"}
    assert export_dataproto_ref(more)[STORAGE_GROUP_ID] == "g"


@pytest.mark.parametrize("given", ["h", ["h"]])
def test_other_group_conflicts(plain: PlainStore, given: Any):
    ref = put(plain, "g")
    groups(plain)
    with pytest.raises(ValueError, match="conflicts"):
        MooncakeBundleTransfer(plain, "p").append_dataproto_fields(
            ref, {"y": ROWS}, stage="s", config=Config(given)
        )
    assert plain.configs == []


@pytest.mark.parametrize(
    ("config", "expected"), [(None, None), (Config(), "None"), (Config("h"), "['h']")]
)
def test_batch_without_a_group_gets_none_later(plain: PlainStore, config: Any, expected: Any):
    ref = put(plain, "")
    groups(plain)
    more = MooncakeBundleTransfer(plain, "p").append_dataproto_fields(
        ref, {"y": ROWS}, stage="s", config=config
    )
    assert groups(plain) == {expected}
    assert STORAGE_GROUP_ID not in export_dataproto_ref(more)


def test_parallel_appends_are_independent(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    handle = export_dataproto_ref(put(plain, "g"))
    with ThreadPoolExecutor(2) as threads:
        appended = list(
            threads.map(
                lambda name: transfer.append_dataproto_fields(handle, {name: ROWS}, stage=name),
                "ab",
            )
        )
    assert [sorted(each.field_index) for each in appended] == [["a", "x"], ["b", "x"]]
    assert {each._storage_group_id for each in appended} == {"g"}


def test_append_to_a_handle_reads_nothing(plain: PlainStore):
    transfer = MooncakeBundleTransfer(plain, "p")
    handle = export_dataproto_ref(put(plain, "g"))
    plain.get = None
    more = transfer.append_dataproto_fields(handle, {"y": ROWS}, stage="s")
    assert import_dataproto_ref(handle).stage_refs["default"].manifest == {}
    assert more.stage_refs["default"].manifest == {}


def test_config_that_cannot_be_copied_is_made_anew(plain: PlainStore):
    class Uncopyable(Config):
        def __copy__(self) -> Any:
            raise TypeError("no copy")

    class Neither(Uncopyable):
        def __init__(self, number: int) -> None:
            super().__init__()

    transfer = MooncakeBundleTransfer(plain, "p")
    config = Uncopyable()
    config.replica_num = 5
    transfer.put({"x": ROWS}, config=config)
    assert {each.replica_num for each in plain.configs} == {5}
    plain.configs.clear()
    with pytest.raises(TypeError, match="must be copyable or default-constructible"):
        transfer.put({"x": ROWS}, config=Neither(1))
    transfer.put({"meta_info": {"a": 1}}, config=Neither(1))
    assert plain.configs == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 3}, "unsupported .* version"),
        ({"version": None}, "unsupported .* version"),
        ({"version": 2, STORAGE_GROUP_ID: None}, "storage_group_id"),
        ({STORAGE_GROUP_ID: ""}, "storage_group_id"),
        ({"meta_info": None}, "meta_info"),
    ],
)
def test_false_handles_are_refused(plain: PlainStore, change: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        import_dataproto_ref({**export_dataproto_ref(put(plain, "g")), **change})


def test_handles_of_all_versions_are_imported(plain: PlainStore):
    handle = export_dataproto_ref(put(plain, "g"))
    for version in (1, "1", 2):
        again = export_dataproto_ref(import_dataproto_ref({**handle, "version": version, "new": 1}))
        assert again == handle
    short = {
        name: each
        for name, each in handle.items()
        if name not in ("namespace", "partition", "global_indexes", "meta_info", STORAGE_GROUP_ID)
    }
    ref = import_dataproto_ref({**short, "batch_size": "3"})
    assert (ref.namespace, ref.partition, ref.meta_info) == ("default", "default", {})
    assert (ref.batch_size, ref.global_indexes, ref._storage_group_id) == (3, None, None)
