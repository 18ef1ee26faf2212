"""Base of the small HTTP servers written in Python.

Strangers can reach these servers, so everything is bounded: connections, the time in which a
request arrives and an answer is taken, and the bytes of all bodies together.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from email.message import Message
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import urlsplit

__all__ = [
    "Admission",
    "Body",
    "ErrorHandler",
    "Handler",
    "Headers",
    "Limits",
    "Reply",
    "Request",
    "Server",
    "listen_failure",
]

_log = logging.getLogger("mooncake.http")

# Bodies up to this length are read even if large bodies have used up the room.
_SMALL_BODY_BYTES = 64 << 10
_READ_BYTES = 1 << 20
_LENGTH_DIGITS_MAX = 18
_LINGER_S = 5.0
# Where the target of a request would be cut off, or split. Between other words spaces are enough.
_CUTS_TARGET = re.compile(rb"[\0-\x1f\x7f#]")
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
# A line of a head without its end: a field, or nothing.
_FIELD_LINE = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\0\r\n]*)?")


Headers: TypeAlias = tuple[tuple[str, str], ...]
# An iterator yields the body in pieces while it is sent; the reply has its length.
Body: TypeAlias = bytes | memoryview | Iterator[bytes]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server.

    Attributes:
        connections: Maximum connections, each of which has a thread. A further one displaces the
            connection that has waited for bytes of its client for the longest time.
        idle_s: Time until the first byte of a further request on a connection.
        head_s: Time for a request without its body, also until the first byte of a new connection.
        body_s: Time for a body or an answer, plus that of its bytes at `bytes_per_s`.
        bytes_per_s: Minimum rate at which a client sends a body and takes an answer.
        bodies_bytes: Bytes of all bodies together.
    """

    connections: int = 256
    idle_s: float = 60.0
    head_s: float = 10.0
    body_s: float = 10.0
    bytes_per_s: float = 256 << 10
    bodies_bytes: int = 512 << 20

    def time_for(self, length: int) -> float:
        """Return the time in which that many bytes must be sent or taken."""
        return self.body_s + length / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        method: For instance ``"GET"``.
        path: Raw path: each byte is a character or an escape.
        query: Raw query string, without the question mark.
        body: Body of the request; empty while its admission is decided.
        headers: Headers by name; the case of a name does not matter.
        peer: Address of the client.
        host: Address of this host that the client connected to.
    """

    method: str
    path: str
    query: str
    body: bytes
    headers: Message = field(default_factory=Message)
    peer: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """A response.

    Attributes:
        status: Status code.
        body: Body of the response; of an iterator `length` is the length of all pieces together.
        kind: Content type.
        headers: Further headers.
        length: Content length where it is not that of the body: of the reply to a HEAD.
    """

    status: int
    body: Body
    kind: str = "application/json"
    headers: Headers = ()
    length: int | None = None

    def content(self) -> bytes:
        """Return the whole body."""
        if isinstance(self.body, Iterator):
            return b"".join(self.body)
        return bytes(self.body)


Handler = Callable[[Request], Reply]
# Called before the body is read: returns its maximum length, or the refusal of the request.
Admission = Callable[[Request], "int | Reply"]
ErrorHandler = Callable[[int, str], Reply]


def listen_failure(host: str, port: int, error: BaseException) -> str:
    """Return in words why a program cannot listen, with the process that holds the port."""
    from mooncake._runtime import _native

    reason = str(error)
    if isinstance(error, OSError) and error.errno is not None:
        # asyncio puts the address into the text; a name that is unknown has a negative number.
        reason = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
    holder = _native.port_holder(port) if 0 < port < 1 << 16 else None
    held = f"; the port is held by {holder}: choose another --port" if holder else ""
    return f"cannot listen at {host}:{port}: {reason}{held}"


def _plain_text_error(status: int, text: str) -> Reply:
    return Reply(status, text.encode(), "text/plain")


@dataclass(slots=True)
class _Connection:
    # Time since which bytes of the client are awaited; None while a request is handled.
    waits_since: float | None


class Server(ThreadingHTTPServer):
    """A server that listens from construction on; each connection has a thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: Handler,
        admission: Admission,
        error_handler: ErrorHandler = _plain_text_error,
        limits: Limits | None = None,
    ) -> None:
        """Listen.

        Args:
            address: Address to listen at; port 0 takes a free port.
            handler: Called for each request, from many threads.
            admission: Called for each request before its body is read; returns the maximum length
                of the body, or the refusal of the request. Longer bodies are refused without being
                read.
            error_handler: Called with status and reason for requests that `handler` does not see,
                and when `handler` fails.
            limits: Limits; None for the defaults.

        Raises:
            OSError: The address cannot be listened at.
        """
        self.handler = handler
        self.admission = admission
        self.error_handler = error_handler
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, _Connection] = {}
        self._bodies_bytes = 0
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
        """Stop accepting connections, and close those without a request in progress.

        The server must have been started.
        """
        self.shutdown()
        self.server_close()
        with self._lock:
            waiting = [s for s, each in self._connections.items() if each.waits_since is not None]
        for connection in waiting:
            _shut_down(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection in a thread of its own, unless all others are busy."""
        if not self._add(request):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._remove(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._remove(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log that a connection broke."""
        del request
        _log.debug("the connection of %s broke", client_address, exc_info=True)

    def note_waiting(self, connection: socket.socket, *, is_waiting: bool) -> None:
        """Record whether bytes of the client are awaited, so that it may be displaced."""
        with self._lock:
            known = self._connections.get(connection)
            if known is not None:
                known.waits_since = time.monotonic() if is_waiting else None

    def take_room(self, length: int) -> bool:
        """Count bytes of a body; return false if there is no room for them."""
        with self._lock:
            if self._bodies_bytes + length > self.limits.bodies_bytes:
                return False
            self._bodies_bytes += length
            return True

    def return_room(self, length: int) -> None:
        """Return what `take_room` counted."""
        with self._lock:
            self._bodies_bytes -= length

    def _add(self, connection: socket.socket) -> bool:
        """Add a connection; return false if there are too many, none of which can be displaced."""
        displaced = None
        with self._lock:
            if len(self._connections) >= self.limits.connections:
                waiting = (
                    (each.waits_since, id(known), known)
                    for known, each in self._connections.items()
                    if each.waits_since is not None
                )
                longest = min(waiting, default=None)
                if longest is None:
                    return False
                displaced = longest[2]
                del self._connections[displaced]
            self._connections[connection] = _Connection(time.monotonic())
        if displaced is not None:
            _shut_down(displaced)
        return True

    def _remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)


def _shut_down(connection: socket.socket) -> None:
    """End a connection, whose thread closes it."""
    with contextlib.suppress(OSError):  # the client has ended it
        connection.shutdown(socket.SHUT_RDWR)


class _TimedReader(io.RawIOBase):
    """Reads from a socket until a deadline for all reads together.

    Without a deadline the first bytes may take `first_s`, and start the time of `head_s`.
    """

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits
        self._first_s = limits.head_s
        self._deadline: float | None = None

    def readable(self) -> bool:
        return True

    def expect_request(self) -> None:
        """Await a further request."""
        self._first_s, self._deadline = self._limits.idle_s, None

    def end_within(self, seconds: float) -> None:
        """Set the deadline of the following reads."""
        self._deadline = time.monotonic() + seconds

    def readinto(self, buffer: Any) -> int:
        if self._deadline is None:
            self._connection.settimeout(self._first_s)
            received = self._connection.recv_into(buffer)
            self.end_within(self._limits.head_s)
            return received
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client sends too slowly")
        self._connection.settimeout(left)
        return self._connection.recv_into(buffer)


class _HeadLines(io.BufferedIOBase):
    """Lines of a head that follow the request line.

    Attributes:
        are_clear: False if a line is none that every server reads alike: it is folded, a space
            precedes its colon, it ends in another way than the request line, or it is cut off.
            Of two servers in a row one could take a part of a body for a request.
    """

    def __init__(self, file: io.BufferedIOBase, request_line: bytes) -> None:
        self._file = file
        self._end = b"\r\n" if request_line.endswith(b"\r\n") else b"\n"
        self.are_clear = True

    def readline(self, size: int | None = -1, /) -> bytes:
        line = self._file.readline(size)
        field_line = line.removesuffix(self._end)
        self.are_clear &= field_line != line and _FIELD_LINE.fullmatch(field_line) is not None
        return line


class _Handler(BaseHTTPRequestHandler):
    server: Server
    raw_requestline: bytes
    protocol_version = "HTTP/1.1"
    # A buffered response is sent as one packet.
    wbufsize = -1
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._reader = _TimedReader(self.connection, self.server.limits)
        self.rfile = io.BufferedReader(self._reader, 1 << 16)

    def handle_one_request(self) -> None:
        super().handle_one_request()
        self.server.note_waiting(self.request, is_waiting=True)
        self._reader.expect_request()

    def parse_request(self) -> bool:
        """Read the head of a request; return false if the request was refused."""
        # The library splits the line also at bytes that are spaces in Latin-1.
        self.raw_requestline = _NOT_ASCII.sub(
            lambda found: b"%%%02X" % found[0][0], self.raw_requestline
        )
        file = self.rfile
        self.rfile = lines = _HeadLines(file, self.raw_requestline)
        try:
            is_read = super().parse_request()
        finally:
            self.rfile = file
        if not is_read:
            return False
        if not lines.are_clear:
            self._refuse_bad("a header cannot be read")
        elif _CUTS_TARGET.search(self.raw_requestline.rstrip(b"\r\n")):
            self._refuse_bad("the path cannot be read: a # in it is written as %23")
        else:
            return True
        return False

    def do_GET(self) -> None:
        self._answer()

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Return the handler of any HTTP method; the library looks it up by name."""
        if name.startswith("do_"):
            return self.do_GET
        raise AttributeError(name)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that cannot be read in the form of all other errors."""
        del explain
        self.close_connection = True
        # A line that is no request has no command yet.
        self.command = getattr(self, "command", None) or "GET"
        # A reply to the version that is assumed until a request is read would have no headers.
        self.request_version = self.protocol_version
        self._reply(self._failed(code, message or HTTPStatus(code).phrase))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _log.debug(format, *args)

    def _answer(self) -> None:
        lengths = set(self.headers.get_all("Content-Length", []))
        is_coded = "Transfer-Encoding" in self.headers
        if len(lengths) + is_coded > 1:
            self._refuse_bad("the length of the body is given in two ways")
            return
        text = lengths.pop() if lengths else "0"
        if not (text.isascii() and text.isdecimal()):
            self._refuse_bad("Content-Length must be a number")
            return
        length = int(text) if len(text) <= _LENGTH_DIGITS_MAX else 10**_LENGTH_DIGITS_MAX
        try:
            target = urlsplit(self.path)
        except ValueError:
            self._refuse_bad("the path cannot be read")
            return
        request = Request(
            self.command,
            target.path,
            target.query,
            b"",
            self.headers,
            str(self.client_address[0]),
            str(self.connection.getsockname()[0]),
        )
        admitted = self.server.admission(request)
        if isinstance(admitted, Reply):
            self._refuse(admitted)
            return
        if length > admitted:
            large = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            self._refuse(self._failed(large, "the body is too large"))
            return
        if is_coded:
            required = HTTPStatus.LENGTH_REQUIRED
            self._refuse(self._failed(required, "a Content-Length is required"))
            return
        self._answer_admitted(request, length)

    def _answer_admitted(self, request: Request, length: int) -> None:
        body = bytearray()
        taken = 0
        self._reader.end_within(self.server.limits.time_for(length))
        try:
            while len(body) < length:
                part = self.rfile.read1(min(length - len(body), _READ_BYTES))
                if not part:
                    self.close_connection = True
                    return
                body += part
                if len(body) > _SMALL_BODY_BYTES:
                    if not self.server.take_room(len(body) - taken):
                        busy = HTTPStatus.SERVICE_UNAVAILABLE
                        text = "too many large bodies are being sent; try again"
                        self._refuse(self._failed(busy, text))
                        return
                    taken = len(body)
            self.server.note_waiting(self.request, is_waiting=False)
            reply = self._handled(replace(request, body=bytes(body)))
        finally:
            self.server.return_room(taken)
        self._reply(reply)

    def _handled(self, request: Request) -> Reply:
        try:
            return self.server.handler(request)
        except Exception:  # noqa: BLE001
            _log.exception("%s %s failed", self.command, self.path)
            return self._failed(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error")

    def _failed(self, status: int, text: str) -> Reply:
        return self.server.error_handler(status, text)

    def _refuse_bad(self, text: str) -> None:
        self._refuse(self._failed(HTTPStatus.BAD_REQUEST, text))

    def _refuse(self, refusal: Reply) -> None:
        """Refuse a request without reading its body, and close the connection after it.

        An unread body would be parsed as the next request.
        """
        self.close_connection = True
        self._reply(refusal)
        # Drain the body for a while: a client that is still sending would get a reset before it
        # reads the response.
        self.server.note_waiting(self.request, is_waiting=True)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._reader.end_within(_LINGER_S)
            while self.rfile.read1(_READ_BYTES):
                pass

    def _reply(self, reply: Reply) -> None:
        self.send_response(reply.status)
        # A reply without content has neither type nor length.
        if reply.status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            length = len(reply.content()) if reply.length is None else reply.length
            self.send_header("Content-Type", reply.kind)
            self.send_header("Content-Length", str(length))
        for name, value in reply.headers:
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            self._send(b"")
        elif isinstance(reply.body, Iterator):
            self._send_pieces(reply.body)
        else:
            self._send(reply.body)

    def _send(self, body: bytes | memoryview) -> None:
        # The time-out of `sendall` is that of the whole; the buffer would send in parts.
        self.connection.settimeout(self.server.limits.time_for(len(body)))
        if len(body) > _SMALL_BODY_BYTES:
            self.wfile.flush()
            self.connection.sendall(body)
        else:
            self.wfile.write(body)
            self.wfile.flush()

    def _send_pieces(self, pieces: Iterator[bytes]) -> None:
        """Send a body in pieces, each within its time; a failure cuts the body off."""
        try:
            for piece in pieces:
                self._send(piece)
        except Exception as error:
            # The headers are sent: a connection that ends early tells the client.
            self.close_connection = True
            if isinstance(error, OSError):
                raise
            _log.warning("%s %s was cut off: %s", self.command, self.path, error)
