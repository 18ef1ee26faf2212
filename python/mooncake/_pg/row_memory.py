"""Memory for received rows, used again once the caller has dropped the tensors over it."""

from __future__ import annotations

import mmap
import sys

import torch

__all__ = ["RowMemory"]

_KEPT_MAX = 16


class RowMemory:
    """Blocks of memory whose pages exist already.

    A tensor over a block holds a reference to it. A block without such a reference is free.
    """

    def __init__(self) -> None:
        self._blocks: list[mmap.mmap] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose content is undefined."""
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype, device="cpu")
        for index in range(len(self._blocks)):
            block = self._blocks[index]
            # The list, the name `block` and the argument of the call hold one each.
            if size <= len(block) <= 2 * size and sys.getrefcount(block) == 3:
                break
        else:
            block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._blocks = [*self._blocks[1 - _KEPT_MAX :], block]
        return torch.frombuffer(block, dtype=dtype, count=count).reshape(shape)
