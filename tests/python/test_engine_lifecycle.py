"""The transfer engine before `initialize`, its settings, misuse, fork, exit and sharing."""

from __future__ import annotations

import array
import collections
import inspect
import itertools
import json
import socket
import time

import pytest
from conftest import MIB, PROMPT_S, MasterProcess, assert_quiet, run_script
from engine_peers import Memory, start_engine, start_peer

import mooncake.engine
from mooncake.engine import (
    InnerTransferEngine,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
)
from mooncake.errors import InvalidArgumentError
from mooncake.store import MooncakeDistributedStore

# The result of every call on an engine that is not initialized.
IDLE = [
    (lambda e: e.get_rpc_port(), -1),
    (lambda e: e.get_engine(), None),
    (lambda e: e.get_engine_ptr(), 0),
    (lambda e: e.register_memory(4096, 10), -1),
    (lambda e: e.unregister_memory(4096), -1),
    (lambda e: e.batch_register_memory([4096], [10]), -1),
    (lambda e: e.batch_unregister_memory([4096]), -1),
    (lambda e: e.allocate_managed_buffer(10), 0),
    (lambda e: e.free_managed_buffer(4096, 10), -1),
    (lambda e: e.get_first_buffer_address("s"), 0),
    (lambda e: e.transfer_sync_write("s", 1, 2, 3), -1),
    (lambda e: e.transfer_sync_read("s", 1, 2, 3), -1),
    (lambda e: e.transfer_sync("s", 1, 2, 3, TransferOpcode.Read), -1),
    (lambda e: e.transfer_submit_write("s", 1, 2, 3), 0),
    (lambda e: e.transfer_check_status(1), -1),
    (lambda e: e.batch_transfer_sync_write("s", [1], [2], [3]), -1),
    (lambda e: e.batch_transfer_sync_read("s", [1], [2], [3]), -1),
    (lambda e: e.batch_transfer_sync("s", [1], [2], [3], TransferOpcode.Write), -1),
    (lambda e: e.batch_transfer_async_write("s", [1], [2], [3]), 0),
    (lambda e: e.batch_transfer_async_read("s", [1], [2], [3]), 0),
    (lambda e: e.batch_transfer_async("s", [1], [2], [3], TransferOpcode.Write), 0),
    (lambda e: e.get_batch_transfer_status([1]), -1),
    (lambda e: e.get_notifies(), []),
    (lambda e: e.send_probe("127.0.0.1:1"), -1),
    (lambda e: e.warmup_efa_segment("s"), -1),
]


@pytest.mark.parametrize("call", IDLE, ids=range(len(IDLE)))
def test_uninitialized_engine_fails_every_call(call):
    ask, answer = call
    assert ask(TransferEngine()) == answer
    failed = TransferEngine()
    assert failed.initialize("localhost", "", "tcp", "") == -1
    assert ask(failed) == answer


def test_initialize_validates_its_arguments():
    engine = TransferEngine()
    start = time.monotonic()
    here = "127.0.0.1:1"
    for metadata in (
        "",
        "foo://x",
        f"redis://{here}",
        here,
        f"http://{here}/metadata",
        "https://h",
    ):
        assert engine.initialize("127.0.0.1:1", metadata, "tcp", "") == -1, metadata
    assert engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", "xgmi", "") == -1
    assert engine.initialize("a:b:c:d", "P2PHANDSHAKE", "tcp", "") == -1
    assert time.monotonic() - start < PROMPT_S
    for protocol, device in (("tcp", ""), ("rdma", None), ("", ""), ("nonsense", "mlx5_0")):
        assert engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", protocol, device) == 0
    for name in ("127.0.0.1", ""):
        assert engine.initialize(name, "P2PHANDSHAKE", "tcp", "") == 0
        assert engine.get_rpc_port() > 0
    assert engine.initialize_ext("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "", "etcd") == 0
    with pytest.raises(TypeError, match="protocol"):
        engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", None, "")
    with pytest.raises(TypeError):
        engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", "tcp")


def test_block_releases_the_engine():
    with start_engine() as engine:
        assert repr(engine) == f"<mooncake.engine.TransferEngine port={engine.get_rpc_port()}>"
        assert engine.get_engine_ptr() != 0
    assert engine.get_engine_ptr() == 0
    assert repr(engine) == "<mooncake.engine.TransferEngine not initialized>"


def test_rpc_port_comes_from_the_configured_range(monkeypatch):
    monkeypatch.setenv("MC_MIN_RPC_PORT", "23100")
    monkeypatch.setenv("MC_MAX_RPC_PORT", "23199")
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    engine = start_engine(name="")
    assert 23100 <= engine.get_rpc_port() <= 23199
    assert engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}") == 0
    monkeypatch.setenv("MC_LEGACY_RPC_PORT_BINDING", "1")
    port = engine.get_rpc_port()
    del engine
    assert start_engine(name=f"127.0.0.1:{port}").get_rpc_port() == port


def test_environment_configures_the_handshake_socket(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("MC_LEGACY_RPC_PORT_BINDING", "1")
    monkeypatch.setenv("MC_HANDSHAKE_PORT", str(port))
    monkeypatch.setenv("MC_HANDSHAKE_LISTEN_BACKLOG", "1")
    monkeypatch.setenv("MC_HANDSHAKE_MAX_LENGTH", str(2 * MIB))
    monkeypatch.setenv("MC_USE_IPV6", "1")
    engine = start_engine(name="127.0.0.1")
    assert engine.get_rpc_port() == port
    assert engine.send_probe(f"127.0.0.1:{port}") == 0
    monkeypatch.setenv("MC_HANDSHAKE_MAX_LENGTH", "5")
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1


def test_ineffective_variable_is_logged_once():
    start = "e = TransferEngine(); assert e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '') == 0"
    script = f"from mooncake.engine import TransferEngine\n{start}\n{start}"
    done = run_script(script, env={"MC_TCP_PROTO": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("MC_TCP_PROTO") == 1
    assert "no effect" in done.stderr


def test_second_initialize_replaces_the_engine():
    engine = start_engine()
    memory = Memory.of(bytes(100))
    assert engine.register_memory(memory.address, 100) == 0
    old = f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.initialize("127.0.0.1:3", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.unregister_memory(memory.address) == -3
    assert f"127.0.0.1:{engine.get_rpc_port()}" != old
    assert engine.send_probe(old) == -102


def test_metadata_name_belongs_to_one_live_engine(master: MasterProcess):
    server = f"http://{master.metadata}/metadata"
    first = start_engine(name="127.0.0.1:501", metadata=server)
    second = TransferEngine()
    assert second.initialize("127.0.0.1:501", server, "tcp", "") == -1
    assert first.initialize("127.0.0.1:501", server, "tcp", "") == 0
    assert first.send_probe("127.0.0.1:501") == 0
    assert first.send_probe("127.0.0.1:502") == -200
    del first
    assert second.initialize("127.0.0.1:501", server, "tcp", "") == 0


def test_registration_returns_upstream_codes():
    engine = start_engine()
    memory = Memory.of(bytes(1000))
    at = memory.address
    assert engine.register_memory(buffer_addr=at, capacity=500, location="cpu:0") == 0
    assert engine.register_memory(at, 500) == -7
    assert engine.register_memory(at + 499, 10) == -7
    assert engine.register_memory(at + 500, 0) == -1
    assert engine.register_memory(at + 500, 2**64 - 1) == -1
    assert engine.register_memory(at + 500, 100) == 0
    for nowhere in (0, 8, 1 << 62):
        assert engine.register_memory(nowhere, 100) == -1
        # One range is unmapped: none is registered.
        assert engine.batch_register_memory([at + 700, nowhere], [100, 100]) == -1
        assert engine.unregister_memory(at + 700) == -3
    assert engine.unregister_memory(at + 1) == -3
    assert engine.unregister_memory(at) == 0
    assert engine.unregister_memory(at) == -3
    assert engine.batch_register_memory([], []) == 0
    assert engine.batch_unregister_memory([]) == 0
    assert engine.batch_register_memory([at, at + 100], [100]) == -1
    # One range overlaps: none is registered.
    assert engine.batch_register_memory([at, at + 550], [100, 10]) == -7
    assert engine.batch_register_memory((at, at + 100), (100, 100)) == 0
    assert engine.batch_unregister_memory([at, at + 300, at + 100]) == -3
    assert engine.register_memory(at, 500) == 0


def test_wrong_argument_types_raise():
    engine = start_engine()
    with pytest.raises(TypeError):
        engine.register_memory("here", 10)
    with pytest.raises(TypeError, match="0 to 2"):
        engine.register_memory(-1, 10)
    with pytest.raises(TypeError, match="sequence of integers"):
        engine.batch_register_memory(b"bytes", [10])
    with pytest.raises(TypeError):
        engine.transfer_sync_write("s", b"bytes", 1, 1)
    with pytest.raises(TypeError):
        engine.transfer_sync_write(None, 1, 1, 1)
    with pytest.raises(TypeError, match="nonsense"):
        engine.register_memory(1, 1, nonsense=1)
    with pytest.raises(TypeError):
        engine.transfer_check_status("7")


class Tens:
    """A sequence whose `__len__` is wrong."""

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> int:
        if index >= 3:
            raise IndexError
        return 10


def test_lists_accept_any_sequence():
    numpy = pytest.importorskip("numpy", reason="needs numpy: pip install numpy")
    engine, memory = start_engine(), Memory.of(bytes(range(100)))
    at = [memory.address + 10 * i for i in range(3)]
    segment = f"127.0.0.1:{engine.get_rpc_port()}"
    starts = range(at[0], at[2] + 1, 10)
    assert engine.batch_register_memory(starts, Tens()) == 0
    for kind in (list, tuple, collections.deque, numpy.array, lambda each: array.array("Q", each)):
        back = Memory.of(bytes(30))
        here = kind([back.address + 10 * i for i in range(3)])
        lengths = kind([10] * 3)
        assert engine.batch_transfer_sync_read(segment, here, kind(at), lengths) == 0
        assert back.content == memory.content[:30]
        batch = engine.batch_transfer_async(segment, here, kind(at), lengths, TransferOpcode.Read)
        assert engine.get_batch_transfer_status(kind([batch])) == 0
    assert engine.batch_unregister_memory(numpy.array(at, dtype=numpy.uint64)) == 0
    for other in ({1}, {1: 2}, frozenset([1]), bytearray(b"1"), "1", iter([1]), 1, None, [1.5]):
        with pytest.raises(TypeError):
            engine.get_batch_transfer_status(other)


def test_managed_buffers_are_disjoint_and_freed_once():
    engine = start_engine()
    lengths = [0, 1, 8192, 8193, 100_000, MIB, 256 * MIB, 256 * MIB + 1]
    buffers = [(engine.allocate_managed_buffer(length), length) for length in lengths]
    ordered = sorted(buffers)
    assert all(at > 0 for at, _ in buffers)
    assert all(at + length <= after for (at, length), (after, _) in itertools.pairwise(ordered))
    for at, length in buffers:
        text = f"{length}".encode()[:length]
        assert engine.write_bytes_to_buffer(at, text, len(text)) == 0
        assert engine.read_bytes_from_buffer(at, len(text)) == text
    for at, length in buffers:
        assert engine.free_managed_buffer(at + 1, length) == -1
        assert engine.free_managed_buffer(buffer_addr=at, length=length) == 0
        assert engine.free_managed_buffer(at, length) == -1
    assert engine.allocate_managed_buffer(1 << 60) == 0


def test_copies_reject_bad_addresses():
    engine = TransferEngine()
    memory = Memory.of(bytes(10))
    assert engine.write_bytes_to_buffer(memory.address, b"a\0b", 3) == 0
    assert engine.write_bytes_to_buffer(memory.address + 3, bytearray(b"cdef"), 2) == 0
    assert (
        engine.write_bytes_to_buffer(dest_address=memory.address + 5, src_ptr="\u00e9", length=2)
        == 0
    )
    assert memory.content == b"a\0bcd" + "\u00e9".encode() + bytes(3)
    assert engine.read_bytes_from_buffer(source_address=memory.address, length=5) == b"a\0bcd"
    assert engine.write_bytes_to_buffer(memory.address, b"xy", 3) == -1
    assert engine.read_bytes_from_buffer(8, 0) == b""
    for bad in (0, 8, 2**47, 2**64 - 8):
        for length in (1, 100_000):
            assert engine.write_bytes_to_buffer(bad, bytes(length), length) == -1
            with pytest.raises(InvalidArgumentError):
                engine.read_bytes_from_buffer(bad, length)


def test_topology_comes_from_kernel_or_file(monkeypatch, tmp_path):
    topology = json.loads(TransferEngine().get_local_topology())
    assert "cpu:0" in topology
    assert all(len(lists) == 2 for lists in topology.values())
    assert TransferEngine().get_local_topology(device_name="none") is not None
    path = tmp_path / "topology.json"
    path.write_text('{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}')
    monkeypatch.setenv("MC_CUSTOM_TOPO_JSON", str(path))
    assert json.loads(TransferEngine().get_local_topology()) == {"cpu:0": [["mlx5_0"], ["mlx5_1"]]}
    path.write_text("nonsense")
    assert json.loads(TransferEngine().get_local_topology()) == topology


def test_opcodes_and_notifications_match_upstream():
    assert repr(TransferOpcode.Read) == "<TransferOpcode.Read: 0>"
    assert TransferOpcode.Read is TransferOpcode.READ is mooncake.engine.Read
    assert TransferOpcode.Write is TransferOpcode.WRITE is mooncake.engine.Write
    assert TransferEngine.TransferOpcode is TransferOpcode
    assert int(TransferOpcode.Write) == 1
    assert TransferOpcode.Read != 0
    empty, message = TransferNotify(), TransferNotify(name="n", msg="m")
    assert (empty.name, empty.msg, message.name, message.msg) == ("", "", "n", "m")
    message.msg = "other"
    assert message.msg == "other"
    with pytest.raises(TypeError, match="msg"):
        TransferNotify("n", 1)
    with pytest.raises(TypeError):
        InnerTransferEngine()
    flags = [name for name in mooncake.engine.__all__ if name.startswith("SUPPORT_")]
    assert len(flags) == 6
    assert not any(getattr(mooncake.engine, name) for name in flags)


def test_stream_calls_name_the_missing_driver(monkeypatch):
    monkeypatch.setenv("MC_CUDA_DRIVER", "libno-driver.so.1")
    engine = start_engine()
    for name in ("transfer_write_on_cuda", "transfer_read_on_cuda"):
        with pytest.raises(RuntimeError, match=r"no CUDA driver.*libno-driver\.so\.1"):
            getattr(engine, name)("s", 1, 2, 3)
        with pytest.raises(RuntimeError, match=r"no CUDA driver.*libno-driver\.so\.1"):
            getattr(engine, f"batch_{name}")("s", [1], [2], [3], stream_ptr=0)


def test_docstrings_list_the_parameters():
    for name, call in inspect.getmembers(TransferEngine, inspect.isfunction):
        if not name.startswith("_"):
            parameters = list(inspect.signature(call).parameters)[1:]
            assert all(f"{parameter}:" in (call.__doc__ or "") for parameter in parameters), name


def test_store_shares_an_engine_and_leaves_it_running():
    engine = start_engine()
    memory = Memory.of(b"0123456789")
    assert engine.register_memory(memory.address, 10) == 0
    store = MooncakeDistributedStore()
    with pytest.raises(RuntimeError, match="Unable to cast"):
        store.setup("localhost", "P2PHANDSHAKE", 64 * MIB, MIB, "tcp", "", "embedded", engine)
    inner = engine.get_engine()
    assert isinstance(inner, InnerTransferEngine)
    args = ("localhost", "P2PHANDSHAKE", 64 * MIB, MIB, "tcp", "", "embedded")
    assert store.setup(*args, engine=inner) == 0
    assert store.put("k", b"value") == 0
    assert store.get("k") == b"value"
    # Peers of the engine reach the store's segment, because the engine is the same.
    segment = f"127.0.0.1:{engine.get_rpc_port()}"
    assert store.register_buffer(memory.address, 10) != 0
    assert store.close() == 0
    back = Memory.of(bytes(10))
    assert engine.transfer_sync_read(segment, back.address, memory.address, 10) == 0
    assert back.content == memory.content
    assert store.setup(*args, engine=inner) == 0
    del engine, inner
    assert store.put("k", b"value") == 0
    assert store.get("k") == b"value"
    assert store.close() == 0


def test_store_with_shared_engine_is_reachable(master: MasterProcess):
    engine = start_engine()
    store, other = MooncakeDistributedStore(), MooncakeDistributedStore()
    args = ("127.0.0.1", "P2PHANDSHAKE")
    rest = (MIB, "tcp", "", master.address)
    assert store.setup(*args, 64 * MIB, *rest, engine=engine.get_engine()) == 0
    assert other.setup(*args, 0, *rest) == 0
    assert other.put("shared-engine", b"x" * 100_000) == 0
    assert store.get("shared-engine") == b"x" * 100_000
    assert other.close() == 0
    assert store.close() == 0


FORK = """
import os, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "") == 0
name = f"127.0.0.1:{engine.get_rpc_port()}"
buffer = engine.allocate_managed_buffer(100)
assert engine.write_bytes_to_buffer(buffer, b"parent", 6) == 0
child = os.fork()
if child == 0:
    assert engine.register_memory(4096, 10) == -1
    assert engine.transfer_sync_write(name, buffer, buffer, 6) == -1
    assert engine.transfer_submit_write(name, buffer, buffer, 6) == 0
    assert engine.get_batch_transfer_status([1]) == -1
    assert engine.allocate_managed_buffer(10) == 0
    assert engine.get_notifies() == []
    assert engine.read_bytes_from_buffer(buffer, 6) == b"parent"
    assert engine.write_bytes_to_buffer(buffer, b"theirs", 6) == 0
    assert engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "") == 0
    own = f"127.0.0.1:{engine.get_rpc_port()}"
    other = engine.allocate_managed_buffer(100)
    assert engine.transfer_sync_write(own, other, other + 50, 6) == 0
    assert engine.transfer_sync_read(name, other, buffer, 6) == 0
    assert engine.read_bytes_from_buffer(other, 6) == b"parent"
    del engine
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert engine.read_bytes_from_buffer(buffer, 6) == b"parent"
assert engine.transfer_sync_write(name, buffer, buffer + 50, 6) == 0
"""


def test_forked_child_starts_its_own_engine():
    assert_quiet(run_script(FORK))


EXIT = """
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:1", "P2PHANDSHAKE", "tcp", "") == 0
buffer = engine.allocate_managed_buffer(1 << 20)
name = f"127.0.0.1:{engine.get_rpc_port()}"
assert engine.transfer_submit_write(name, buffer, buffer, 1 << 20) > 0
"""


def test_program_exits_with_an_engine_running():
    start = time.monotonic()
    assert_quiet(run_script(EXIT))
    assert time.monotonic() - start < PROMPT_S


def test_engine_ends_while_a_peer_is_attached():
    peer, engine = start_peer(), start_engine()
    memory = Memory.of(bytes(10))
    assert engine.transfer_sync_read(peer.segment, memory.address, peer.managed, 10) == 0
    start = time.monotonic()
    del engine
    assert time.monotonic() - start < PROMPT_S
    peer.end()
