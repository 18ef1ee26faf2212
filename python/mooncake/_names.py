"""What errors and `help` call the calls of a class that is made of parts."""

from __future__ import annotations

import inspect

__all__ = ["rebrand"]


def rebrand(whole: type) -> None:
    """Have the calls of a class's parts go by its own name, which is the one that users know.

    Args:
        whole: The class; nobody else has its parts.
    """
    for part in whole.__mro__[1:-1]:
        for name, call in vars(part).items():
            if inspect.isfunction(call):
                for each in (call, inspect.unwrap(call)):
                    each.__qualname__ = f"{whole.__name__}.{name}"
