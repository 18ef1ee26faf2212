"""Transfers between two processes, over shared memory and TCP, with both kinds of metadata."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from conftest import PROMPT_S
from engine_peers import EnginePeer, Memory, start_engine, start_peer

import mooncake
from mooncake.engine import Read, TransferEngine, TransferNotify, TransferOpcode, Write

CHUNK = 256


@dataclass
class Pair:
    near: TransferEngine
    far: EnginePeer


@pytest.fixture(scope="module", params=["shm-p2p", "tcp-p2p", "shm-http", "tcp-http"])
def pair(request, master) -> Iterator[Pair]:
    transport, metadata = request.param.split("-")
    server = "P2PHANDSHAKE" if metadata == "p2p" else f"http://{master.metadata}/metadata"
    port = ["shm", "tcp"].index(transport)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MC_FORCE_TCP", str(port))
        near = start_engine(name=f"127.0.0.1:2{port}", metadata=server)
        far = start_peer(name=f"127.0.0.1:1{port}", metadata=server)
    yield Pair(near, far)
    far.end()


@pytest.fixture
def mortal() -> Iterator[EnginePeer]:
    """A peer that the test may kill."""
    peer = start_peer()
    yield peer
    peer.end()


def pattern(length: int, seed: int = 1) -> bytes:
    return bytes((i * 7 + seed + (i >> 8)) % 251 for i in range(length))


@pytest.mark.parametrize("kind", ["address", "managed"])
def test_written_bytes_reach_the_peer_and_return(pair, kind):
    there = getattr(pair.far, kind) + 1000
    for length in (1, 4096, 100_001):
        here = Memory.of(pattern(length, length))
        assert pair.near.transfer_sync_write(pair.far.segment, here.address, there, length) == 0
        assert pair.far.bytes_at(there, length) == here.content
        back = Memory.of(bytes(length))
        assert pair.near.transfer_sync_read(pair.far.segment, back.address, there, length) == 0
        assert back.content == here.content


def test_transfer_sync_accepts_both_opcodes(pair):
    here, back = Memory.of(pattern(500)), Memory.of(bytes(500))
    segment, there = pair.far.segment, pair.far.address
    assert pair.near.transfer_sync(segment, here.address, there, 500, Write) == 0
    assert pair.near.transfer_sync(segment, back.address, there, 500, TransferOpcode.READ) == 0
    assert back.content == here.content
    with pytest.raises(TypeError, match="opcode"):
        pair.near.transfer_sync(segment, here.address, there, 500, 1)
    with pytest.raises(TypeError, match="notify"):
        pair.near.transfer_sync(segment, here.address, there, 500, Read, "done")


@pytest.mark.parametrize("count", [1, 256, 20_000])
def test_batches_of_any_size_arrive_intact(pair, count):
    here = Memory.of(pattern(count * CHUNK, count))
    back = Memory.of(bytes(count * CHUNK))
    # The even chunks come first, so that adjacent pieces cannot be merged.
    order = sorted(range(count), key=lambda i: (i % 2, i))
    local = [here.address + i * CHUNK for i in range(count)]
    remote = [pair.far.address + order[i] * CHUNK for i in range(count)]
    lengths = [CHUNK] * count
    segment = pair.far.segment
    assert pair.near.batch_transfer_sync_write(segment, local, remote, lengths) == 0
    local = [back.address + i * CHUNK for i in range(count)]
    assert pair.near.batch_transfer_sync_read(segment, local, remote, lengths) == 0
    assert back.content == here.content
    first = here.content[order.index(0) * CHUNK :][:CHUNK]
    assert pair.far.bytes_at(pair.far.address, CHUNK) == first
    back = Memory.of(bytes(count * CHUNK))
    local = tuple(back.address + i * CHUNK for i in range(count))
    assert pair.near.batch_transfer_sync(segment, local, remote, lengths, Read) == 0
    assert back.content == here.content


def test_async_batches_run_in_the_background(pair):
    count, segment = 2000, pair.far.segment
    here, back = Memory.of(pattern(count * CHUNK, 5)), Memory.of(bytes(count * CHUNK))
    remote = [pair.far.address + i * CHUNK for i in range(count)]
    lengths = [CHUNK] * count

    def local(memory):
        return [memory.address + i * CHUNK for i in range(count)]

    write = pair.near.batch_transfer_async_write(segment, local(here), remote, lengths)
    assert write > 0
    assert pair.near.get_batch_transfer_status([write]) == 0
    read = pair.near.batch_transfer_async_read(segment, local(back), remote, lengths)
    assert read > 0
    assert read != write
    deadline = time.monotonic() + 20
    while (status := pair.near.transfer_check_status(read)) == 0:
        assert time.monotonic() < deadline
    assert status == 1
    assert back.content == here.content
    other = pair.near.batch_transfer_async(segment, local(back), remote, lengths, Read)
    one = pair.near.transfer_submit_write(segment, here.address, remote[0], 10)
    assert pair.near.get_batch_transfer_status([other, one]) == 0


def test_batch_status_is_reported_once(pair):
    here = Memory.of(b"0123456789")
    batch = pair.near.transfer_submit_write(pair.far.segment, here.address, pair.far.address, 10)
    assert pair.near.get_batch_transfer_status([batch]) == 0
    assert pair.near.transfer_check_status(batch) == -1
    assert pair.near.get_batch_transfer_status([batch]) == -1
    assert pair.near.get_batch_transfer_status([]) == 0
    for unknown in (0, 10**9, 2**64 - 1):
        assert pair.near.transfer_check_status(unknown) == -1


def test_rejects_ranges_outside_registered_memory(pair):
    here, segment = Memory.of(bytes(100)), pair.far.segment
    end = pair.far.address + (8 << 20)
    for there in (4096, end, end - 50, 2**64 - 100, 0):
        assert pair.near.transfer_sync_write(segment, here.address, there, 100) == -1
        assert pair.near.transfer_sync_read(segment, here.address, there, 100) == -1
        batch = pair.near.transfer_submit_write(segment, here.address, there, 100)
        assert batch > 0
        assert pair.near.get_batch_transfer_status([batch]) == -1
    good = pair.far.address
    assert (
        pair.near.batch_transfer_sync_write(segment, [here.address] * 2, [good, 4096], [100] * 2)
        == -1
    )
    assert pair.near.transfer_sync_write(segment, here.address, good, 100) == 0


def test_bad_local_addresses_fail_without_a_crash(pair):
    there, segment = pair.far.address, pair.far.segment
    for here in (0, 8, 2**47, 2**64 - 4096):
        for length in (10, 100_000):
            assert pair.near.transfer_sync_write(segment, here, there, length) == -1
            assert pair.near.transfer_sync_read(segment, here, there, length) == -1


def test_empty_transfers_succeed(pair):
    here, segment = Memory.of(b"x"), pair.far.segment
    assert pair.near.transfer_sync_write(segment, here.address, pair.far.address, 0) == 0
    assert pair.near.transfer_sync_read(segment, here.address, 4096, 0) == 0
    assert pair.near.batch_transfer_sync_write(segment, [], [], []) == 0
    empty = pair.near.batch_transfer_async_read(segment, [], [], [])
    assert pair.near.get_batch_transfer_status([empty]) == 0


def test_rejects_lists_of_different_length(pair):
    here, there, segment = Memory.of(bytes(10)).address, pair.far.address, pair.far.segment
    for lists in (([here], [there, there], [10]), ([here] * 2, [there] * 2, [10]), ([], [], [1])):
        assert pair.near.batch_transfer_sync_write(segment, *lists) == -1
        assert pair.near.batch_transfer_sync(segment, *lists, Read) == -1
        assert pair.near.batch_transfer_async_write(segment, *lists) == 0


def test_rejects_unknown_peers(pair):
    here = Memory.of(bytes(10)).address
    for segment in ("127.0.0.1:1", "", "nonsense", "127.0.0.1", "no.such.host.invalid:5"):
        assert pair.near.transfer_sync_write(segment, here, pair.far.address, 10) == -1
        assert pair.near.transfer_submit_write(segment, here, pair.far.address, 10) == 0
        assert pair.near.get_first_buffer_address(segment) == 0
        assert pair.near.send_probe(segment) in (-102, -200)


def test_first_buffer_is_the_earliest_registered(pair):
    assert pair.near.get_first_buffer_address(pair.far.segment) == pair.far.address
    assert pair.near.send_probe(pair.far.segment) == 0
    assert pair.near.warmup_efa_segment(pair.far.segment) == 0


def test_notifications_follow_their_bytes_in_order(pair):
    here, segment = Memory.of(b"0123456789"), pair.far.segment
    for i in range(5):
        message = TransferNotify(f"n{i}", "done \u00e9")
        args = (segment, here.address, pair.far.address, 10)
        assert pair.near.transfer_sync(*args, Write, message) == 0
    # A notification without bytes.
    only = TransferNotify(name="only", msg="")
    assert pair.near.transfer_sync(segment, 0, 0, 0, Write, notify=only) == 0
    args = (segment, [here.address], [pair.far.address], [10])
    assert pair.near.batch_transfer_sync(*args, Read, TransferNotify("b", "x")) == 0
    expected = [[f"n{i}", "done \u00e9"] for i in range(5)] + [["only", ""], ["b", "x"]]
    assert pair.far.ask("notifies") == expected
    assert pair.far.ask("notifies") == []
    # A failed transfer sends no notification.
    assert pair.near.transfer_sync(segment, here.address, 4096, 10, Write, only) == -1
    assert pair.far.ask("notifies") == []
    assert pair.near.get_notifies() == []


def test_too_long_notification_moves_no_bytes(pair):
    here, segment = Memory.of(b"0123456789"), pair.far.segment
    before = pair.far.bytes_at(pair.far.managed, 10)
    message = TransferNotify("long", "x" * (1 << 20))
    assert (
        pair.near.transfer_sync(segment, here.address, pair.far.managed, 10, Write, message) == -1
    )
    assert "MC_HANDSHAKE_MAX_LENGTH" in str(mooncake.last_error())
    assert pair.far.bytes_at(pair.far.managed, 10) == before != b"0123456789"
    assert pair.far.ask("notifies") == []


def test_keywords_have_upstreams_names(pair):
    here = Memory.of(b"0123456789")
    place = {
        "target_hostname": pair.far.segment,
        "buffer": here.address,
        "peer_buffer_address": pair.far.address,
        "length": 10,
        "transport_hint": "any",
    }
    assert pair.near.transfer_sync_write(**place) == 0
    assert pair.near.transfer_sync(**place, opcode=Read, notify=None) == 0
    with pytest.raises(TypeError, match="nonsense"):
        pair.near.transfer_sync_write(**place, nonsense=1)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_calls_use_the_requested_transport(mortal, transport):
    near, here = start_engine(), Memory.of(bytes(10))
    segment, there = mortal.segment, mortal.address
    lists = (segment, [here.address], [there], [10])

    def moved() -> int:
        one = near.metrics()["transports"][transport]
        return int(one["bytes_read"] + one["bytes_written"])

    def is_done(batch: int) -> bool:
        return batch > 0 and near.get_batch_transfer_status([batch]) == 0

    calls = [
        lambda: near.transfer_sync_write(segment, here.address, there, 10, transport) == 0,
        lambda: near.transfer_sync_read(segment, here.address, there, 10, transport) == 0,
        lambda: near.transfer_sync(segment, here.address, there, 10, Read, None, transport) == 0,
        lambda: near.batch_transfer_sync_write(*lists, transport) == 0,
        lambda: near.batch_transfer_sync_read(*lists, transport_hint=transport) == 0,
        lambda: near.batch_transfer_sync(*lists, Write, None, transport) == 0,
        lambda: is_done(near.transfer_submit_write(segment, here.address, there, 10, transport)),
        lambda: is_done(near.batch_transfer_async_write(*lists, transport)),
        lambda: is_done(near.batch_transfer_async_read(*lists, transport)),
        lambda: is_done(near.batch_transfer_async(*lists, Read, transport_hint=transport)),
    ]
    for number, call in enumerate(calls):
        before = moved()
        assert call(), number
        assert moved() == before + 10, number


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_killed_peer_fails_before_the_deadline(transport, monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "1" if transport == "tcp" else "0")
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "60")
    peer, near = start_peer(), start_engine()
    try:
        here = Memory.of(pattern(100))
        assert near.transfer_sync_write(peer.segment, here.address, peer.address, 100) == 0
        peer.kill()
        start = time.monotonic()
        assert near.transfer_sync_write(peer.segment, here.address, peer.address, 100) == -1
        assert near.transfer_sync_read(peer.segment, here.address, peer.address, 100) == -1
        batch = near.transfer_submit_write(peer.segment, here.address, peer.address, 100)
        assert batch == 0 or near.get_batch_transfer_status([batch]) == -1
        assert near.send_probe(peer.segment) == -102
        assert time.monotonic() - start < PROMPT_S
    finally:
        peer.end()


@pytest.fixture(params=[1.0])
def stuck(request, monkeypatch, mortal: EnginePeer) -> tuple[TransferEngine, int, Memory]:
    """An engine, and its batch to a peer that no longer reads."""
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    near, here = start_engine(), Memory.of(bytes(8 << 20))
    assert near.transfer_sync_write(mortal.segment, here.address, mortal.address, 10) == 0
    mortal.process.send_signal(signal.SIGSTOP)
    near._timeout_s = request.param
    lists = ([here.address] * 8, [mortal.address] * 8, [8 << 20] * 8)
    batch = near.batch_transfer_async_write(mortal.segment, *lists)
    assert batch > 0
    return near, batch, here


def test_slow_batch_times_out(stuck):
    near, batch, _here = stuck
    assert near.transfer_check_status(batch) == 0
    deadline = time.monotonic() + 10
    while (status := near.transfer_check_status(batch)) == 0:
        assert time.monotonic() < deadline
    assert status == -2
    assert near.transfer_check_status(batch) == -1


@pytest.mark.parametrize("stuck", [60.0], indirect=True)
def test_engine_ends_while_a_batch_is_stuck(stuck):
    near, _batch, _here = stuck
    segment = f"127.0.0.1:{near.get_rpc_port()}"
    start = time.monotonic()
    # The old engine ends before the new engine starts.
    assert near.initialize("127.0.0.1:5", "P2PHANDSHAKE", "tcp", "") == 0
    assert time.monotonic() - start < PROMPT_S
    assert near.send_probe(segment) == -102


@pytest.mark.parametrize("stuck", [60.0], indirect=True)
def test_stuck_batch_sends_nothing_after_its_engine(stuck, mortal):
    near, _batch, here = stuck
    with near:
        pass
    ctypes.memset(here.address, 3, 8 << 20)
    mortal.process.send_signal(signal.SIGCONT)
    other, there = start_engine(), Memory.of(bytes(8 << 20))
    args = (mortal.segment, there.address, mortal.address, 8 << 20)
    assert other.transfer_sync_read(*args) == 0
    assert 3 not in there.content


def test_unregistered_memory_is_unreachable(mortal):
    near, here = start_engine(), Memory.of(bytes(10))
    assert near.transfer_sync_read(mortal.segment, here.address, mortal.address, 10) == 0
    assert mortal.ask("unregister") == 0
    assert near.transfer_sync_read(mortal.segment, here.address, mortal.address, 10) == -1
    assert near.transfer_sync_read(mortal.segment, here.address, mortal.managed, 10) == 0
