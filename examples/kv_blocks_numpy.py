"""A prefix cache: KV blocks under chained hashes, found and loaded in two calls."""

import hashlib
import sys

import numpy as np

import mooncake

BLOCK_TOKENS, LAYERS, HEADS, HEAD_SIZE = 16, 4, 8, 64
SHAPE = (LAYERS, 2, BLOCK_TOKENS, HEADS, HEAD_SIZE)


def block_keys(tokens: list[int]) -> list[str]:
    """Return a key for each full block, which depends on all tokens up to its end."""
    keys, digest = [], hashlib.sha256(b"model-v1")
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        digest.update(np.array(tokens[start : start + BLOCK_TOKENS], np.int64).tobytes())
        keys.append(f"kv/{digest.hexdigest()}")
    return keys


def compute(tokens: list[int]) -> np.ndarray:
    """Stand for the model: the KV cache of a prompt, block by block."""
    blocks = len(tokens) // BLOCK_TOKENS
    return np.random.default_rng(sum(tokens)).standard_normal((blocks, *SHAPE), np.float32)


def main() -> None:
    """Fill the cache with one prompt, and load what a second prompt shares with it."""
    address = sys.argv[1] if len(sys.argv) > 1 else None
    with mooncake.Store(address) if address else mooncake.Store() as store:
        first = list(range(100))
        cache = compute(first)
        store.put_many(dict(zip(block_keys(first), cache, strict=True)))

        second = [*first[:70], *range(1000, 1040)]
        keys = block_keys(second)
        found = store.exists_many(keys)
        hits = found.index(False) if False in found else len(found)
        # Buffers own their memory: the arrays are views, not copies.
        loaded = [
            np.frombuffer(memoryview(block), np.float32).reshape(SHAPE)
            for block in store.get_buffers(keys[:hits])
        ]
        assert all((block == part).all() for block, part in zip(loaded, cache, strict=False))
        print(f"{hits} of {len(keys)} blocks were cached: {hits * BLOCK_TOKENS} tokens")


if __name__ == "__main__":
    main()
