"""Options of puts: transfer mode, and the store's configuration with its group of keys."""

from __future__ import annotations

import copy
import uuid
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "BundleTransferPolicy",
    "WriteOptions",
    "checked_policy",
    "new_group_id",
]

AUTO_PARALLEL_MIN_BYTES: Final = 64 << 20
AUTO_PARALLEL_MIN_CHUNKS: Final = 8

_PUT_MODES: Final = ("auto", "batch", "parallel")
_COPY_MODES: Final = ("auto", "zero_copy", "copy")


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How payloads are put.

    Attributes:
        max_inflight_put: Number of puts at the same time; more than one needs ``parallel``, or
            ``auto`` with at least `AUTO_PARALLEL_MIN_CHUNKS` chunks of together at least
            `AUTO_PARALLEL_MIN_BYTES`.
        put_mode: ``batch`` puts all objects in one call, if the store has such a call.
        copy_mode: ``zero_copy`` requires a store that reads the caller's memory in place; ``copy``
            passes bytes.
    """

    max_inflight_put: int = 1
    put_mode: Literal["auto", "batch", "parallel"] = "auto"
    copy_mode: Literal["auto", "zero_copy", "copy"] = "auto"


def checked_policy(
    policy: BundleTransferPolicy | None, max_inflight_put: int | None = None
) -> BundleTransferPolicy:
    """Return a valid policy, the default one for None.

    Args:
        policy: Policy of the caller.
        max_inflight_put: Replaces that of the policy.

    Raises:
        ValueError: A value is not allowed.
    """
    policy = BundleTransferPolicy() if policy is None else policy
    if max_inflight_put is not None:
        policy = BundleTransferPolicy(max_inflight_put, policy.put_mode, policy.copy_mode)
    if policy.max_inflight_put < 1:
        raise ValueError("max_inflight_put must be positive")
    if policy.put_mode not in _PUT_MODES:
        raise ValueError(f"unsupported put_mode: {policy.put_mode}")
    if policy.copy_mode not in _COPY_MODES:
        raise ValueError(f"unsupported copy_mode: {policy.copy_mode}")
    return policy


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of the puts of one bundle.

    Attributes:
        policy: How payloads are put.
        config: Configuration of the store, with at most one group; None for the defaults.
        group_id: Group of all keys of the bundle; None for a store without groups.
    """

    policy: BundleTransferPolicy
    config: Any
    group_id: str | None

    def config_for(self, key_count: int) -> Any:
        """Return the configuration of a call that puts a number of keys."""
        if self.group_id is None:
            return self.config
        config = _new_config() if self.config is None else copy.copy(self.config)
        config.group_ids = [self.group_id] * key_count
        return config


def new_group_id(config: Any, *, is_grouped: bool) -> str | None:
    """Return the group of a bundle: that of the configuration, or a new one.

    Args:
        config: Configuration of the caller, or None.
        is_grouped: True if the store has groups of keys.

    Raises:
        ValueError: The configuration has several groups.
    """
    given = getattr(config, "group_ids", None)
    if given:
        if len(given) != 1:
            raise ValueError(
                "structured object store config.group_ids must contain exactly one logical group "
                "id; it is expanded across internal Mooncake keys"
            )
        return str(given[0])
    if not is_grouped or (config is not None and not hasattr(config, "group_ids")):
        return None
    return f"structured-{uuid.uuid4().hex}"


def _new_config() -> Any:
    from mooncake.store import ReplicateConfig

    return ReplicateConfig()
