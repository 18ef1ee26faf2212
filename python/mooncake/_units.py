"""Sizes in bytes, counts and rates: parsing and formatting for people."""

from __future__ import annotations

import math
import re

__all__ = [
    "format_bytes",
    "format_count",
    "format_duration",
    "format_seconds",
    "format_speed",
    "parse_duration",
    "parse_size",
]

_SHIFTS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """Return a number of bytes from a number or from text like ``"512MB"`` or ``"1.5 gb"``.

    Suffixes are powers of 1024.

    Raises:
        ValueError: The text is not a size, or the number is negative.
        TypeError: The argument is neither a number nor text.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise ValueError(f"not a size: {size!r}; write a number with B, KB, MB, GB or TB")
        number, unit = match[1], (match[2] or "").lower()
        shift = _SHIFTS[unit]
        if number.isdigit():
            return int(number) << shift
        value = float(number) * (1 << shift)
        if value == math.inf:
            raise ValueError(f"not a size: {size!r}; it is too large")
        return int(value)
    if isinstance(size, bool):
        raise TypeError("a size is a number of bytes, or text; not bool")
    if not 0 <= size < math.inf:
        raise ValueError(f"not a size: {size}; it is negative, or no number")
    return int(size)


def parse_duration(text: str) -> float:
    """Return seconds: a positive number with ms, s, m, h or d behind it; alone it is seconds.

    Raises:
        ValueError: The text is no such number.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", text.strip())
    seconds = float(found[1]) * _SECONDS[found[2] or "s"] if found else 0.0
    if not seconds:
        raise ValueError(
            f"a duration is a positive number with a unit, as 500ms, 30s or 2h: {text!r}"
        )
    return seconds


def format_bytes(size: float) -> str:
    """Return a number of bytes with a unit of 1024, rounded to one decimal place."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while unit != "TiB" and round(abs(size), 1) >= 1024:
        size, unit = size / 1024, next(units)
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"


def format_count(number: float) -> str:
    """Return a number, with a unit of 1000 from 10,000 on."""
    for unit in ("", "k", "M"):
        if abs(number) < (1000 if unit else 10_000):
            is_whole = number == int(number) and not unit
            return f"{number:.0f}" if is_whole else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def format_duration(seconds: float) -> str:
    """Return a duration in at most two units."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours == 0:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def format_seconds(seconds: float) -> str:
    """Return a time as people read it: 0.42 s, 12 s, 2 min 05 s, 1 h 02 min."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60:02} s"
    return format_duration(seconds)


def format_speed(bytes_per_second: float) -> str:
    """Return bytes per second, in the units of `format_bytes`."""
    return f"{format_bytes(bytes_per_second)}/s"
