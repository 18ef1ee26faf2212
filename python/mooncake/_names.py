"""Names of the methods of a class that is composed of mixins."""

from __future__ import annotations

import inspect

__all__ = ["rebrand"]


def rebrand(whole: type) -> None:
    """Give the methods of a class's mixins the qualified name of the class, which users know.

    `TypeError` messages and `help` then show the class instead of the mixin.

    Args:
        whole: The class. Its mixins must not be used by another class.
    """
    for part in whole.__mro__[1:-1]:
        for name, call in vars(part).items():
            if inspect.isfunction(call):
                for each in (call, inspect.unwrap(call)):
                    each.__qualname__ = f"{whole.__name__}.{name}"
