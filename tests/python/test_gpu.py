"""Transfers and objects in the memory of a real CUDA device. Skipped where there is none."""

from __future__ import annotations

import asyncio
import ctypes
import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import MIB

from mooncake import AsyncStore, Store, StoreConfig
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
from mooncake.tensor import Layout, Shard

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


def pattern(nbytes: int, seed: int = 1) -> Any:
    """Return random bytes in device memory."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    shape = (nbytes,)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)


def started_engine() -> TransferEngine:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def segment_of(engine: TransferEngine) -> str:
    return f"127.0.0.1:{engine.get_rpc_port()}"


# Registers device memory, says where it is, and prints a checksum of it for each line read.
OWNER = """
import json, sys, torch
from mooncake.engine import TransferEngine

length = int(sys.argv[1])
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = torch.arange(length, device="cuda").remainder(251).to(torch.uint8)
torch.cuda.synchronize()
assert engine.register_memory(memory.data_ptr(), length) == 0
print(json.dumps([engine.get_rpc_port(), memory.data_ptr()]), flush=True)
for line in sys.stdin:
    print(int(memory.to(torch.int64).sum()), flush=True)
assert engine.unregister_memory(memory.data_ptr()) == 0
"""


@pytest.mark.parametrize("forced", ["0", "1"], ids=["any transport", "tcp"])
def test_device_memory_of_another_process(forced, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", forced)
    length = 40 * MIB + 13
    command = [sys.executable, "-c", OWNER, str(length)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        port, remote = json.loads(owner.stdout.readline())
        segment, engine = f"127.0.0.1:{port}", started_engine()
        expected = torch.arange(length).remainder(251).to(torch.uint8)
        on_device = torch.zeros(length, dtype=torch.uint8, device="cuda")
        assert engine.transfer_sync_read(segment, on_device.data_ptr(), remote, length) == 0
        assert torch.equal(on_device.cpu(), expected)
        on_host = torch.zeros(length, dtype=torch.uint8)
        assert engine.transfer_sync_read(segment, on_host.data_ptr(), remote, length) == 0
        assert torch.equal(on_host, expected)
        sent = pattern(length)
        torch.cuda.synchronize()
        assert engine.transfer_sync_write(segment, sent.data_ptr(), remote, length) == 0
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert int(owner.stdout.readline()) == int(sent.to(torch.int64).sum())
        # One byte past the end belongs to no registered memory.
        assert engine.transfer_sync_write(segment, sent.data_ptr(), remote + 1, length) == -1
        owner.stdin.close()
        assert owner.wait(60) == 0


def test_transfers_follow_a_busy_stream():
    near, far = started_engine(), started_engine()
    length = 32 * MIB
    remote = torch.zeros(length, dtype=torch.uint8)
    assert far.register_memory(remote.data_ptr(), length) == 0
    stream = torch.cuda.Stream()
    source = torch.zeros(length, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for value in range(1, 6):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            source.fill_(value)
        near.transfer_write_on_cuda(
            segment_of(far), source.data_ptr(), remote.data_ptr(), length, stream.cuda_stream
        )
        assert torch.equal(remote, torch.full_like(remote, value))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(99)
    near.transfer_read_on_cuda(
        segment_of(far), source.data_ptr(), remote.data_ptr(), length, stream.cuda_stream
    )
    assert torch.equal(source.cpu(), remote)


def test_batches_of_many_small_blocks():
    near, far = started_engine(), started_engine()
    blocks, size = 2000, 4096
    remote = torch.zeros(blocks * size, dtype=torch.uint8)
    assert far.register_memory(remote.data_ptr(), remote.nbytes) == 0
    source = pattern(blocks * size)
    torch.cuda.synchronize()
    order = torch.randperm(blocks).tolist()
    addresses = [source.data_ptr() + number * size for number in order]
    targets = [remote.data_ptr() + number * size for number in order]
    sizes = [size] * blocks
    assert near.batch_transfer_sync_write(segment_of(far), addresses, targets, sizes) == 0
    assert torch.equal(remote, source.cpu())
    back = torch.zeros_like(source)
    mirrored = [back.data_ptr() + number * size for number in order]
    assert near.batch_transfer_sync_read(segment_of(far), mirrored, targets, sizes) == 0
    assert torch.equal(back, source)


def test_memory_that_is_partly_of_the_device_is_refused():
    engine = started_engine()
    memory = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    assert engine.register_memory(memory.data_ptr(), 1 << 46) < 0
    assert engine.register_memory(memory.data_ptr(), memory.nbytes) == 0
    assert engine.unregister_memory(memory.data_ptr()) == 0


@pytest.fixture(params=["0", "1"], ids=["no checksums", "checksums"])
def store(monkeypatch, request) -> Any:
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", request.param)
    made = MooncakeDistributedStore()
    assert made.setup("localhost", "P2PHANDSHAKE", 512 * MIB, master_server_addr="embedded") == 0
    yield made
    made.close()


def test_objects_come_from_and_go_to_device_memory(store):
    data = pattern(30 * MIB + 5)
    torch.cuda.synchronize()
    assert store.register_buffer(data.data_ptr(), data.nbytes) == 0
    assert store.put_from("k", data.data_ptr(), data.nbytes) == 0
    assert store.get("k") == bytes(data.cpu().numpy())
    back = torch.zeros_like(data)
    assert store.register_buffer(back.data_ptr(), back.nbytes) == 0
    assert store.get_into("k", back.data_ptr(), back.nbytes) == data.nbytes
    assert torch.equal(back, data)
    size = 128 << 10
    keys = [f"block/{number}" for number in range(64)]
    offsets = [number * size for number in range(64)]
    pointers, sizes = [data.data_ptr() + offset for offset in offsets], [size] * 64
    assert store.batch_put_from(keys, pointers, sizes) == [0] * 64
    targets = [back.data_ptr() + offset for offset in reversed(offsets)]
    assert store.batch_get_into(keys, targets, sizes) == sizes
    expected = data[: 64 * size].reshape(64, size).flip(0)
    assert torch.equal(back[: 64 * size].reshape(64, size), expected)
    for memory in (data, back):
        assert store.unregister_buffer(memory.data_ptr()) == 0


DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_the_device_come_back(store, dtype):
    tensor = torch.randn(64, 96, device="cuda").to(dtype)
    for number, value in enumerate((tensor, tensor.t(), tensor[::2, 3:], tensor[0, 0])):
        key = f"k{number}"
        assert store.put_tensor(key, value) == 0
        found = store.get_tensor(key)
        assert (found.shape, found.dtype) == (value.shape, dtype)
        assert found.tolist() == value.cpu().tolist()
        target = torch.empty(value.shape, dtype=dtype, device="cuda")
        assert store.get_tensor_into_cuda(key, target) == value.nbytes
        assert target.cpu().tolist() == value.cpu().tolist()


def test_shards_are_put_from_the_device(store):
    full = torch.randn(64, 256, device="cuda")
    for rank in range(4):
        assert store.put_tensor_with_tp("k", full, rank, 4, 1) == 0
    for rank in range(4):
        part = store.get_tensor_with_tp("k", rank, 4, 1)
        assert torch.equal(part, full.cpu().chunk(4, 1)[rank])


@pytest.mark.parametrize("checksums", ["0", "1"])
def test_own_api_moves_tensors_of_the_device(checksums, monkeypatch):
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", checksums)
    with Store(config=StoreConfig(segment_bytes=256 * MIB)) as store:
        tensor = torch.randn(1000, 1000, device="cuda", dtype=torch.bfloat16)
        store.put_tensor("k", tensor)
        assert torch.equal(store.get_tensor("k"), tensor.cpu())
        store.put_tensors({"a": tensor, "b": tensor.t()})
        first, second = store.get_tensors(["a", "b"])
        assert torch.equal(first, tensor.cpu())
        assert torch.equal(second, tensor.t().cpu())
        target = torch.zeros_like(tensor)
        store.get_tensor("k", out=target)
        assert torch.equal(target, tensor)
        layout = Layout(4, 1)
        store.put_tensor("sharded", tensor, layout=layout)
        part = torch.zeros(1000, 500, device="cuda", dtype=torch.bfloat16)
        store.get_tensor("sharded", target=Shard.tp(1, 2, 1), out=part)
        assert torch.equal(part, tensor[:, 500:])


def test_async_api_moves_tensors_of_the_device():
    async def run() -> None:
        config = StoreConfig(segment_bytes=256 * MIB)
        async with AsyncStore(config=config) as store:
            tensor = torch.randn(300, 200, device="cuda")
            await store.put_tensor("k", tensor)
            assert torch.equal(await store.get_tensor("k"), tensor.cpu())

    asyncio.run(run())


def test_freed_device_memory_is_an_error_and_no_crash():
    near, far = started_engine(), started_engine()
    remote = ctypes.create_string_buffer(4 * MIB)
    base = ctypes.addressof(remote)
    assert far.register_memory(base, len(remote)) == 0
    # Large enough for torch to allocate it alone, and to free it with its cache.
    address = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda").data_ptr()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert near.transfer_sync_write(segment_of(far), address, base, 4 * MIB) == -1
