"""Measures what a standby costs, and how soon clients go on after the leader is killed.

    VENV/bin/python benches/programs/failover.py [--kills 20] [--objects 1000000] [--plot FILE]
    VENV/bin/python benches/programs/failover.py --join [--objects 1000000] [--rate 2000]

Needs `etcd` on the path. Puts, gets and probes at two single masters and at a leader with a standby
take turns, so that other load on the machine affects all alike. The bound of a put of 4 KiB is that
of a single master and two round trips over TCP between two processes that sleep meanwhile. `--plot`
draws the ratios.

Then, for each duration of the lease, in a pool that is half full and in one that is full, the
leader of two masters is killed with SIGKILL while 8 clients put objects of 4 KiB and get others.
Printed is the time from the kill to the end of the first good get and of the first good put that
began after it, of the client that is first and of the one that is last: median and slowest of all
kills. The masters have the default of `--log_sync`.

`--join` measures instead how long an empty standby takes until it is in sync with a leader that has
many objects and gets puts of 64 bytes meanwhile, and what these puts take before and meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bars

import mooncake

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Event

MIB = 1 << 20
CLIENTS = 8
SMALL, SIZE = 64, 4096
BATCH = 10_000
PAUSE_S = 0.005
"""Between two calls of a client, so that the clients leave the processors to the masters."""
TURNS, CALLS = 9, 200
PUTTERS = 2
"""Processes that put while a standby joins."""
BEFORE_S = 10
"""Duration of the puts before the standby starts."""
DEADLINE_S = 120


@dataclass
class Master:
    """A master that can be killed and started again."""

    state: Path
    port: int
    options: tuple[str, ...]
    process: subprocess.Popen[str] | None = None
    admin: str = ""

    def start(self) -> None:
        ports = ("--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_port=0")
        words = (*ports, f"--state_dir={self.state}", *self.options)
        command = [sys.executable, "-m", "mooncake.cli", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r" ready .*admin=\S+:(\d+)", line):
                self.admin = f"http://127.0.0.1:{found[1]}"
                return
        raise SystemExit("a master did not start")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def status(self) -> dict[str, Any]:
        """Return what the master says of itself, nothing if it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.admin}/api/v1/ha", timeout=2) as answer:
                told: dict[str, Any] = json.load(answer)
                return told
        except OSError:
            return {}


def leader_in_sync(masters: list[Master]) -> Master:
    """Wait until one of two masters leads, and the other one could."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for master in masters:
            told = master.status()
            standbys = [row["is_in_sync"] for row in told.get("standbys", ())]
            if told.get("state") == "serving" and len(told["in_sync"]) == 2 and standbys == [True]:
                return master
        time.sleep(0.02)
    raise SystemExit(f"no standby in sync: {[master.status() for master in masters]}")


def wait_until_serving(master: Master) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while master.status().get("state") != "serving":
        if time.monotonic() > deadline:
            raise SystemExit(f"the master does not lead: {master.status()}")
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [server.getsockname()[1] for server in sockets]


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[str]:
    """Run etcd, and yield its address once it answers."""
    own, peer = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    words = [
        f"--data-dir={folder}",
        f"--listen-client-urls={own}",
        f"--advertise-client-urls={own}",
    ]
    words += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
    words += [f"--initial-cluster=default={peer}", "--log-level=error"]
    process = subprocess.Popen(["etcd", *words], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{own}/health", timeout=2):
                break
            time.sleep(0.05)
        yield own.removeprefix("http://")
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def two_masters(
    folder: Path, service: str, lease_s: float, started: int = 2
) -> Iterator[list[Master]]:
    """Run two masters of a cluster of their own. Clients are told so by the environment.

    Args:
        folder: Place of the state directories.
        service: Address of etcd.
        lease_s: Duration of the lease.
        started: Number of masters that run at first.
    """
    options = (
        "--enable_ha=true",
        f"--etcd_endpoints={service}",
        f"--ha_lease_ttl={lease_s * 1000:.0f}ms",
        f"--cluster_id={folder.name}",
    )
    os.environ["MC_STORE_CLUSTER_ID"] = folder.name
    masters = [
        Master(folder / str(port), port, (*options, f"--advertise_address=127.0.0.1:{port}"))
        for port in free_ports(2)
    ]
    try:
        for master in masters[:started]:
            master.start()
        if started == 2:
            leader_in_sync(masters)
        else:
            wait_until_serving(masters[0])
        yield masters
    finally:
        for master in masters:
            master.kill()


@dataclass
class Client:
    """A store whose threads put and get, and what they found after the last kill."""

    store: mooncake.Store
    number: int
    objects: int
    killed: float | None = None
    first_s: dict[str, float] = field(default_factory=dict)
    failed: int = 0

    def put(self, chance: random.Random) -> bool:
        key = f"c{self.number} {chance.randrange(1000)}"
        return self.store.put(key, bytes(SIZE), overwrite=True)

    def get(self, chance: random.Random) -> bool:
        # In a full pool some objects have been evicted: their absence is an answer as well.
        return self.store.get(f"k{chance.randrange(self.objects)}", None) != b""

    def run(self, verb: str, is_over: threading.Event) -> None:
        chance, call = random.Random(self.number), getattr(self, verb)
        while not is_over.wait(PAUSE_S):
            begun = time.monotonic()
            try:
                is_good = call(chance)
            except mooncake.MooncakeError:
                is_good = False
            killed = self.killed
            if not is_good:
                self.failed += 1
            elif killed is not None and begun > killed and verb not in self.first_s:
                self.first_s[verb] = time.monotonic() - killed


def fill(store: mooncake.Store, objects: int) -> None:
    for begin in range(0, objects, BATCH):
        names = range(begin, min(begin + BATCH, objects))
        store.put_many({f"k{name}": bytes(SMALL) for name in names})


def kills(options: argparse.Namespace, service: str, lease_s: float, is_full: bool) -> None:
    """Kill the leader often, and print a row for gets and a row for puts."""
    rows: list[dict[str, list[float]]] = []
    failed = 0
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    with two_masters(folder, service, lease_s) as masters, ExitStack() as stack:
        place = f"etcd://{service}"
        filled = options.objects * SMALL
        # In a pool of the size of the objects, the puts of the clients evict some.
        lent = filled if is_full else 2 * (filled + CLIENTS * 1000 * SIZE)
        config = mooncake.StoreConfig(segment_bytes=lent)
        store = stack.enter_context(mooncake.Store(place, config))
        fill(store, options.objects)
        clients = [
            Client(stack.enter_context(mooncake.Store(place)), number, options.objects)
            for number in range(CLIENTS)
        ]
        is_over = threading.Event()
        runs = [(client.run, (verb, is_over)) for client in clients for verb in ("get", "put")]
        threads = [threading.Thread(target=run, args=words) for run, words in runs]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(is_over.set)
        for _ in range(options.kills):
            leader = leader_in_sync(masters)
            time.sleep(random.random() * lease_s / 3)
            for client in clients:
                client.killed, client.first_s = None, {}
            assert leader.process is not None
            killed = time.monotonic()
            leader.process.kill()
            for client in clients:
                client.killed = killed
            while not all(len(client.first_s) == 2 for client in clients):
                if time.monotonic() > killed + DEADLINE_S:
                    raise SystemExit("a client does not go on")
                time.sleep(0.01)
            rows.append({v: [c.first_s[v] for c in clients] for v in ("get", "put")})
            leader.kill()
            leader.start()
        failed = sum(client.failed for client in clients)
    for verb in ("get", "put"):
        first = [min(row[verb]) for row in rows]
        last = [max(row[verb]) for row in rows]
        cells = [f"{lease_s:g} s", "full" if is_full else "half full", verb]
        cells += [f"{statistics.median(times):.2f} | {max(times):.2f}" for times in (first, last)]
        print(f"| {' | '.join(cells)} | {failed} |", flush=True)


def put_at_rate(
    place: str, rate: float, seed: int, is_over: Event, results: Queue[list[tuple[float, float]]]
) -> None:
    """Put objects in a process of its own; return when each put began and how long it took."""
    chance, calls = random.Random(seed), []
    with mooncake.Store(place) as store:
        due = time.monotonic()
        while not is_over.is_set():
            # A put that is late makes the next ones no rarer.
            due += 1 / rate
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            begun = time.monotonic()
            store.put(f"p{seed} {chance.randrange(10_000)}", bytes(SMALL), overwrite=True)
            calls.append((begun, time.monotonic() - begun))
    results.put(calls)


def join(options: argparse.Namespace, service: str) -> None:
    """Start an empty standby while others put, and print a row."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    place = f"etcd://{service}"
    with two_masters(folder, service, 5, started=1) as masters, ExitStack() as stack:
        lent = 2 * options.objects * SMALL + 64 * MIB
        store = stack.enter_context(mooncake.Store(place, mooncake.StoreConfig(segment_bytes=lent)))
        fill(store, options.objects)
        spawn = multiprocessing.get_context("spawn")
        is_over, results = spawn.Event(), spawn.Queue()
        each = options.rate / PUTTERS
        putters = [
            spawn.Process(target=put_at_rate, args=(place, each, number, is_over, results))
            for number in range(PUTTERS)
        ]
        for putter in putters:
            putter.start()
            stack.callback(putter.join)
        stack.callback(is_over.set)
        # The first puts warm up.
        time.sleep(BEFORE_S + 2)
        begun = time.monotonic()
        masters[1].start()
        started = time.monotonic()
        leader_in_sync(masters)
        ended = time.monotonic()
        is_over.set()
        calls = [call for _ in putters for call in results.get(timeout=DEADLINE_S)]
    before = [took for at, took in calls if begun - BEFORE_S < at < begun]
    meanwhile = [took for at, took in calls if begun < at < ended]
    print(
        "| objects | in sync s | start s | puts/s before | p99 ms | meanwhile | p99 ms | max ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    p99 = [statistics.quantiles(times, n=100)[98] * 1000 for times in (before, meanwhile)]
    cells = [str(options.objects), f"{ended - begun:.2f}", f"{started - begun:.2f}"]
    cells += [f"{len(before) / BEFORE_S:.0f}", f"{p99[0]:.2f}"]
    cells += [f"{len(meanwhile) / (ended - begun):.0f}", f"{p99[1]:.2f}"]
    cells += [f"{max(meanwhile) * 1000:.1f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while message := connection.recv(64):
        connection.sendall(message)


@contextlib.contextmanager
def peer() -> Iterator[Callable[[], object]]:
    """Yield a call that waits for a round trip over TCP to a process that sleeps meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = multiprocessing.get_context("fork").Process(target=echo, args=(server,))
        process.start()
        with socket.create_connection(server.getsockname()) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def round_trip() -> object:
                connection.sendall(b"x" * 64)
                return connection.recv(64)

            yield round_trip
        process.join()


def timed(call: Callable[[], object], times: list[float]) -> None:
    for _ in range(CALLS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)


def calls_of(store: mooncake.Store) -> dict[str, Callable[[], object]]:
    small, large = bytes(SIZE), bytes(MIB)
    store.put("small", small)
    return {
        "put 4 KiB": lambda: store.put("a", small, overwrite=True),
        "put 1 MiB": lambda: store.put("b", large, overwrite=True),
        "get 4 KiB": lambda: store.get("small"),
        "exists": lambda: store.exists("small"),
    }


def costs(options: argparse.Namespace, service: str) -> dict[str, float]:
    """Print a table of calls with and without a standby; return the ratios of the medians."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    times: dict[tuple[str, str], list[float]] = {}
    with peer() as round_trip, ExitStack() as stack:
        stack.enter_context(two_masters(folder, service, 5))
        config = mooncake.StoreConfig(segment_bytes=256 * MIB)
        sides = {"standby": stack.enter_context(mooncake.Store(f"etcd://{service}", config))}
        for name, port in zip(("single", "another"), free_ports(2), strict=True):
            master = Master(folder / name, port, ())
            master.start()
            stack.callback(master.kill)
            sides[name] = stack.enter_context(mooncake.Store(f"127.0.0.1:{port}", config))
        calls = {name: calls_of(store) for name, store in sides.items()}
        for turn in range(TURNS + 1):
            if turn == 1:
                # The first turn warms up.
                times.clear()
            timed(round_trip, times.setdefault(("round trip", ""), []))
            for verb in calls["single"]:
                for name in sides:
                    timed(calls[name][verb], times.setdefault((verb, name), []))
    trip = statistics.median(times["round trip", ""]) * 1e6
    print(f"round trip over TCP: {trip:.1f} µs\n")
    print("| call | single µs | p99 | with a standby µs | p99 | ratio | another single | bound |")
    print("|---|---|---|---|---|---|---|---|")
    ratios = {}
    for verb in ("put 4 KiB", "put 1 MiB", "get 4 KiB", "exists"):
        middle = {name: statistics.median(times[verb, name]) * 1e6 for name in sides}
        high = {name: statistics.quantiles(times[verb, name], n=100)[98] * 1e6 for name in sides}
        ratios[verb] = middle["single"] / middle["standby"]
        other = middle["another"] / middle["single"]
        bound = {"put 4 KiB": 1 + 2 * trip / middle["single"], "put 1 MiB": 1.15}
        cells = [verb]
        for name in ("single", "standby"):
            cells += [f"{middle[name]:.1f}", f"{high[name]:.1f}"]
        cells += [f"{1 / ratios[verb]:.2f}", f"{other:.2f}"]
        cells += [f"{bound.get(verb, 1.05 * max(other, 1)):.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="kills for each row")
    parser.add_argument("--objects", type=int, default=1_000_000, help="objects of 64 bytes")
    parser.add_argument("--leases", type=float, nargs="+", default=[2, 5], help="seconds")
    parser.add_argument("--plot", type=Path, help="draw the ratios to this SVG file")
    parser.add_argument("--join", action="store_true", help="measure only how a standby joins")
    parser.add_argument("--rate", type=float, default=2000, help="puts a second meanwhile")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        with etcd(Path(folder) / "etcd") as service:
            if options.join:
                join(options, service)
                return
            ratios = costs(options, service)
            if options.plot:
                title = "Calls with a standby relative to a single master"
                groups = {"speed": list(ratios.items())}
                options.plot.write_text(bars.draw(title, groups), encoding="utf-8")
            print(
                "\n| lease | pool | call | first client s | slowest | last s | slowest | failed |"
            )
            print("|---|---|---|---|---|---|---|---|", flush=True)
            for lease_s in options.leases:
                for is_full in (False, True):
                    kills(options, service, lease_s, is_full)


if __name__ == "__main__":
    main()
