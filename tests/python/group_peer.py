"""A rank of a process group with RDMA devices, which commands on its input drive; without torch.

``python group_peer.py RANK HOST DEVICES [COORDINATOR]`` prints the coordinator's address. A command
is a list: ``["group"]``, ``["broadcast", length]``, ``["sum", count]``, ``["metrics"]``.
"""

from __future__ import annotations

import ctypes
import json
import sys

from mooncake import _native

UINT8, INT64, SUM = 0, 4, 0
LIMIT_S = 200.0


def main() -> None:
    rank, host, devices = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    engine = _native.Engine.start(name=host, metadata="P2PHANDSHAKE", rdma_devices=devices)
    coordinator = sys.argv[4] if len(sys.argv) > 4 else None
    context = _native.CollectiveContext(
        global_rank=rank, host=host, coordinator=coordinator, engine=engine
    )
    print(json.dumps(context.address), flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "group":
            group = context.group(
                "rdma",
                rank,
                declared_size=2,
                max_group_size=2,
                is_extension=False,
                auto_deactivate=True,
                first_rank=0,
                timeout_s=LIMIT_S,
            )
            answer: object = group.size()
        elif command == "broadcast":
            memory = ctypes.create_string_buffer(arguments[0])
            if rank == 0:
                memory.raw = pattern(arguments[0])
            completion = group.broadcast(ctypes.addressof(memory), arguments[0], 0, UINT8)
            answer = ended(completion) and memory.raw == pattern(arguments[0])
        elif command == "sum":
            count = arguments[0]
            values = (ctypes.c_int64 * count)(*([rank + 1] * count))
            address = ctypes.addressof(values)
            answer = ended(group.allreduce(address, address, count, INT64, SUM))
            answer = answer and set(values) == {3}
        else:
            answer = group.metrics()["bytes_fetched"], engine.snapshot()["transports"]
        print(json.dumps(answer), flush=True)


def pattern(length: int) -> bytes:
    """Return bytes that differ from page to page."""
    return bytes(at // 7 % 251 for at in range(4096)) * (length // 4096)


def ended(completion: _native.CollectiveCompletion) -> bool:
    """Wait for an operation; return whether it was done without a loss."""
    completion.start()
    if not completion.wait(LIMIT_S):
        raise TimeoutError("the operation is not done in time")
    error = completion.error()
    if error is not None:
        raise error
    return completion.failed_ranks() == []


if __name__ == "__main__":
    main()
