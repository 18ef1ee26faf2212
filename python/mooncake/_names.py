"""Names of the methods of a class that is composed of mixins."""

from __future__ import annotations

import inspect

__all__ = ["rebrand"]


def rebrand(cls: type) -> None:
    """Give the methods of a class's mixins the qualified name of the class, which users know.

    `TypeError` messages and `help` then show the class instead of the mixin.

    Args:
        cls: The class. Its mixins must not be used by another class.
    """
    for mixin in cls.__mro__[1:-1]:
        for name, call in vars(mixin).items():
            if inspect.isfunction(call):
                for each in (call, inspect.unwrap(call)):
                    each.__qualname__ = f"{cls.__name__}.{name}"
