"""Parts of the REST server, `mooncake.mooncake_store_service`."""

from __future__ import annotations

__all__: list[str] = []
