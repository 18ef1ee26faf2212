"""A program that calls upstream's API with random arguments from a seed; no call may crash it.

``random_arguments.py SEED ROUNDS MASTER`` joins a master (or ``embedded``) and prints the number
of calls. Reads go only into the program's own buffer or to unmapped addresses.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction

MEMORY_BYTES = 1 << 20
KEYS = [*(f"k{at}" for at in range(6)), "", "x" * 70_000]
SIZES = [0, 1, 7, 100, 1000, 4096, 65_536, MEMORY_BYTES]
HUGE_SIZES = [MEMORY_BYTES + 1, 1 << 30, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
OFFSETS = [0, 0, 1, 50, 99, 100, 101, 4096, 1 << 32, 1 << 63, (1 << 64) - 1, (1 << 64) - 100]
UNMAPPED = [0, 1, 8, 4096, (1 << 47) - 4096, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1]
PATTERNS = ["k1", "^k", "[", "(a+)+$", ".*"]


class Caller:
    """Chooses calls and arguments at random."""

    def __init__(self, seed: int, own: str) -> None:
        self.random = random.Random(seed)
        self.memory = np.zeros(MEMORY_BYTES, dtype=np.uint8)
        self.base = self.memory.ctypes.data
        self.segments = [own, "no:1", ""]

    def choose(self, values: list[Any]) -> Any:
        return self.random.choice(values)

    def key(self) -> str:
        return self.choose(KEYS)

    def size(self) -> int:
        return self.choose(SIZES + HUGE_SIZES)

    def offset(self) -> int:
        return self.choose(OFFSETS)

    def segment(self) -> str:
        return self.choose(self.segments)

    def value(self) -> bytes:
        return self.random.randbytes(self.choose([0, 1, 100, 1000, 5000, 70_000]))

    def address(self) -> int:
        own = [
            self.base,
            self.base + 4096,
            self.base + MEMORY_BYTES // 4,
            self.base + MEMORY_BYTES - 10,
        ]
        return self.choose(own * 2 + UNMAPPED)

    def length_from(self, address: int) -> int:
        """Return a length that ends in our buffer, or far beyond all memory."""
        left = self.base + MEMORY_BYTES - address
        if not 0 < left <= MEMORY_BYTES:
            return self.size()
        return self.choose([size for size in SIZES if size <= left] + [1 << 63, (1 << 64) - 1])

    def many(self, make: Callable[[], Any], count: int) -> list[Any]:
        """Make `count` values, and sometimes another number."""
        if self.random.random() < 0.1:
            count = self.random.randrange(4)
        return [make() for _ in range(count)]

    def buffers(self, count: int) -> tuple[list[int], list[int]]:
        addresses = self.many(self.address, count)
        return addresses, [self.length_from(address) for address in addresses]

    def config(self) -> ReplicateConfig | None:
        if self.random.random() < 0.5:
            return None
        config = ReplicateConfig()
        config.replica_num = self.choose([0, 1, 1, 2, 3, 1000, 1 << 40])
        config.soft_pin_action = self.choose(list(SoftPinAction))
        config.soft_pin_ttl_ms = self.choose([None, None, 0, 1, 1 << 40, (1 << 64) - 1])
        config.group_ids = self.choose([None, [], ["g"], ["", "h"]])
        config.preferred_segments = self.many(self.segment, self.random.randrange(3))
        config.with_hard_pin = self.random.random() < 0.1
        config.prefer_alloc_in_same_node = self.random.random() < 0.2
        config.nof_replica_num = self.choose([0] * 9 + [1])
        config.dfs_replica_num = self.choose([0] * 9 + [1, 2])
        return config

    def calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield one call of each kind."""
        yield from self.plain()
        count = self.random.randrange(4)
        keys = self.many(self.key, count)
        addresses, lengths = self.buffers(count)
        yield "batch_get_into", (keys, addresses, lengths)
        sizes = [self.size() for _ in addresses]
        yield "batch_put_from", (keys, addresses, sizes, self.config())
        yield "batch_upsert_from", (keys, addresses, sizes, self.config())
        rows = [self.buffers(self.random.randrange(4)) for _ in range(count)]
        scattered, span_lengths = [row[0] for row in rows], [row[1] for row in rows]
        offsets = [self.many(self.offset, len(row)) for row in scattered]
        yield "batch_get_into_multi_buffers", (keys, scattered, span_lengths)
        yield "batch_put_from_multi_buffers", (keys, scattered, span_lengths, self.config())
        yield "batch_get_session_start", (keys,)
        yield "batch_get_into_multi_buffer_ranges", (keys, scattered, span_lengths, offsets)
        yield (
            "batch_put_session_start",
            (keys, [self.choose(SIZES[:6]) for _ in keys], self.config()),
        )
        yield "batch_put_from_multi_buffer_ranges", (keys, scattered, span_lengths, offsets)
        yield self.choose(["batch_put_session_end", "batch_put_session_revoke"]), (keys,)
        yield "batch_get_session_end", (keys,)
        yield "get_into_ranges", self.ranges()

    def plain(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys = self.many(self.key, 2)
        for name in ("put", "upsert"):
            yield name, (self.key(), self.value(), self.config())
            yield f"{name}_batch", (keys, self.many(self.value, 2), self.config())
            yield f"{name}_from", (self.key(), self.address(), self.size(), self.config())
        addresses, sizes = (self.address(), self.address()), (self.size(), self.size())
        yield "put_from_with_metadata", (self.key(), *addresses, *sizes, self.config())
        address = self.address()
        yield "get_into", (self.key(), address, self.length_from(address))
        for name in ("get", "get_buffer", "get_size", "is_exist", "get_replica_desc"):
            yield name, (self.key(),)
        for name in ("get_batch", "batch_get_buffer", "batch_is_exist", "batch_get_replica_desc"):
            yield name, (keys,)
        is_forced = self.random.random() < 0.3
        yield "remove", (self.key(), is_forced)
        yield "batch_remove", (keys, is_forced)
        yield "remove_by_regex", (self.choose(PATTERNS), is_forced)
        yield "batch_replica_clear", (keys, self.segment())
        yield "create_copy_task", (self.key(), self.many(self.segment, 1))
        yield "create_move_task", (self.key(), self.segment(), self.segment())
        yield "query_task", ((self.random.getrandbits(64), self.random.getrandbits(64)),)
        yield "register_buffer", (self.choose(UNMAPPED), self.size())
        yield "unregister_buffer", (self.choose(UNMAPPED),)
        yield "allocate_and_mount_segment", (self.choose([0, 1 << 63, (1 << 64) - 1]),)
        yield "alloc_from_mem_pool", (self.size(),)

    def ranges(self) -> tuple[Any, ...]:
        into = self.many(lambda: self.choose([self.base, self.base + 4096, 0, 1]), 2)
        keys = [self.many(self.key, 2) for _ in into]
        counts = [[self.random.randrange(3) for _ in row] for row in keys]

        def cells(make: Callable[[], int]) -> list[list[list[int]]]:
            return [[self.many(make, count) for count in row] for row in counts]

        lengths = cells(lambda: self.choose([0, 1, 50, 100, 101, 1 << 63, (1 << 64) - 1]))
        return into, keys, cells(self.offset), cells(self.offset), lengths


def main() -> None:
    seed, rounds, master = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    store = MooncakeDistributedStore()
    segment_bytes = 64 << 20 if master == "embedded" else 0
    assert (
        store.setup("localhost", "P2PHANDSHAKE", segment_bytes, MEMORY_BYTES, "tcp", "", master)
        == 0
    )
    caller = Caller(seed, store.get_hostname())
    assert store.register_buffer(caller.base, MEMORY_BYTES // 2) == 0
    made = 0
    for _ in range(rounds):
        for name, arguments in caller.calls():
            getattr(store, name)(*arguments)
            made += 1
    # The store still works.
    assert store.upsert("last", b"value") == 0
    assert store.get("last") == b"value"
    assert store.close() == 0
    print(made)


if __name__ == "__main__":
    main()
