"""Upstream's module of the buffer pool: the class of `mooncake.store` under two names."""

from __future__ import annotations

from mooncake.store import BufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]

RegisteredBufferPool = BufferPool
