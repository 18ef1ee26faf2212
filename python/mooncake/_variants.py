"""Pairs of upstream's methods that differ in one decision, such as put and upsert."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ._aliases import accept_aliases

__all__ = ["variants"]

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")

# In a docstring: what the first method says, and what the second one says.
_PHRASES = {
    "{an existing object}": "{. An existing object is kept|, replacing an existing object}",
    "{existing objects}": "{. Existing objects are kept|, replacing existing objects}",
}
_ALTERNATIVES = re.compile(r"\{([^{}|]*)\|([^{}|]*)\}")


def variants(
    call: Callable[Concatenate[S, bool, P], T], first: str, second: str, **aliases: str
) -> tuple[Callable[Concatenate[S, P], T], Callable[Concatenate[S, P], T]]:
    """Return two methods that pass all their arguments on to one that both share.

    They have its signature without the decision, and cost as much as written methods that call it.
    Its docstring may have alternatives, as in ``{Read|Write} one range.``, and phrases that stand
    for some, as in ``Store one object{an existing object}.``

    Args:
        call: A method whose first argument is the decision.
        first: Name of the method that decides for False.
        second: Name of the method that decides for True.
        aliases: As for `accept_aliases`.
    """
    return _variant(call, False, first, aliases), _variant(call, True, second, aliases)


def _variant(call: Any, decision: bool, name: str, aliases: dict[str, str]) -> Any:
    code = call.__code__
    positional = code.co_varnames[2 : code.co_argcount]
    named = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
    rest = [f"*{each}" for each in code.co_varnames[code.co_argcount + len(named) :][:1]]
    rest = rest if code.co_flags & inspect.CO_VARARGS else []
    parameters = ", ".join(["self", *positional, *(rest or ["*"] * bool(named)), *named])
    passed = ", ".join(
        ["self", str(decision), *positional, *rest, *(f"{each}={each}" for each in named)]
    )
    source = f"def make(call):\n def {name}({parameters}):\n  return call({passed})\n return {name}"
    made: dict[str, Any] = {}
    exec(compile(source, f"<{name}>", "exec"), call.__globals__, made)
    method = made["make"](call)
    method.__qualname__ = f"{call.__qualname__.rpartition('.')[0]}.{name}"
    method.__defaults__, method.__kwdefaults__ = call.__defaults__, call.__kwdefaults__
    method.__annotations__ = call.__annotations__.copy()
    method.__annotations__.pop(code.co_varnames[1], None)
    if call.__doc__ is not None:
        text = call.__doc__
        for phrase, alternatives in _PHRASES.items():
            text = text.replace(phrase, alternatives)
        method.__doc__ = _ALTERNATIVES.sub(lambda found: found[1 + decision], text)
    return accept_aliases(**aliases)(method) if aliases else method
