"""Options of puts: transfer mode, and the store's configuration with its group of keys."""

from __future__ import annotations

import copy
import types
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = [
    "AUTO_PARALLEL_MIN_BYTES",
    "AUTO_PARALLEL_MIN_CHUNKS",
    "BundleTransferPolicy",
    "WriteOptions",
    "checked_policy",
    "options_of_append",
    "options_of_batch",
    "options_of_bundle",
]

AUTO_PARALLEL_MIN_BYTES: Final = 64 << 20
AUTO_PARALLEL_MIN_CHUNKS: Final = 8

_PUT_MODES: Final = ("auto", "batch", "parallel")
_COPY_MODES: Final = ("auto", "zero_copy", "copy")

# Fields of a configuration that cannot be copied as a whole.
_CONFIG_FIELDS: Final = (
    "data_type",
    "group_ids",
    "nof_replica_num",
    "prefer_alloc_in_same_node",
    "preferred_nof_segments",
    "preferred_segment",
    "preferred_segments",
    "replica_num",
    "with_hard_pin",
    "with_soft_pin",
)


@dataclass(frozen=True)
class BundleTransferPolicy:
    """How payloads are put.

    Attributes:
        max_inflight_put: Number of puts at the same time; more than one needs ``parallel``, or
            ``auto`` with at least `AUTO_PARALLEL_MIN_CHUNKS` chunks of together at least
            `AUTO_PARALLEL_MIN_BYTES`.
        put_mode: ``batch`` puts all objects in one call, if the store has such a call.
        copy_mode: ``copy`` passes bytes to the store; ``auto`` lets it read the caller's memory
            where it can. ``zero_copy`` accepts only members of `tensor_object_buffer`, which no
            store copies.
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
    """Options of the puts of one call.

    Attributes:
        policy: How payloads are put.
        config: Configuration of the store, as the caller gave it; None for the defaults.
        group_ids: Group of all keys of the call, or none to put them without a group. None leaves
            the configuration as it is.
    """

    policy: BundleTransferPolicy
    config: Any
    group_ids: tuple[str, ...] | None = None

    @property
    def storage_group_id(self) -> str | None:
        """The group of all keys, or None if they have none."""
        return (self.group_ids or ("",))[0] or None

    def config_for(self, key_count: int) -> Any:
        """Return the configuration of a call that puts a number of keys.

        Raises:
            TypeError: The configuration needs a group, but can neither be copied nor made anew.
        """
        if self.group_ids is None:
            return self.config
        ids = list(self.group_ids) * key_count or None
        if self.config is not None and getattr(self.config, "group_ids", None) == ids:
            return self.config
        config = _new_config() if self.config is None else _copied(self.config)
        config.group_ids = ids
        return config


def options_of_bundle(policy: BundleTransferPolicy, config: Any) -> WriteOptions:
    """Return the options for a bundle, whose keys have only the group that the caller names.

    Raises:
        ValueError: The configuration has several groups, or one that is no text.
    """
    return WriteOptions(policy, config, _given_group(config))


def options_of_batch(policy: BundleTransferPolicy, config: Any) -> WriteOptions:
    """Return the options for a batch, whose keys have the caller's group or a new one.

    The store evicts the keys of a group together, so that no batch loses a part of its fields. The
    caller's group ``""`` puts the keys without a group.

    Raises:
        ValueError: The configuration has several groups, or one that is no text.
    """
    given = _given_group(config) or (f"structured-{uuid.uuid4().hex}",)
    return WriteOptions(policy, config, given)


def options_of_append(
    policy: BundleTransferPolicy, config: Any, group_id: str | None
) -> WriteOptions:
    """Return the options for more fields of a batch, whose keys have the group of the batch.

    Args:
        policy: How payloads are put.
        config: Configuration of the caller, or None.
        group_id: Group of the batch. A batch without one keeps none.

    Raises:
        ValueError: The configuration has another group than the batch.
    """
    given = _given_group(config)
    if group_id is None:
        return WriteOptions(policy, config, given)
    if given not in (None, (), ("",), (group_id,)):
        raise ValueError(
            f"config.group_ids conflicts with the storage group of the batch: {given[0]!r} is not "
            f"{group_id!r}"
        )
    return WriteOptions(policy, config, (group_id,))


def _given_group(config: Any) -> tuple[str, ...] | None:
    """Return the groups of a configuration, of which there is at most one; None without the field.

    Raises:
        ValueError: There are several, or one is no text.
    """
    given = getattr(config, "group_ids", None)
    if given is None:
        return None
    try:
        ids: Sequence[Any] = (given,) if isinstance(given, str) else tuple(given)
    except TypeError as error:
        raise ValueError(
            f"structured object store config.group_ids must contain strings, got {given!r}"
        ) from error
    if len(ids) > 1:
        raise ValueError(
            "structured object store config.group_ids must contain exactly one logical group "
            "id; it is expanded across internal Mooncake keys"
        )
    if not all(isinstance(each, str) for each in ids):
        raise ValueError(
            f"structured object store config.group_ids must contain strings, got {ids[0]!r}"
        )
    return tuple(ids)


def _copied(config: Any) -> Any:
    """Return a copy of a configuration of any class.

    Raises:
        TypeError: It can neither be copied nor made anew.
    """
    try:
        return copy.copy(config)
    except TypeError:
        pass
    try:
        made = type(config)()
    except TypeError as error:
        raise TypeError(
            "structured object store config must be copyable or default-constructible, not "
            f"{type(config).__name__}"
        ) from error
    for name in _CONFIG_FIELDS:
        if hasattr(config, name):
            setattr(made, name, getattr(config, name))
    return made


def _new_config() -> Any:
    from mooncake import store

    made = getattr(store, "ReplicateConfig", types.SimpleNamespace)
    return made()
