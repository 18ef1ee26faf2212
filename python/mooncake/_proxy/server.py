"""The HTTP server of the proxy: connections, streaming, clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from typing import TYPE_CHECKING

from .routes import answer, send_error
from .wire import HttpError, read_body, read_request_head, write_head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .proxy import Proxy

__all__ = ["CONNECTIONS_MAX", "ProxyServer"]

CONNECTIONS_MAX = 4096
_HEAD_TIMEOUT_S = 30.0
_BODY_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 300.0
# A client that takes nothing for so long is treated as gone.
_WRITE_TIMEOUT_S = 120.0
_LINE_BYTES_MAX = 64 << 10


class ProxyServer:
    """Serves a proxy over HTTP/1.1, and checks its backends while it does."""

    def __init__(self, proxy: Proxy, *, health_interval_s: float | None = 5.0) -> None:
        """Make a server that does not listen yet.

        Args:
            proxy: The proxy.
            health_interval_s: Time between two checks of the backends; None for no checks.
        """
        self.proxy = proxy
        self._health_interval_s = health_interval_s
        self._connections: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve within the block; give the port, which is chosen if 0 was asked for."""
        server = await asyncio.start_server(
            self._accept, host, port, limit=_LINE_BYTES_MAX, backlog=1024
        )
        checks = []
        if self._health_interval_s is not None:
            checks.append(asyncio.create_task(self.proxy.check_backends(self._health_interval_s)))
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            tasks = [*checks, *self._connections]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        """Serve one request; return what was read of the next one, None if there is none."""
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
        response = _StreamResponse(writer, takes_chunks=head.takes_chunks)
        serving = asyncio.create_task(answer(self.proxy, head, body, response))
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

    async def _refuse(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            await send_error(_StreamResponse(writer), status, text)


class _StreamResponse:
    """A response over a stream: where its length is not known, chunked or up to the end."""

    def __init__(self, writer: asyncio.StreamWriter, *, takes_chunks: bool = True) -> None:
        self._writer = writer
        self._takes_chunks = takes_chunks
        self._is_chunked = False

    async def begin(self, status: int, kind: str, length: int | None) -> None:
        headers: dict[str, object] = {"Content-Type": kind}
        self._is_chunked = length is None and self._takes_chunks
        if length is not None:
            headers["Content-Length"] = length
        elif self._is_chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Connection"] = "close"
        write_head(self._writer, _status_line(status), headers)

    async def write(self, piece: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._is_chunked else piece)
        await _drain(self._writer)

    async def end(self) -> None:
        if self._is_chunked:
            self._writer.write(b"0\r\n\r\n")
        await _drain(self._writer)


async def _drain(writer: asyncio.StreamWriter) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_S):
        await writer.drain()


def _status_line(status: int) -> str:
    try:
        reason = HTTPStatus(status).phrase
    except ValueError:
        reason = "Unknown"
    return f"HTTP/1.1 {status} {reason}"
