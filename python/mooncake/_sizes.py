"""Sizes in bytes, as people write them."""

from __future__ import annotations

import math
import re

__all__ = ["parse_size"]

_SHIFTS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Return a number of bytes from a number or from text like ``"512MB"`` or ``"1.5 gb"``.

    Suffixes are powers of 1024.

    Raises:
        ValueError: It is no size, or negative.
        TypeError: It is neither a number nor text.
    """
    if isinstance(size, str):
        match = _FORM.fullmatch(size.strip())
        if match is None:
            raise ValueError(f"not a size: {size!r}; write a number with B, KB, MB, GB or TB")
        number, unit = match[1], (match[2] or "").lower()
        shift = _SHIFTS[unit]
        return int(number) << shift if number.isdigit() else int(float(number) * (1 << shift))
    if isinstance(size, bool):
        raise TypeError("a size is a number of bytes, or text; not bool")
    if not 0 <= size < math.inf:
        raise ValueError(f"not a size: {size}; it is negative, or no number")
    return int(size)
