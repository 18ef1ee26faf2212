"""A TCP proxy that changes one bit of what a leader sends to a standby, whenever it is asked."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress
from typing import Self

# The first bytes of the connection of a standby.
STANDBY = b"MOONSTBY"


class FlippingProxy:
    """Forwards connections to a port. Damages a marker in the stream of a leader to a standby.

    Example:
        >>> with FlippingProxy(50051) as proxy:
        ...     proxy.damage(b"marker")
    """

    def __init__(self, to: int) -> None:
        """Begin to listen at a free port.

        Args:
            to: Port of the leader on this host.
        """
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._marker = b""
        self._sockets = ExitStack()
        self.damaged = 0
        """Bytes that were changed."""

    def damage(self, marker: bytes) -> None:
        """Change one bit of the next marker that a leader sends."""
        with self._lock:
            self._marker = marker

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._lock:
            self._sockets.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._to))
        except OSError:
            client.close()
            return
        with self._lock:
            self._sockets.enter_context(client)
            self._sockets.enter_context(server)
        first = client.recv(1 << 16)
        server.sendall(first)
        is_standby = first.startswith(STANDBY)
        args = (server, client, is_standby)
        threading.Thread(target=self._forward, args=args, daemon=True).start()
        self._forward(client, server, is_damaged=False)

    def _forward(self, source: socket.socket, to: socket.socket, is_damaged: bool) -> None:
        """Forward one direction, and end both with it."""
        try:
            while data := source.recv(1 << 20):
                to.sendall(self._damaged(data) if is_damaged else data)
        except OSError:
            pass
        for each in (source, to):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytes) -> bytes:
        with self._lock:
            at = data.find(self._marker) if self._marker else -1
            if at < 0:
                return data
            self._marker = b""
            self.damaged += 1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
