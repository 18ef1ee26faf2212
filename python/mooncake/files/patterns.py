"""Patterns of paths: ``*``, ``?`` and ``[…]`` within a component, ``**`` over any of them."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["fixed_part", "has_magic", "matcher"]

_MAGIC = re.compile(r"[*?[]")
_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", re.DOTALL)
_MEANINGS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def has_magic(path: str) -> bool:
    """Return whether a path is a pattern."""
    return _MAGIC.search(path) is not None


def fixed_part(pattern: str) -> str:
    """Return the directory that all paths of a pattern are in; "" is the root."""
    found = _MAGIC.search(pattern)
    return pattern[: found.start() if found else None].rpartition("/")[0]


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a path, or a directory that it is in, matches."""
    text = "".join(map(_regex_of, _TOKEN.findall(pattern)))
    expression = re.compile(f"(?:{text})(?:/.*)?", re.DOTALL)
    return lambda path: expression.fullmatch(path) is not None


def _regex_of(token: str) -> str:
    if token in _MEANINGS:
        return _MEANINGS[token]
    if token.startswith("[") and len(token) > 2:
        is_negated = token[1] == "!"
        members = token[2 if is_negated else 1 : -1].replace("\\", "\\\\").replace("[", "\\[")
        return f"[{'^/' if is_negated else ''}{members.replace('^', chr(92) + '^')}]"
    return re.escape(token)
