"""The HTTP server of the proxy: routes, streaming, clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING

from .backend import BackendError
from .proxy import Proxy, ProxyError, Reply
from .wire import Head, HttpError, read_body, read_request_head, write_head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["CONNECTIONS_MAX", "ProxyServer"]

_log = logging.getLogger("mooncake.proxy")

CONNECTIONS_MAX = 4096
_HEAD_TIMEOUT_S = 30.0
_BODY_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 300.0
# A client that takes nothing for so long is treated as gone.
_WRITE_TIMEOUT_S = 120.0
_LINE_BYTES_MAX = 64 << 10
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


class ProxyServer:
    """Serves a proxy over HTTP/1.1, and checks its backends while it does."""

    def __init__(self, proxy: Proxy, *, health_interval_s: float = 5.0) -> None:
        self.proxy = proxy
        self._health_interval_s = health_interval_s
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Serves within the block; gives the port, which is chosen if 0 was asked for."""
        server = await asyncio.start_server(
            self._accept, host, port, limit=_LINE_BYTES_MAX, backlog=1024
        )
        checks = asyncio.create_task(self._check_backends())
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            tasks = [checks, *self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_backends(self) -> None:
        pools = (self.proxy.prefill, self.proxy.decode)
        while True:
            await asyncio.sleep(self._health_interval_s)
            await asyncio.gather(*(pool.check(self.proxy.timeouts) for pool in pools))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            first: bytes | None = b""
            while first is not None:
                first = await self._serve_request(reader, writer, first)
        except HttpError as error:
            await self._refuse(writer, error.status, str(error))
        except (OSError, EOFError, TimeoutError):
            pass  # the client is gone
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_HEAD_TIMEOUT_S):
                    await writer.wait_closed()

    async def _serve_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes
    ) -> bytes | None:
        """Serves one request; returns what was read of the next one, None if there is none."""
        if not first:
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                first = await reader.read(1)
            if not first:
                return None
        async with asyncio.timeout(_HEAD_TIMEOUT_S):
            head = await read_request_head(reader, first)
        if head is None:
            return None
        if len(self._connections) > CONNECTIONS_MAX:
            raise HttpError(503, f"there are more than {CONNECTIONS_MAX} connections")
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            if head.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await read_body(reader, head.headers, is_request=True)
        serving = asyncio.create_task(self._answer(head, body, writer))
        # A byte that arrives meanwhile begins the next request; no byte means that the client
        # hung up, and the calls to the servers end at once.
        watching = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
            if not serving.done() and (watching.exception() or not watching.result()):
                raise EOFError("the client hung up")
            is_whole = await serving
            if not (is_whole and head.keeps_alive):
                return None
            return watching.result() if watching.done() and watching.result() else b""
        except (OSError, EOFError, TimeoutError):
            self.proxy.outcomes["client hung up"] += 1
            return None
        finally:
            for task in (serving, watching):
                task.cancel()
            await asyncio.gather(serving, watching, return_exceptions=True)

    async def _answer(self, head: Head, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answers a request; returns whether the answer is whole."""
        if head.path in _COMPLETIONS:
            if head.method != "POST":
                return await self._send_error(writer, 405, "use POST")
            return await self._complete(head, body, writer)
        if head.method != "GET":
            return await self._send_error(writer, 404, f"there is no {head.method} {head.path}")
        if head.path == "/healthcheck":
            sizes = (len(self.proxy.prefill.backends), len(self.proxy.decode.backends))
            record = {"status": "ok", "prefill_instances": sizes[0], "decode_instances": sizes[1]}
            return await self._send(writer, 200, json.dumps(record).encode(), "application/json")
        if head.path == "/metrics":
            text = self.proxy.metrics().encode()
            return await self._send(writer, 200, text, "text/plain; version=0.0.4")
        return await self._send_error(writer, 404, f"there is no {head.path}")

    async def _complete(self, head: Head, body: bytes, writer: asyncio.StreamWriter) -> bool:
        try:
            request = json.loads(body)
        except ValueError:
            request = None
        if not isinstance(request, dict):
            return await self._send_error(writer, 400, "the body must be a JSON object")
        authorization = head.headers.get("authorization")
        try:
            async with self.proxy.request(head.path, request, authorization) as reply:
                is_whole = await self._stream(writer, reply, is_events=bool(request.get("stream")))
        except ProxyError as error:
            self.proxy.outcomes["refused" if error.status < 500 else "failed"] += 1
            return await self._send_error(writer, error.status, str(error))
        self.proxy.outcomes["completed" if is_whole else "broke off"] += 1
        return is_whole

    async def _stream(self, writer: asyncio.StreamWriter, reply: Reply, *, is_events: bool) -> bool:
        """Sends an answer as it arrives; returns False if it broke off."""
        head = {"Content-Type": reply.kind, "Transfer-Encoding": "chunked"}
        write_head(writer, _status_line(reply.status), head)
        try:
            async for piece in reply.chunks:
                await _write_chunk(writer, piece)
        except BackendError as error:
            _log.warning("an answer broke off: %s", error)
            if is_events:
                event = json.dumps(_error_record(502, str(error)))
                await _write_chunk(writer, f"data: {event}\n\n".encode())
            # No last chunk: the client sees that the answer is not whole.
            return False
        writer.write(b"0\r\n\r\n")
        await _drain(writer)
        return True

    async def _send_error(self, writer: asyncio.StreamWriter, status: int, text: str) -> bool:
        body = json.dumps(_error_record(status, text)).encode()
        return await self._send(writer, status, body, "application/json")

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str
    ) -> bool:
        head = {"Content-Type": kind, "Content-Length": len(body)}
        write_head(writer, _status_line(status), head)
        writer.write(body)
        await _drain(writer)
        return True

    async def _refuse(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await self._send_error(writer, status, text)


async def _write_chunk(writer: asyncio.StreamWriter, piece: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    await _drain(writer)


async def _drain(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await writer.drain()


def _status_line(status: int) -> str:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Unknown"
    return f"HTTP/1.1 {status} {reason}"


def _error_record(status: int, text: str) -> Mapping[str, object]:
    """Returns an error as OpenAI's clients read it; a text that is one already is passed on."""
    with contextlib.suppress(ValueError):
        given = json.loads(text)
        if isinstance(given, dict):
            return given
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "code": status}}
