"""Admin ports of several masters: answers as `mooncake_master --enable_ha` gives them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

NOT_SERVING = {"error_code": -1011, "error_message": "service plane is not active"}


class Masters:
    """Masters at 127.0.0.1, 127.0.0.2, …, with the same admin port.

    Attributes:
        leader: Index of the leader; None without one.
        view: Number of the view.
        in_sync: Indices of the members that have everything.
        away: Indices of standbys that have lost their connection to the leader.
        lags: Bytes of the log that a standby lacks, by index.
        service_error: Why the lease service cannot be used.
        token: Token that changes need; empty: none.
        port: Admin port of all masters.
        rpc_port: Port for clients of all masters.
        is_enabled: Whether they run with ``--enable_ha``.
        asked: Method and path of each request, by index.
        more: Further pages of the leader, by path.
    """

    def __init__(self, count: int, hosts: str = "127.0.0.", first: int = 1) -> None:
        self.count = count
        self.hosts, self.first = hosts, first
        self.leader: int | None = 0
        self.view = 7
        self.in_sync = set(range(count))
        self.away = set[int]()
        self.lags: dict[int, int] = {}
        self.state = "serving"
        self.service_error: str | None = None
        self.token = ""
        self.port = 0
        self.rpc_port = 50051
        self.is_enabled = True
        self.more: dict[str, Any] = {}
        self.asked: list[tuple[int, str, str]] = []

    def address(self, index: int) -> str:
        return f"{self.hosts}{self.first + index}:{self.rpc_port}"

    def admin(self, index: int) -> str:
        return f"127.0.0.{index + 1}:{self.port}"

    def seen(self, index: int) -> dict[str, Any]:
        """The answer of a master to `/api/v1/ha`."""
        if not self.is_enabled:
            return {"enabled": False}
        is_leader = index == self.leader
        is_in_sync = index in self.in_sync
        others = [each for each in range(self.count) if each != index]
        return {
            "enabled": True,
            "role": "leader" if is_leader else "standby",
            "state": self.state if is_leader else "standby",
            "cluster_id": "mooncake_cluster",
            "backend": "etcd://10.0.0.1:2379",
            "member": f"m{index}",
            "address": self.address(index),
            "leader_address": None if self.leader is None else self.address(self.leader),
            "view_version": None if self.leader is None else self.view,
            "promotable": is_in_sync,
            "reasons": [] if is_in_sync else ["it is not in sync"],
            "in_sync": [f"m{each}" for each in sorted(self.in_sync)],
            "standbys": [self._standby(each) for each in others] if is_leader else [],
            "lease_ms": 3300 if is_leader else None,
            "service_error": self.service_error,
        }

    def _standby(self, index: int) -> dict[str, Any]:
        return {
            "member": f"m{index}",
            "address": self.address(index),
            "is_attached": index not in self.away,
            "is_in_sync": index in self.in_sync,
            "lag_bytes": self.lags.get(index, 0),
            "silent_ms": 3,
        }

    def answer(self, index: int, method: str, target: str, token: str) -> tuple[int, Any]:
        """The answer to a request."""
        self.asked.append((index, method, target))
        parts = urlsplit(target)
        if (method, parts.path) == ("GET", "/api/v1/ha"):
            return 200, self.seen(index)
        if index != self.leader:
            return 503, NOT_SERVING
        if (method, parts.path) == ("POST", "/api/v1/handover"):
            if token != self.token:
                text = "changes need the admin token, except from this host"
                return 403, {"error_code": -601, "error_message": text}
            return self._hand_over(parse_qs(parts.query).get("to", [""])[0])
        if method == "GET" and parts.path in self.more:
            return 200, self.more[parts.path]
        return 404, {"error_code": -704, "error_message": "there is no such thing"}

    def _hand_over(self, to: str) -> tuple[int, Any]:
        names = {self.address(each): each for each in self.in_sync if each != self.leader}
        if not names or (to and to not in names):
            text = f"{to} cannot lead" if to else "no standby is in sync"
            return 409, {"error_code": -1010, "error_message": text}
        self.leader = names[to] if to else min(names.values())
        self.view += 1
        return 200, {"leader_address": self.address(self.leader), "view_version": self.view}


@contextmanager
def running(count: int) -> Iterator[Masters]:
    """Serve the admin ports of so many masters."""
    masters = Masters(count)
    with ExitStack() as stack:
        for index in range(count):
            serve(stack, masters, index)
        yield masters


def serve(stack: ExitStack, masters: Masters, index: int) -> None:
    """Serve the admin port of a master until the stack is closed."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply("GET")

        def do_POST(self) -> None:
            self.reply("POST")

        def reply(self, method: str) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, value = masters.answer(index, method, self.path, token)
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer((f"127.0.0.{index + 1}", masters.port), Handler)
    masters.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
