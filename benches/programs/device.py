"""Measures transfers between device memory and a store or engine of another process.

    python benches/programs/device.py [--mib 64] [--rounds 9]

One process lends host memory to a store, registers host memory and device memory with an engine,
and waits. This one puts and gets tensors that lie in device memory, and writes and reads the
registered memory. Each row has the median of its rates in GB/s. The first rows are the limits:
copies between device memory and pinned memory, and a `memmove` by one thread. Rows alternate round
by round. Needs torch and a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from mooncake import Store, StoreConfig
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

MIB = 1 << 20
BLOCK = 64 << 10


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--mib", type=int, default=64, help="size of each object")
    arguments.add_argument(
        "--rounds", type=int, default=9, help="rounds, of which medians are taken"
    )
    arguments.add_argument("--holder", action="store_true", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.holder:
        hold(given.mib * MIB)
        return
    command = [sys.executable, __file__, "--holder", f"--mib={given.mib}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        places = json.loads(holder.stdout.readline())
        for name, rate in measure(places, given.mib * MIB, given.rounds).items():
            print(f"{name:44} {rate:8.2f} GB/s")
        holder.communicate()


def hold(nbytes: int) -> None:
    """Lend memory, say where it is, and wait until the other process has finished."""
    import torch

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    host = torch.zeros(nbytes, dtype=torch.uint8)
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for memory in (host, device):
        assert engine.register_memory(memory.data_ptr(), nbytes) == 0
    with Store(config=StoreConfig(segment_bytes=4 * nbytes)) as store:
        places = {
            "master": store.master_address,
            "segment": f"127.0.0.1:{engine.get_rpc_port()}",
            "host": host.data_ptr(),
            "device": device.data_ptr(),
        }
        print(json.dumps(places), flush=True)
        sys.stdin.read()


def measure(places: dict[str, Any], nbytes: int, rounds: int) -> dict[str, float]:
    """Return the median rate of each row."""
    import torch

    store, engine = MooncakeDistributedStore(), TransferEngine()
    master, segment = places["master"], places["segment"]
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 512 * MIB, "tcp", "", master) == 0
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    device = torch.arange(nbytes // 4, dtype=torch.int32, device="cuda")
    target = torch.zeros_like(device)
    pinned = torch.zeros(nbytes // 4, dtype=torch.int32, pin_memory=True)
    host, other = torch.ones(nbytes // 4, dtype=torch.int32), torch.zeros(nbytes // 4).int()
    blocks = [number * BLOCK for number in range(nbytes // BLOCK)]
    sizes = [BLOCK] * len(blocks)
    for memory in (device, target):
        assert store.register_buffer(memory.data_ptr(), nbytes) == 0

    def done(code: Any) -> None:
        assert code in (0, nbytes, nbytes + 304), code

    def transfer(call: Callable[..., int], memory: Any, remote: int) -> Callable[[], None]:
        return lambda: done(call(segment, memory.data_ptr(), remote, nbytes))

    def batch(call: Callable[..., int], memory: Any, remote: int) -> Callable[[], None]:
        local = [memory.data_ptr() + offset for offset in blocks]
        far = [remote + offset for offset in blocks]
        return lambda: done(call(segment, local, far, sizes))

    def put() -> None:
        done(store.put_from("k", device.data_ptr(), nbytes))

    rows: dict[str, Callable[[], Any]] = {
        "limit: device to pinned": lambda: pinned.copy_(device),
        "limit: pinned to device": lambda: target.copy_(pinned),
        "limit: device to pageable": lambda: host.copy_(device),
        "limit: memmove": lambda: other.copy_(host),
        "store: put_from device": put,
        "store: get_into device": lambda: done(store.get_into("k", target.data_ptr(), nbytes)),
        "store: get_into_cuda tensor": lambda: done(store.get_tensor_into_cuda("t", target)),
        "engine: device to host of peer": transfer(
            engine.transfer_sync_write, device, places["host"]
        ),
        "engine: host of peer to device": transfer(
            engine.transfer_sync_read, target, places["host"]
        ),
        "engine: device to device of peer": transfer(
            engine.transfer_sync_write, device, places["device"]
        ),
        "engine: device of peer to device": transfer(
            engine.transfer_sync_read, target, places["device"]
        ),
        "engine: 64 KiB blocks to host of peer": batch(
            engine.batch_transfer_sync_write, device, places["host"]
        ),
        "engine: 64 KiB blocks to device of peer": batch(
            engine.batch_transfer_sync_write, device, places["device"]
        ),
    }
    assert store.put_tensor("t", device) == 0
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for at in range(rounds + 1):
        for name, call in rows.items():
            target.zero_()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            took = time.perf_counter() - begin
            if name.endswith("of peer to device") or "get_into" in name:
                assert torch.equal(target, device), name
            if at > 0:
                rates[name].append(nbytes / took / 1e9)
        assert store.remove("k", True) == 0
    return {name: statistics.median(values) for name, values in rates.items()}


if __name__ == "__main__":
    main()
