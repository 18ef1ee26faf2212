"""Base of the small HTTP servers written in Python."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = ["ErrorHandler", "Handler", "Reply", "Request", "Server"]

_IDLE_S = 60.0
_LINGER_S = 5.0

_log = logging.getLogger("mooncake.http")


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        method: For instance ``"GET"``.
        path: Raw path: each byte is a character or an escape.
        query: Raw query string, without the question mark.
        body: Body of the request.
    """

    method: str
    path: str
    query: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """A response.

    Attributes:
        status: Status code.
        body: Body of the response.
        kind: Content type.
    """

    status: int
    body: bytes
    kind: str = "application/json"


Handler = Callable[[Request], Reply]
ErrorHandler = Callable[[int, str], Reply]


def _plain_text_error(status: int, text: str) -> Reply:
    return Reply(status, text.encode(), "text/plain")


class Server(ThreadingHTTPServer):
    """A server that listens from construction on; each connection has a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: Handler,
        body_bytes_max: int,
        error_handler: ErrorHandler = _plain_text_error,
    ) -> None:
        """Listen.

        Args:
            address: Address to listen at; port 0 takes a free port.
            handler: Called for each request, from many threads.
            body_bytes_max: Longest body; longer ones are refused without being read.
            error_handler: Called with status and reason for requests that `handler` does not see,
                and when `handler` fails.

        Raises:
            OSError: The address cannot be listened at.
        """
        self.handler = handler
        self.body_bytes_max = body_bytes_max
        self.error_handler = error_handler
        super().__init__(address, _Handler)

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        return int(self.server_address[1])

    def start(self, name: str) -> threading.Thread:
        """Start serving.

        Args:
            name: Name of the thread that accepts connections.

        Returns:
            The accepting thread, which ends when the server is closed.
        """
        thread = threading.Thread(target=self.serve_forever, name=name, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Stop accepting connections. The server must have been started."""
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    # A buffered response is sent as one packet.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    # The library looks up handlers by the name of the HTTP method.
    do_PUT = do_POST = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _log.debug(format, *args)

    def _answer(self) -> None:
        text = self.headers.get("Content-Length", "0")
        length = int(text) if text.isdecimal() else -1
        if length > self.server.body_bytes_max:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the body is too large")
            return
        if length < 0 or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "a Content-Length is required")
            return
        body = self.rfile.read(length)
        try:
            target = urlsplit(self.path)
        except ValueError:
            self._reply(
                self.server.error_handler(HTTPStatus.BAD_REQUEST, "the path cannot be read")
            )
            return
        try:
            reply = self.server.handler(Request(self.command, target.path, target.query, body))
        except Exception:  # noqa: BLE001
            _log.exception("%s %s failed", self.command, self.path)
            reply = self.server.error_handler(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")
        self._reply(reply)

    def _refuse(self, status: int, text: str) -> None:
        """Refuse a request without reading its body, and close the connection after it.

        An unread body would be parsed as the next request.
        """
        self.close_connection = True
        self._reply(self.server.error_handler(status, text))
        # Drain the body for a while: a client that is still sending would get a reset before it
        # reads the response.
        end = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_S)
            while time.monotonic() < end and self.rfile.read1(1 << 16):
                pass

    def _reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)
