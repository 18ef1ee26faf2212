"""A stand-alone HTTP metadata server, for transfer engines without a master."""

from __future__ import annotations

import argparse
import hmac
import logging
import signal
import threading
from enum import Enum
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

from mooncake._http import Reply, Request, Server, listen_failure
from mooncake._standard_streams import open_closed_streams

__all__ = ["KVBootstrapServer", "KVPoll", "main"]

_VALUE_BYTES_MAX: Final = 16 << 20
_OTHER_BYTES_MAX: Final = 1 << 16
_KEY_BYTES_MAX: Final = 4096
_KEYS_MAX: Final = 1 << 20
# Engines with a transfer token send it with what they write about themselves.
_OWNER: Final = "X-Mooncake-Owner"
_OWNED: Final = b"the entry belongs to engines with a transfer token"
_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_log = logging.getLogger("mooncake.http_metadata_server")


class KVPoll(Enum):
    """State of a server, in upstream's words; only the first and the last occur."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """Serves ``/metadata?key=…`` with GET, PUT and DELETE.

    Attributes:
        store: Values by key.
        port: Port to listen at; after `run` the actual port if 0 was requested.
    """

    def __init__(self, port: int, host: str = "0.0.0.0") -> None:
        """Make a server that does not listen yet.

        Args:
            port: Port to listen at; 0 takes a free port.
            host: Address to listen at.
        """
        self.port = port
        self.host = host
        self.store: dict[str, bytes] = {}
        # Owners of the entries that were written with one; only they change and remove them.
        self._owners: dict[str, str] = {}
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._thread: threading.Thread | None = None

    def run(self) -> threading.Thread:
        """Start serving, and return the thread that serves.

        If the address cannot be listened at, an error is logged, the thread ends, and `poll`
        returns Failed.
        """
        try:
            self._server = Server((self.host, self.port), self._answer, _admit)
        except (OSError, OverflowError) as error:
            _log.error("%s", listen_failure(self.host, self.port, error))
            self._thread = threading.Thread(target=lambda: None, daemon=True)
            self._thread.start()
            self._thread.join()
        else:
            self.port = self._server.port
            self._thread = self._server.start("mooncake-metadata")
        return self._thread

    def close(self) -> None:
        """Stop serving. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> KVPoll:
        """Return Success while the server runs, else Failed."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return KVPoll.Success if is_alive else KVPoll.Failed

    def _answer(self, request: Request) -> Reply:
        if request.path != "/metadata":
            return Reply(HTTPStatus.NOT_FOUND, b"404: Not Found")
        query = parse_qs(request.query, keep_blank_values=True, errors="surrogateescape")
        key = query.get("key", [""])[0]
        if not key:
            return Reply(HTTPStatus.BAD_REQUEST, b"metadata key is required")
        if len(key) > _KEY_BYTES_MAX:
            return Reply(HTTPStatus.BAD_REQUEST, b"metadata key is too long")
        match request.method:
            case "GET":
                value = self.store.get(key)
                if value is None:
                    return Reply(HTTPStatus.NOT_FOUND, b"metadata not found")
                return Reply(HTTPStatus.OK, value)
            case "PUT":
                return self._put(key, request.body, request.headers.get(_OWNER, ""))
            case "DELETE":
                return self._delete(key, request.headers.get(_OWNER, ""))
        return Reply(HTTPStatus.METHOD_NOT_ALLOWED, b"405: Method Not Allowed")

    def _put(self, key: str, value: bytes, owner: str) -> Reply:
        with self._lock:
            if not self._is_open_to(key, owner):
                return Reply(HTTPStatus.FORBIDDEN, _OWNED)
            old = self.store.get(key)
            if old is not None and "rpc_meta" in key:
                # The address of a live engine must not be overwritten by another engine.
                if old == value:
                    return Reply(HTTPStatus.OK, b"metadata unchanged")
                return Reply(HTTPStatus.BAD_REQUEST, b"Duplicate rpc_meta key not allowed")
            if old is None and len(self.store) >= _KEYS_MAX:
                return Reply(HTTPStatus.INSUFFICIENT_STORAGE, b"too many keys")
            self.store[key] = value
            if owner:
                self._owners[key] = owner
            return Reply(HTTPStatus.OK, b"metadata updated")

    def _is_open_to(self, key: str, owner: str) -> bool:
        own = self._owners.get(key)
        return own is None or hmac.compare_digest(own.encode(), owner.encode())

    def _delete(self, key: str, owner: str) -> Reply:
        with self._lock:
            if not self._is_open_to(key, owner):
                return Reply(HTTPStatus.FORBIDDEN, _OWNED)
            self._owners.pop(key, None)
            if self.store.pop(key, None) is None:
                return Reply(HTTPStatus.NOT_FOUND, b"metadata not found")
            return Reply(HTTPStatus.OK, b"metadata deleted")


def _admit(request: Request) -> int:
    return _VALUE_BYTES_MAX if request.method == "PUT" else _OTHER_BYTES_MAX


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command.

    Args:
        arguments: Arguments of the command; None takes the command line.
    """
    parser = argparse.ArgumentParser(
        prog="mooncake_http_metadata_server", description="A metadata server for transfer engines."
    )
    parser.add_argument(
        "--port", type=int, default=8080, help="port to listen at; 0 takes a free port"
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen at")
    parser.add_argument("--log-level", default="INFO", choices=_LEVELS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code.

    Args:
        arguments: Arguments of the command; None takes the command line.
    """
    open_closed_streams()
    options = parse_args(arguments)
    logging.basicConfig(level=options.log_level)
    stops = (signal.SIGINT, signal.SIGTERM)
    for number in stops:
        # A shell lets commands that it runs in the background ignore SIGINT.
        signal.signal(number, lambda *_: None)
    # Threads inherit it. A handler that runs as the wait begins would not end the wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    server = KVBootstrapServer(options.port, options.host)
    server.run()
    if server.poll() is not KVPoll.Success:
        return 1
    _log.info("serving http://%s:%s/metadata", server.host, server.port)
    signal.sigwait(stops)
    server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
