"""`KeyMap` behaves like a dictionary, and releases what it no longer has."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest

from mooncake._native import KeyMap

# Short, long, outside of ASCII, with a zero, and with half of a surrogate pair.
NAMES = ["", "a", "a\0", "k" * 1000, "é", "名", "\U0001f642", "\ud800", "\ud800\udc00"]


class Value:
    """A value that can be watched."""


def filled(expected: dict[str, Any]) -> KeyMap:
    keys = KeyMap()
    for key, value in expected.items():
        keys[key] = value
    return keys


@pytest.mark.parametrize("seed", range(20))
def test_random_changes_are_those_of_a_dictionary(seed: int):
    rng = random.Random(seed)
    names = [*NAMES, *(f"key {number}" for number in range(rng.choice([5, 400])))]
    expected: dict[str, Any] = {}
    keys = KeyMap()
    for step in range(4000):
        key = rng.choice(names)
        # Phases of growth and of removal.
        if rng.random() < (0.8 if step % 2000 < 1000 else 0.2):
            keys[key] = expected[key] = step
        else:
            assert keys.pop(key) == expected.pop(key, None)
        if step % 100 == 0:
            assert keys.items() == list(expected.items())
            assert keys.find(names) == [expected.get(name) for name in names]
            assert [keys.get(name) for name in names] == keys.find(names)
            assert [name in keys for name in names] == [name in expected for name in names]
            assert (len(keys), bool(keys)) == (len(expected), bool(expected))


def test_keys_may_be_found_twice_and_in_any_order():
    keys = filled({"a": 1, "b": 2})
    assert keys.find(["b", "a", "c", "b"]) == [2, 1, None, 2]
    assert keys.find([]) == []
    assert keys.find(("a",)) == [1]


@pytest.mark.parametrize("bad", [None, 3, b"a"])
def test_other_keys_are_refused(bad: Any):
    keys = filled({"a": 1})
    for call in (keys.get, keys.pop, keys.__contains__, lambda key: keys.find(["a", key])):
        with pytest.raises(TypeError):
            call(bad)
    with pytest.raises(TypeError):
        keys[bad] = 1
    assert keys.items() == [("a", 1)]


def test_values_live_as_long_as_their_keys():
    keys = KeyMap()
    seen = []
    for key in ("replaced", "removed", "kept"):
        keys[key] = value = Value()
        seen.append(weakref.ref(value))
        del value
    assert all(each() is keys.get(key) for each, (key, _) in zip(seen, keys.items(), strict=True))
    keys["replaced"] = None
    assert keys.pop("removed") is not None
    assert [each() is None for each in seen] == [True, True, False]
    del keys
    assert seen[2]() is None


def test_end_of_a_value_may_use_the_map():
    keys = KeyMap()
    keys["a"] = value = Value()
    counts: list[int] = []
    weakref.finalize(value, lambda: counts.append(len(keys)))
    del value
    keys["a"] = 1
    assert counts == [1]
