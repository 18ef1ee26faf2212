"""Checkpoints: what is saved is loaded, whole or not at all, and failures name the tensor."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from conftest import run_script

import mooncake
from mooncake import checkpoint

MIB = 1 << 20


@pytest.fixture
def store() -> Iterator[mooncake.Store]:
    config = mooncake.StoreConfig(segment_bytes=32 * MIB)
    with mooncake.Store(config=config) as store:
        yield store


def tensors(count: int = 4, elements: int = 1000, first: float = 0.0) -> dict[str, Any]:
    return {f"w{at}": torch.full((elements,), float(first + at)) for at in range(count)}


def part_of(store: mooncake.Store, prefix: str, name: str) -> str:
    """Return the key of the part of a tensor."""
    (key,) = [key for key in store.keys(f"{prefix}/@") if key.endswith(f".{name}")]
    return key


def assert_same(left: Any, right: Any) -> None:
    assert type(left) is type(right), (left, right)
    if isinstance(left, dict):
        assert [*left] == [*right]
        assert [type(key) for key in left] == [type(key) for key in right]
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape, left.layout) == (right.dtype, right.shape, right.layout)
        dense = [
            each.to_dense() if each.layout is not torch.strided else each for each in (left, right)
        ]
        assert torch.equal(*dense)
    elif isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    else:
        assert left == right or (left != left and right != right)


def test_model_and_optimizer_come_back(store: mooncake.Store) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    saved = checkpoint.save(state, store, "run/1")
    assert (saved.prefix, saved.nbytes) == ("run/1", checkpoint.list(store)[0].nbytes)
    loaded = checkpoint.load(store, "run/1")
    assert_same(loaded, {**state, "model": OrderedDict(state["model"])})
    optimizer.load_state_dict(loaded["optimizer"])


def test_keys_and_values_keep_their_types(store: mooncake.Store) -> None:
    state = {
        "1": "text",
        1: True,
        1.5: None,
        (1, "a"): (1, [2.0, float("inf")]),
        b"k": b"\x00\xff",
        "big": 1 << 70,
        "complex": 1 + 2j,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "nan": math.nan,
        "empty": [{}, [], ()],
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(2.5),
        "text \udc80": "\udc80",
    }
    checkpoint.save(state, store, "types")
    assert_same(checkpoint.load(store, "types"), state)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_every_layout_of_a_tensor_comes_back(store: mooncake.Store) -> None:
    dense = torch.arange(12.0).reshape(3, 4)
    state = {
        "transposed": dense.t(),
        "strided": dense[:, ::2],
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(5),
        "many": torch.arange(4).reshape(2, 1, 2, 1, 1, 1, 1, 1, 1, 1),
        "half": dense.to(torch.bfloat16),
        "bool": dense > 3,
        "coo": dense.to_sparse(),
        "csr": dense.to_sparse_csr(),
        "parameter": torch.nn.Parameter(dense).detach(),
    }
    checkpoint.save(state, store, "layouts")
    assert_same(checkpoint.load(store, "layouts"), state)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged)
    checkpoint.save([jagged], store, "jagged")
    (loaded,) = checkpoint.load(store, "jagged")
    assert_same([*loaded.unbind()], [*jagged.unbind()])


def test_tied_tensors_are_stored_once_and_stay_tied(store: mooncake.Store) -> None:
    tied = torch.ones(1000)
    saved = checkpoint.save({"embed": tied, "head": tied}, store, "tied")
    assert saved.nbytes == tied.nbytes
    loaded = checkpoint.load(store, "tied")
    assert loaded["embed"] is loaded["head"]


def test_into_is_filled_in_place_and_returned(store: mooncake.Store) -> None:
    state = {"a": torch.arange(6.0), "b": [np.arange(4), 3], "c": (torch.ones(2), "new")}
    checkpoint.save(state, store, "run")
    a, array, c = torch.zeros(12)[::2], np.zeros(4, np.int64), torch.zeros(2)
    into = {"a": a, "b": [array, 0], "c": (c, "old")}
    assert checkpoint.load(store, "run", into=into) is into
    assert_same(into, state)
    assert into["a"] is a
    assert into["b"][0] is array
    assert into["c"][0] is c


def test_into_may_lack_values_of_the_checkpoint(store: mooncake.Store) -> None:
    checkpoint.save(tensors(), store, "run")
    into = {"w2": torch.zeros(1000)}
    checkpoint.load(store, "run", into=into)
    assert into["w2"][0] == 2


@pytest.mark.parametrize(
    ("into", "error", "name"),
    [
        ({"w1": torch.zeros(3)}, ValueError, "w1"),
        ({"w1": torch.zeros(1000, dtype=torch.int32)}, ValueError, "w1"),
        ({"w1": torch.zeros(1000), "other": 1}, KeyError, "other"),
        ({"w1": [torch.zeros(1000)]}, ValueError, "w1"),
    ],
    ids=["shape", "dtype", "missing", "kind"],
)
def test_unfit_destination_is_named_and_unchanged(
    store: mooncake.Store, into: dict[str, Any], error: type[Exception], name: str
) -> None:
    checkpoint.save(tensors(first=5), store, "run")
    whole = {"w0": torch.zeros(1000), **into}
    with pytest.raises(error, match=name) as raised:
        checkpoint.load(store, "run", into=whole)
    assert isinstance(raised.value, mooncake.MooncakeError)
    assert whole["w0"].sum() == 0


def test_value_that_cannot_be_stored_is_named_by_its_path(store: mooncake.Store) -> None:
    with pytest.raises(TypeError, match=r"optimizer\.0\.hook is of type .*object"):
        checkpoint.save({"optimizer": [{"hook": object()}]}, store, "bad")
    with pytest.raises(TypeError, match=r"a\.b cannot be stored: .*device meta"):
        checkpoint.save({"a": {"b": torch.ones(2, device="meta")}}, store, "bad")
    with pytest.raises(TypeError, match="the key"):
        checkpoint.save({frozenset(): 1}, store, "bad")
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(TypeError, match="contains itself"):
        checkpoint.save(cycle, store, "bad")
    assert list(store.keys()) == []


def test_prefix_is_a_name(store: mooncake.Store) -> None:
    for name in ("run/1", "run/10", "run/1/ema", "run"):
        checkpoint.save(tensors(1), store, name)
    names = [each.prefix for each in checkpoint.list(store, "run/1")]
    assert names == ["run/1", "run/1/ema"]
    checkpoint.delete(store, "run/1")
    assert [each.prefix for each in checkpoint.list(store)] == ["run", "run/1/ema", "run/10"]
    for name in ("run", "run/1/ema", "run/10"):
        checkpoint.delete(store, name)
    assert list(store.keys()) == []
    with pytest.raises(mooncake.NotFoundError, match="run/1"):
        checkpoint.delete(store, "run/1")


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a/../b", "..", ".", "a/@b", "x" * 5000])
def test_names_that_are_none_are_refused(store: mooncake.Store, name: str) -> None:
    for call in (
        lambda: checkpoint.save({}, store, name),
        lambda: checkpoint.load(store, name),
        lambda: checkpoint.verify(store, name),
        lambda: checkpoint.delete(store, name),
    ):
        with pytest.raises(mooncake.InvalidArgumentError, match="name of a checkpoint"):
            call()


def test_checkpoint_is_one_group_and_pinned(store: mooncake.Store) -> None:
    for pin, is_hard, is_soft in (
        ("soft", False, True),
        ("hard", True, False),
        (None, False, False),
    ):
        checkpoint.save(tensors(), store, "run", pin=pin)  # type: ignore[arg-type]
        infos = [store.info(key) for key in store.keys("run/@")]
        assert len(infos) == 5
        assert len({info.group for info in infos}) == 1
        assert {info.is_hard_pinned for info in infos} == {is_hard}
        assert {info.soft_pin_ttl_s is not None for info in infos} == {is_soft}
    with pytest.raises(ValueError, match="pin"):
        checkpoint.save(tensors(), store, "run", pin="other")  # type: ignore[arg-type]


def test_progress_ends_with_all_bytes(store: mooncake.Store) -> None:
    seen: list[tuple[int, int]] = []
    saved = checkpoint.save(tensors(600), store, "run", progress=lambda *each: seen.append(each))
    assert seen[-1] == (saved.nbytes, saved.nbytes)
    assert [*seen] == sorted(seen)
    assert len(seen) > 1
    seen.clear()
    checkpoint.load(store, "run", progress=lambda *each: seen.append(each))
    assert seen[-1] == (saved.nbytes, saved.nbytes)


@pytest.mark.parametrize("checksum", [True, False])
def test_replaced_part_is_corrupt_and_named(store: mooncake.Store, checksum: bool) -> None:
    checkpoint.save(tensors(), store, "run", checksum=checksum)
    key = part_of(store, "run", "w2")
    for size in (store.size(key), 10):
        store.put(key, bytes(size), overwrite=True)
        for call in (checkpoint.verify, checkpoint.load):
            with pytest.raises(mooncake.CorruptError, match="w2"):
                call(store, "run")


def test_wrong_bytes_of_the_right_version_are_corrupt(store: mooncake.Store) -> None:
    checkpoint.save(tensors(), store, "run")
    key = part_of(store, "run", "w1")
    store.put(key, bytes(store.size(key)), overwrite=True)
    manifest = json.loads(store.get("run/@checkpoint"))
    manifest["tensors"][1]["parts"][0]["version"] = store.info(key).version
    store.put("run/@checkpoint", json.dumps(manifest).encode(), overwrite=True)
    for call in (checkpoint.verify, checkpoint.load):
        with pytest.raises(mooncake.CorruptError, match=r"checksum.*w1"):
            call(store, "run")


def test_missing_part_is_named(store: mooncake.Store) -> None:
    checkpoint.save(tensors(), store, "run")
    store.delete(part_of(store, "run", "w3"))
    for call in (checkpoint.verify, checkpoint.load):
        with pytest.raises(mooncake.NotFoundError, match="w3"):
            call(store, "run")
    with pytest.raises(mooncake.NotFoundError, match="other"):
        checkpoint.load(store, "other")


def altered(text: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(text), **changes}).encode()


def with_part(text: bytes, **changes: Any) -> bytes:
    document = json.loads(text)
    document["tensors"][0]["parts"][0].update(changes)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: b"{}",
        lambda text: b"\xff" * 100,
        lambda text: b"[" * 100_000,
        lambda text: altered(text, format="other"),
        lambda text: altered(text, nbytes=1),
        lambda text: altered(text, tree={"dict": [["w0", {"tensor": 99}]]}),
        lambda text: altered(text, tree={"pickle": "x"}),
        lambda text: altered(text, tree={"dict": [[{"list": []}, 1]]}),
        lambda text: altered(text, tensors="x"),
        lambda text: with_part(text, object="../other/@checkpoint"),
        lambda text: with_part(text, object="@0123456789abcdef/../../x"),
        lambda text: with_part(text, shape=[2000]),
        lambda text: with_part(text, offset=[500]),
        lambda text: with_part(text, nbytes=-1),
    ],
)
def test_damaged_and_foreign_manifests_are_refused(store: mooncake.Store, damage: Any) -> None:
    checkpoint.save(tensors(), store, "run")
    store.put("run/@checkpoint", damage(store.get("run/@checkpoint")), overwrite=True)
    for call in (checkpoint.verify, checkpoint.load):
        with pytest.raises(mooncake.CorruptError, match="run/@checkpoint"):
            call(store, "run")
    (listed,) = checkpoint.list(store)
    assert (listed.prefix, listed.is_readable) == ("run", False)
    # It can be replaced, and what it left is removed.
    checkpoint.save(tensors(), store, "run")
    assert len(list(store.keys("run/"))) == 5


def test_newer_manifest_is_not_supported(store: mooncake.Store) -> None:
    checkpoint.save(tensors(), store, "run")
    text = altered(store.get("run/@checkpoint"), version=2)
    store.put("run/@checkpoint", text, overwrite=True)
    with pytest.raises(mooncake.NotSupportedError, match="newer release"):
        checkpoint.load(store, "run")


def test_save_replaces_the_earlier_one_and_removes_it(store: mooncake.Store) -> None:
    checkpoint.save(tensors(6), store, "run")
    checkpoint.save(tensors(2, first=9), store, "run")
    assert_same(checkpoint.load(store, "run"), tensors(2, first=9))
    assert len(list(store.keys("run/"))) == 3


def test_failed_save_leaves_the_earlier_one_and_nothing_else(store: mooncake.Store) -> None:
    checkpoint.save(tensors(), store, "run")
    before = set(store.keys())

    def fail(done: int, total: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        checkpoint.save(tensors(600, first=1), store, "run", progress=fail)
    assert set(store.keys()) == before
    assert_same(checkpoint.load(store, "run"), tensors())


def interrupt(done: int, total: int) -> None:
    if done > total // 2:
        raise KeyboardInterrupt


def test_interrupted_save_is_continued(store: mooncake.Store) -> None:
    state = tensors(1000)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(state, store, "run", progress=interrupt)
    assert checkpoint.list(store) == []
    put = {key: store.info(key).version for key in store.keys("run/@") if "~" not in key}
    assert len(put) > 500
    state["w3"] += 1
    checkpoint.save(state, store, "run")
    assert_same(checkpoint.load(store, "run"), state)
    infos = zip(put.items(), store.info_many(put), strict=True)
    kept = {key for (key, version), info in infos if info and info.version == version}
    (changed,) = {*put} - kept
    assert changed.endswith(".w3")
    assert len(list(store.keys("run/"))) == 1001
    assert len({info.group for info in store.info_many(store.keys("run/")) if info}) == 1


def test_interrupted_load_is_continued(store: mooncake.Store) -> None:
    state = tensors(600)
    checkpoint.save(state, store, "run")
    into = {name: torch.zeros(1000) for name in state}
    with pytest.raises(KeyboardInterrupt):
        checkpoint.load(store, "run", into=into, progress=interrupt)
    into["w0"][0] = 77
    seen: list[int] = []
    checkpoint.load(store, "run", into=into, resume=True, progress=lambda n, _: seen.append(n))
    assert seen[0] > 400 * 4000
    assert_same(into, state)


KILLED = """
import os, signal, sys
import numpy as np
import mooncake
from mooncake import checkpoint

def die(done, total):
    if done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)

with mooncake.Store(sys.argv[1]) as store:
    state = {f"w{at}": np.full(1000, at + 100.0) for at in range(600)}
    checkpoint.save(state, store, "run", progress=die, checksum=sys.argv[2] == "1")
"""


@pytest.mark.parametrize("checksum", [True, False])
def test_parts_of_a_killed_save_are_found_and_removed(
    store: mooncake.Store, checksum: bool
) -> None:
    checkpoint.save(tensors(), store, "run", checksum=checksum)
    ended = run_script(KILLED, store.master_address, str(int(checksum)))
    assert ended.returncode == -9, ended.stderr
    assert len(list(store.objects("run/"))) > 300
    assert_same(checkpoint.load(store, "run"), tensors())
    assert checkpoint.verify(store, "run").tensors == 4
    checkpoint.save(tensors(first=1), store, "run", checksum=checksum)
    assert len([each for each in store.objects("run/") if each.is_complete]) == 5
    run_script(KILLED, store.master_address, str(int(checksum)))
    with pytest.raises(mooncake.BusyError, match="until the lease is over"):
        checkpoint.delete(store, "run")
    checkpoint.delete(store, "run", force=True)
    assert list(store.keys("run/")) == []


def test_checkpoint_that_cannot_fit_fails_before_its_first_byte(store: mooncake.Store) -> None:
    with pytest.raises(mooncake.NoSpaceError, match=r"needed_bytes=\d+ free_bytes=\d+") as raised:
        checkpoint.save({"w": torch.zeros(10 * MIB)}, store, "run")
    assert raised.value.context["needed_bytes"] == str(40 * MIB)
    assert list(store.objects()) == []
    assert "put" not in store.stats()["store"]["operations"]
    # Also if what is there may not be evicted: a hard pin, or the checkpoint that is replaced.
    state = {f"w{at}": torch.full((MIB,), float(at)) for at in range(5)}
    checkpoint.save(state, store, "run")
    with pytest.raises(mooncake.NoSpaceError, match="needed_bytes"):
        checkpoint.save(state, store, "run")
    assert checkpoint.verify(store, "run").tensors == 5
    checkpoint.save({"w": state["w0"]}, store, "small", pin="hard")
    with pytest.raises(mooncake.NoSpaceError, match="needed_bytes"):
        checkpoint.save({"w": torch.zeros(7 * MIB)}, store, "large")
    assert {each.prefix for each in checkpoint.list(store)} == {"run", "small"}


def test_save_evicts_other_objects_but_not_its_own_checkpoint(store: mooncake.Store) -> None:
    state = {f"w{at}": torch.full((MIB,), float(at)) for at in range(3)}
    checkpoint.save(state, store, "run", pin=None)
    for at in range(16):
        store.put(f"cache/{at}", bytes(MIB))
    checkpoint.save(state, store, "run", pin=None)
    assert checkpoint.verify(store, "run").tensors == 3
    assert len(list(store.keys("cache/"))) < 16


def test_save_that_another_one_overtakes_is_refused(store: mooncake.Store) -> None:
    checkpoint.save(tensors(), store, "run")

    def overtake(done: int, total: int) -> None:
        if done == total:
            checkpoint.save(tensors(first=7), store, "run")

    with pytest.raises((mooncake.AlreadyExistsError, mooncake.NoSpaceError)):
        checkpoint.save(tensors(first=3), store, "run", progress=overtake)
    assert_same(checkpoint.load(store, "run"), tensors(first=7))
    assert len(list(store.keys("run/"))) == 5


def test_load_begins_again_if_the_checkpoint_is_replaced(store: mooncake.Store) -> None:
    checkpoint.save(tensors(600), store, "run")
    replaced: list[int] = []

    def replace(done: int, total: int) -> None:
        if not replaced:
            replaced.append(done)
            checkpoint.save(tensors(600, first=1000), store, "run")

    loaded = checkpoint.load(store, "run", progress=replace)
    assert replaced
    assert_same(loaded, tensors(600, first=1000))


def test_store_of_another_api_is_refused() -> None:
    with pytest.raises(TypeError, match=r"mooncake\.Store"):
        checkpoint.load({}, "run")  # type: ignore[arg-type]


def test_package_works_without_torch(store: mooncake.Store) -> None:
    code = """
import sys
sys.modules["torch"] = None
import numpy as np
import mooncake
from mooncake import checkpoint
with mooncake.Store(sys.argv[1]) as store:
    state = {"w": np.arange(5), "n": [1, "x"]}
    checkpoint.save(state, store, "arrays")
    loaded = checkpoint.load(store, "arrays")
    assert (loaded["w"] == state["w"]).all() and loaded["n"] == state["n"]
    assert checkpoint.verify(store, "arrays").nbytes == 40
    print(sorted({"torch"} & {name for name, module in sys.modules.items() if module}))
"""
    ended = run_script(code, store.master_address)
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", "[]\n")


def test_tensors_are_put_below_a_prefix(store: mooncake.Store) -> None:
    assert store.put_tensors(tensors(2), prefix="weights/") == [True, True]
    assert list(store.keys()) == ["weights/w0", "weights/w1"]


RANDOMLY_KILLED = """
import os, signal, sys, threading
import numpy as np
import mooncake
from mooncake import checkpoint

with mooncake.Store(sys.argv[1]) as store:
    state = {f"w{at}": np.full(10_000, float(sys.argv[2])) for at in range(100)}
    threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        checkpoint.save(state, store, "run")
"""


@pytest.mark.skipif(
    os.environ.get("MOONCAKE_LONG_TESTS") != "1", reason="needs MOONCAKE_LONG_TESTS=1"
)
@pytest.mark.timeout(600)
def test_random_kills_leave_whole_checkpoints(store: mooncake.Store) -> None:
    random = Random(7)
    checkpoint.save({f"w{at}": np.zeros(10_000) for at in range(100)}, store, "run")
    for number in range(30):
        seconds = f"{random.uniform(0.01, 0.5):.3f}"
        ended = run_script(RANDOMLY_KILLED, store.master_address, str(number), seconds)
        assert ended.returncode == -9, ended.stderr
        checkpoint.verify(store, "run")
        loaded = checkpoint.load(store, "run")
        assert len({each[0] for each in loaded.values()}) == 1
    checkpoint.delete(store, "run", force=True)
    assert list(store.keys()) == []
