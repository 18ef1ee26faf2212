"""Engines that authenticate each other with a shared token."""

from __future__ import annotations

import itertools

import pytest
from engine_peers import Memory, start_engine, start_peer

from mooncake.engine import TransferEngine, TransferNotify, Write

SECRET = "correct horse"
NAMES = (f"127.0.0.1:{number}" for number in itertools.count(2000))


@pytest.fixture(params=["shm", "tcp"])
def transport(request, monkeypatch) -> str:
    monkeypatch.setenv("MC_FORCE_TCP", str(int(request.param == "tcp")))
    return request.param


@pytest.fixture(params=["p2p", "http"])
def server(request, master) -> str:
    return "P2PHANDSHAKE" if request.param == "p2p" else f"http://{master.metadata}/metadata"


def with_token(monkeypatch, secret: str, server: str) -> TransferEngine:
    monkeypatch.setenv("MC_TRANSFER_TOKEN", secret)
    return start_engine(name=next(NAMES), metadata=server)


@pytest.mark.usefixtures("transport")
def test_wrong_token_is_refused(monkeypatch, server):
    monkeypatch.setenv("MC_TRANSFER_TOKEN", SECRET)
    far = start_peer(name=next(NAMES), metadata=server)
    try:
        here = Memory.of(b"123456789")
        place = (far.segment, here.address, far.address, 9)
        note = TransferNotify("a", "b")
        good = with_token(monkeypatch, SECRET, server)
        assert good.transfer_sync(*place, Write, note) == 0
        assert far.bytes_at(far.address, 9) == here.content
        for secret in ("", "another one"):
            bad = with_token(monkeypatch, secret, server)
            assert bad.transfer_sync_write(*place) == -1
            assert bad.transfer_sync(far.segment, 0, 0, 0, Write, note) == -1
            assert bad.metrics()["refused"]["token_there"] >= 2
            assert bad.send_probe(far.segment) == 0
        assert far.ask("notifies") == [["a", "b"]]
        refused = far.ask("refused")["token_here"]
        assert refused >= 4, refused
    finally:
        far.end()


@pytest.mark.usefixtures("transport")
def test_engine_with_token_refuses_peers_without(monkeypatch, server):
    monkeypatch.delenv("MC_TRANSFER_TOKEN", raising=False)
    far = start_peer(name=next(NAMES), metadata=server)
    try:
        here = Memory.of(b"123456789")
        near = with_token(monkeypatch, SECRET, server)
        note = TransferNotify("a", "b")
        assert near.transfer_sync_write(far.segment, here.address, far.address, 9) == -1
        assert near.transfer_sync(far.segment, 0, 0, 0, Write, note) == -1
        assert far.ask("notifies") == []
        assert far.bytes_at(far.address, 9) == bytes(9)
    finally:
        far.end()


def test_rejects_short_token(monkeypatch):
    monkeypatch.setenv("MC_TRANSFER_TOKEN", "short")
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
