"""Tensors in the memory of CUDA devices: through a fake driver, and on a device if there is one."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import pytest
from conftest import MIB
from test_device import Driver, driver

from mooncake import AsyncStore, Store, StoreConfig
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
__all__ = ["driver"]


class DeviceTensor(torch.Tensor):
    """A tensor that torch takes for one of a CUDA device, in memory of the fake driver."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    driver: Driver
    address: int
    is_cpu = False
    device = torch.device("cuda", 0)

    @staticmethod
    def of(driver: Driver, tensor: torch.Tensor) -> DeviceTensor:
        made = torch.Tensor._make_subclass(DeviceTensor, tensor)
        made.driver, made.address = driver, driver.memory(bytes_of(tensor))
        return made

    def detach(self) -> DeviceTensor:
        return self

    def data_ptr(self) -> int:
        return self.address

    def cpu(self) -> torch.Tensor:
        data = bytearray(self.driver.bytes(self.address, self.nbytes))
        return torch.frombuffer(data, dtype=self.dtype).reshape(self.shape)

    def copy_(self, source: torch.Tensor) -> DeviceTensor:
        self.driver.call("fake_poke", *poke(self.address, bytes_of(source)))
        return self


class Stream:
    """torch's current stream, whose pending work writes to device memory."""

    def __init__(self, driver: Driver, address: int, data: bytes) -> None:
        self.work = lambda: driver.call("fake_poke", *poke(address, data))
        self.synchronized = 0

    def synchronize(self) -> None:
        self.work()
        self.synchronized += 1


def poke(address: int, data: bytes) -> tuple[object, ...]:
    """Return the arguments with which the fake driver writes to device memory."""
    return ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@pytest.fixture(params=["0", "1"], ids=["no checksums", "checksums"])
def store(driver: Driver, monkeypatch, request) -> Any:
    """A store that was set up after the driver was loaded."""
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", request.param)
    made = MooncakeDistributedStore()
    assert made.setup("localhost", "P2PHANDSHAKE", 64 * MIB, master_server_addr="embedded") == 0
    yield made
    made.close()


@pytest.mark.parametrize("checksums", ["0", "1"])
def test_own_api_puts_tensors_of_a_device(driver, monkeypatch, checksums):
    monkeypatch.setenv("MOONCAKE_STORE_CHECKSUM", checksums)
    idle = Stream(driver, driver.memory(b"x"), b"y")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)
    tensor = DeviceTensor.of(driver, matrix())

    async def put_and_get() -> torch.Tensor:
        async with AsyncStore(config=StoreConfig(segment_bytes=64 * MIB)) as store:
            await store.put_tensor("k", tensor)
            return await store.get_tensor("k")

    with Store(config=StoreConfig(segment_bytes=64 * MIB)) as store:
        store.put_tensor("k", tensor)
        assert torch.equal(store.get_tensor("k"), matrix())
    assert torch.equal(asyncio.run(put_and_get()), matrix())


def matrix() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


def test_device_tensors_are_put_after_pending_work(store, driver, monkeypatch):
    tensor = DeviceTensor.of(driver, matrix())
    newest = bytes_of(matrix() * 2)
    stream = Stream(driver, tensor.address, newest)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert store.put_tensor("k", tensor) == 0
    assert stream.synchronized == 1
    assert torch.equal(store.get_tensor("k"), matrix() * 2)
    assert store.put_tensor("large", DeviceTensor.of(driver, torch.zeros(3 * MIB))) == 0
    assert torch.equal(store.get_tensor("large"), torch.zeros(3 * MIB))


def test_device_tensors_are_filled(store, driver, monkeypatch):
    target = DeviceTensor.of(driver, torch.zeros(4, 6))
    pending = b"\xff" * target.nbytes
    stream = Stream(driver, target.address, pending)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    assert store.put_tensor("k", matrix()) == 0
    assert store.get_tensor_into_cuda("k", target) == target.nbytes
    # Work that was pending before the call does not overwrite the elements.
    found = torch.frombuffer(bytearray(driver.bytes(target.address, 96)), dtype=torch.float32)
    assert torch.equal(found.reshape(4, 6), matrix())
    assert store.batch_get_tensor_into_cuda(["none", "k"], [target, target]) == [-704, 96]
    assert store.put_tensor("other", matrix().to(torch.int32)) == 0
    assert store.get_tensor_into_cuda("other", target) == -600
    assert store.put("bytes", b"x" * (304 + target.nbytes)) == 0
    assert store.get_tensor_into_cuda("bytes", target) == -600


def test_batches_mix_devices_and_groups(store, driver, monkeypatch):
    other = driver.memory(b"x")
    idle = Stream(driver, other, b"y")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)
    config = ReplicateConfig()
    config.group_ids = ["a", "b", "c"]
    tensors = [matrix(), DeviceTensor.of(driver, matrix() + 1), None]
    assert store.batch_pub_tensor(["0", "1", "2"], tensors, config) == [0, 0, -600]
    assert torch.equal(store.get_tensor("0"), matrix())
    assert torch.equal(store.get_tensor("1"), matrix() + 1)


def test_serialized_tensors_are_not_read_from_a_device(store, driver):
    assert store.put_tensor("k", matrix()) == 0
    address = driver.memory(store.get("k"))
    assert store.put_tensor_from("new", address, 304 + 96) == -600
    assert store.is_exist("new") == 0
