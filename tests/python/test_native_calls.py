"""The calls of event loops are generated from the stub of the blocking ones, and up to date."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from mooncake import _native
from mooncake._api.native_calls import AsyncNative

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/generate_native_calls.py"
spec = importlib.util.spec_from_file_location("generate_native_calls", SCRIPT)
assert spec is not None
assert spec.loader is not None
generator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generator)


def test_generated_calls_are_up_to_date() -> None:
    wanted = generator.generated(generator.STUB.read_text(encoding="utf-8"))
    assert len(wanted) == 2
    for path, text in wanted.items():
        assert path.read_text(encoding="utf-8") == text, "run make generate"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def sizes(self, keys: _Keys, *, lease: bool = True)", "def sizes(self, keys: _Keys)"),
        ("-> dict[str, Any]:\n", "-> dict[str, int]:\n"),
        ("\n    def health(self) -> None:", "\n    def is_well(self) -> None:"),
    ],
)
def test_changed_blocking_call_makes_both_files_stale(old: str, new: str) -> None:
    stub = generator.STUB.read_text(encoding="utf-8")
    before, marker, shared = stub.partition(generator.SHARED)
    assert old in shared
    changed = before + marker + shared.replace(old, new)
    wanted = generator.generated(changed)
    assert wanted[generator.STUB] != changed
    assert wanted[generator.COROUTINES] != generator.COROUTINES.read_text(encoding="utf-8")


def test_call_of_the_loop_names_the_held_memory() -> None:
    wanted = generator.generated(generator.STUB.read_text(encoding="utf-8"))
    pending = wanted[generator.STUB].partition(generator.GENERATED)[2]
    assert "`Store.read_into` does. The memory is held until it is taken." in pending
    assert '`Store.sizes` does."""' in pending


def test_coroutines_take_the_arguments_of_blocking_calls() -> None:
    calls = generator.shared_calls(generator.STUB.read_text(encoding="utf-8"))
    assert len(calls) >= 25
    for call in calls:
        coroutine = inspect.signature(getattr(AsyncNative, call.name)).parameters
        blocking = inspect.signature(getattr(_native.Store, call.name)).parameters
        kinds = [(name, argument.kind) for name, argument in coroutine.items()]
        # `self` of native methods is positional only.
        assert kinds[1:] == [(name, argument.kind) for name, argument in blocking.items()][1:]
