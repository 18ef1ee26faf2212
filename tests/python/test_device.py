"""Transfers of device memory in stream order, through a fake CUDA driver."""

from __future__ import annotations

import ctypes
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

import mooncake.engine
from mooncake import _cuda
from mooncake.engine import TransferEngine, TransferNotify, Write

SOURCE = pathlib.Path(__file__).parents[2] / "crates/transfer-engine/tests/device/fake_driver.c"
SIZE = 100_000


class Driver:
    """The fake driver, with a current context in this thread."""

    def __init__(self, file: pathlib.Path) -> None:
        self.library = ctypes.CDLL(str(file))
        context = ctypes.c_size_t()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxPushCurrent_v2", context)

    def call(self, name: str, *arguments: object) -> None:
        assert getattr(self.library, name)(*arguments) == 0, name

    def memory(self, data: bytes) -> int:
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        self.call("fake_poke", address, data, ctypes.c_size_t(len(data)))
        return address.value

    def bytes(self, address: int, length: int) -> bytes:
        into = ctypes.create_string_buffer(length)
        self.call("fake_peek", ctypes.c_uint64(address), into, ctypes.c_size_t(length))
        return into.raw

    def stream(self) -> int:
        stream = ctypes.c_size_t()
        self.call("cuStreamCreate", ctypes.byref(stream), 0)
        return stream.value

    def fill(self, stream: int, address: int, byte: int, length: int) -> None:
        where = (ctypes.c_size_t(stream), ctypes.c_uint64(address))
        self.call("fake_fill", *where, byte, ctypes.c_size_t(length))


@pytest.fixture
def driver(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: install the package gcc")
    file = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-pthread", "-o", str(file), str(SOURCE)]
    subprocess.run(command, check=True)
    monkeypatch.setenv("MC_CUDA_DRIVER", str(file))
    return Driver(file)


@pytest.fixture
def pair() -> tuple[TransferEngine, str, ctypes.Array[ctypes.c_char]]:
    """An engine, and the segment name and registered memory of another engine."""
    near, far = TransferEngine(), TransferEngine()
    for engine in (near, far):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    remote = ctypes.create_string_buffer(SIZE)
    remote.owner = far  # type: ignore[attr-defined]
    assert far.register_memory(ctypes.addressof(remote), SIZE) == 0
    return near, f"127.0.0.1:{far.get_rpc_port()}", remote


def test_transfers_follow_stream_order(driver, pair):
    engine, segment, remote = pair
    base = ctypes.addressof(remote)
    memory, stream = driver.memory(bytes(SIZE)), driver.stream()
    driver.fill(stream, memory, 7, SIZE)
    assert engine.transfer_write_on_cuda(segment, memory, base, SIZE, stream) is None
    assert remote.raw == b"\7" * SIZE
    ctypes.memset(base, 9, SIZE)
    driver.fill(stream, memory, 8, SIZE)
    assert engine.transfer_read_on_cuda(segment, memory, base, SIZE, stream_ptr=stream) is None
    assert driver.bytes(memory, SIZE) == b"\11" * SIZE


def test_stream_batches_mix_device_and_host_memory(driver, pair):
    engine, segment, remote = pair
    base = ctypes.addressof(remote)
    memory, host = driver.memory(b"device"), ctypes.create_string_buffer(b"host", 4)
    here, there, lengths = [memory, ctypes.addressof(host)], [base + 4, base], [6, 4]
    engine.batch_transfer_write_on_cuda(segment, here, there, lengths, driver.stream())
    assert remote.raw[:10] == b"hostdevice"
    ctypes.memmove(base, b"HOSTDEVICE", 10)
    engine.batch_transfer_read_on_cuda(segment, here, there, lengths)
    assert (driver.bytes(memory, 6), host.raw) == (b"DEVICE", b"HOST")


def test_calls_without_stream_accept_device_memory(driver, pair):
    engine, segment, remote = pair
    memory = driver.memory(b"bytes of a device")
    base = ctypes.addressof(remote)
    assert engine.transfer_sync_write(segment, memory, base, 17) == 0
    assert remote.raw[:17] == b"bytes of a device"
    batch = engine.transfer_submit_write(segment, memory, base + 20, 5)
    assert engine.get_batch_transfer_status([batch]) == 0
    assert remote.raw[20:25] == b"bytes"


@pytest.mark.parametrize("transport", ["tcp", "memory"])
def test_stream_calls_use_the_requested_transport(driver, pair, transport):
    engine, segment, remote = pair
    memory, base, stream = driver.memory(b"bytes"), ctypes.addressof(remote), driver.stream()
    one, many = (memory, base, 5), ([memory], [base], [5])
    for call, arguments in (
        (engine.transfer_write_on_cuda, one),
        (engine.transfer_read_on_cuda, one),
        (engine.batch_transfer_write_on_cuda, many),
        (engine.batch_transfer_read_on_cuda, many),
    ):
        before = engine.metrics()["transports"][transport]["pieces"]
        call(segment, *arguments, stream, transport)
        assert engine.metrics()["transports"][transport]["pieces"] == before + 1, call.__name__


def test_stream_failures_raise(driver, pair):
    engine, segment, remote = pair
    memory, base = driver.memory(b"bytes"), ctypes.addressof(remote)
    with pytest.raises(RuntimeError, match="Failed to open segment"):
        engine.transfer_write_on_cuda("127.0.0.1:1", memory, base, 5)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        engine.transfer_write_on_cuda(segment, memory, base, 6)
    with pytest.raises(RuntimeError):
        engine.transfer_write_on_cuda(segment, memory, base + SIZE, 5)
    with pytest.raises(RuntimeError, match="not initialized"):
        TransferEngine().transfer_write_on_cuda(segment, memory, base, 5)
    assert engine.register_memory(memory, 6) < 0, "the last byte is not device memory"
    assert remote.raw == bytes(SIZE)


# Registers device memory, and prints the content of a range after a notification about it.
OWNER = """
import json, sys, time
sys.path.insert(0, sys.argv[1])
from test_device import Driver
import pathlib
from mooncake.engine import TransferEngine

driver = Driver(pathlib.Path(sys.argv[2]))
engine, length = TransferEngine(), 9 << 20
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = driver.memory(bytes(length))
assert engine.register_memory(memory, length) == 0
print(json.dumps([engine.get_rpc_port(), memory]), flush=True)
for line in sys.stdin:
    while not (received := engine.get_notifies()):
        time.sleep(0.001)
    start, end = json.loads(received[0].msg)
    print(driver.bytes(memory + start, end - start).hex(), flush=True)
assert engine.unregister_memory(memory) == 0
"""


@pytest.mark.parametrize("tcp", ["0", "1"])
def test_another_process_reaches_device_memory(driver, monkeypatch, tcp):
    monkeypatch.setenv("MC_FORCE_TCP", tcp)
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-c", OWNER, str(here), driver.library._name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as lender:
        assert lender.stdin is not None
        assert lender.stdout is not None
        port, memory = json.loads(lender.stdout.readline())
        segment, near = f"127.0.0.1:{port}", TransferEngine()
        assert near.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert near.get_first_buffer_address(segment) == memory
        own = driver.memory(b"from a device" * 1000)
        host = ctypes.create_string_buffer(b"from the host", 13)
        length = 9 << 20
        note = TransferNotify("", json.dumps([0, 13_000]))
        assert near.transfer_sync(segment, own, memory, 13_000, Write, note) == 0
        lender.stdin.write("\n")
        lender.stdin.flush()
        assert bytes.fromhex(lender.stdout.readline()) == b"from a device" * 1000
        end = memory + length - 13
        batch = near.transfer_submit_write(segment, ctypes.addressof(host), end, 13)
        assert near.get_batch_transfer_status([batch]) == 0
        ctypes.memset(host, 0, 13)
        assert near.transfer_sync_read(segment, ctypes.addressof(host), end, 13) == 0
        assert host.raw == b"from the host"
        assert near.transfer_sync_write(segment, ctypes.addressof(host), end + 1, 13) == -1
        lender.stdin.close()
        assert lender.wait(20) == 0


@pytest.fixture
def cuda_support(monkeypatch):
    """Return what `SUPPORT_CUDA` says with a driver of this name, and devices at these places."""

    def ask(named, *devices):
        monkeypatch.setenv("MC_CUDA_DRIVER", named)
        monkeypatch.setattr(_cuda, "_DEVICES", devices)
        _cuda.is_usable.cache_clear()
        return mooncake.engine.SUPPORT_CUDA

    yield ask
    _cuda.is_usable.cache_clear()


def test_support_is_told_where_driver_and_device_are(tmp_path, monkeypatch, cuda_support):
    # Loading an empty file would fail: nothing is loaded.
    (tmp_path / "libthere.so.1").touch()
    (tmp_path / "gpu0").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    gpu = f"{tmp_path}/gpu[0-9]*"
    assert cuda_support("libthere.so.1", gpu) is True
    assert cuda_support("libthere.so.1", f"{tmp_path}/none*") is False
    assert cuda_support("libno-driver.so.1", gpu) is False
    assert cuda_support(str(tmp_path / "libthere.so.1")) is True
    assert cuda_support(str(tmp_path / "absent.so")) is False
