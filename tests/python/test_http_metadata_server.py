"""The stand-alone metadata server: its protocol, start and end, and stores that use it."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mooncake.http_metadata_server import KVBootstrapServer, KVPoll
from mooncake.store import MooncakeDistributedStore


@pytest.fixture
def server() -> Iterator[KVBootstrapServer]:
    server = KVBootstrapServer(0, "127.0.0.1")
    server.run()
    assert server.poll() is KVPoll.Success
    yield server
    server.close()
    assert server.poll() is KVPoll.Failed
    server.close()


class HttpClient:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def __call__(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        self.connection.request(method, path, body, headers)
        answer = self.connection.getresponse()
        assert (answer.headers["Content-Type"] == "application/json") == (answer.status < 411)
        return answer.status, answer.read()


def test_values_are_stored_by_key(server):
    call = HttpClient(server.port)
    path = "/metadata?key=mooncake%2Fram%2Fa"
    assert call("GET", path) == (404, b"metadata not found")
    assert call("PUT", path, b"\0\xff") == (200, b"metadata updated")
    assert server.store == {"mooncake/ram/a": b"\0\xff"}
    assert call("GET", path) == (200, b"\0\xff")
    assert call("PUT", path, b"") == (200, b"metadata updated")
    assert call("GET", path) == (200, b"")
    assert call("DELETE", path) == (200, b"metadata deleted")
    assert call("DELETE", path) == (404, b"metadata not found")
    call.connection.close()


def test_engine_address_cannot_be_overwritten(server):
    call = HttpClient(server.port)
    path = "/metadata?key=mooncake/rpc_meta/a:1"
    assert call("PUT", path, b"one") == (200, b"metadata updated")
    assert call("PUT", path, b"one") == (200, b"metadata unchanged")
    assert call("PUT", path, b"two") == (400, b"Duplicate rpc_meta key not allowed")
    assert call("GET", path) == (200, b"one")
    call.connection.close()


def test_rejects_malformed_requests(server):
    call = HttpClient(server.port)
    assert call("GET", "/metadata") == (400, b"metadata key is required")
    assert call("GET", "/metadata?key=") == (400, b"metadata key is required")
    assert call("GET", "/metadata?key=" + "k" * 5000)[0] == 400
    for path in ("/", "/health", "/metrics"):
        assert call("GET", path)[0] == 404
    assert call("PUT", "/metadata?key=k", None, **{"Content-Length": str(1 << 30)})[0] == 413
    call.connection.close()
    call = HttpClient(server.port)
    assert call("PUT", "/metadata?key=k", None, **{"Transfer-Encoding": "chunked"})[0] == 411
    assert server.store == {}
    call.connection.close()


def test_occupied_port_fails_without_an_exception(caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = KVBootstrapServer(taken.getsockname()[1], "127.0.0.1")
        assert not server.run().is_alive()
        assert server.poll() is KVPoll.Failed
        assert "cannot listen" in caplog.text
        assert f"(pid {os.getpid()}): choose another --port" in caplog.text
        server.close()


def test_stores_discover_each_other(server, master):
    metadata = f"http://127.0.0.1:{server.port}/metadata"
    first, other = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert first.setup("localhost", metadata, 16 << 20, 1 << 20, "tcp", "", master.address) == 0
    assert other.setup("localhost", metadata, 0, 1 << 20, "tcp", "", master.address) == 0
    assert any("rpc_meta" in key for key in server.store)
    assert other.put("by-metadata", b"value") == 0
    assert first.get("by-metadata") == b"value"
    assert other.close() == 0
    assert first.close() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_program_serves_until_signalled(number):
    command = [sys.executable, "-m", "mooncake.http_metadata_server", "--port=0"]
    done = subprocess.Popen(
        [*command, "--host=127.0.0.1"], stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert done.stderr is not None
    with done, done.stderr:
        port = re.search(r":(\d+)/metadata", done.stderr.readline())
        assert port is not None
        call = HttpClient(int(port[1]))
        assert call("PUT", "/metadata?key=k", b"v")[0] == 200
        call.connection.close()
        done.send_signal(number)
        assert done.wait(30) == 0
