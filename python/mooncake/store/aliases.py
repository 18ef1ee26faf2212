"""Keywords that the documents of the established calls spell in more than one way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["also_named"]

P = ParamSpec("P")
T = TypeVar("T")


def also_named(**aliases: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a call be made with other names for its keywords.

    Args:
        aliases: The other name, and the parameter that it stands for.
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(call)
        def renamed(*args: P.args, **kwargs: P.kwargs) -> T:
            for alias in aliases.keys() & kwargs.keys():
                name = aliases[alias]
                if name in kwargs:
                    raise TypeError(
                        f"{call.__name__}() got {alias!r} and {name!r}, which are the same argument"
                    )
                kwargs[name] = kwargs.pop(alias)
            return call(*args, **kwargs)

        return renamed

    return decorate
