"""Several masters in processes of their own, of which a lease service elects one."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from conftest import MasterProcess, start_master

T = TypeVar("T")
LEASE_S = 2
# A limit for what takes a few seconds on an idle machine.
DEADLINE_S = 60


@dataclass
class Member:
    """A master with a port and a state directory of its own, which can be started again."""

    port: int
    state: Path
    flags: list[str]
    host: str = "127.0.0.1"
    within: Sequence[str] = ()
    master: MasterProcess | None = None
    advertised: str = ""
    """The address that it tells others, if it is not its own."""

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def running(self) -> MasterProcess:
        assert self.master is not None
        return self.master

    @property
    def pid(self) -> int:
        return self.running.process.pid

    def start(self, *more: str) -> None:
        advertised = self.advertised or self.address
        flags = [f"--rpc_port={self.port}", f"--advertise_address={advertised}"]
        flags += [f"--metrics_host={self.host}", f"--state_dir={self.state}", *self.flags]
        self.master = start_master(*flags, *more, host=self.host, within=self.within)

    def kill(self) -> None:
        self.running.kill()
        self.master = None

    def stop(self) -> None:
        if self.master is not None:
            self.master.process.kill()
            self.master.stop()
            self.master = None

    def page(self, path: str, *, method: str = "GET", timeout_s: float = 2) -> tuple[int, bytes]:
        """Ask the admin port; return the status, 0 if nobody answers, and the content."""
        if self.master is None:
            return 0, b""
        request = urllib.request.Request(f"{self.running.admin}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()
        except (OSError, http.client.HTTPException):
            return 0, b""

    def status(self) -> dict[str, Any]:
        """Return what the master says of itself, nothing if it does not answer."""
        code, content = self.page("/api/v1/ha")
        told: dict[str, Any] = json.loads(content) if code == 200 else {}
        return told

    @property
    def leads(self) -> bool:
        return self.status().get("state") == "serving"


@dataclass
class Masters:
    """The masters of a cluster, and the address by which clients find the leader."""

    place: str
    members: list[Member] = field(default_factory=list)

    def leader(self, *, but: Sequence[Member] = (), within_s: float = DEADLINE_S) -> Member:
        """Wait until a master serves that is not one of those named."""
        others = [member for member in self.members if member not in but]
        return awaited(
            lambda: next((member for member in others if member.leads), None), self, within_s
        )

    def in_sync(self, count: int, *, within_s: float = DEADLINE_S) -> Member:
        """Wait until a leader has that many members in sync, itself included."""

        def seen() -> Member | None:
            for member in self.members:
                told = member.status()
                if told.get("state") == "serving":
                    near = sum(row["is_in_sync"] for row in told["standbys"])
                    return member if near + 1 == count == len(told["in_sync"]) else None
            return None

        return awaited(seen, self, within_s)

    def start_all(self) -> None:
        """Start the members that do not run."""
        for member in self.members:
            if member.master is None:
                member.start()

    def __str__(self) -> str:
        return "\n".join(f"{member.address}: {member.status()}" for member in self.members)


def awaited(condition: Callable[[], T | None], what: object, within_s: float = DEADLINE_S) -> T:
    """Wait until a condition returns something true, and return that."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {within_s} s:\n{what}"
        time.sleep(0.02)
    return found


@contextmanager
def elected_masters(
    service: str,
    folder: Path,
    *flags: str,
    hosts: Sequence[tuple[str, Sequence[str]]] = (("127.0.0.1", ()),) * 2,
    started: int | None = None,
    has_list: bool = False,
) -> Iterator[Masters]:
    """Run masters that a lease service elects, until the block ends; all are in sync at first.

    Args:
        service: Address of the lease service, which is the one for clients as well.
        folder: Place of the state directories.
        flags: More options of the masters.
        hosts: Address of each master, and what begins the command line there.
        started: Number of masters that run at first.
        has_list: Clients ask the masters themselves for the leader, not the service.
    """
    kind, _, place = service.partition("://")
    options = [f"--ha_backend_type={kind}", f"--ha_backend_connstring={place}"]
    options += ["--enable_ha=true", f"--ha_lease_ttl={LEASE_S}s", f"--in_sync_copies={len(hosts)}"]
    members = [
        Member(port, folder / str(port), [*options, *flags], host, within)
        for port, (host, within) in zip(distinct_ports(len(hosts)), hosts, strict=True)
    ]
    masters = Masters(",".join(m.address for m in members) if has_list else service, members)
    with ExitStack() as stack:
        for member in members:
            stack.callback(member.stop)
        for member in members[:started]:
            member.start()
        masters.in_sync(started or len(members))
        yield masters


def distinct_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in sockets]
