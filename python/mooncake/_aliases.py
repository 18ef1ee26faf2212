"""Second names for keyword parameters of the upstream calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["accept_aliases"]

P = ParamSpec("P")
T = TypeVar("T")


def accept_aliases(**aliases: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let callers pass keyword arguments under the names that upstream's documents use as well.

    Args:
        aliases: ``alias="parameter"`` for each alias.

    Returns:
        A decorator. The decorated call raises TypeError if both names of a parameter are given.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> T:
            # Calls with positional arguments only skip the lookup: they are the fast path.
            if kwargs and not aliases.keys().isdisjoint(kwargs):
                for alias in aliases.keys() & kwargs.keys():
                    name = aliases[alias]
                    if name in kwargs:
                        raise TypeError(
                            f"{call.__name__}() got {alias!r} and {name!r}, which are the same "
                            "argument"
                        )
                    kwargs[name] = kwargs.pop(alias)
            return call(*args, **kwargs)

        return renamed

    return decorate
