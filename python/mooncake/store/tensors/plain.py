"""Puts and gets of one tensor."""

from __future__ import annotations

from mooncake._hints import torch
from mooncake.store.batch import Key
from mooncake.store.config import ReplicateConfig
from mooncake.store.tensors.base import TensorBase

__all__ = ["PlainTensorCalls"]


class PlainTensorCalls(TensorBase):
    """Puts and gets of one tensor."""

    __slots__ = ()

    def put_tensor(
        self, key: Key, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """Store a tensor under a key. An existing object is kept, which counts as success.

        Args:
            key: Key of the object.
            tensor: A torch tensor of any dtype, stride and device, with at most 8 dimensions; also
                a parameter or a jagged nested tensor. A contiguous one is read in place.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number: -600 if the tensor cannot be stored; the log and
            `mooncake.last_error()` have the reason.
        """
        return self._put_tensors([key], [tensor], config)[0]

    def get_tensor(self, key: Key) -> torch.Tensor | None:
        """Return a tensor, which owns its memory on the host; None if there is none.

        Args:
            key: Key of the object.

        Raises:
            ImportError: torch is not installed.
        """
        return self._get_tensors([key])[0]

    def pub_tensor(
        self, key: Key, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """Store a tensor as `put_tensor` does.

        Args:
            key: Key of the object.
            tensor: The tensor.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        return self._put_tensors([key], [tensor], config)[0]

    def upsert_tensor(
        self, key: Key, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """Store a tensor under a key, replacing an existing object of any shape and dtype.

        Args:
            key: Key of the object.
            tensor: The tensor, as for `put_tensor`.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number; the old object is kept after a failure.
        """
        return self._put_tensors([key], [tensor], config, is_upsert=True)[0]

    def upsert_pub_tensor(
        self, key: Key, tensor: torch.Tensor, config: ReplicateConfig | None = None
    ) -> int:
        """Store a tensor as `upsert_tensor` does.

        Args:
            key: Key of the object.
            tensor: The tensor.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        return self._put_tensors([key], [tensor], config, is_upsert=True)[0]
