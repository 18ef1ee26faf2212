"""Our engine and upstream's move bytes to and from each other over RDMA devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_peers import EnginePeer, start_peer
from upstream_package import upstream_python

FOLDER = Path("/sys/class/infiniband")
DEVICES = sorted(os.listdir(FOLDER)) if FOLDER.exists() else []
# Of scripts/rdma-vm: the address of the card under each device.
ADDRESSES = ["10.77.0.1", "10.77.0.2"]

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(300),
    pytest.mark.skipif(len(DEVICES) < 2, reason="needs two RDMA devices: run make test-rdma"),
]

LENGTH = 2 << 20
RANGES = [(0, 1), (1, 4096), (4097, 65_535), (70_001, 82_000), (200_003, 1 << 20)]


@pytest.fixture(scope="module", params=["to upstream", "from upstream"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[EnginePeer, EnginePeer]]:
    """The calling engine, and the engine whose memory it reaches; TCP reaches neither."""
    pythons = [sys.executable, upstream_python()]
    if request.param == "from upstream":
        pythons.reverse()
    peers = [
        start_peer(
            name=f"{address}:1", length=LENGTH, python=python, protocol="rdma", device=device
        )
        for address, device, python in zip(ADDRESSES, DEVICES, pythons, strict=False)
    ]
    yield peers[0], peers[1]
    for peer in peers:
        peer.end()


def pattern(seed: int, length: int) -> bytes:
    period = bytes((seed + 7 * index) % 251 for index in range(1009))
    return (period * (length // 1009 + 1))[:length]


def fill(peer: EnginePeer, content: bytes) -> None:
    assert peer.ask("write", peer.address, content.hex()) == 0


def test_reads_arrive(pair: tuple[EnginePeer, EnginePeer]) -> None:
    caller, owner = pair
    content = pattern(3, LENGTH)
    fill(owner, content)
    fill(caller, bytes(LENGTH))
    expected = bytearray(LENGTH)
    for offset, length in RANGES:
        arguments = owner.segment, caller.address + offset, owner.address + offset, length
        assert caller.call("transfer_sync_read", *arguments) == 0
        expected[offset : offset + length] = content[offset : offset + length]
    assert caller.bytes_at(caller.address, LENGTH) == bytes(expected)


def test_writes_arrive(pair: tuple[EnginePeer, EnginePeer]) -> None:
    caller, owner = pair
    content = pattern(5, LENGTH)
    fill(caller, content)
    fill(owner, bytes(LENGTH))
    expected = bytearray(LENGTH)
    for offset, length in RANGES:
        arguments = owner.segment, caller.address + offset, owner.address + offset, length
        assert caller.call("transfer_sync_write", *arguments) == 0
        expected[offset : offset + length] = content[offset : offset + length]
    assert owner.bytes_at(owner.address, LENGTH) == bytes(expected)


def test_unregistered_memory_is_refused(pair: tuple[EnginePeer, EnginePeer]) -> None:
    caller, owner = pair
    end = owner.address + LENGTH
    refused = caller.call("transfer_sync_read", owner.segment, caller.address, end + (64 << 20), 64)
    assert refused == -1
    assert caller.call("transfer_sync_read", owner.segment, caller.address, end - 64, 64) == 0


def test_doctor_lists_the_devices() -> None:
    command = [sys.executable, "-m", "mooncake", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    rows = found["rdma devices"]
    for device, address in zip(DEVICES[:2], ADDRESSES, strict=True):
        assert f"::ffff:{address} (RoCE v2" in rows[device]
        assert rows[f"{device} port"].startswith("active, Ethernet")
        assert "queue pairs: " in rows[f"{device} limits"]
    assert found["choice"]["other hosts"].startswith("rdma")
