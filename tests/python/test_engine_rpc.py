"""The RPC helper: data and tensors between processes, callbacks, misuse and failures."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import PROMPT_S, assert_quiet, run_script

import mooncake.engine
from mooncake.engine import RpcInterface, create_rpc_client, create_rpc_server


@pytest.fixture
def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def server(free_address: str) -> Iterator[RpcInterface]:
    server = create_rpc_server()
    assert server.initialize_server(free_address, 2, 20)
    assert server.start_server_async()
    yield server
    server.stop_server()


@pytest.fixture
def client() -> RpcInterface:
    client = create_rpc_client()
    assert client.initialize_client(pool_size=4, timeout_seconds=20)
    return client


def wait_for(is_met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_data_arrives_with_its_source_address(server, client, free_address):
    received = []
    server.set_data_receive_callback(received.append)
    bodies = [b"", b"a\0b", bytearray(b"xy"), memoryview(b"0123")[1:3], bytes(range(256)) * 20_000]
    for body in bodies:
        assert client.send_data(free_address, body) == 0
    assert [each.get_bytes() for each in received] == [bytes(body) for body in bodies]
    assert [each.data_size for each in received] == [len(body) for body in bodies]
    assert bytes(received[1].get_memory_view()) == b"a\0b"
    host, port = received[0].source_address.rsplit(":", 1)
    assert (host, port.isdigit()) == ("127.0.0.1", True)


def test_numpy_arrays_arrive_with_shape_and_dtype(server, client, free_address):
    np = pytest.importorskip("numpy", reason="needs numpy: pip install numpy")
    received = []
    server.set_tensor_receive_callback(received.append)
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.array(7, dtype=np.int8),
        np.zeros((0, 3), dtype=np.float16),
        np.array([True, False]),
    ]
    for array in arrays:
        assert client.send_tensor(free_address, array) == 0
    for each, array in zip(received, arrays, strict=True):
        assert (each.shape, each.dtype) == (list(array.shape), str(array.dtype))
        assert each.total_bytes == each.get_data_size() == array.nbytes
        back = np.frombuffer(each.get_memory_view(), dtype=each.dtype).reshape(each.shape)
        assert np.array_equal(back, array)
        assert each.get_data_as_bytes() == array.tobytes()


def test_torch_tensors_arrive(server, client, free_address):
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    received = []
    server.set_tensor_receive_callback(received.append)
    tensor = torch.arange(6).to(torch.bfloat16).reshape(2, 3)
    assert client.send_tensor(free_address, tensor.t()) == 0
    assert (received[0].shape, received[0].dtype) == ([3, 2], "torch.bfloat16")
    back = torch.frombuffer(received[0].get_memory_view(), dtype=torch.bfloat16).reshape(3, 2)
    assert torch.equal(back, tensor.t())


def test_messages_without_a_callback_are_dropped(server, client, free_address, caplog):
    for _ in range(3):
        assert client.send_data(free_address, b"lost") == 0
        assert client.send_tensor(free_address, np.zeros(2)) == 0
    logged = [record for record in caplog.records if "was dropped" in record.message]
    assert [record.args for record in logged] == [("data",), ("tensor",)], "one warning for a kind"
    received = []
    server.set_data_receive_callback(lambda each: received.append(each.get_bytes()))
    assert client.send_data(free_address, b"kept") == 0
    assert received == [b"kept"]


def test_undelivered_data_fails_the_send(server, client, free_address):
    assert client.send_data("nonsense", b"x") == -1
    assert client.send_data("127.0.0.1:1", b"x") == -1
    assert RpcInterface().send_data(free_address, b"x") == -1
    for target, data in ((1, b"x"), (free_address, "text"), (free_address, 7)):
        with pytest.raises(TypeError):
            client.send_data(target, data)
    with pytest.raises(TypeError, match="torch or numpy"):
        client.send_tensor(free_address, [1, 2])
    with pytest.raises(TypeError, match="must be callable"):
        server.set_data_receive_callback(None)
    for cls in (mooncake.engine.ReceivedData, mooncake.engine.ReceivedTensor):
        with pytest.raises(TypeError, match="no constructor"):
            cls()


def test_failing_callback_is_logged(server, client, free_address, caplog):
    calls = itertools.count()

    def fail(_):
        if next(calls) == 0:
            raise ValueError("no such luck")

    server.set_data_receive_callback(fail)
    assert client.send_data(free_address, b"x") == 0
    assert "no such luck" in caplog.text
    assert client.send_data(free_address, b"x") == 0


def test_callbacks_run_on_all_threads(server, client, free_address):
    both = threading.Barrier(2)
    server.set_data_receive_callback(lambda _: both.wait(20))
    answers = []
    senders = [
        threading.Thread(target=lambda: answers.append(client.send_data(free_address, b"x")))
        for _ in range(4)
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert answers == [0] * 4


def test_async_sends_do_not_block(server, client, free_address):
    np = pytest.importorskip("numpy", reason="needs numpy: pip install numpy")
    data, tensors = [], []
    server.set_data_receive_callback(lambda each: data.append(each.get_bytes()))
    server.set_tensor_receive_callback(tensors.append)

    async def talk() -> list[int]:
        loop = asyncio.get_running_loop()
        sends = [client.send_data_async(free_address, b"%d" % i, loop) for i in range(40)]
        sends.append(client.send_tensor_async(free_address, np.ones(3), loop))
        sends.append(client.send_data_async("127.0.0.1:1", b"x", loop))
        return await asyncio.gather(*sends)

    assert asyncio.run(talk()) == [0] * 41 + [-1]
    assert sorted(data) == sorted(b"%d" % i for i in range(40))
    assert len(tensors) == 1


def test_server_restarts_repeatedly(client, free_address):
    server = RpcInterface()
    assert not server.start_server()
    assert not server.start_server_async()
    server.stop_server()
    for bad in ("", " "):
        assert not server.initialize_server(bad)
    assert not server.initialize_server(free_address, 0)
    assert server.initialize_server("nonsense")
    assert not server.start_server_async()
    assert server.initialize(free_address, 1, 20, 10)
    server.set_data_receive_callback(lambda _: None)
    for _ in range(3):
        assert server.start_server_async()
        assert server.start_server_async()
        other = RpcInterface()
        assert other.initialize_server(free_address)
        assert not other.start_server_async()
        assert client.send_data(free_address, b"x") == 0
        server.stop_server()
        server.stop_server()
        assert client.send_data(free_address, b"x") == -1
    assert not server.initialize_client(0)
    assert not server.initialize_client(1, -1)


def test_callback_can_stop_a_blocking_server(client, free_address):
    server = RpcInterface()
    assert server.initialize_server(listen_address=free_address, thread_count=1, timeout_seconds=20)
    server.set_data_receive_callback(lambda _: server.stop_server())
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.start_server()))
    thread.start()
    # Sends fail until the server listens; the first received message stops it.
    wait_for(lambda: client.send_data(free_address, b"x") in (0, -1) and not thread.is_alive())
    assert answers == [True]


SENDER = """
import sys
from mooncake.engine import create_rpc_client
client = create_rpc_client(local_rank=0, world_size=2)
assert all(client.send_data(sys.argv[1], b"from afar") == 0 for _ in range(3))
"""


def test_another_process_can_send(server, free_address):
    received = []
    server.set_data_receive_callback(lambda each: received.append(each.get_bytes()))
    assert_quiet(run_script(SENDER, free_address))
    assert received == [b"from afar"] * 3


EXIT = """
import asyncio, os, threading
from mooncake.engine import create_rpc_server
here = create_rpc_server()
assert here.initialize_server("127.0.0.1:0")
assert here.start_server_async()
child = os.fork()
if child == 0:
    here.stop_server()
    assert here.send_data("127.0.0.1:1", b"x") == -1
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
import socket
silent = socket.create_server(("127.0.0.1", 0))
target = f"127.0.0.1:{silent.getsockname()[1]}"
async def begin():
    here.send_data_async(target, b"x", asyncio.get_running_loop())
asyncio.run(begin())
"""


def test_program_exits_with_calls_in_flight():
    begin = time.monotonic()
    assert_quiet(run_script(EXIT))
    assert time.monotonic() - begin < PROMPT_S


@pytest.mark.parametrize("failure", [SystemExit, asyncio.CancelledError])
def test_server_outlives_a_callback_that_would_end_its_thread(
    server, client, free_address, failure
):
    calls = []

    def fail(_: object) -> None:
        calls.append(failure)
        raise failure

    server.set_data_receive_callback(fail)
    # More than the server has threads.
    for count in range(1, 5):
        assert client.send_data(free_address, b"x") == 0
        assert len(calls) == count


def test_dropped_interface_stops_to_listen(free_address):
    interface = create_rpc_server()
    assert interface.initialize_server(free_address, 2, 20)
    assert interface.start_server_async()
    del interface
    other = create_rpc_server()
    assert other.initialize_server(free_address, 2, 20)
    wait_for(other.start_server_async)
    other.stop_server()
