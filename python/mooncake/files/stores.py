"""The stores behind file systems that were not given one: one for each pool and its settings."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from mooncake._api.config import StoreConfig, check_address, master_of_environment
from mooncake._api.store import Store

__all__ = ["settings", "store_at"]

_lock = threading.Lock()
_stores: dict[tuple[str, StoreConfig], Store] = {}


def settings(
    *, token: str | None = None, tenant: str | None = None, metadata: str | None = None
) -> StoreConfig:
    """Return the settings of a process that lends nothing; what is None is from the environment."""
    config = StoreConfig.from_env().for_another_process()
    return replace(
        config,
        token=token,
        tenant=config.tenant if tenant is None else tenant,
        metadata=config.metadata if metadata is None else metadata,
    )


def store_at(master: str, config: StoreConfig) -> Store:
    """Return the open store for the pool of a master, which all threads of this process share.

    Args:
        master: ``host:port``; "" is the one that ``MOONCAKE_MASTER`` names.
        config: Settings.

    Raises:
        UnavailableError: The master cannot be reached.
    """
    master = master or master_of_environment()
    check_address(master)
    with _lock:
        store = _stores.get((master, config))
        # A store is closed in a forked child, too.
        if store is None or store.is_closed:
            store = _stores[master, config] = Store(master, config)
        return store


def _forget_lock() -> None:
    """Give a forked child a lock of its own: another thread of the parent may hold the old one."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)
