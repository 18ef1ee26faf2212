"""The parts of the command `mooncake`: objects, files, the pool, help and output."""

from __future__ import annotations

__all__: list[str] = []
