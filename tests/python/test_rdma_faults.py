"""Faults of links, devices, packets and peers, stores and the benchmark, over RDMA devices.

Runs in the virtual machine of ``make test-rdma``, which has four devices and the network namespace
h0. The owner of the memory is in h0, so that it is reached over its devices, not through shared
memory. Packets of rxe0 and rxe1 (the caller's) to rxe2 and rxe3 pass the bridge ports sw0 to sw3.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import MIB, start_master
from engine_peers import EnginePeer, start_peer

FOLDER = Path("/sys/class/infiniband")
DEVICES = sorted(os.listdir(FOLDER)) if FOLDER.exists() else []
NAMESPACE = "h0"
INSIDE = ["ip", "netns", "exec", NAMESPACE]
HERE, THERE = "10.77.0.1", "10.77.1.1"
LENGTH = 1 << 20
CONTENT = bytes(index % 251 for index in range(LENGTH))

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(DEVICES) < 4, reason="needs four RDMA devices: run make test-rdma"),
]


@pytest.fixture
def pair() -> Iterator[tuple[EnginePeer, EnginePeer]]:
    """The calling engine with two devices, and the owner with two others."""
    caller = start_peer(name=f"{HERE}:1", length=LENGTH, protocol="rdma", device="rxe0,rxe1")
    owner = start_owner()
    assert caller.ask("write", caller.address, CONTENT.hex()) == 0
    yield caller, owner
    caller.end()
    owner.end()


def start_owner() -> EnginePeer:
    devices = "rxe2,rxe3"
    name = f"{THERE}:1"
    return start_peer(
        name=name, length=LENGTH, protocol="rdma", device=devices, namespace=NAMESPACE
    )


def write(caller: EnginePeer, owner: EnginePeer, length: int = LENGTH) -> int:
    arguments = owner.segment, caller.address, owner.address, length
    return int(caller.call("transfer_sync_write", *arguments))


def metric(text: str, name: str, device: str) -> int:
    pattern = rf'^mooncake_transfer_device_{name}\{{device="{device}"[^}}]*\}} (\d+)$'
    return sum(int(value) for value in re.findall(pattern, text, re.MULTILINE))


def wait_until(condition: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def test_transfers_outlive_a_link(pair: tuple[EnginePeer, EnginePeer]) -> None:
    caller, owner = pair
    assert write(caller, owner) == 0
    changed = threading.Event()

    def break_link() -> None:
        run("ip", "link", "set", "sw1", "down")
        changed.set()

    breaker = threading.Thread(target=break_link)
    breaker.start()
    took: list[float] = []
    while not changed.is_set() or len(took) < 5:
        begin = time.monotonic()
        assert write(caller, owner) == 0
        took.append(time.monotonic() - begin)
    breaker.join()
    assert max(took) < 10
    assert owner.bytes_at(owner.address, LENGTH) == CONTENT
    wait_until(lambda: metric(caller.call("metrics_text"), "active", "rxe1") == 0)
    moved = metric(caller.call("metrics_text"), "bytes_total", "rxe1")
    run("ip", "link", "set", "sw1", "up")

    def is_used_again() -> bool:
        assert write(caller, owner) == 0
        return metric(caller.call("metrics_text"), "bytes_total", "rxe1") > moved

    wait_until(is_used_again)
    assert metric(caller.call("metrics_text"), "active", "rxe1") == 1
    assert metric(caller.call("metrics_text"), "link_failures_total", "rxe1") == 1


def test_killed_peer_is_an_error_and_its_successor_is_reached(
    pair: tuple[EnginePeer, EnginePeer],
) -> None:
    caller, owner = pair
    assert write(caller, owner) == 0
    owner.kill()
    begin = time.monotonic()
    assert write(caller, owner) == -1
    assert time.monotonic() - begin < 60
    successor = start_owner()
    assert write(caller, successor) == 0
    assert successor.bytes_at(successor.address, LENGTH) == CONTENT
    successor.end()


def dropped(port: str) -> int:
    """The packets that the queue of a bridge port has dropped."""
    shown = subprocess.check_output(["tc", "-s", "-j", "qdisc", "show", "dev", port, "root"])
    return int(json.loads(shown)[0]["drops"])


@pytest.mark.parametrize("loss", ["1%", "10%"])
def test_bytes_arrive_over_a_lossy_network(pair: tuple[EnginePeer, EnginePeer], loss: str) -> None:
    caller, owner = pair
    assert write(caller, owner, 64) == 0
    ports = ["sw0", "sw1", "sw2", "sw3"]
    for port in ports:
        run("tc", "qdisc", "add", "dev", port, "root", "netem", "loss", loss)
    try:
        deadline = time.monotonic() + 60
        while sum(map(dropped, ports)) < 5:
            assert time.monotonic() < deadline
            assert write(caller, owner) == 0
    finally:
        for port in ports:
            run("tc", "qdisc", "del", "dev", port, "root")
    assert owner.bytes_at(owner.address, LENGTH) == CONTENT
    assert write(caller, owner) == 0


HOLDER = f"""
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("{THERE}", "P2PHANDSHAKE", {16 * MIB}, 0, "rdma", "rxe2", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
store.close()
"""

USER = f"""
import sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
assert store.setup("{HERE}", "P2PHANDSHAKE", 0, {16 * MIB}, "rdma", "rxe0", sys.argv[1]) == 0
value = bytes(range(256)) * 4096
assert store.put("key", value) == 0
assert store.get("key") == value
twice = ReplicateConfig()
twice.replica_num = 2
assert store.put("copied", value, twice) == 0
assert len(store.get_replica_desc("copied")) == 2
assert store.get("copied") == value
store.close()
"""


def packets(device: str) -> int:
    """The packets that a device has sent and received, as its driver counts them."""
    counters = FOLDER / device / "ports/1/hw_counters"
    return sum(int((counters / name).read_text()) for name in ("sent_pkts", "rcvd_pkts"))


def test_store_puts_gets_and_copies_over_rdma() -> None:
    master = start_master("--rpc_address=0.0.0.0")
    address = f"{HERE}:{master.port}"
    command = [*INSIDE, sys.executable, "-c", HOLDER, address]
    holders = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "0\n"
        before = packets("rxe0")
        done = subprocess.run(
            [sys.executable, "-c", USER, address], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        # One put and its get, two copies and a get.
        assert packets("rxe0") - before >= 5 * MIB // 4096
    finally:
        for holder in holders:
            holder.communicate(timeout=30)
        master.stop()


def test_benchmark_runs_over_rdma() -> None:
    program = "import sys; from mooncake._native import run_transfer_bench as run; "
    program += "sys.exit(run(sys.argv[1:]))"
    common = ["--protocol=rdma", "--buffer_size=4MiB", "--batch_size=8", "--threads=1"]
    bench = [sys.executable, "-c", program, *common]
    names = ["--mode=target", f"--local_server_name={THERE}", "--device_name=rxe2"]
    target = subprocess.Popen([*INSIDE, *bench, *names], stderr=subprocess.PIPE, text=True)
    try:
        assert target.stderr is not None
        line = next(line for line in target.stderr if "listening on" in line)
        segment = line.split()[-1]
        names = [f"--local_server_name={HERE}", "--device_name=rxe0", f"--segment_id={segment}"]
        done = subprocess.run(
            [*bench, *names, "--duration=1", "--json"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["transport"] == "rdma"
    finally:
        target.terminate()
        target.communicate(timeout=30)


def test_transfers_outlive_the_card_of_a_device(pair: tuple[EnginePeer, EnginePeer]) -> None:
    """Run last, since the card of rxe1 does not come back.

    The driver keeps the device until its user is gone; one that does not reports an event, as the
    simulated device does.
    """
    caller, owner = pair
    assert write(caller, owner) == 0
    # Ends when the last user of the card is gone.
    remover = subprocess.Popen(["ip", "link", "delete", "sw1"])

    def is_noticed() -> bool:
        assert write(caller, owner) == 0
        return metric(caller.call("metrics_text"), "active", "rxe1") == 0

    wait_until(is_noticed)
    assert write(caller, owner) == 0
    assert owner.bytes_at(owner.address, LENGTH) == CONTENT
    caller.end()
    assert remover.wait(60) == 0


@pytest.fixture
def ranks() -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of a process group, as on two hosts, each with two devices."""
    program = [sys.executable, str(Path(__file__).with_name("group_peer.py"))]
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> str:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        started.append(process)
        assert process.stdout is not None
        return str(json.loads(process.stdout.readline()))

    coordinator = start(*program, "0", HERE, "rxe0,rxe1")
    start(*INSIDE, *program, "1", THERE, "rxe2,rxe3", coordinator)
    yield started
    for process in started:
        process.communicate(timeout=30)


def test_large_tensors_of_another_host_are_read_over_rdma(
    ranks: list[subprocess.Popen[str]],
) -> None:
    def ask(*command: object) -> list[object]:
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(command) + "\n")
            rank.stdin.flush()
        return [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]

    assert ask("group") == [2, 2]
    for length in (4096, MIB, 3 * MIB):
        assert ask("broadcast", length) == [True, True]
    assert ask("sum", 200_000) == [True, True]
    # The receiver reads 1 and 3 MiB; in the sum each rank reads half of the elements, and half of
    # the sums.
    half = 200_000 * 8
    found = ask("metrics")
    assert [fetched for fetched, _ in found] == [half, 4 * MIB + half]  # type: ignore[misc]
    for (fetched, transports), _ in zip(found, ranks, strict=True):  # type: ignore[misc]
        assert transports["rdma"]["bytes_read"] == fetched, transports
