"""Columns of Python objects for tests: what is put, and the codec that it must get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
T = torch.tensor

# Name, codec and rows. Each column must come back as it is.
EXACT: list[tuple[str, str, list[Any]]] = [
    ("text", "utf8_ragged", ["a", None, "héé", ""]),
    ("bytes", "bytes_ragged", [b"a", None, b"xyz", b""]),
    ("integers", "ndarray", [1, None, -3]),
    ("unsigned", "ndarray", [2**63, 1]),
    ("floats", "ndarray", [1.5, None, 2.0]),
    ("booleans", "ndarray", [True, None, False]),
    ("numbers", "msgpack_ragged", [True, 1, 2.5]),
    ("lists", "typed_ragged", [[1, 2], [3], None]),
    ("empty list", "typed_ragged", [[1, 2], [], None]),
    ("float lists", "typed_ragged", [[1.5], [2.0, 3.0]]),
    ("mixed lists", "msgpack_ragged", [[1.5], [2]]),
    ("nested lists", "typed_ragged", [[[1, 2], [3, 4]], [[5, 6]]]),
    ("ragged lists", "msgpack_ragged", [[[1, 2], [3]], [[5, 6]]]),
    ("boolean lists", "msgpack_ragged", [[True, False], [True]]),
    ("empty lists", "typed_ragged", [[], []]),
    ("arrays", "typed_ragged", [np.arange(3, dtype="i2"), np.zeros((2, 2), "i2"), None]),
    ("array and list", "typed_ragged", [np.arange(2), [1, 2]]),
    ("array without dimensions", "typed_ragged", [np.array(3, "f4"), np.zeros(0, "f4")]),
    ("strided arrays", "typed_ragged", [np.arange(10)[::2], np.arange(6).reshape(2, 3).T]),
    ("tensors", "ragged_tensor", [T([1, 2]), T([[3]]), None]),
    ("bfloat16", "ragged_tensor", [torch.ones(2, dtype=torch.bfloat16), None]),
    ("scalar tensors", "ragged_tensor", [T(3.0), T(4.0)]),
    ("dicts", "msgpack_ragged", [{"a": 1, "b": "x"}, None, {"c": [1, None]}]),
    ("lists of text", "msgpack_ragged", [["a", "b"], []]),
    ("anything", "msgpack_ragged", [1, "a", None, [1]]),
    ("lists of bytes", "media_list_ragged", [[b"a", b"bc"], [], None]),
    ("dicts of tensors", "structured_recursive", [{"x": T([1]), "y": "s"}, {"x": T([3])}, None]),
    ("missing keys", "structured_recursive", [{"x": T([1]), "y": None}, {"y": None}, {}]),
    ("deep", "structured_recursive", [{"a": {"b": {"c": T([1])}, "n": None}}, {"a": None}]),
    (
        "lists of dicts",
        "structured_recursive",
        [{"l": [{"t": T([1])}, {}]}, {"l": []}, {"l": None}],
    ),
    ("lists of arrays", "structured_recursive", [[np.arange(2), np.arange(3)], [np.arange(1)]]),
    (
        "odd keys",
        "structured_recursive",
        [{"a.b": T([1]), "c[0]": 1, "d\\e": 2, "": "x", "ü": b"q"}],
    ),
    ("empty dict", "structured_recursive", [{"t": T([1]), "d": {}}, {"t": T([2]), "d": {}}]),
    ("nothing", "utf8_ragged", [None, None]),
]


def is_same(got: Any, expected: Any) -> bool:
    """Return whether two rows have the same types and values."""
    if type(got) is not type(expected):
        return False
    if isinstance(expected, np.ndarray):
        return got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(expected, torch.Tensor):
        return got.dtype == expected.dtype and torch.equal(got, expected)
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(is_same(got[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(is_same, got, expected))
    return got == expected


def are_same(got: list[Any], expected: list[Any]) -> bool:
    """Return whether two columns have the same rows."""
    return len(got) == len(expected) and all(map(is_same, got, expected))
