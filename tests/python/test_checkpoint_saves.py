"""Saves of one name beside other saves and deletes: no checkpoint that can be loaded gets lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mooncake
from mooncake import checkpoint
from mooncake.checkpoint import saving
from mooncake.checkpoint.names import native_of

MIB = 1 << 20
DEADLINE_S = 30
MANIFEST = "run/@checkpoint"


@pytest.fixture
def store() -> Iterator[mooncake.Store]:
    config = mooncake.StoreConfig(segment_bytes=96 * MIB)
    with mooncake.Store(config=config) as store:
        yield store


def arrays(value: int, count: int = 4, nbytes: int = 1000) -> dict[str, Any]:
    return {f"w{at}": np.full(nbytes, value, np.uint8) for at in range(count)}


def values(store: mooncake.Store) -> set[int]:
    """Return the values of all elements of the checkpoint."""
    return {int(each) for array in checkpoint.load(store, "run").values() for each in array}


def fail(done: int, total: int) -> None:
    raise RuntimeError("stop")


class Watched:
    """A native store that runs a step before or after its first put of the manifest."""

    def __init__(self, native: Any, before: Callable[[], object], after: Callable[[], object]):
        self._native, self._before, self._after = native, before, after

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._native, name)
        if name not in ("put", "put_versions"):
            return call

        def put(keys: list[str], *args: Any, **kwargs: Any) -> Any:
            if keys != [MANIFEST]:
                return call(keys, *args, **kwargs)
            before, self._before = self._before, nothing
            before()
            outcomes = call(keys, *args, **kwargs)
            after, self._after = self._after, nothing
            after()
            return outcomes

        return put


def nothing() -> None:
    """Do nothing."""


def save_watched(
    monkeypatch: pytest.MonkeyPatch,
    store: mooncake.Store,
    state: dict[str, Any],
    before: Callable[[], object] = nothing,
    after: Callable[[], object] = nothing,
) -> None:
    """Save, with a step before or after the put of the manifest."""
    thread = threading.current_thread()

    def watched(given: Any) -> Any:
        native = native_of(given)
        if threading.current_thread() is not thread or used:
            return native
        used.append(True)
        return Watched(native, before, after)

    used: list[bool] = []
    monkeypatch.setattr(saving, "native_of", watched)
    checkpoint.save(state, store, "run", pin=None)


def test_save_short_of_memory_spares_a_running_one(
    store: mooncake.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(arrays(1, 30, MIB), store, "run", pin=None)
    for at in range(20):
        store.put(f"cache/{at}", bytes(MIB))

    def start_another() -> None:
        with pytest.raises(RuntimeError, match="stop"):
            checkpoint.save(arrays(3, 20, MIB), store, "run", pin=None, progress=fail)

    save_watched(monkeypatch, store, arrays(2, 30, MIB), before=start_another)
    assert values(store) == {2}


def test_failing_save_spares_parts_that_another_one_uses(
    store: mooncake.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(arrays(1), store, "run", pin=None)
    is_ready, may_publish = threading.Event(), threading.Event()

    def wait() -> None:
        is_ready.set()
        assert may_publish.wait(DEADLINE_S)

    def save() -> None:
        save_watched(monkeypatch, store, arrays(2, 600), before=wait)

    user = threading.Thread(target=save)

    def start_user_and_fail(done: int, total: int) -> None:
        user.start()
        assert is_ready.wait(DEADLINE_S)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        checkpoint.save(arrays(2, 600), store, "run", pin=None, progress=start_user_and_fail)
    may_publish.set()
    user.join(DEADLINE_S)
    assert values(store) == {2}
    assert len(list(store.keys("run/"))) == 601


@pytest.mark.parametrize("has_earlier", [True, False])
def test_part_lost_before_the_manifest_brings_back_the_old(
    store: mooncake.Store, monkeypatch: pytest.MonkeyPatch, has_earlier: bool
) -> None:
    if has_earlier:
        checkpoint.save(arrays(1), store, "run", pin="hard")
    before = {*store.keys()}

    def lose_part() -> None:
        (key,) = {key for key in store.keys("run/") if key.endswith(".w2")} - before
        store.delete(key, force=True)

    with pytest.raises(mooncake.NoSpaceError, match="w2"):
        save_watched(monkeypatch, store, arrays(2), before=lose_part)
    assert {*store.keys()} == before
    if has_earlier:
        assert values(store) == {1}
        assert store.info(MANIFEST).is_hard_pinned


def test_save_that_seems_dead_brings_back_the_old(
    store: mooncake.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(arrays(1), store, "run")
    before = {*store.keys()}

    def lose_marks() -> None:
        store.delete_many([key for key in store.keys("run/") if "~lease" in key], force=True)

    with pytest.raises(mooncake.NotFoundError, match="removed while it ran"):
        save_watched(monkeypatch, store, arrays(2), before=lose_marks)
    assert {*store.keys()} == before
    assert values(store) == {1}


def test_save_that_is_replaced_at_once_has_succeeded(
    store: mooncake.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        checkpoint.save(arrays(3, 5), store, "run")

    save_watched(monkeypatch, store, arrays(2), after=replace)
    assert values(store) == {3}
    assert len(list(store.keys())) == 6


@pytest.mark.parametrize("has_earlier", [True, False])
def test_delete_is_refused_while_a_save_runs(store: mooncake.Store, has_earlier: bool) -> None:
    if has_earlier:
        checkpoint.save(arrays(1), store, "run")

    def delete(done: int, total: int) -> None:
        with pytest.raises(mooncake.BusyError, match="a save of the checkpoint runs"):
            checkpoint.delete(store, "run")

    checkpoint.save(arrays(2), store, "run", progress=delete)
    assert values(store) == {2}
    checkpoint.delete(store, "run")
    assert list(store.keys()) == []


@pytest.mark.parametrize(("has_earlier", "text"), [(True, "was deleted"), (False, "by a delete")])
def test_forced_delete_ends_a_save_that_says_so(
    store: mooncake.Store, has_earlier: bool, text: str
) -> None:
    if has_earlier:
        checkpoint.save(arrays(1), store, "run")

    def delete(done: int, total: int) -> None:
        checkpoint.delete(store, "run", force=True)

    with pytest.raises(mooncake.NotFoundError, match=text):
        checkpoint.save(arrays(2), store, "run", progress=delete)
    assert list(store.keys()) == []


def test_checkpoint_of_a_newer_release_is_not_replaced(store: mooncake.Store) -> None:
    checkpoint.save(arrays(1, 40, MIB), store, "run", pin=None)
    text = json.dumps({**json.loads(store.get(MANIFEST)), "version": 2})
    store.put(MANIFEST, text.encode(), overwrite=True)
    before = {*store.keys()}
    with pytest.raises(mooncake.NotSupportedError, match="newer release"):
        checkpoint.save(arrays(2, 70, MIB), store, "run", pin=None)
    assert {*store.keys()} == before
    checkpoint.delete(store, "run")
    assert list(store.keys()) == []


def test_damaged_checkpoint_stays_until_it_is_replaced(store: mooncake.Store) -> None:
    checkpoint.save(arrays(1, 40, MIB), store, "run", pin=None)
    info, whole = store.info(MANIFEST), store.get(MANIFEST)
    options = mooncake.PutOptions(groups=[info.group])
    store.put(MANIFEST, whole[:-9], overwrite=True, options=options)
    before = {*store.keys()}
    with pytest.raises((RuntimeError, mooncake.NoSpaceError)):
        checkpoint.save(arrays(2, 70, MIB), store, "run", pin=None, progress=fail)
    assert {*store.keys()} == before
    checkpoint.save(arrays(2, 4), store, "run")
    assert values(store) == {2}
    assert len(list(store.keys())) == 5
