"""Pairs of methods that are made from one: signatures, errors, docstrings and second names."""

from __future__ import annotations

import inspect
import typing

import pytest

from mooncake._variants import variants


class Words:
    """Methods that are made of others."""

    def _join(self, is_loud: bool, first: str, *more: str, end: str = ".") -> str:
        """Join words {quietly|loudly}.

        Args:
            first: The first word{| of all}.
        """
        text = " ".join([first, *more]) + end
        return text.upper() if is_loud else text

    join, shout = variants(_join, "join", "shout")

    def _store(self, is_upsert: bool, key: str, size: int = 3, *, pinned: bool = False) -> object:
        """Store an object{an existing object}."""
        return is_upsert, key, size, pinned

    put, upsert = variants(_store, "put", "upsert", name="key")


def test_each_method_decides_and_passes_the_rest_on():
    assert Words().join("a", "b") == "a b."
    assert Words().shout("a", "b", end="!") == "A B!"
    assert Words().put("k", 4, pinned=True) == (False, "k", 4, True)
    assert Words().upsert(key="k") == (True, "k", 3, False)


def test_method_has_a_name_and_signature_of_its_own():
    assert str(inspect.signature(Words.shout)) == (
        "(self, first: 'str', *more: 'str', end: 'str' = '.') -> 'str'"
    )
    assert Words.shout.__qualname__ == "Words.shout"
    assert Words.shout.__module__ == __name__
    assert typing.get_type_hints(Words.put) == {
        "key": str,
        "size": int,
        "pinned": bool,
        "return": object,
    }


def test_wrong_arguments_name_the_method_that_was_called():
    with pytest.raises(TypeError, match=r"Words\.shout\(\) missing 1 .*'first'"):
        Words().shout()
    with pytest.raises(TypeError, match=r"Words\.put\(\) got an unexpected .*'is_upsert'"):
        Words().put("k", is_upsert=True)


def test_docstring_has_the_words_of_the_method():
    assert inspect.getdoc(Words.join) == "Join words quietly.\n\nArgs:\n    first: The first word."
    assert inspect.getdoc(Words.shout).splitlines()[0] == "Join words loudly."
    assert "The first word of all." in inspect.getdoc(Words.shout)
    assert inspect.getdoc(Words.put) == "Store an object. An existing object is kept."
    assert inspect.getdoc(Words.upsert) == "Store an object, replacing an existing object."


def test_second_name_of_an_argument_is_accepted():
    assert Words().put(name="k") == (False, "k", 3, False)
    with pytest.raises(TypeError, match="the same argument"):
        Words().put(name="k", key="k")


def test_no_alternative_is_left_in_a_docstring():
    from mooncake.engine import TransferEngine
    from mooncake.store import MooncakeDistributedStore

    for cls in (MooncakeDistributedStore, TransferEngine):
        for name, call in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                assert "|" not in (call.__doc__ or "").replace("``", ""), name
                assert "{an existing" not in (call.__doc__ or ""), name
