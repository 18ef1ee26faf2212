"""A lone master becomes one of two, and hands over: the next leader knows what it knew."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import MIB, freeze
from elected_masters import DEADLINE_S, LEASE_S, Masters, Member, awaited, distinct_ports
from metadata_servers import etcd_process
from test_dummy_client import start_daemon
from test_rest_objects import call

import mooncake
from mooncake.mooncake_store_service import MooncakeStoreService
from mooncake.store import MooncakeDistributedStore

TOKEN = "a token of sixteen bytes or more"
VARIABLE = "MOONCAKE_MASTER_TOKEN"
TENANTS = "version: 1\ntenants:\n  - name: default\n    quota: 1GB\n"


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[str]:
    with etcd_process(tmp_path) as (address, _):
        yield address


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[Member]]:
    """Three masters that do not run yet."""
    members = [Member(port, tmp_path / str(port), []) for port in distinct_ports(3)]
    yield members
    for member in members:
        member.stop()


def options(etcd: str) -> list[str]:
    return ["--enable_ha=true", f"--etcd_endpoints={etcd}", f"--ha_lease_ttl={LEASE_S}s"]


def hand_over(leader: Member, to: Member | str) -> tuple[int, dict[str, Any]]:
    """Ask a leader for a hand-over; return the status and the answer."""
    address = to if isinstance(to, str) else to.address
    path = f"/api/v1/handover?to={address}"
    status, content = leader.page(path, method="POST", timeout_s=20)
    return status, json.loads(content)


def set_quota(leader: Member, tenant: str, limit: int) -> None:
    request = urllib.request.Request(
        f"{leader.running.admin}/api/v1/tenant_quotas?tenant_id={tenant}",
        json.dumps({"requested_quota_bytes": limit}).encode(),
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200


def quotas(leader: Member) -> dict[str, int]:
    _, content = leader.page("/api/v1/tenant_quotas")
    rows = json.loads(content)["data"]
    return {row["tenant_id"]: row["requested_quota_bytes"] for row in rows}


def rest_server(stack: ExitStack, place: str) -> MooncakeStoreService:
    settings = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": place,
        "global_segment_size": "16mb",
        "local_buffer_size": "1mb",
    }
    service = MooncakeStoreService(cli_config=settings)
    assert asyncio.run(service.start_store_service(30))
    stack.callback(lambda: asyncio.run(service.stop()))
    assert asyncio.run(service.start_http_service(0))
    return service


def dummy_client(stack: ExitStack, place: str) -> MooncakeDistributedStore:
    daemon = start_daemon(place)
    stack.callback(daemon.stop)
    dummy = MooncakeDistributedStore()
    assert dummy.setup_dummy(MIB, 0, daemon.address) == 0
    stack.callback(dummy.close)
    return dummy


def test_lone_master_becomes_one_of_two(etcd: str, members: list[Member], tmp_path: Path) -> None:
    first, second = members[:2]
    for member in (first, second):
        file = tmp_path / f"quotas-{member.port}"
        file.write_text(TENANTS)
        member.flags = ["--enable_multi_tenants", f"--tenant_quota_connector_uri=file://{file}"]
    listed = f"{first.address},{second.address}"
    masters = Masters(f"etcd://{etcd}", [first, second])
    config = mooncake.StoreConfig(segment_bytes=16 * MIB, retry_s=DEADLINE_S)
    with ExitStack() as stack:
        first.start()
        store = stack.enter_context(mooncake.Store(listed, config))
        assert store.put("kept", b"value", tags={"model": "m"})
        first.stop()
        for member in (first, second):
            member.flags += options(etcd)
        first.start()
        masters.leader()
        assert store.get("kept") == b"value", "it is a restart of the lone master"
        status, told = hand_over(first, second)
        assert (status, told["success"]) == (409, False), "there is no standby yet"

        second.start()
        masters.in_sync(2)
        other = stack.enter_context(mooncake.Store(masters.place, config))
        rest = rest_server(stack, listed)
        dummy = dummy_client(stack, masters.place)
        task = store.copy("kept", to=other.name)
        assert task.wait(DEADLINE_S).state == "success"
        drain = store.drain(other.name, to=store.name)
        assert drain.wait(DEADLINE_S).state == "succeeded"
        session = dummy.alloc_from_mem_pool(4096)
        assert dummy.batch_get_session_start(["kept"]) == [0]
        set_quota(first, "late", 7 * MIB)
        assert hand_over(first, "127.0.0.1:1")[0] == 409, "nobody is there"

        before = masters.leader().status()["view_version"]
        status, told = hand_over(first, second)
        assert (status, told["leader_address"]) == (200, second.address)
        assert told["view_version"] > before
        assert masters.leader() is second
        for member in (first, second):
            leader = awaited(partial(leader_told, member), masters)
            assert leader == (second.address, told["view_version"])

        assert store.get("kept") == b"value"
        assert store.info("kept").tags == {"model": "m"}
        assert store.task(task.id).info().state == "success"
        assert store.drain_of(drain.id).info().state == "succeeded"
        assert quotas(second) == {"default": 1 << 30, "late": 7 * MIB}
        assert call(rest, "GET", "/objects/kept").body == b"value"
        assert call(rest, "PUT", "/objects/rest", b"r").status == 204
        assert dummy.get("kept") == b"value"
        assert dummy.batch_get_into_multi_buffer_ranges(["kept"], [[session]], [[3]], [[2]]) == [3]
        assert ctypes.string_at(session, 3) == b"lue"
        assert dummy.put("dummy", b"d") == 0
        assert store.get_many(["rest", "dummy"]) == [b"r", b"d"]


def test_tasks_and_drains_under_way_outlast_a_handover(etcd: str, members: list[Member]) -> None:
    first, second = members[:2]
    for member in (first, second):
        member.flags = options(etcd)
        member.start()
    masters = Masters(f"etcd://{etcd}", [first, second])
    leader = masters.in_sync(2)
    follower = second if leader is first else first
    config = mooncake.StoreConfig(segment_bytes=16 * MIB, retry_s=DEADLINE_S)
    with ExitStack() as stack:
        copying, drained = (start_daemon(masters.place) for _ in range(2))
        # Their tasks wait for them while they are stopped.
        for daemon in (copying, drained):
            stack.callback(daemon.kill)
        store = stack.enter_context(mooncake.Store(masters.place, config))
        assert store.put(
            "copied", b"c", options=mooncake.PutOptions(preferred_segments=[copying.name])
        )
        assert store.put(
            "moved", b"m", options=mooncake.PutOptions(preferred_segments=[drained.name])
        )
        for daemon in (copying, drained):
            freeze(daemon.process.pid)
        cancelled = store.drain(copying.name, to=store.name)
        cancelled.cancel()
        task = store.copy("copied", to=store.name)
        drain = store.drain(drained.name, to=store.name)
        awaited(lambda: drain.info().active == 1, masters)
        before = [each.info() for each in (task, drain, cancelled)]
        assert not before[0].is_over
        assert not before[1].is_over
        assert hand_over(leader, follower)[0] == 200

        task, drain = store.task(task.id), store.drain_of(drain.id)
        found = [each.info() for each in (task, drain, store.drain_of(cancelled.id))]
        assert (found[0].state, found[2].state) == (before[0].state, "canceled")
        assert not found[1].is_over
        assert found[1].segments == [drained.name]
        for daemon in (copying, drained):
            os.kill(daemon.process.pid, signal.SIGCONT)
        assert task.wait(DEADLINE_S).state == "success"
        assert drain.wait(DEADLINE_S).state == "succeeded"
        assert {copy.segment for copy in store.copies("copied")} == {copying.name, store.name}
        assert {copy.segment for copy in store.copies("moved")} == {store.name}
        assert store.get_many(["copied", "moved"]) == [b"c", b"m"]


def leader_told(member: Member) -> tuple[str, int] | None:
    """Return who leads, and in which view, as a master says."""
    told = json.loads(member.page("/leader")[1])
    return (told["leader_address"], told["view_version"]) if told["present"] else None


def greeting_of(member: Member) -> bytes:
    """Greet a master as a client does; return all that it says to one that proves nothing."""
    with socket.create_connection((member.host, member.port), 20) as stream:
        stream.sendall(b"MOONLEAN" + (2).to_bytes(4, "little"))
        stream.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: stream.recv(4096), b""))


def refused_tokens(member: Member) -> int:
    _, metrics = member.page("/metrics")
    found = re.search(rb"^ha_refused_tokens_total (\d+)$", metrics, re.MULTILINE)
    assert found
    return int(found[1])


def test_former_leader_names_the_next_to_those_with_its_token(
    etcd: str, members: list[Member], tmp_path: Path
) -> None:
    first, second = members[:2]
    file = tmp_path / "token"
    file.write_text(TOKEN)
    for member in (first, second):
        member.flags = [*options(etcd), f"--rpc_token_file={file}"]
        member.start()
    masters = Masters(f"{first.address},{second.address}", [first, second])
    leader = masters.in_sync(2)
    follower = second if leader is first else first
    request = urllib.request.Request(
        f"{leader.running.admin}/api/v1/handover",
        headers={"Authorization": f"Bearer {TOKEN}"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
    awaited(lambda: leader_told(leader) == leader_told(follower), masters)

    def refusal(token: str | None) -> str:
        config = mooncake.StoreConfig(token=token, retry_s=0)
        with pytest.raises(mooncake.MooncakeError) as refused:
            mooncake.Store(leader.address, config)
        return str(refused.value)

    told = refusal(TOKEN)
    assert "does not lead" in told
    assert f"leader={follower.address}" in told
    assert refused_tokens(leader) == 0
    for token in (None, "another token of this length"):
        told = refusal(token)
        assert VARIABLE in told
        assert "lead" not in told.replace(leader.address, "")
        assert follower.address not in told
    assert refused_tokens(leader) == 1
    assert follower.address.encode() not in greeting_of(leader)
    config = mooncake.StoreConfig(token=TOKEN, segment_bytes=16 * MIB)
    with mooncake.Store(masters.place, config) as store:
        assert store.put("key", b"value")
        assert store.get("key") == b"value"


def answer_to_standby(leader: Member, version: int) -> bytes:
    """Greet a master as a standby of some version does; return what it says until it closes."""
    with socket.create_connection((leader.host, leader.port), 20) as stream:
        stream.sendall(b"MOONSTBY" + version.to_bytes(4, "little"))
        return b"".join(iter(lambda: stream.recv(4096), b""))


def test_standby_needs_token_and_version_of_the_leader(
    etcd: str,
    members: list[Member],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    first, second, stranger = members
    for member in members:
        file = tmp_path / f"token-{member.port}"
        file.write_text("another " * (member is stranger) + TOKEN)
        member.flags = [*options(etcd), "--in_sync_copies=3", f"--rpc_token_file={file}"]
    masters = Masters(f"etcd://{etcd}", members)
    monkeypatch.setenv(VARIABLE, TOKEN)
    first.start()
    masters.leader()
    stranger.start()
    awaited(lambda: "token" in capfd.readouterr().err, masters)
    awaited(lambda: refused_tokens(first) > 0, masters)
    assert b"another version of the log's protocol" in answer_to_standby(first, version=999)
    second.start()
    awaited(lambda: len(first.status()["in_sync"]) == 2, masters)
    assert [row["address"] for row in first.status()["standbys"]] == [second.address]
    with mooncake.Store(masters.place, mooncake.StoreConfig(segment_bytes=16 * MIB)) as store:
        assert store.put("key", b"value")
        assert store.get("key") == b"value"
