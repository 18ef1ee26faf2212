"""Engines that discover each other through etcd and Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_peers import Memory, start_engine, start_peer
from metadata_servers import running_etcd, running_redis

from mooncake.engine import TransferEngine

PASSWORD = "open sesame"


@pytest.fixture(params=["etcd", "bare", "redis"])
def server(
    request: pytest.FixtureRequest, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """The address of a server, and its type for `initialize_ext`."""
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    if request.param == "redis":
        monkeypatch.setenv("MC_REDIS_PASSWORD", PASSWORD)
        monkeypatch.setenv("MC_REDIS_DB_INDEX", "3")
        with running_redis(tmp_path, PASSWORD) as address:
            yield f"redis://{address}", "redis"
    else:
        with running_etcd(tmp_path) as address:
            yield (address if request.param == "bare" else f"etcd://{address}"), "etcd"


def test_engines_connect_and_reuse_a_dead_engines_name(server):
    address, kind = server
    peer = start_peer(name="peer:1", metadata=address)
    engine = start_engine(name="caller:1", metadata=address)
    memory = Memory.of(b"across a server")
    length = len(memory.content)
    reached = ("peer:1", memory.address, peer.managed, length)
    assert engine.transfer_sync_write(*reached) == 0
    assert peer.bytes_at(peer.managed, length) == memory.content
    assert engine.get_first_buffer_address("peer:1") == peer.address
    assert engine.send_probe("unknown:1") == -200
    second = TransferEngine()
    bare = address.rpartition("//")[2]
    assert second.initialize_ext("peer:1", bare, "tcp", "", kind) == -1
    peer.kill()
    assert engine.transfer_sync_write(*reached) == -1
    assert second.initialize_ext("peer:1", bare, "tcp", "", kind) == 0
    there = second.allocate_managed_buffer(length)
    assert engine.transfer_sync_write("peer:1", memory.address, there, length) == 0
    assert second.read_bytes_from_buffer(there, length) == memory.content
    peer.end()


def test_wrong_redis_password_fails(tmp_path, monkeypatch):
    with running_redis(tmp_path, PASSWORD) as address:
        for password in ("", "shut sesame"):
            monkeypatch.setenv("MC_REDIS_PASSWORD", password)
            engine = TransferEngine()
            assert engine.initialize("a:1", f"redis://{address}", "tcp", "") == -1
        assert engine.initialize("a:1", f"redis://:{PASSWORD}@{address}", "tcp", "") == 0
