"""Puts and gets tensors with upstream's package; run by the interpreter of its environment.

    python upstream_tensors.py FOLDER_OF_TORCH < request.json

The request has ``tensors`` (name, dtype, shape and bytes as hex, and the ``object`` that our
package stored), ``objects`` (objects to store, by key), ``tensor_reads`` and ``full_reads`` (keys
to read). The reply has for each tensor the object that upstream stores and the tensor that upstream
reads from our object, then all objects of shards that upstream stored by key, then the results of
the reads.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20
START_SECONDS = 60.0


def main() -> None:
    # Behind upstream's own folder: the folder of torch may have our package.
    sys.path.append(sys.argv[1])
    request = json.load(sys.stdin)
    port = free_port()
    program = Path(sys.executable).parent / "mooncake_master"
    flags = (f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}")
    null = subprocess.DEVNULL
    master = subprocess.Popen([str(program), *flags], stdout=null, stderr=null)
    try:
        print(json.dumps(serve(connected_store(port), request)))
    finally:
        master.kill()
        master.wait()


def serve(store: Any, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    tensors = {}
    for case in request["tensors"]:
        name, dtype = case["name"], getattr(torch, case["dtype"])
        data = bytearray.fromhex(case["data"])
        # An array of no elements has no memory, which `frombuffer` refuses.
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        ok(store.put_tensor(f"own {name}", flat.reshape(case["shape"])))
        ok(store.put(f"foreign {name}", bytes.fromhex(case["object"])))
        found = store.get_tensor(f"foreign {name}")
        tensors[name] = {"object": store.get(f"own {name}").hex(), "read": described(found)}
    for key, value in request["objects"].items():
        ok(store.put(key, bytes.fromhex(value)))
    return {
        "tensors": tensors,
        "shards": put_shards(store),
        "tensor_reads": {key: described(store.get_tensor(key)) for key in request["tensor_reads"]},
        "full_reads": {key: described(read_full(store, key)) for key in request["full_reads"]},
    }


def put_shards(store: Any) -> dict[str, str]:
    """Store one tensor in each form of shards; return the objects by key."""
    import torch

    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    ok(store.put_tensor_with_tp("tp", whole, 0, 2, 1))
    for rank in (0, 1):
        shard = whole[:, 3 * rank : 3 * rank + 3].contiguous()
        ok(store.put_tensor_with_parallelism("axis", shard, parallelism(axis(rank, 2, 1))))
        dp = axis(0, 3, None, kind="dp")
        ok(store.put_tensor_with_parallelism("grid", whole, parallelism(dp, axis(rank, 2, 0))))
        ok(store.put_tensor_with_parallelism("writer", whole, writer_partition=axis(rank, 2, 1)))
    ep = axis(1, 2, None, kind="ep")
    ep.expert_id = 17
    ok(store.put_tensor_with_parallelism("expert", whole, parallelism(ep)))
    pp = axis(2, 3, None, kind="pp")
    pp.stage_id = 2
    ok(store.put_tensor_with_parallelism("stage", whole, parallelism(pp)))
    keys = [
        *(f"tp_tp_{rank}" for rank in (0, 1)),
        *(f"axis_tp_{rank}" for rank in (0, 1)),
        "axis__parallelism_manifest",
        *(f"grid__dp_0of3__tp_{rank}of2_sd0" for rank in (0, 1)),
        "grid__parallelism_manifest",
        *(f"writer__writer_{rank}of2_sd1" for rank in (0, 1)),
        "writer__writer_manifest",
        "expert__ep_1of2_eid17",
        "stage__pp_2of3_sid2",
    ]
    return {key: store.get(key).hex() for key in keys}


def read_full(store: Any, key: str) -> Any:
    """Read a tensor from the shards of two ranks that split dimension 1."""
    import mooncake.store

    target = mooncake.store.ReadTarget()
    target.mode = "full"
    target.parallelism = parallelism(axis(0, 2, 1))
    return store.get_tensor_with_parallelism(key, target)


def axis(rank: int, size: int, split_dim: int | None, *, kind: str = "tp") -> Any:
    import mooncake.store

    made = mooncake.store.ParallelAxis()
    made.kind, made.rank, made.size, made.split_dim = kind, rank, size, split_dim
    return made


def parallelism(*axes: Any) -> Any:
    import mooncake.store

    made = mooncake.store.TensorParallelism()
    made.axes = list(axes)
    return made


def described(tensor: Any) -> dict[str, Any] | None:
    """Return dtype, shape and bytes of a tensor."""
    import torch

    if tensor is None:
        return None
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "data": data.hex()}


def connected_store(port: int) -> Any:
    """Return a store that has joined the master, which may still be starting."""
    from mooncake.store import MooncakeDistributedStore

    deadline = time.monotonic() + START_SECONDS
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        if time.monotonic() > deadline:
            raise TimeoutError("the master of upstream does not start")
        time.sleep(0.05)
    store = MooncakeDistributedStore()
    address = f"127.0.0.1:{port}"
    ok(store.setup("127.0.0.1", "P2PHANDSHAKE", 64 * MIB, 64 * MIB, "tcp", "", address))
    return store


def ok(code: int) -> None:
    if code != 0:
        raise AssertionError(f"upstream returned {code}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
