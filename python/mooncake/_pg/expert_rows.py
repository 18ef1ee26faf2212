"""Rows of tokens for experts: their ranks, quantization to fp8, the sum over experts."""

from __future__ import annotations

import torch

__all__ = ["BLOCK", "combine_rows", "quantize", "route"]

BLOCK = 128
"""Channels that share a scale."""

_FP8_MAX = 448.0


def route(topk_idx: torch.Tensor, experts: range) -> list[torch.Tensor]:
    """Returns for each of the experts the tokens that are routed to it, in their order."""
    return [(topk_idx == expert).any(dim=1).nonzero().flatten() for expert in experts]


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows as fp8, and a scale for each 128 channels."""
    count, hidden = rows.shape
    blocks = rows.to(torch.float32).reshape(count, hidden // BLOCK, BLOCK)
    largest = blocks.abs().amax(dim=2, keepdim=True).clamp(min=1e-4)
    quantized = (blocks * (_FP8_MAX / largest)).to(torch.float8_e4m3fn)
    return quantized.reshape(count, hidden), (largest / _FP8_MAX).squeeze(2)


def combine_rows(
    returned: dict[int, torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    hidden: int,
) -> torch.Tensor:
    """Returns for each token the weighted sum over its experts, in the order of `topk_idx`.

    Args:
        returned: Rows by expert, one for each token that was routed to it, in their order.
            Experts without rows contribute nothing.
        topk_idx: Experts of each token; -1 for none.
        topk_weights: Weight of each of them.
        hidden: Length of a row.
    """
    tokens = topk_idx.shape[0]
    total = torch.zeros(tokens, hidden, dtype=torch.float32, device="cpu")
    for k in range(topk_idx.shape[1]):
        experts = topk_idx[:, k]
        for expert, rows in returned.items():
            chosen = (experts == expert).nonzero().flatten()
            if not len(chosen):
                continue
            routed = (topk_idx == expert).any(dim=1).nonzero().flatten()
            place = torch.searchsorted(routed, chosen)
            weights = topk_weights[chosen, k].to(torch.float32).unsqueeze(1)
            total[chosen] += weights * rows[place].to(torch.float32)
    return total.to(torch.bfloat16)
