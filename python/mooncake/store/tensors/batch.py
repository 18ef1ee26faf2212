"""Puts and gets of many tensors in one call."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

from collections.abc import Sequence

from mooncake._aliases import accept_aliases
from mooncake._hints import torch
from mooncake._variants import variants
from mooncake.store.batch import Key
from mooncake.store.config import ReplicateConfig
from mooncake.store.tensors.base import TensorBase

__all__ = ["BatchTensorCalls"]


class BatchTensorCalls(TensorBase):
    """Puts and gets of many tensors. An item that fails does not affect the others."""

    __slots__ = ()

    def _batch_put_tensor(
        self,
        is_upsert: bool,
        keys: Sequence[Key],
        tensors_list: Sequence[torch.Tensor],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store many tensors{existing objects}.

        Args:
            keys: Keys of the objects.
            tensors_list: A tensor for each key, as for `put_tensor`; also named ``tensors``.
            config: Number of copies, pins and placement.

        Returns:
            For each key 0{, also if an object is kept,|} or a negative number; -600 for all if the
            lists differ in length.
        """
        return self._put_tensors(keys, tensors_list, config, is_upsert=is_upsert)

    batch_put_tensor, batch_upsert_tensor = variants(
        _batch_put_tensor, "batch_put_tensor", "batch_upsert_tensor", tensors="tensors_list"
    )
    batch_pub_tensor, batch_upsert_pub_tensor = variants(
        _batch_put_tensor, "batch_pub_tensor", "batch_upsert_pub_tensor", tensors="tensors_list"
    )

    @accept_aliases(base_keys="keys")
    def batch_get_tensor(self, keys: Sequence[Key]) -> list[torch.Tensor | None]:
        """Return many tensors, each of which owns its memory; None for each failure.

        Args:
            keys: Keys of the objects; also named ``base_keys``.

        Raises:
            ImportError: torch is not installed.
        """
        return self._get_tensors(keys)
