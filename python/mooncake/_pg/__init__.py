"""Process groups for torch over `mooncake._native`; the public names are in `mooncake.pg`."""

from __future__ import annotations

__all__: list[str] = []
