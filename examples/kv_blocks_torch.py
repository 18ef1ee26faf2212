"""Blocks of a paged KV cache of torch, put from and got into one registered tensor in place."""

import sys

import torch

from mooncake.store import MooncakeDistributedStore

BLOCKS, LAYERS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 32, 4, 16, 8, 64


def main() -> None:
    """Put three blocks of a cache, and get them into other blocks of it."""
    store = MooncakeDistributedStore()
    address = sys.argv[1] if len(sys.argv) > 1 else "embedded"
    if store.setup("localhost", "P2PHANDSHAKE", 256 << 20, 0, "tcp", "", address) != 0:
        sys.exit(f"no store at {address}")
    # Blocks first: a block is one range of memory.
    cache = torch.zeros(BLOCKS, LAYERS, 2, BLOCK_TOKENS, HEADS, HEAD_SIZE, dtype=torch.bfloat16)
    size = cache[0].nbytes
    assert store.register_buffer(cache.data_ptr(), cache.nbytes) == 0

    source, target = [3, 7, 8], [20, 21, 30]
    for block in source:
        cache[block].normal_()
    keys = [f"kv/request-1/{index}" for index in range(len(source))]
    stored = store.batch_put_from(keys, [cache[block].data_ptr() for block in source], [size] * 3)
    assert stored == [0, 0, 0], stored
    got = store.batch_get_into(keys, [cache[block].data_ptr() for block in target], [size] * 3)
    assert got == [size] * 3, got
    assert torch.equal(cache[source], cache[target])
    print(f"{len(keys)} blocks of {size} bytes moved into blocks {target}")

    assert store.unregister_buffer(cache.data_ptr()) == 0
    assert store.close() == 0


if __name__ == "__main__":
    main()
