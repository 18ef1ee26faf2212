"""The HTTP servers in Python under floods: silent, slow and greedy clients."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from conftest import MIB, PROMPT_S

from mooncake._http import Limits, Reply, Request, Server

LIMITS = Limits(connections=16, idle_s=30, head_s=20, body_s=20, bodies_bytes=3 * MIB)
QUICK = Limits(connections=16, idle_s=0.3, head_s=0.3, body_s=0.3, bytes_per_s=8 << 20)


@contextlib.contextmanager
def serving(limits: Limits) -> Iterator[Server]:
    """A server whose answer is as long as its path says, or the length of the body."""

    def answer(request: Request) -> Reply:
        length = int(request.path[1:] or 0)
        return Reply(200, b"x" * length if length else str(len(request.body)).encode())

    server = Server(("127.0.0.1", 0), answer, lambda _: 2 * MIB, limits=limits)
    server.start("test-http")
    try:
        yield server
    finally:
        server.close()


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PROMPT_S)


def put(server: Server, length: int) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PROMPT_S)
    try:
        client.request("PUT", "/", bytes(length))
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def is_closed(connection: socket.socket) -> bool:
    """Wait for the end of a connection; false if the server waits for longer than that."""
    try:
        while connection.recv(1 << 20):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def threads_of(server: Server) -> int:
    del server
    return sum("process_request" in each.name for each in threading.enumerate())


@pytest.mark.parametrize("sent", [b"", b"GET", b"PUT / HTTP/1.1\r\nContent-Length: 9\r\n\r\nx"])
def test_new_client_is_served_behind_a_flood(sent: bytes) -> None:
    with serving(LIMITS) as server, contextlib.ExitStack() as flood:
        silent = [flood.enter_context(connect(server)) for _ in range(200)]
        for each in silent:
            with contextlib.suppress(OSError):
                each.sendall(sent)
        begin = time.monotonic()
        assert put(server, 5) == (200, b"5")
        assert time.monotonic() - begin < 5
        assert is_closed(silent[0]), "the oldest gave way"
        deadline = time.monotonic() + PROMPT_S
        while threads_of(server) > LIMITS.connections:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nA: ", b"PUT / HTTP/1.1\r\nContent-Length: 999\r\n\r\n"]
)
def test_one_byte_at_a_time_does_not_hold_a_connection(sent: bytes) -> None:
    with serving(QUICK) as server, connect(server) as slow:
        slow.settimeout(0.05)
        slow.sendall(sent)
        deadline = time.monotonic() + PROMPT_S
        while not is_closed(slow):
            assert time.monotonic() < deadline
            if sent:
                with contextlib.suppress(OSError):
                    slow.sendall(b"x")


def test_idle_connection_is_closed_after_its_requests() -> None:
    with serving(QUICK) as server, connect(server) as idle:
        for _ in range(3):
            idle.sendall(b"GET /3 HTTP/1.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"xxx"):
                answer += idle.recv(4096)
        assert is_closed(idle)


def test_answer_that_is_not_taken_is_given_up() -> None:
    with serving(QUICK) as server, connect(server) as slow:
        slow.sendall(f"GET /{32 * MIB} HTTP/1.1\r\n\r\n".encode())
        assert slow.recv(1) == b"H"
        deadline = time.monotonic() + PROMPT_S
        while threads_of(server) > 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_large_bodies_are_limited_together() -> None:
    with serving(LIMITS) as server, contextlib.ExitStack() as held:
        for _ in range(2):
            each = held.enter_context(connect(server))
            each.sendall(f"PUT / HTTP/1.1\r\nContent-Length: {2 * MIB}\r\n\r\n".encode())
            each.sendall(bytes(5 * MIB // 4))
        deadline = time.monotonic() + PROMPT_S
        while server._bodies_bytes < 5 * MIB // 2:
            assert time.monotonic() < deadline
        status, text = put(server, MIB)
        assert (status, b"try again" in text) == (503, True)
        assert put(server, 64 << 10) == (200, b"65536"), "small bodies always fit"
        assert put(server, 3 * MIB)[0] == 413
        held.close()
        while put(server, 2 * MIB)[0] != 200:
            assert time.monotonic() < deadline
        assert server._bodies_bytes == 0


def test_busy_connections_are_not_displaced() -> None:
    gate, busy = threading.Event(), threading.Semaphore(0)

    def answer(request: Request) -> Reply:
        busy.release()
        gate.wait(PROMPT_S)
        return Reply(200, request.path.encode())

    limits = Limits(connections=4)
    server = Server(("127.0.0.1", 0), answer, lambda _: 0, limits=limits)
    server.start("test-http")
    try:
        with contextlib.ExitStack() as clients:
            used = [clients.enter_context(connect(server)) for _ in range(4)]
            for each in used:
                each.sendall(b"GET /busy HTTP/1.1\r\n\r\n")
            for _ in used:
                assert busy.acquire(timeout=PROMPT_S)
            assert is_closed(clients.enter_context(connect(server))), "there is no room"
            gate.set()
            for each in used:
                assert each.recv(1) == b"H"
    finally:
        server.close()
