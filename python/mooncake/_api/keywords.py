"""Unknown keyword arguments: the error names the known one that is meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

__all__ = ["suggesting", "suggesting_methods", "suggestion"]

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a sentence for the end of an error, or "" if no known name is similar."""
    similar = get_close_matches(name, list(known), 1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def suggesting(function: Callable[P, R]) -> Callable[P, R]:
    """Let the errors of a function for unknown keywords name the keyword that is meant."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            _explain(error, function, call.__qualname__, kwargs)
            raise

    return call


def _suggesting_coroutine(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[P, Coroutine[Any, Any, R]]:
    """Do what `suggesting` does, so that the result is a coroutine function, too."""

    @functools.wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            coroutine = function(*args, **kwargs)
        except TypeError as error:
            _explain(error, function, call.__qualname__, kwargs)
            raise
        return await coroutine

    return call


def suggesting_methods(cls: C) -> C:
    """Do what `suggesting` does for the public methods of a class that have keywords."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        parameters = inspect.signature(method).parameters.values()
        has_keywords = any(each.kind is each.KEYWORD_ONLY for each in parameters)
        if not name.startswith("_") and has_keywords:
            is_coroutine = inspect.iscoroutinefunction(method)
            told = _suggesting_coroutine(method) if is_coroutine else suggesting(method)
            told.__qualname__ = f"{cls.__name__}.{name}"
            setattr(cls, name, told)
    return cls


def _explain(
    error: TypeError, function: Callable[..., Any], shown: str, given: Iterable[str]
) -> None:
    """Raise the error for the first unknown keyword, if there is one."""
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        # The function itself was entered.
        return
    known = list(inspect.signature(function).parameters)
    name = next((name for name in given if name not in known), None)
    if name is None:
        return
    end = suggestion(name, known) or _of_single(name, function) or _of_others(name)
    raise TypeError(
        f"{shown.removesuffix('.__init__')}() got an unexpected keyword argument {name!r}{end}"
    ) from None


def _of_single(name: str, function: Callable[..., Any]) -> str:
    """Return the method for one key that takes a keyword which the one for many does not take."""
    single = function.__qualname__.rpartition(".")[2].removesuffix("_many")
    owner = function.__globals__.get(function.__qualname__.partition(".")[0])
    method = getattr(owner, single, None)
    if method is None or method is function or name not in inspect.signature(method).parameters:
        return ""
    return f"; {single} takes it, for one key"


def _of_others(name: str) -> str:
    """Return what takes a setting that a call itself does not take."""
    from mooncake._api.config import StoreConfig
    from mooncake._runtime import PutOptions

    options = list(inspect.signature(PutOptions).parameters)
    settings = [field.name for field in fields(StoreConfig)]
    for what, keyword, known in (
        ("PutOptions", "options", options),
        ("StoreConfig", "config", settings),
    ):
        if similar := get_close_matches(name, known, 1):
            return f"; did you mean {keyword}={what}({similar[0]}=...)?"
    return ""
