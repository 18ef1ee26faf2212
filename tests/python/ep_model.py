"""A model of `dispatch` and `combine` in numpy: which rows reach an expert, and what comes back.

Arrays are float32; those that stand for bf16 hold values that bf16 has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BLOCK = 128
FP8_MAX = np.float32(448.0)


@dataclass(frozen=True)
class Tokens:
    """Tokens of a rank, the experts of each (-1 for none) and their weights."""

    x: np.ndarray
    choice: np.ndarray
    weights: np.ndarray

    def of_expert(self, expert):
        """Return the numbers of the tokens that go to an expert."""
        return np.flatnonzero((self.choice == expert).any(axis=1))


def tokens_of(rank, seed, count, experts, top, hidden):
    """Return tokens that depend on the arguments alone, so that each rank knows all of them."""
    draw = np.random.default_rng([seed, rank])
    x = to_bf16(draw.standard_normal((count, hidden), dtype=np.float32))
    choice = draw.random((count, experts)).argsort(axis=1)[:, :top]
    choice[draw.random(choice.shape) < 0.2] = -1
    return Tokens(x, choice, draw.random(choice.shape, dtype=np.float32))


def to_bf16(values):
    """Round to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF_0000)
    return bits.view(np.float32)


def to_e4m3(values):
    """Round to the nearest value with 3 bits of mantissa and exponents from -6, ties to even."""
    exponent = np.maximum(np.frexp(values)[1] - 1, -6)
    step = np.ldexp(np.float32(1), exponent - 3)
    return np.clip(np.rint(values / step) * step, -FP8_MAX, FP8_MAX)


def quantized(x):
    """Return fp8 values and the scale of each block of channels."""
    blocks = x.reshape(len(x), x.shape[1] // BLOCK, BLOCK)
    largest = np.maximum(np.abs(blocks).max(axis=2, keepdims=True), np.float32(1e-4))
    values = to_e4m3(blocks * (FP8_MAX / largest))
    return values.reshape(x.shape), (largest / FP8_MAX)[:, :, 0]


def received(tokens, use_fp8):
    """Return the rows of tokens as an expert gets them, in bf16."""
    if not use_fp8:
        return tokens.x
    values, scales = quantized(tokens.x)
    blocks = values.reshape(*scales.shape, BLOCK) * scales[:, :, None]
    return to_bf16(blocks.reshape(values.shape))


def output(rows, expert):
    """Return what an expert computes: each one multiplies by its own factor."""
    return to_bf16(rows * np.float32(1 + 0.1 * expert))


def check_combined(result, tokens, use_fp8, is_present):
    """Compare with the sum over the experts that are present, in f32 and rounded once."""
    rows = received(tokens, use_fp8)
    total, magnitude = np.zeros_like(rows), np.zeros_like(rows)
    for k in range(tokens.choice.shape[1]):
        for token, expert in enumerate(tokens.choice[:, k]):
            if expert >= 0 and is_present(expert):
                term = tokens.weights[token, k] * output(rows[token : token + 1], expert)[0]
                total[token] += term
                magnitude[token] += np.abs(term)
    # Half a step of bf16, and the roundings of a sum in f32 in some order.
    error = np.abs(result - total) - np.abs(total) * 2.0**-8 - magnitude * 1e-6
    assert (error <= 0).all(), f"the sum is wrong by {error.max()}"
