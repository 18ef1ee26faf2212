"""Rows of tokens for experts: their order on the way, quantization to fp8, the sum over experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BLOCK", "Routing", "combine_rows", "quantize", "rows_of_experts"]

BLOCK = 128
"""Channels that share a scale."""

_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Routing:
    """Which tokens go to which experts, ordered by expert and then by token.

    A token goes to an expert once, also if `topk_idx` names the expert twice.
    """

    tokens: torch.Tensor
    """Token of each row, int64."""
    counts: torch.Tensor
    """Number of rows for each expert, int64."""
    places: torch.Tensor
    """Row of each entry of `topk_idx`; the number of rows where there is none."""

    @classmethod
    def of(cls, topk_idx: torch.Tensor, num_experts: int) -> Routing:
        """Return the routing of `topk_idx`, int64 [T, K], where -1 stands for none."""
        count = max(topk_idx.shape[0], 1)
        numbers = torch.arange(topk_idx.shape[0], dtype=torch.int64, device="cpu").unsqueeze(1)
        is_routed = topk_idx >= 0
        keys = torch.where(is_routed, topk_idx * count + numbers, -1)
        pairs = torch.unique(keys[is_routed])
        places = torch.searchsorted(pairs, keys)
        places[~is_routed] = len(pairs)
        counts = torch.bincount(pairs // count, minlength=num_experts)
        return cls(pairs % count, counts, places)

    def bounds(self, ranks: int) -> list[int]:
        """Return where the rows of each rank begin, and their number at the end."""
        per_rank = self.counts.reshape(ranks, -1).sum(dim=1)
        return [0, *per_rank.cumsum(0).tolist()]


def rows_of_experts(begins: torch.Tensor, counts: torch.Tensor, size: int) -> torch.Tensor:
    """Return which rows of [experts, size] are the first `counts` from `begins` on."""
    experts = torch.arange(len(counts), dtype=torch.int64, device="cpu") * size
    firsts = counts.cumsum(0) - counts
    offsets = torch.arange(int(counts.sum()), dtype=torch.int64, device="cpu")
    return offsets + (experts + begins - firsts).repeat_interleave(counts)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows as fp8, and a scale for each 128 channels."""
    count, hidden = rows.shape
    blocks = rows.to(torch.float32).reshape(count, hidden // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-4)
    # A tensor over a tensor: torch divides a number by a tensor with one more rounding.
    factors = torch.full_like(largest, _FP8_MAX) / largest
    quantized = (blocks * factors).to(torch.float8_e4m3fn)
    return quantized.reshape(count, hidden), (largest / _FP8_MAX).squeeze(2)


def combine_rows(
    returned: torch.Tensor, places: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Return for each token the weighted sum of its rows, in the order of `topk_idx`.

    Args:
        returned: Rows; the last one is zero and stands for none.
        places: Row of each entry of `topk_idx`, [T, K].
        topk_weights: Weight of each entry, [T, K].
    """
    shape = (places.shape[0], returned.shape[1])
    total = torch.zeros(shape, dtype=torch.float32, device="cpu")
    weights = topk_weights.to(torch.float32)
    for k in range(places.shape[1]):
        rows = returned.index_select(0, places[:, k]).to(torch.float32)
        total.addcmul_(rows, weights[:, k : k + 1])
    return total.to(torch.bfloat16)
