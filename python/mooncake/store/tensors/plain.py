"""Puts and gets of one tensor."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

from mooncake._hints import torch
from mooncake._variants import variants
from mooncake.store.batch import Key
from mooncake.store.config import ReplicateConfig
from mooncake.store.tensors.base import TensorBase

__all__ = ["PlainTensorCalls"]


class PlainTensorCalls(TensorBase):
    """Puts and gets of one tensor."""

    __slots__ = ()

    def _put_tensor(
        self,
        is_upsert: bool,
        key: Key,
        tensor: torch.Tensor,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store a tensor under a key{an existing object}.

        Args:
            key: Key of the object.
            tensor: A torch tensor of any dtype, stride and device, with at most 8 dimensions; also
                a parameter or a jagged nested tensor. A contiguous one is read in place.
            config: Number of copies, pins and placement.

        Returns:
            0{, also if an object is kept,|} or a negative number: -600 if the tensor cannot be
            stored; the log and `mooncake.last_error()` have the reason. An old object, of whatever
            shape and dtype, is kept after a failure.
        """
        return self._put_tensors([key], [tensor], config, is_upsert=is_upsert)[0]

    put_tensor, upsert_tensor = variants(_put_tensor, "put_tensor", "upsert_tensor")
    pub_tensor, upsert_pub_tensor = variants(_put_tensor, "pub_tensor", "upsert_pub_tensor")

    def get_tensor(self, key: Key) -> torch.Tensor | None:
        """Return a tensor, which owns its memory on the host; None if there is none.

        Args:
            key: Key of the object.

        Raises:
            ImportError: torch is not installed.
        """
        return self._get_tensors([key])[0]
