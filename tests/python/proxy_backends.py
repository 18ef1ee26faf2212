"""Fake prefill and decode servers, and a client, over plain asyncio sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake._proxy.backend import Backend, BackendPool, Timeouts
from mooncake._proxy.proxy import Proxy
from mooncake._proxy.server import ProxyServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PARAMETERS = {"remote_engine_id": "e1", "remote_block_ids": [1, 2]}
DEADLINE_S = 100


@dataclass(eq=False)
class FakeBackend:
    """A server whose behaviour has a name; see `_answer`."""

    role: str
    behaviour: str = "ok"
    pieces: tuple[bytes, ...] = (b"data: one\n\n", b"data: two\n\n")
    seen: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    # The answer to `GET /query`, which vLLM gives at a port of its own.
    engines: bytes = b"{}"
    paths: list[str] = field(default_factory=list)
    hang_ups: int = 0
    most_in_flight: int = 0
    in_flight: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=1024)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            if head.startswith("GET /health "):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                return
            if head.startswith("GET /query "):
                self._send(writer, 200, self.engines)
                return
            body = await reader.readexactly(int(headers["content-length"]))
            self.seen.append(json.loads(body))
            self.headers.append(headers)
            self.paths.append(lines[0].split()[1])
            await self._answer(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            self.hang_ups += 1
        finally:
            self.in_flight -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.behaviour == "close":
            return
        if self.behaviour == "hang":
            if not await reader.read(1):
                self.hang_ups += 1
            return
        if self.behaviour.isdigit():
            self._send(writer, int(self.behaviour), b'{"error": {"message": "from the backend"}}')
        elif self.behaviour == "no JSON":
            self._send(writer, 200, b"[1]")
        elif self.role == "prefill":
            self._send(writer, 200, json.dumps({"kv_transfer_params": PARAMETERS}).encode())
        else:
            await self._stream(reader, writer)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        for number, piece in enumerate(self.pieces):
            if number == 1 and self.behaviour == "break off":
                return
            if number == 1 and self.behaviour == "wait":
                watch = asyncio.create_task(reader.read(1))
                release = asyncio.create_task(self.release.wait())
                await asyncio.wait((watch, release), return_when=asyncio.FIRST_COMPLETED)
                release.cancel()
                if watch.done():
                    self.hang_ups += 1
                    return
                watch.cancel()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    @staticmethod
    def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


@dataclass(eq=False)
class Cluster:
    """A proxy with its fake servers."""

    prefill: list[FakeBackend]
    decode: list[FakeBackend]
    proxy: Proxy
    port: int

    async def post(self, body: object = None, **options: Any) -> Response:
        payload = {"model": "m", "prompt": "p"} if body is None else body
        text = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        return await request(self.port, "POST", "/v1/completions", text, **options)


@asynccontextmanager
async def cluster(
    prefill: tuple[str, ...] = ("ok",),
    decode: tuple[str, ...] = ("ok",),
    *,
    health_interval_s: float = 3600,
    timeouts: Timeouts | None = None,
) -> AsyncIterator[Cluster]:
    """Start a proxy and servers with the given behaviours; a `refused` one does not listen."""
    roles = [("prefill", prefill), ("decode", decode)]
    fakes: dict[str, list[FakeBackend]] = {}
    pools = []
    for role, behaviours in roles:
        fakes[role] = [FakeBackend(role, behaviour) for behaviour in behaviours]
        for fake in fakes[role]:
            await fake.start()
            if fake.behaviour == "refused":
                await fake.stop()
        pools.append(
            BackendPool(role, [Backend(role, "127.0.0.1", fake.port) for fake in fakes[role]])
        )
    proxy = Proxy(pools[0], pools[1], timeouts or Timeouts())
    server = ProxyServer(proxy, health_interval_s=health_interval_s)
    try:
        async with server.serving("127.0.0.1", 0) as port:
            yield Cluster(fakes["prefill"], fakes["decode"], proxy, port)
    finally:
        for fake in (*fakes["prefill"], *fakes["decode"]):
            await fake.stop()


@dataclass
class Response:
    """What a client got; `is_whole` is False if the connection ended within the body."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_whole: bool

    def json(self) -> Any:
        return json.loads(self.body)


async def request(
    port: int, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Response:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        send(writer, method, path, body, headers)
        return await receive(reader)
    finally:
        writer.close()


def send(
    writer: asyncio.StreamWriter,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> None:
    given = {"Host": "x", "Content-Length": str(len(body)), **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


async def receive(reader: asyncio.StreamReader) -> Response:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    status = int(head[0].split(" ")[1])
    if "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
        return Response(status, headers, body, True)
    pieces = []
    while (piece := await receive_chunk(reader)) is not None:
        if not piece:
            return Response(status, headers, b"".join(pieces), True)
        pieces.append(piece)
    return Response(status, headers, b"".join(pieces), False)


async def receive_chunk(reader: asyncio.StreamReader) -> bytes | None:
    """Return a chunk, empty if it is the last one, None if the connection ended."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        line = await reader.readuntil(b"\r\n")
        return (await reader.readexactly(int(line, 16) + 2))[:-2]
    return None


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
