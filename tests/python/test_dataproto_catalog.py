"""The DataProto catalog: locations, publications, pins and retired fragments."""

from __future__ import annotations

import copy
import json
import operator
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dataproto_handles import appended, handle

from mooncake.dataproto_catalog import DataProtoCatalog


@pytest.fixture
def catalog() -> DataProtoCatalog:
    return DataProtoCatalog()


def assigned(values: list[Any], more: list[Any]) -> list[Any]:
    values[:] = more
    values.extend(more)
    return values


# Locations and tags


def test_resolve_groups_fields_by_location(catalog):
    catalog.update("p", ["k0", "k1"], handle=handle("A"))
    catalog.update("p", ["k1"], handle=handle("B", 1, "bc"))
    answer = catalog.resolve("p", ["k1", "k0"], ["a", "b"])
    assert answer["field_groups"] == [
        {"fields": ["a"], "locations": [("A", 1), ("A", 0)]},
        {"fields": ["b"], "locations": [("B", 0), ("A", 0)]},
    ]
    assert answer["handles"] == {"A": handle("A"), "B": handle("B", 1, "bc")}
    assert (answer["keys"], answer["fields"]) == (["k1", "k0"], ["a", "b"])
    assert "read_token" not in answer
    one = catalog.resolve("p", ["k1"])
    assert one["fields"] == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"fields are not ready for key 'k0': .'c'"):
        catalog.resolve("p", ["k0", "k1"])


def test_tags_are_merged_and_listed(catalog):
    catalog.update("p", ["k0", "k1"], tags=[{"x": 1}, {}])
    done = catalog.update("p", ["k0"], tags=[{"y": 2}])
    assert done == {"keys": ["k0"], "tags": [{"x": 1, "y": 2}], "fields": [], "retired_handles": []}
    catalog.update("q", ["k0"], tags=[{}])
    assert catalog.list("p") == {"p": {"k0": {"x": 1, "y": 2}, "k1": {}}}
    assert set(catalog.list()) == {"p", "q"}
    assert catalog.list("absent") == {}


def test_equal_tags_of_keys_stay_apart(catalog):
    tags = [{"step": 1}, {"step": 1}, {"step": True}, {"step": 1.0}]
    catalog.update("p", list("abcd"), tags=tags)
    catalog.update("p", ["a"], tags=[{"step": 2}])
    catalog.list("p")["p"]["b"]["step"] = 3
    assert [repr(tag) for tag in catalog.list("p")["p"].values()] == [
        repr(tag) for tag in ({"step": 2}, *tags[1:])
    ]


def test_answers_are_copies(catalog):
    given = handle("A")
    catalog.update("p", ["k0", "k1"], tags=[{"x": []}, {}], handle=given)
    given["meta_info"]["changed"] = 1
    catalog.list()["p"]["k0"]["x"].append(1)
    catalog.resolve("p", ["k0"])["handles"]["A"]["meta_info"]["changed"] = 1
    assert catalog.list("p")["p"]["k0"] == {"x": []}
    assert catalog.resolve("p", ["k0"])["meta_info"] == {}


@pytest.mark.parametrize(
    "take",
    [
        lambda handles: handles["A"],
        lambda handles: handles.get("A"),
        lambda handles: dict(handles)["A"],
        lambda handles: {**handles}["A"],
        lambda handles: (handles | {})["A"],
        lambda handles: handles.copy()["A"],
        lambda handles: copy.copy(handles)["A"],
        lambda handles: pickle.loads(pickle.dumps(handles))["A"],
        lambda handles: json.loads(json.dumps(handles))["A"],
        lambda handles: dict(handles.items())["A"],
        lambda handles: next(iter(handles.values())),
        lambda handles: handles.pop("A"),
        lambda handles: handles.popitem()[1],
        lambda handles: handles.setdefault("A", None),
    ],
)
def test_handles_of_an_answer_may_be_changed(catalog, take):
    catalog.update("p", ["k0", "k1"], handle=handle("A"))
    handles = catalog.resolve("p", ["k0"])["handles"]
    assert (isinstance(handles, dict), handles.get("B"), len(handles)) == (True, None, 1)
    taken = take(handles)
    assert taken == handle("A")
    taken["field_index"]["a"]["stage"] = taken["kind"] = "changed"
    assert catalog.resolve("p", ["k0"])["handles"] == {"A": handle("A")}


@pytest.mark.parametrize(
    "take",
    [
        lambda tags: tags[1],
        lambda tags: tags[-1],
        lambda tags: tags[1:][0],
        lambda tags: list(tags)[1],
        lambda tags: [*tags][1],
        lambda tags: tuple(tags)[1],
        lambda tags: next(reversed(tags)),
        lambda tags: operator.add(tags, [])[1],
        lambda tags: operator.add([{}], tags)[2],
        lambda tags: assigned([], tags)[1],
        lambda tags: (tags * 2)[1],
        lambda tags: tags.copy()[1],
        lambda tags: copy.copy(tags)[1],
        lambda tags: copy.deepcopy(tags)[1],
        lambda tags: pickle.loads(pickle.dumps(tags))[1],
        lambda tags: json.loads(json.dumps(tags))[1],
        lambda tags: sorted(tags, key=len)[1],
        lambda tags: max(tags, key=len),
        lambda tags: tags.pop(),
        lambda tags: (tags.insert(0, {}), tags[2])[1],
        lambda tags: (tags.reverse(), tags[0])[1],
        lambda tags: (tags.append({}), tags[1])[1],
        lambda tags: (operator.iadd(tags, [{}]), tags[1])[1],
        lambda tags: (operator.delitem(tags, 0), tags[0])[1],
    ],
)
def test_tags_of_an_answer_may_be_changed(catalog, take):
    catalog.update("p", ["k0", "k1"], tags=[{}, {"x": [1]}], handle=handle("A"))
    tags = catalog.resolve("p", ["k0", "k1"])["tags"]
    assert (isinstance(tags, list), len(tags), tags) == (True, 2, [{}, {"x": [1]}])
    taken = take(tags)
    assert taken == {"x": [1]}
    taken["x"].append(2)
    taken["y"] = 1
    assert catalog.resolve("p", ["k0", "k1"])["tags"] == [{}, {"x": [1]}]
    assert catalog.list("p") == {"p": {"k0": {}, "k1": {"x": [1]}}}


def test_tags_of_an_answer_are_kept_as_they_are_changed(catalog):
    catalog.update("p", ["k0", "k1"], tags=[{"x": 1}, {}])
    catalog.update("p", ["k0", "k1"], handle=handle("A"))
    tags = catalog.resolve("p", ["k0", "k1"])["tags"]
    tags[0]["y"] = tags[-1]["z"] = 2
    catalog.update("p", ["k0"], tags=[{"x": 3}])
    assert [tags[0], *tags] == [{"x": 1, "y": 2}, {"x": 1, "y": 2}, {"z": 2}]
    with pytest.raises(IndexError):
        _ = tags[2]


def test_look_up_copies_no_tag(catalog, monkeypatch):
    keys = [f"k{number}" for number in range(50)]
    catalog.update("p", keys, tags=[{"n": number} for number in range(50)], handle=handle("A", 50))
    copies = []
    monkeypatch.setattr("mooncake._dataproto.answers.copied", copies.append)
    tags = catalog.resolve("p", keys)["tags"]
    assert (len(tags), copies) == (50, [])
    _ = tags[7]
    assert copies == [{"n": 7}]


def test_look_up_copies_no_handle(catalog, monkeypatch):
    for number in range(50):
        catalog.update("p", [f"k{number}"], handle=handle(f"A{number}", 1))
    copies = []
    monkeypatch.setattr("mooncake._dataproto.answers.copied", copies.append)
    answer = catalog.resolve("p", [f"k{number}" for number in range(50)])
    assert (len(answer["handles"]), copies) == (50, [])
    _ = answer["handles"]["A7"]
    assert copies == [handle("A7", 1)]


@pytest.mark.parametrize("names", [("k0", "k1"), iter(["k0", "k1"]), {"k0": 0, "k1": 1}])
def test_keys_are_any_names_with_an_order(catalog, names):
    assert catalog.update("p", names, handle=handle("A"))["keys"] == ["k0", "k1"]
    for other in ({"k0", "k1"}, 3, None):
        with pytest.raises(ValueError, match="must be a sequence of non-empty strings"):
            catalog.update("p", other, handle=handle("B"))


def test_fields_of_several_fragments_are_counted(catalog):
    catalog.publish("o1", "p", ["k0", "k1"], handle=handle("A", 2, "ab"))
    catalog.publish("o2", "p", ["k0"], handle=handle("B", 1, "bc"))
    catalog.publish("o3", "p", ["k0"], handle=handle("C", 1, "abc"))
    assert catalog.resolve("p", ["k0"])["handles"] == {"C": handle("C", 1, "abc")}
    done = catalog.publish("o4", "p", ["k1"], handle=handle("D", 1, "ab"))
    retired = {each["stage_refs"]["default"]["manifest_key"] for each in done["retired_handles"]}
    assert retired == {"A", "B"}


@pytest.mark.parametrize("given", [{}, {"partition": "", "namespace": ""}, {"partition": "q"}])
def test_partition_of_a_handle_need_not_be_the_catalogs(catalog, given):
    whole = handle("A", 1)
    bare = {name: whole[name] for name in ("type", "kind", "batch_size")}
    bare |= {name: whole[name] for name in ("stage_refs", "field_index")}
    catalog.publish("o", "p", ["k"], handle={**bare, **given, "version": "1", "later": 1})
    found = catalog.resolve("p", ["k"])["handles"]["A"]
    del whole["storage_group_id"]
    assert found == {**whole, "partition": "default", **given}
    assert list(found) == list(whole)
    # The same fragment, with its fields written out.
    catalog.publish("o1", "p", ["k"], handle=found)
    catalog.remove("p", ["k"])
    assert catalog.ack_retired([{**bare, **given, "version": 1}]) == {"retired_handles": []}


def test_refused_handles_leave_no_partition(catalog):
    for bad in (handle("A", 2), handle("A", 1, version=999), handle("A", 1, stage_refs={})):
        with pytest.raises(ValueError, match=r"batch size|version|unknown stage"):
            catalog.update("p", ["k"], handle=bad)
    assert catalog.list() == {}


def test_meta_info_is_merged_unless_it_conflicts(catalog):
    catalog.update("p", ["a"], handle=handle("A", 1, meta_info={"x": 1}))
    catalog.update("p", ["b"], handle=handle("B", 1, meta_info={"y": 2, "x": 1}))
    catalog.update("p", ["c"], handle=handle("C", 1, meta_info={"x": 2}))
    assert catalog.resolve("p", ["a", "b"])["meta_info"] == {"x": 1, "y": 2}
    with pytest.raises(ValueError, match="conflicting DataProto meta_info value for 'x'"):
        catalog.resolve("p", ["a", "c"])


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda c: c.update("p", ["k"]), "requires tags or a DataProto handle"),
        (lambda c: c.update("", ["k"], tags=[{}]), "partition must be a non-empty string"),
        (lambda c: c.update("p", "k", tags=[{}]), "keys must be a sequence"),
        (lambda c: c.update("p", [], tags=[]), "keys must be non-empty strings"),
        (lambda c: c.update("p", [3], tags=[{}]), "keys must be non-empty strings"),
        (lambda c: c.update("p", ["k", "k"], tags=[{}, {}]), "keys must be unique"),
        (lambda c: c.update("p", ["k"], tags=[]), "same length as keys"),
        (lambda c: c.update("p", ["k"], handle=3), "not a Mooncake DataProto ref handle"),
        (lambda c: c.update("p", ["k"], handle=handle("A")), "batch size 2 does not match 1"),
        (lambda c: c.update("p", ["k"], handle=handle("A", 1, "")), "field names"),
        (lambda c: c.update("p", ["k"], handle=handle("A", "x")), "batch_size"),
        (
            lambda c: c.update("p", ["k"], handle=handle("A", 1, version=999)),
            "unsupported .* version",
        ),
        (lambda c: c.update("p", ["k"], handle=handle("A", 1, stage_refs={})), "unknown stage"),
        (
            lambda c: c.update("p", ["k"], handle=appended(handle("A", 1), "s", "c")),
            "exactly one DataProto stage",
        ),
        (lambda c: c.resolve("p", ["zz"]), "keys were not found in partition 'p': .'zz'"),
        (lambda c: c.resolve("p", ["known"]), "do not contain any fields"),
        (lambda c: c.resolve("p", ["known"], "ab"), "field names must be a sequence"),
        (lambda c: c.list(""), "partition"),
        (lambda c: c.publish("", "p", ["k"], tags=[{}]), "operation_id"),
        (lambda c: c.ack_publication(3), "operation_id"),
    ],
)
def test_bad_calls_are_refused(catalog, call, reason):
    catalog.update("p", ["known"], tags=[{}])
    with pytest.raises(ValueError, match=reason):
        call(catalog)
    assert catalog.list() == {"p": {"known": {}}}


def test_tags_must_be_mappings(catalog):
    with pytest.raises(TypeError, match="tags must be mappings"):
        catalog.update("p", ["k"], tags=[3])


# Publications


def test_publication_takes_effect_once(catalog):
    first = catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    catalog.remove("p", ["k0"])
    assert catalog.publish("o", "p", ["k0", "k1"], handle=handle("A")) == first
    assert list(catalog.list()["p"]) == ["k1"]
    catalog.ack_publication("o")
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    assert set(catalog.list()["p"]) == {"k0", "k1"}


def test_unacknowledged_results_are_bounded(catalog, monkeypatch):
    monkeypatch.setattr("mooncake._dataproto.catalog.UNACKNOWLEDGED_MAX", 2)
    for number in range(3):
        catalog.publish(f"o{number}", "p", ["k"], tags=[{"n": number}])
    assert catalog.publish("o2", "p", ["k"], tags=[{"n": 7}])["tags"] == [{"n": 2}]
    assert catalog.publish("o0", "p", ["k"], tags=[{"n": 7}])["tags"] == [{"n": 7}]


def test_fragment_ids_name_one_fragment(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    with pytest.raises(ValueError, match="fragment id collision: 'A'"):
        catalog.publish("o1", "p", ["k0", "k1"], handle=handle("A", fields="c"))
    with pytest.raises(ValueError, match="management mismatch: 'A'"):
        catalog.update("p", ["k0", "k1"], handle=handle("A"))
    assert catalog.remove("p", ["k0", "k1"])["retired_handles"] == [handle("A")]
    with pytest.raises(ValueError, match="pending retirement: 'A'"):
        catalog.publish("o2", "p", ["k0", "k1"], handle=handle("A"))


def test_fragments_of_update_are_never_retired(catalog):
    catalog.update("p", ["k0", "k1"], handle=handle("A"))
    assert catalog.remove("p", ["k0", "k1"]) == {"retired_handles": []}
    assert catalog.drain() == {"retired_handles": []}


# Appends


def test_append_adds_fields(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    longer = appended(handle("A"), "s", "c")
    given = {"previous_handle": handle("A"), "handle": longer}
    done = catalog.publish_append("o1", "A", "p", ["k0", "k1"], **given)
    assert done["fields"] == ["a", "b", "c"]
    assert catalog.publish_append("o1", "A", "p", ["k0", "k1"], **given) == done
    assert catalog.resolve("p", ["k1"])["handles"] == {"A": longer}


def test_append_leaves_fields_of_other_fragments(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    catalog.publish("o1", "p", ["k0"], handle=handle("B", 1, "b"))
    given = {"previous_handle": handle("A"), "handle": appended(handle("A"), "s", "c")}
    catalog.publish_append("o2", "A", "p", ["k0", "k1"], **given)
    groups = catalog.resolve("p", ["k0"])["field_groups"]
    assert groups == [
        {"fields": ["a", "c"], "locations": [("A", 0)]},
        {"fields": ["b"], "locations": [("B", 0)]},
    ]


def changed(**changes: Any) -> dict[str, Any]:
    return {**appended(handle("A"), "s", "c"), **changes}


@pytest.mark.parametrize(
    ("fragment", "keys", "previous", "following", "reason"),
    [
        ("X", "01", handle("A"), changed(), "stale DataProto append handle: 'X'"),
        ("A", "01", handle("A", fields="a"), changed(), "stale DataProto append handle: 'A'"),
        ("A", "02", handle("A"), changed(), "keys not found in partition 'p': ['k2']"),
        ("A", "0", handle("A"), changed(), "changed fragment identity"),
        ("A", "01", handle("A"), changed(batch_size=3), "changed fragment identity"),
        ("A", "01", handle("A"), changed(partition="q"), "changed fragment identity"),
        ("A", "01", handle("A"), changed(storage_group_id="x"), "changed fragment identity"),
        (
            "A",
            "01",
            handle("A"),
            changed(field_index={"b": handle("A")["field_index"]["b"]}),
            "changed existing fields",
        ),
        ("A", "01", handle("A"), handle("other"), "changed"),
    ],
)
def test_appends_that_do_not_continue_are_rejected(
    catalog, fragment, keys, previous, following, reason
):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    names = [f"k{digit}" for digit in keys]
    given = {"previous_handle": previous, "handle": following}
    done = catalog.publish_append("o1", fragment, "p", names, **given)
    assert reason in done["append_rejected"]
    assert catalog.publish_append("o1", fragment, "p", names, **given) == done
    assert catalog.resolve("p", ["k0"])["handles"] == {"A": handle("A")}


def test_second_append_to_the_same_handle_is_stale(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    for operation, field, is_accepted in (("o1", "c", True), ("o2", "d", False)):
        following = appended(handle("A"), operation, field)
        given = {"previous_handle": handle("A"), "handle": following}
        done = catalog.publish_append(operation, "A", "p", ["k0", "k1"], **given)
        assert ("append_rejected" not in done) == is_accepted


# Pins and retirement


def test_replaced_fragments_are_retired_until_acknowledged(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    done = catalog.publish("o1", "p", ["k0", "k1"], handle=handle("B"))
    assert done["retired_handles"] == [handle("A")]
    assert catalog.remove("p", ["absent"])["retired_handles"] == [handle("A")]
    with pytest.raises(ValueError, match="retired DataProto fragment mismatch: 'A'"):
        catalog.ack_retired([handle("A", fields="a")])
    assert catalog.ack_retired([handle("A"), handle("unknown")]) == {"retired_handles": []}


def test_pinned_fragments_are_retired_after_the_last_read(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    tokens = [catalog.resolve("p", ["k0"], pin=True)["read_token"] for _ in range(2)]
    assert tokens[0] != tokens[1]
    assert catalog.remove("p", ["k0", "k1"]) == {"retired_handles": []}
    for _ in range(2):
        assert catalog.release_read(tokens[0]) == {"retired_handles": []}
    assert catalog.release_read(tokens[1]) == {"retired_handles": [handle("A")]}


def test_fragment_that_is_only_read_can_be_published_again(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    token = catalog.resolve("p", ["k0"], pin=True)["read_token"]
    catalog.remove("p", ["k0", "k1"])
    catalog.publish("o1", "p", ["k0", "k1"], handle=handle("A"))
    assert catalog.release_read(token) == {"retired_handles": []}
    assert catalog.resolve("p", ["k1"])["field_groups"][0]["locations"] == [("A", 1)]


def test_drain_retires_everything_and_refuses_more(catalog):
    catalog.publish("o", "p", ["k0", "k1"], handle=handle("A"))
    token = catalog.resolve("p", ["k0"], pin=True)["read_token"]
    with pytest.raises(RuntimeError, match=r"with 1 active read\(s\)"):
        catalog.drain()
    assert catalog.list() != {}
    catalog.release_read(token)
    assert catalog.drain() == {"retired_handles": [handle("A")]}
    assert catalog.drain() == {"retired_handles": [handle("A")]}
    assert catalog.list() == {}
    with pytest.raises(RuntimeError, match="catalog is drained"):
        catalog.update("p", ["k"], tags=[{}])
    given = {"previous_handle": handle("A"), "handle": changed()}
    done = catalog.publish_append("o1", "A", "p", ["k0", "k1"], **given)
    assert done == {"append_rejected": "DataProto catalog is drained"}


def test_every_published_fragment_is_alive_or_retired_once():
    for seed in range(40):
        rng = random.Random(seed)
        catalog = DataProtoCatalog()
        published, deleted, tokens = set(), set(), []
        retired: list[dict[str, Any]] = []
        for step in range(150):
            names = rng.sample([f"k{number}" for number in range(5)], rng.randint(1, 3))
            choice = rng.random()
            if choice < 0.4:
                fields = "".join(rng.sample("abc", rng.randint(1, 3)))
                done = catalog.publish(
                    f"o{step}", "p", names, handle=handle(f"A{step}", len(names), fields)
                )
                published.add(f"A{step}")
            elif choice < 0.6:
                done = catalog.remove("p", names)
            elif choice < 0.75 and tokens:
                done = catalog.release_read(tokens.pop(rng.randrange(len(tokens))))
            elif choice < 0.85:
                chosen = rng.sample(retired, rng.randint(0, len(retired)))
                done = catalog.ack_retired(chosen)
                deleted |= {item["stage_refs"]["default"]["manifest_key"] for item in chosen}
            else:
                known = [name for name in names if name in catalog.list().get("p", {})]
                if known:
                    answer = catalog.resolve("p", known[:1], pin=True)
                    tokens.append(answer["read_token"])
                    assert deleted.isdisjoint(answer["handles"])
                continue
            retired = done["retired_handles"]
        for token in tokens:
            catalog.release_read(token)
        retired = catalog.drain()["retired_handles"]
        names = [item["stage_refs"]["default"]["manifest_key"] for item in retired]
        assert sorted([*names, *deleted]) == sorted(published), seed


def test_threads_may_share_a_catalog(catalog):
    barrier = threading.Barrier(8)

    def work(number: int) -> int:
        barrier.wait()
        deleted = 0
        for step in range(100):
            name = f"{number}.{step}"
            catalog.publish(name, "p", ["shared"], handle=handle(name, 1))
            token = catalog.resolve("p", ["shared"], pin=True)["read_token"]
            retired = catalog.release_read(token)["retired_handles"]
            catalog.ack_retired(retired)
            deleted += len(retired)
        return deleted

    with ThreadPoolExecutor(8) as pool:
        # Threads may be told of the same fragment; each was told of at least one.
        assert sum(pool.map(work, range(8))) >= 8 * 100 - 1
    last = catalog.resolve("p", ["shared"])["handles"]
    assert catalog.drain()["retired_handles"] == list(last.values())


def test_stage_with_more_fields_replaces_its_fragment(catalog):
    """A later field in an existing stage gives the stage another manifest."""
    names = ["k0", "k1"]
    catalog.publish("o1", "p", names, handle=handle("A"))
    longer = handle("A", fields="abc")
    longer["stage_refs"]["default"]["manifest_key"] = "merged"
    done = catalog.publish_append("o2", "A", "p", names, previous_handle=handle("A"), handle=longer)
    assert done["fields"] == ["a", "b", "c"]
    assert catalog.resolve("p", names)["handles"] == {"A": longer}
    assert catalog.remove("p", names)["retired_handles"] == [longer]
    with pytest.raises(ValueError, match="retired DataProto fragment mismatch: 'A'"):
        catalog.ack_retired([handle("A")])
    assert catalog.ack_retired([longer]) == {"retired_handles": []}
    catalog.publish("o3", "p", names, handle=handle("A"))
