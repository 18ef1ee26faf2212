"""A metadata server of its own: small texts under names, for transfer engines without a master."""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from enum import Enum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import parse_qs, urlsplit

__all__ = ["KVBootstrapServer", "KVPoll", "main"]

_VALUE_BYTES_MAX: Final = 16 << 20
_KEY_BYTES_MAX: Final = 4096
_KEYS_MAX: Final = 1 << 20
_IDLE_S: Final = 60.0
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_log = logging.getLogger("mooncake.http_metadata_server")


class KVPoll(Enum):
    """How a server stands, in the established words; only the first and the last occur."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """Serves ``/metadata?key=…`` with GET, PUT and DELETE.

    Attributes:
        store: What it keeps: values by key.
        port: Where it listens; after `run` the port that was taken if 0 was asked for.
    """

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        """Make a server that does not listen yet.

        Args:
            port: Where to listen; 0 takes any free port.
            host: The address to listen at.
        """
        self.port = port
        self.host = host
        self.store: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> threading.Thread:
        """Begin to serve, and return the thread that does.

        A server that cannot listen says so in the log; its thread ends, and `poll` says Failed.
        """
        try:
            self._server = _Server((self.host, self.port), self)
        except (OSError, OverflowError) as error:
            _log.error("cannot listen at %s:%s: %s", self.host, self.port, error)
            self._thread = threading.Thread(target=lambda: None, daemon=True)
        else:
            self.port = self._server.server_address[1]
            self._thread = threading.Thread(
                target=self._server.serve_forever, name="mooncake-metadata", daemon=True
            )
        self._thread.start()
        if self._server is None:
            self._thread.join()
        return self._thread

    def close(self) -> None:
        """Stop serving. Closing again does nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> KVPoll:
        """Say whether it serves."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return KVPoll.Success if is_alive else KVPoll.Failed

    def _put(self, key: str, value: bytes) -> tuple[HTTPStatus, bytes]:
        with self._lock:
            old = self.store.get(key)
            if old is not None and "rpc_meta" in key:
                # The address of a live engine must not be taken by another.
                if old == value:
                    return HTTPStatus.OK, b"metadata unchanged"
                return HTTPStatus.BAD_REQUEST, b"Duplicate rpc_meta key not allowed"
            if old is None and len(self.store) >= _KEYS_MAX:
                return HTTPStatus.INSUFFICIENT_STORAGE, b"too many keys"
            self.store[key] = value
            return HTTPStatus.OK, b"metadata updated"

    def _delete(self, key: str) -> tuple[HTTPStatus, bytes]:
        with self._lock:
            if self.store.pop(key, None) is None:
                return HTTPStatus.NOT_FOUND, b"metadata not found"
            return HTTPStatus.OK, b"metadata deleted"

    def _get(self, key: str) -> tuple[HTTPStatus, bytes]:
        value = self.store.get(key)
        if value is None:
            return HTTPStatus.NOT_FOUND, b"metadata not found"
        return HTTPStatus.OK, value


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: KVBootstrapServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    # One answer is one packet.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        _log.debug(format, *args)

    def _answer(self, method: str) -> None:
        body = self._body()
        if body is None:
            return
        url = urlsplit(self.path)
        key = parse_qs(url.query, keep_blank_values=True, errors="surrogateescape").get("key", [""])
        owner = self.server.owner
        if url.path != "/metadata":
            self._reply(HTTPStatus.NOT_FOUND, b"404: Not Found")
        elif not key[0]:
            self._reply(HTTPStatus.BAD_REQUEST, b"metadata key is required")
        elif len(key[0]) > _KEY_BYTES_MAX:
            self._reply(HTTPStatus.BAD_REQUEST, b"metadata key is too long")
        elif method == "PUT":
            self._reply(*owner._put(key[0], body))
        elif method == "DELETE":
            self._reply(*owner._delete(key[0]))
        else:
            self._reply(*owner._get(key[0]))

    def _body(self) -> bytes | None:
        """Read the body, or refuse it and end the connection."""
        text = self.headers.get("Content-Length", "0")
        length = int(text) if text.isdecimal() else -1
        if 0 <= length <= _VALUE_BYTES_MAX and "Transfer-Encoding" not in self.headers:
            return self.rfile.read(length)
        self.close_connection = True
        if length > _VALUE_BYTES_MAX:
            self._reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"the value is too large")
        else:
            self._reply(HTTPStatus.LENGTH_REQUIRED, b"a Content-Length is required")
        return None

    def _reply(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Args:
        arguments: The command line; None takes that of the process.
    """
    parser = argparse.ArgumentParser(
        prog="mooncake_http_metadata_server", description="A metadata server for transfer engines."
    )
    parser.add_argument("--port", type=int, default=8080, help="where to listen; 0: any free port")
    parser.add_argument("--host", default="0.0.0.0", help="the address to listen at")
    parser.add_argument("--log-level", default="INFO", choices=_LEVELS)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=options.log_level)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    server = KVBootstrapServer(options.port, options.host)
    server.run()
    if server.poll() is not KVPoll.Success:
        return 1
    _log.info("serving http://%s:%s/metadata", server.host, server.port)
    stop.wait()
    server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
