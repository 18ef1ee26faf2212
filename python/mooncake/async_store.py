"""`MooncakeDistributedStoreAsync`: upstream's calls as coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from mooncake.store import MooncakeDistributedStore

__all__ = ["MooncakeDistributedStoreAsync"]

_PREFIX = "async_"


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """A store with a coroutine ``async_name`` for every call ``name``.

    A coroutine runs its call in the event loop's default executor. Cancelling it stops the wait,
    not the call.
    """

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return the coroutine of a call."""
        call = name.removeprefix(_PREFIX)
        if call == name or call.startswith("_") or not hasattr(type(self), call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        blocking = getattr(self, call)

        async def run(*args: Any, **kwargs: Any) -> Any:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, functools.partial(blocking, *args, **kwargs))

        run.__name__ = run.__qualname__ = name
        return run
