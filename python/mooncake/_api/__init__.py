"""Our own API: `mooncake.Store` and `mooncake.AsyncStore`."""

from __future__ import annotations

__all__: list[str] = []
