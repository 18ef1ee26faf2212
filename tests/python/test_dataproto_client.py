"""The client of a DataProto catalog: lost calls, stale appends, deletion of what is retired."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from dataproto_handles import appended, handle
from structured_stores import PlainStore

from mooncake.dataproto_catalog import DataProtoCatalog, DataProtoCatalogTransfer
from mooncake.structured_object_store import MooncakeBundleTransfer

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeTransfer:
    """Records what a bundle transfer is asked for; actions named in `failing` raise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.failing: set[str] = set()
        self.stored = 0
        self.before_return: Callable[[], object] = lambda: None

    def _record(self, name: str, detail: Any) -> None:
        self.calls.append((name, detail))
        if name in self.failing:
            raise OSError(f"{name} failed")

    def put(self, data: Any, **options: Any) -> dict[str, Any]:
        self._record("put", options)
        self.stored += 1
        return handle(f"A{self.stored}", len(data), partition=options["partition"])

    def append_dataproto_fields(self, ref: dict[str, Any], data: Any, *, stage: str) -> Any:
        self._record("append", stage)
        self.before_return()
        return appended(ref, stage, "c")

    def cleanup_dataproto(self, ref: dict[str, Any]) -> None:
        self._record("cleanup", ref["stage_refs"]["default"]["manifest_key"])

    def cleanup_dataproto_append(self, before: Any, after: dict[str, Any]) -> None:
        self._record("cleanup append", [*after["stage_refs"]][-1])

    def release_result(self, result: Any) -> None:
        self._record("release", result)

    def named(self, name: str) -> list[Any]:
        return [detail for called, detail in self.calls if called == name]


class FlakyCatalog:
    """A remote catalog whose calls, or their answers, are lost a number of times."""

    def __init__(self) -> None:
        self.catalog = DataProtoCatalog()
        self.lost_calls: dict[str, int] = {}
        self.lost_answers: dict[str, int] = {}

    def __call__(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._lose(self.lost_calls, method)
        answer = getattr(self.catalog, method)(*args, **kwargs)
        self._lose(self.lost_answers, method)
        return answer

    @staticmethod
    def _lose(counts: dict[str, int], method: str) -> None:
        if counts.get(method, 0) > 0:
            counts[method] -= 1
            raise ConnectionError(f"{method} was lost")


ROWS = [0, 1]
KEYS = ["k0", "k1"]


class Client:
    """A client of a catalog, and what lies behind it."""

    def __init__(self) -> None:
        self.transfer, self.remote = FakeTransfer(), FlakyCatalog()
        self.client = DataProtoCatalogTransfer(self.transfer, self.remote)

    def put(self, keys: list[str] | None = None, **options: Any) -> dict[str, Any]:
        return self.client.put(ROWS, partition="p", keys=keys or KEYS, **options)

    def append(self, keys: list[str] | None = None) -> dict[str, Any]:
        current = self.remote.catalog.resolve("p", KEYS)["handles"]
        fragment_id, given = next(iter(current.items()))
        return self.client.append(
            fragment_id, given, ROWS, partition="p", keys=keys or KEYS, stage="s"
        )


@pytest.fixture
def peer() -> Client:
    return Client()


def test_rows_of_stored_batches_are_read_back():
    store, catalog = PlainStore(), DataProtoCatalog()
    transfer = MooncakeBundleTransfer(store)
    client = DataProtoCatalogTransfer(
        transfer, lambda name, *a, **k: getattr(catalog, name)(*a, **k)
    )
    names = np.array(["x", "y", "z"], dtype=object)
    given = {"batch": {"a": np.arange(6).reshape(3, 2)}, "non_tensor_batch": {"n": names}}
    keys = ["k0", "k1", "k2"]
    client.put(given, partition="p", keys=keys)
    fragment_id, first = next(iter(catalog.resolve("p", keys)["handles"].items()))
    more = {"b": np.arange(3.0)}
    client.append(fragment_id, first, more, partition="p", keys=keys, stage="s")
    with pytest.raises(ValueError, match="stale DataProto append handle"):
        client.append(fragment_id, first, {"c": np.arange(3)}, partition="p", keys=keys, stage="t")
    found = client.resolve("p", ["k2", "k0"])
    (group,) = found["field_groups"]
    assert group["fields"] == ["a", "n", "b"]
    rows = [row for _, row in group["locations"]]
    read = transfer.get(found["handles"][fragment_id], fields=group["fields"], rows=rows)
    assert read["batch"]["a"].tolist() == [[4, 5], [0, 1]]
    assert read["batch"]["b"].tolist() == [2.0, 0.0]
    assert read["non_tensor_batch"]["n"].tolist() == ["z", "x"]
    client.remove("p", keys)
    assert store.objects
    client.release_read(found["read_token"])
    assert store.objects == {}


def test_put_stores_and_publishes(peer):
    done = peer.put(tags=[{"x": 1}, {}], stage="default")
    assert done["fields"] == ["a", "b"]
    assert peer.transfer.named("put") == [
        {"type": "dataproto", "partition": "p", "stage": "default"}
    ]
    assert peer.client.list() == {"p": {"k0": {"x": 1}, "k1": {}}}


@pytest.mark.parametrize("lost", ["lost_calls", "lost_answers"])
def test_lost_publication_is_repeated_at_once(peer, lost):
    getattr(peer.remote, lost)["publish"] = 1
    assert peer.put()["keys"] == KEYS
    assert list(peer.client.list()["p"]) == KEYS


@pytest.mark.parametrize("lost", ["lost_calls", "lost_answers"])
def test_lost_publication_is_delivered_before_the_next(peer, lost):
    getattr(peer.remote, lost)["publish"] = 2
    with pytest.raises(ConnectionError):
        peer.put()
    peer.put()
    # The second batch replaced the first one, which was then deleted.
    assert peer.transfer.named("cleanup") == ["A1"]
    assert set(peer.remote.catalog.resolve("p", KEYS)["handles"]) == {"A2"}


def test_put_fails_while_a_publication_is_undelivered(peer):
    peer.remote.lost_calls["publish"] = 3
    with pytest.raises(ConnectionError):
        peer.put()
    with pytest.raises(RuntimeError, match=r"publish pending DataProto fragment for 1 item\(s\)"):
        peer.put(["k2", "k3"])
    assert len(peer.transfer.named("put")) == 1
    peer.client.close()
    assert list(peer.client.list()["p"]) == KEYS


def test_lost_acknowledgement_is_repeated(peer):
    peer.remote.lost_calls["ack_publication"] = 1
    peer.put()
    assert peer.remote.catalog._publications
    peer.client.close()
    assert not peer.remote.catalog._publications


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"keys": ["k0"]}, "batch size 2 does not match 1"),
        ({"keys": ["k0", "k0"]}, "unique"),
        ({"keys": KEYS, "tags": [{}]}, "same length"),
        ({"keys": KEYS, "partition": ""}, "partition"),
    ],
)
def test_nothing_is_stored_for_bad_names(peer, given, reason):
    with pytest.raises(ValueError, match=reason):
        peer.client.put(ROWS, **{"partition": "p", **given})
    assert peer.transfer.calls == []


def test_batch_with_other_rows_is_deleted(peer):
    # The length of a mapping says nothing about its rows.
    with pytest.raises(ValueError, match="batch size 1 does not match 2"):
        peer.client.put({"a": [1, 2]}, partition="p", keys=KEYS)
    assert peer.transfer.named("cleanup") == ["A1"]
    assert peer.client.list() == {}


def test_append_publishes_new_fields(peer):
    peer.put()
    assert peer.append()["fields"] == ["a", "b", "c"]
    assert peer.transfer.named("append") == ["s"]


def test_append_to_a_removed_batch_leaves_nothing(peer):
    peer.put()
    peer.transfer.before_return = lambda: peer.remote.catalog.remove("p", ["k0"])
    with pytest.raises(ValueError, match=r"keys not found in partition 'p': .'k0'"):
        peer.append()
    assert peer.transfer.named("cleanup append") == ["s"]


def test_stale_append_is_refused_before_it_stores(peer):
    peer.put()
    for fragment_id, given, reason in (
        ("X", handle("A1"), "stale DataProto append handle: 'X'"),
        ("A1", handle("A1", fields="a"), "stale DataProto append handle: 'A1'"),
        ("A1", handle("A1", partition="q"), "does not match Catalog partition"),
    ):
        with pytest.raises(ValueError, match=reason):
            peer.client.append(fragment_id, given, ROWS, partition="p", keys=KEYS, stage="s")
    assert peer.transfer.named("append") == []


def test_removed_batches_are_deleted_after_their_last_read(peer):
    peer.put()
    token = peer.client.resolve("p", ["k0"])["read_token"]
    peer.client.remove("p", KEYS)
    assert peer.transfer.named("cleanup") == []
    peer.client.release_read(token)
    assert peer.transfer.named("cleanup") == ["A1"]
    assert peer.remote.catalog.drain() == {"retired_handles": []}


def test_failed_deletion_is_tried_again(peer):
    peer.put()
    peer.transfer.failing.add("cleanup")
    peer.client.remove("p", KEYS)
    peer.transfer.failing.clear()
    peer.client.remove("p", ["absent"])
    assert peer.transfer.named("cleanup") == ["A1", "A1"]
    assert peer.remote.catalog.drain() == {"retired_handles": []}


def test_drain_deletes_everything_or_fails(peer):
    peer.put()
    peer.transfer.failing.add("cleanup")
    with pytest.raises(RuntimeError, match=r"clean up 1 retired DataProto fragment\(s\)"):
        peer.client.drain()
    peer.transfer.failing.clear()
    peer.client.drain()
    assert peer.transfer.named("cleanup")[-1] == "A1"
    with pytest.raises(RuntimeError, match="drained"):
        peer.put()


def test_attached_results_are_released_once(peer):
    class Output:
        pass

    output = Output()
    peer.client.attach_results(output, [1])
    peer.client.attach_results(output, [2])
    peer.client.release_result(output)
    peer.client.release_result(output)
    peer.client.release_result(Output())
    assert peer.transfer.named("release") == [1, 2]
    with pytest.raises(AttributeError):
        peer.client.attach_results({}, [1])


def test_results_that_cannot_be_released_are_tried_again(peer):
    peer.transfer.failing.add("release")
    peer.client.discard_results([1, 2])
    with pytest.raises(RuntimeError, match=r"for 3 item\(s\)"):
        peer.client.discard_results([3], strict=True)
    peer.transfer.failing.clear()
    peer.transfer.calls.clear()
    peer.client.close()
    assert peer.transfer.named("release") == [1, 2, 3]
