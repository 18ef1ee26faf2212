"""The sockets with which a decode worker of vLLM asks for blocks."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")
pytest.importorskip("torch")

import vllm_interface as vllm  # noqa: E402

from mooncake._connector.event_loop import BackgroundLoop  # noqa: E402
from mooncake._connector.requests import RecvReqMeta, Stage  # noqa: E402

DEADLINE_S = 40


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def port() -> Iterator[int]:
    """The side channel of a prefill worker that says to each call that its blocks were sent."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as channel:
        port = channel.bind_to_random_port("tcp://127.0.0.1")
        stopped = threading.Event()

        def serve() -> None:
            while not stopped.is_set():
                if channel.poll(20):
                    caller, empty, _ = channel.recv_multipart()
                    channel.send_multipart([caller, empty, b"trans_done"])

        thread = threading.Thread(target=serve)
        thread.start()
        yield port
        stopped.set()
        thread.join()


class Decode:
    """The receiver of a decode worker, in an event loop of its own."""

    def __init__(self, port: int) -> None:
        vllm.install()
        from mooncake._connector.receiver import BlockReceiver

        self.port = port
        self.count = 0
        self.loop = BackgroundLoop("decode")
        self.receiver = BlockReceiver(
            self.loop, "127.0.0.1", 1, 5.0, stage=Stage(), reports_failures=True
        )

    def fetch(self, count: int) -> None:
        """Fetch the blocks of some requests, one call after the other."""
        for _ in range(count):
            self.count += 1
            request_id = f"r-{self.count}"
            meta = RecvReqMeta([1], "127.0.0.1", self.port)
            self.loop.call(self.receiver.fetch, "127.0.0.1", self.port, [(request_id, meta)])
            until(lambda wanted=request_id: wanted in self.receiver.finished.take())


@pytest.fixture
def decode(port: int) -> Iterator[Decode]:
    made = Decode(port)
    yield made
    made.loop.result(made.receiver.close(), DEADLINE_S)
    made.loop.close()


def test_fetches_leave_no_socket_open(decode):
    decode.fetch(2)
    before = open_files()
    decode.fetch(100)
    # libzmq closes the files of a socket in a thread of its own.
    until(lambda: open_files() <= before + 5)
    assert decode.receiver.failed_blocks.take() == set()


@pytest.mark.parametrize("kind", [zmq.PAIR, zmq.REQ], ids=["events", "call"])
def test_fetch_without_a_socket_fails_and_later_ones_go_on(decode, monkeypatch, kind):
    decode.fetch(1)
    context = decode.receiver._context
    make = context.socket

    def refuse(asked, *arguments, **options):
        if asked == kind:
            raise zmq.ZMQError(errno.EMFILE)
        return make(asked, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(
            type(context), "socket", lambda _self, *given, **options: refuse(*given, **options)
        )
        decode.fetch(1)
    assert decode.receiver.failed_blocks.take() == {1}
    decode.fetch(1)
    assert decode.receiver.failed_blocks.take() == set()
