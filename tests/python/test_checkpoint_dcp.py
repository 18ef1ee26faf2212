"""Checkpoints of torch.distributed.checkpoint in a pool."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import mooncake
from mooncake import checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage"
)


def state(first: float = 1.0) -> dict[str, Any]:
    model = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(model.weight, first)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    tensors = {"empty": torch.empty(0, 2), "scalar": torch.tensor(3), "half": torch.ones(2).half()}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, **tensors}


def assert_same(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


@contextlib.contextmanager
def failing(kind: type[Exception], text: str) -> Iterator[None]:
    """Assert that a block fails, and that torch passes on the failure of the rank."""
    with pytest.raises(CheckpointException, match=text) as raised:
        yield
    ((failure, _),) = raised.value.failures.values()
    assert isinstance(failure, kind), failure


def test_state_is_saved_and_loaded(store: mooncake.Store) -> None:
    saved = state()
    dcp.save(saved, storage_writer=checkpoint.Writer(store, "run"), no_dist=True)
    loaded = state(2.0)
    loaded["step"] = 0
    dcp.load(loaded, storage_reader=checkpoint.Reader(store, "run"), no_dist=True)
    assert_same(loaded, saved)
    assert [each.prefix for each in checkpoint.list(store)] == ["run"]
    assert not [key for key in store.keys("run/") if "~" in key]
    checkpoint.verify(store, "run")


def test_second_save_replaces_the_first(store: mooncake.Store) -> None:
    writer = checkpoint.Writer(store, "run", checksum=False)
    for first in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), first)}, storage_writer=writer, no_dist=True)
    assert len(list(store.keys("run/"))) == 2
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=checkpoint.Reader(store, "run"), no_dist=True)
    assert loaded["w"][0] == 2
    checkpoint.delete(store, "run")
    assert list(store.keys()) == []


def test_tensors_of_both_kinds_of_saves_are_read_by_either(store: mooncake.Store) -> None:
    checkpoint.save({"a": {"w": torch.arange(6.0)}}, store, "ours")
    loaded = {"a": {"w": torch.zeros(6)[::1]}}
    dcp.load(loaded, storage_reader=checkpoint.Reader(store, "ours"), no_dist=True)
    assert loaded["a"]["w"][5] == 5
    dcp.save(
        {"a": {"w": torch.ones(3)}}, storage_writer=checkpoint.Writer(store, "x"), no_dist=True
    )
    assert torch.equal(checkpoint.load(store, "x")["a.w"], torch.ones(3))
    dcp.save(state(), storage_writer=checkpoint.Writer(store, "x"), no_dist=True)
    # What torch has pickled stays with torch.
    with pytest.raises(mooncake.InvalidArgumentError, match=r"pickled.*value=opt"):
        checkpoint.load(store, "x")


def test_missing_and_replaced_parts_are_named(store: mooncake.Store) -> None:
    dcp.save(state(), storage_writer=checkpoint.Writer(store, "run"), no_dist=True)
    (key,) = [key for key in store.keys("run/") if key.endswith(".model.weight")]
    store.put(key, bytes(store.size(key)), overwrite=True)
    with pytest.raises(mooncake.CorruptError, match=r"model\.weight"):
        checkpoint.verify(store, "run")
    store.delete(key)
    with failing(mooncake.NotFoundError, r"tensor=model\.weight"):
        dcp.load(state(), storage_reader=checkpoint.Reader(store, "run"), no_dist=True)
    # torch itself wraps failures to read the metadata.
    with failing(AssertionError, "no checkpoint of that name"):
        dcp.load(state(), storage_reader=checkpoint.Reader(store, "none"), no_dist=True)


def test_checkpoint_that_cannot_fit_is_refused(store: mooncake.Store) -> None:
    large = {"w": torch.zeros(20 << 20)}
    with failing(mooncake.NoSpaceError, "needed_bytes"):
        dcp.save(large, storage_writer=checkpoint.Writer(store, "run"), no_dist=True)
    assert list(store.objects()) == []


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/r", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_asynchronous_save(store: mooncake.Store) -> None:
    saved = state()
    writer = checkpoint.Writer(store, "run")
    dcp.async_save(saved, storage_writer=writer).result()
    loaded = state(2.0)
    dcp.load(loaded, storage_reader=checkpoint.Reader(store, "run"))
    assert_same(loaded, saved)
