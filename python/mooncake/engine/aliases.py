"""Other names of parameters: those that other documents of the established interface use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["also"]

F = TypeVar("F", bound=Callable[..., Any])


def also(**others: str) -> Callable[[F], F]:
    """Let parameters of a call be given by other names too.

    Args:
        others: ``other_name="parameter"`` for each.
    """

    def renaming(call: F) -> F:
        @functools.wraps(call)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            # Calls by position, which hurry, look no further.
            if kwargs and not others.keys().isdisjoint(kwargs):
                for other in others.keys() & kwargs.keys():
                    name = others[other]
                    if name in kwargs:
                        both = f"{call.__name__}() got {name!r} and {other!r}, which are the same"
                        raise TypeError(both)
                    kwargs[name] = kwargs.pop(other)
            return call(*args, **kwargs)

        return cast("F", renamed)

    return renaming
