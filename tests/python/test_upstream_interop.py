"""Our engine and upstream's engine transfer bytes to and from each other."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest
from engine_peers import EnginePeer, start_peer
from metadata_servers import running_etcd
from upstream_package import upstream_python

if TYPE_CHECKING:
    from conftest import MasterProcess

pytestmark = pytest.mark.timeout(300)

LENGTH = 8 << 20
# Upstream's engine leaves its entry on a metadata server, so that a name can be used once.
NAMES = itertools.count(601)
READ, WRITE = {"opcode": "Read"}, {"opcode": "Write"}
# Several alignments, and lengths around upstream's chunk of 64 KiB.
RANGES = [(0, 1), (1, 4096), (4097, 65535), (70_001, 65537), (200_003, 1 << 20), (2 << 20, 3 << 20)]


@pytest.fixture(scope="module")
def upstream() -> str:
    return upstream_python()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as address:
        yield address


@pytest.fixture(scope="module", params=["p2p", "http", "etcd"])
def metadata(request: pytest.FixtureRequest) -> str:
    if request.param == "http":
        master: MasterProcess = request.getfixturevalue("master")
        return f"http://{master.metadata}/metadata"
    return request.getfixturevalue("etcd") if request.param == "etcd" else "P2PHANDSHAKE"


@pytest.fixture(scope="module", params=["to upstream", "from upstream"])
def pair(
    request: pytest.FixtureRequest, metadata: str, upstream: str
) -> Iterator[tuple[EnginePeer, EnginePeer]]:
    """The calling engine, and the engine whose memory it reaches."""
    pythons = [sys.executable, upstream]
    if request.param == "from upstream":
        pythons.reverse()
    with pytest.MonkeyPatch.context() as patch:
        # With a metadata server the first address of the host would be published.
        patch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
        peers = [
            start_peer(name=f"127.0.0.1:{port}", metadata=metadata, length=LENGTH, python=python)
            for port, python in zip(NAMES, pythons, strict=False)
        ]
    yield peers[0], peers[1]
    for peer in peers:
        peer.end()


def wait_for(is_met: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pattern(seed: int, length: int) -> bytes:
    return bytes((seed + 7 * index) % 251 for index in range(length % 1009 + 1)) * (
        length // (length % 1009 + 1) + 1
    )


def fill(peer: EnginePeer, seed: int) -> list[bytes]:
    """Write a pattern into every range of a peer's memory, and return the patterns."""
    contents = [pattern(seed + index, length)[:length] for index, (_, length) in enumerate(RANGES)]
    for (offset, _), content in zip(RANGES, contents, strict=True):
        assert peer.ask("write", peer.address + offset, content.hex()) == 0
    return contents


def contents_of(peer: EnginePeer) -> list[bytes]:
    return [peer.bytes_at(peer.address + offset, length) for offset, length in RANGES]


def entries(caller: EnginePeer, target: EnginePeer) -> list[tuple[int, int, int]]:
    return [(caller.address + at, target.address + at, length) for at, length in RANGES]


def columns(caller: EnginePeer, target: EnginePeer) -> list[list[int]]:
    return [list(column) for column in zip(*entries(caller, target), strict=True)]


def one_by_one(caller: EnginePeer, target: EnginePeer, opcode: dict[str, str]) -> None:
    name = "write" if opcode == WRITE else "read"
    for local, remote, length in entries(caller, target):
        assert caller.call(f"transfer_sync_{name}", target.segment, local, remote, length) == 0


def with_opcode(caller: EnginePeer, target: EnginePeer, opcode: dict[str, str]) -> None:
    for local, remote, length in entries(caller, target):
        assert caller.call("transfer_sync", target.segment, local, remote, length, opcode) == 0


def as_batch(caller: EnginePeer, target: EnginePeer, opcode: dict[str, str]) -> None:
    name = "write" if opcode == WRITE else "read"
    batch = columns(caller, target)
    assert caller.call(f"batch_transfer_sync_{name}", target.segment, *batch) == 0


def as_async_batches(caller: EnginePeer, target: EnginePeer, opcode: dict[str, str]) -> None:
    batch = columns(caller, target)
    numbers = [
        caller.call("batch_transfer_async", target.segment, *batch, opcode) for _ in range(3)
    ]
    assert all(number > 0 for number in numbers)
    assert caller.call("get_batch_transfer_status", numbers) == 0


def submitted(caller: EnginePeer, target: EnginePeer, _write: dict[str, str]) -> None:
    for local, remote, length in entries(caller, target):
        number = caller.call("transfer_submit_write", target.segment, local, remote, length)
        assert number > 0
        wait_for(partial(has_ended, caller, number))


def has_ended(caller: EnginePeer, number: int) -> bool:
    status = caller.call("transfer_check_status", number)
    assert status in (0, 1)
    return status == 1


TRANSFERS = [one_by_one, with_opcode, as_batch, as_async_batches, submitted]
CASES = [
    pytest.param(transfer, opcode, id=f"{transfer.__name__}-{opcode['opcode'].lower()}")
    for transfer in TRANSFERS
    for opcode in (READ, WRITE)
    if (transfer, opcode) != (submitted, READ)  # upstream submits writes only
]


@pytest.mark.parametrize(("transfer", "opcode"), CASES)
def test_transfers_interoperate(pair, transfer, opcode):
    caller, target = pair
    seed = TRANSFERS.index(transfer) * 20
    own, other = fill(caller, seed + 1), fill(target, seed + 10)
    transfer(caller, target, opcode)
    wanted = own if opcode == WRITE else other
    assert contents_of(caller) == wanted
    assert contents_of(target) == wanted


def test_notification_follows_the_bytes(pair):
    caller, target = pair
    notification = {"notify": ["done", "chunk 1, ä"]}
    at = (target.segment, caller.address, target.address, 4096)
    assert caller.call("transfer_sync", *at, WRITE, notification) == 0
    wait_for(lambda: bool(messages := target.ask("notifies")) and check(messages))
    batch = columns(caller, target)
    assert caller.call("batch_transfer_sync", target.segment, *batch, READ, notification) == 0
    wait_for(lambda: bool(messages := target.ask("notifies")) and check(messages))


def check(messages: list[list[str]]) -> bool:
    assert messages == [["done", "chunk 1, ä"]]
    return True


def test_peers_discover_each_other(pair):
    caller, target = pair
    assert caller.call("send_probe", target.segment) == 0
    assert caller.call("get_first_buffer_address", target.segment) == target.address


def test_rejects_unregistered_ranges(pair):
    caller, target = pair
    for remote in (target.address + LENGTH - 10, target.address - 4096, 4096):
        for name in ("transfer_sync_write", "transfer_sync_read"):
            assert caller.call(name, target.segment, caller.address, remote, 4096) == -1
    # The first transfer after a refusal may have to reconnect.
    arguments = (target.segment, caller.address, target.address, 4096)
    wait_for(lambda: caller.call("transfer_sync_write", *arguments) == 0)


def test_dead_peer_fails_without_a_hang(pair):
    caller, target = pair
    arguments = (target.segment, caller.address, target.address, 4096)
    assert caller.call("transfer_sync_write", *arguments) == 0
    # The last test of the pair: no later test needs the target.
    target.kill()
    assert caller.call("transfer_sync_write", *arguments) == -1
    assert caller.call("transfer_sync_read", *arguments) == -1
