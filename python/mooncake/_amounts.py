"""Amounts of bytes and rates, as people read them."""

from __future__ import annotations

__all__ = ["amount", "count", "rate"]


def amount(bytes_: float) -> str:
    """Return a number of bytes with a unit of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(bytes_) < 1024:
            return f"{bytes_:g} {unit}" if bytes_ == int(bytes_) else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} TiB"


def count(number: float) -> str:
    """Return a number with a unit of 1000 where it is long."""
    for unit in ("", "k", "M"):
        if abs(number) < (1000 if unit else 10_000):
            is_whole = number == int(number) and not unit
            return f"{number:.0f}" if is_whole else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}G"


def rate(bytes_: int, seconds: float) -> str:
    """Return bytes a second, in units of 1000."""
    return f"{bytes_ / seconds / 1e9:.2f} GB/s"
