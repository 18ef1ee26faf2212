"""Several masters that are killed, stopped, handed over and damaged, under checked load."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checked_load import Load
from conftest import MIB, freeze
from elected_masters import DEADLINE_S, LEASE_S, Masters, Member, awaited, elected_masters
from metadata_servers import etcd_process, free_ports, running

import mooncake

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"
LONG = pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
HANDOVERS = 100 if IS_LONG else 5
AWAY_S = 60 if IS_LONG else 2 * LEASE_S

pytestmark = pytest.mark.timeout(900 if IS_LONG else 120)


@pytest.fixture(scope="module")
def etcd(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with etcd_process(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, etcd: tuple[str, subprocess.Popen[bytes]]
) -> Iterator[Masters]:
    folder = tmp_path_factory.mktemp("masters")
    hosts = (("127.0.0.1", ()),) * 3
    with elected_masters(f"etcd://{etcd[0]}", folder, hosts=hosts) as masters:
        yield masters


@pytest.fixture
def three(shared: Masters) -> Masters:
    """Three masters, all in sync."""
    shared.start_all()
    shared.in_sync(3)
    return shared


def by_role(masters: Masters) -> list[Member]:
    """Return the members, the leader first."""
    leader = masters.leader()
    return [leader, *(member for member in masters.members if member is not leader)]


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(order, marks=[] if order == (0, 1, 2) else LONG, id="-".join(map(str, order)))
        for order in itertools.permutations(range(3))
    ],
)
def test_nothing_is_lost_when_all_die_one_after_the_other(three: Masters, order: tuple[int, ...]):
    members = [by_role(three)[number] for number in order]
    with Load(three.place) as load:
        load.await_calls(50)
        for number, member in enumerate(members):
            member.kill()
            if number < 2:
                three.leader(but=members[: number + 1])
                load.await_calls(50)
        three.start_all()
        load.await_calls(50)
        three.in_sync(3)
    assert not load.failures, (load.seed, load.failures)


def test_nothing_is_lost_when_leader_and_standby_die_together(three: Masters):
    leader, standby, survivor = by_role(three)
    with Load(three.place) as load:
        load.await_calls(50)
        for member in (leader, standby):
            member.running.process.kill()
        for member in (leader, standby):
            member.kill()
        assert three.leader() is survivor
        load.await_calls(50)
    assert not load.failures, (load.seed, load.failures)


def test_stopped_leader_never_answers_as_leader(three: Masters):
    leader = three.leader()
    url = leader.running.admin
    seen: list[object] = []
    with Load(three.place) as load:
        config = mooncake.StoreConfig(rpc_timeout_s=30, retry_s=0)
        with mooncake.Store(leader.address, config) as direct:
            assert direct.put("before", b"value")
            # Connections that it accepts before it is stopped, and others that it does not.
            early = [connected(leader) for _ in range(20)]
            freeze(leader.pid)
            connections = [*early, *(connected(leader) for _ in range(20))]
            # Requests that lie in its sockets while its lease runs out.
            threads = [
                threading.Thread(target=answer_of, args=(seen, direct.get, "before")),
                threading.Thread(target=answer_of, args=(seen, direct.put, "late", b"value")),
                threading.Thread(target=answer_of, args=(seen, direct.exists, "before")),
                *(
                    threading.Thread(target=answer_of, args=(seen, leader_page, leader, path))
                    for path in ("/role", "/get_all_keys", "/query_key?key=before")
                ),
                *(
                    threading.Thread(target=answer_of, args=(seen, leader_health, connection))
                    for connection in connections
                ),
            ]
            for thread in threads:
                thread.start()
            try:
                successor = three.leader(but=[leader])
                stopped = time.monotonic()
                # The lease was renewed at most a third of it before the master was stopped.
                awaited(lambda: time.monotonic() > stopped + 3, successor)
                load.await_calls(20)
            finally:
                os.kill(leader.pid, signal.SIGCONT)
            awaited(lambda: not any(thread.is_alive() for thread in threads), url)
            assert not seen
            answer_of(seen, direct.get, "before")
            assert not seen
        # It follows the other one.
        while successor.leads and len(successor.status()["in_sync"]) < 3:
            assert leader_page(leader, "/role") is None
        with mooncake.Store(three.place) as store:
            assert store.get("late", None) is None
            store.delete("before", force=True)
    assert not load.failures, (load.seed, load.failures)


def answer_of(seen: list[object], call: object, *args: object) -> None:
    """Note what a call returns, if it does not raise."""
    try:
        answer = call(*args)  # type: ignore[operator]
    except mooncake.MooncakeError:
        return
    if answer is not None:
        seen.append((call, answer))


def leader_page(member: Member, path: str) -> object:
    """Return what a master says as leader, if it does."""
    code, content = member.page(path, timeout_s=30)
    if code == 200 and content != b"standby":
        return path, content
    return None


def connected(member: Member) -> socket.socket:
    """Connect to the RPC port of a master."""
    return socket.create_connection((member.host, member.port), timeout=30)


def leader_health(connection: socket.socket) -> object:
    """Return what a master says of its health as leader at its RPC port, if it does."""
    with connection, contextlib.suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\n\r\n")
        with connection.makefile("rb") as answer:
            content = answer.read()
        if b'"role":"leader"' in content or b'"service_ready":true' in content:
            return content
    return None


def test_handovers_fail_no_call(three: Masters):
    longest: list[dict[str, float]] = []
    with Load(three.place, retry_s=None) as load:
        load.await_calls(20)
        for _ in range(HANDOVERS):
            leader = three.in_sync(3)
            load.take_longest()
            code, content = leader.page("/api/v1/handover", method="POST", timeout_s=20)
            assert code == 200, content
            assert not leader.leads
            load.await_calls(5)
            longest.append(load.take_longest())
    for verb in ("put", "overwrite", "get", "remove"):
        durations = [times.get(verb, 0) for times in longest]
        print(f"longest {verb}: {statistics.median(durations):.3f}, {max(durations):.3f} s")
        # Those of CI share their processors.
        assert max(durations) < (1 if IS_LONG else 5), verb
    assert not load.failures, (load.seed, load.failures)


def test_leader_ends_with_its_lease_while_etcd_is_away(
    three: Masters, etcd: tuple[str, subprocess.Popen[bytes]]
):
    leader = three.leader()
    with Load(three.place, retry_s=AWAY_S + 50) as load:
        load.await_calls(20)
        freeze(etcd[1].pid)
        begun = time.monotonic()
        try:
            load.await_calls(20)
            assert time.monotonic() < begun + LEASE_S, "the machine is too slow"
            awaited(lambda: not leader.leads, three, 2 * LEASE_S)
            while time.monotonic() < begun + AWAY_S:
                assert not any(member.leads for member in three.members)
                time.sleep(0.1)
            assert leader.page("/get_all_keys")[0] == 503
        finally:
            os.kill(etcd[1].pid, signal.SIGCONT)
        continued = time.monotonic()
        three.leader()
        print(f"a leader {time.monotonic() - continued:.1f} s after etcd")
        load.await_calls(20)
    assert not load.failures, (load.seed, load.failures)


def test_empty_directory_comes_back_under_the_same_address(three: Masters):
    leader = three.leader()
    with Load(three.place) as load:
        load.await_calls(20)
        former = leader.status()["member"]
        leader.kill()
        shutil.rmtree(leader.state)
        three.leader()
        leader.start()
        now = awaited(lambda: leader.status()["promotable"] and three.in_sync(3), three)
        assert now is not leader
        assert leader.status()["member"] in now.status()["in_sync"]
        assert former not in now.status()["in_sync"]
        # It has everything: the others may go.
        for member in three.members:
            if member is not leader:
                member.running.process.kill()
                member.kill()
        assert three.leader() is leader
        load.await_calls(20)
    assert not load.failures, (load.seed, load.failures)


def test_copied_state_directory_is_refused(three: Masters, tmp_path: Path):
    leader, standby, _ = by_role(three)
    standby.kill()
    awaited(lambda: len(leader.status().get("in_sync", [])) == 2, three)
    copy = Member(standby.port, tmp_path / "copy", standby.flags)
    shutil.copytree(leader.state, copy.state)
    copy.start()
    try:
        told = awaited(copy.status, three)
        assert told["member"] == leader.status()["member"]
        with Load(three.place) as load:
            load.await_calls(100)
        assert not load.failures, (load.seed, load.failures)
        assert not any(row["address"] == copy.address for row in leader.status()["standbys"])
        assert leader.leads
        assert not copy.leads
    finally:
        copy.stop()


@pytest.mark.parametrize("ttl", ["2s", "15s"])
def test_change_that_nobody_can_confirm_names_standby_and_service(tmp_path: Path, ttl: str):
    """With the shorter lease the leader has lost it before changes fail."""
    flag = f"--ha_lease_ttl={ttl}"
    with (
        etcd_process(tmp_path) as (etcd, process),
        elected_masters(f"etcd://{etcd}", tmp_path / "masters", flag) as masters,
    ):
        leader, standby = by_role(masters)
        config = mooncake.StoreConfig(segment_bytes=16 * MIB, rpc_timeout_s=9)
        with mooncake.Store(masters.place, config) as store:
            assert store.put("before", b"value")
            for pid in (standby.pid, process.pid):
                freeze(pid)
            try:
                with pytest.raises(mooncake.MooncakeError) as failure:
                    store.put("late", b"value")
            finally:
                for pid in (process.pid, standby.pid):
                    os.kill(pid, signal.SIGCONT)
        text = str(failure.value)
        assert f"standby={standby.address}" in text, text
        assert f"{etcd}" in text, text
        assert f"leader={leader.address}" not in text, text


@pytest.fixture
def pair(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    etcd: tuple[str, subprocess.Popen[bytes]],
) -> Iterator[Masters]:
    """Two masters of a cluster of their own, which sync each change before its answer."""
    flags = (f"--cluster_id={tmp_path.name}", "--log_sync=always")
    started = getattr(request, "param", 2)
    with elected_masters(
        f"etcd://{etcd[0]}", tmp_path, *flags, started=started, has_list=True
    ) as masters:
        yield masters


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def newest_log(member: Member) -> Path:
    """Return the newest file of the log that has more than a header."""
    logs = sorted(path for path in member.state.glob("log-*") if path.stat().st_size > 60)
    return logs[-1]


def test_damaged_log_of_a_standby_does_not_lead(pair: Masters):
    leader, standby = by_role(pair)
    with Load(pair.place) as load:
        load.await_calls(50)
        leader.kill()
        assert pair.leader() is standby
        load.await_calls(50)
        leader.start()
        pair.in_sync(2)
        load.await_calls(50)
        for member in pair.members:
            member.running.process.kill()
        for member in pair.members:
            member.kill()
        path = newest_log(leader)
        flip(path, path.stat().st_size // 2)
        leader.start()
        assert leader.running.process.wait(DEADLINE_S) == 1
        leader.stop()
        standby.start()
        assert pair.leader() is standby
        load.await_calls(20)
        shutil.rmtree(leader.state)
        leader.start()
        pair.in_sync(2)
    assert not load.failures, (load.seed, load.failures)


def test_damaged_end_of_a_log_loses_nothing_acknowledged(pair: Masters):
    leader, standby = by_role(pair)
    with mooncake.Store(pair.place, mooncake.StoreConfig(segment_bytes=MIB, retry_s=50)) as store:
        assert store.put("first", bytes(2000))
        assert store.put("last", b"acknowledged")
        for member in pair.members:
            member.running.process.kill()
        for member in pair.members:
            member.kill()
        path = newest_log(standby)
        flip(path, -1)
        standby.start()
        deadline = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < deadline:
            assert not standby.leads
            time.sleep(0.05)
        leader.start()
        assert pair.leader() is leader
        assert store.get("last") == b"acknowledged"


def test_full_pool_takes_puts_at_once_after_a_take_over(pair: Masters):
    """The put evicts what nobody has read lately, and no object with a lease.

    The second time the standby has attached less than the duration of a lease before.
    """
    names, value = [f"k{number}" for number in range(16)], bytes(MIB)
    config = mooncake.StoreConfig(segment_bytes=16 * MIB, retry_s=50)
    with mooncake.Store(pair.place, config) as store:
        assert all(store.put_many(dict.fromkeys(names, value)))
        assert all(map(store.exists, names))
        for new in ("new", "newer"):
            leader = pair.in_sync(2)
            # The standby is told of leases at once, and they last on after the block.
            told = time.monotonic() + 1
            while time.monotonic() < told:
                with store.lease("k0", "k1"):
                    time.sleep(0.2)
            leader.kill()
            pair.leader(but=[leader])
            awaited(lambda key=new: put_or_none(store, key, value), pair)
            for name in ("k0", "k1"):
                with pytest.raises(mooncake.BusyError, match="lease"):
                    store.delete(name)
                assert store.get(name) == value
            leader.start()
        held = [*names, "new", "newer"]
        assert sum(map(store.exists, held)) == len(names)


def put_or_none(store: mooncake.Store, key: str, value: bytes) -> bool | None:
    try:
        return store.put(key, value)
    except mooncake.MooncakeError:
        return None


@pytest.mark.parametrize("pair", [1], indirect=True)
def test_empty_standby_is_soon_in_sync(pair: Masters):
    count = 1_000_000 if IS_LONG else 50_000
    config = mooncake.StoreConfig(segment_bytes=count * 1024 + 64 * MIB, retry_s=50)
    with mooncake.Store(pair.place, config) as store, Load(pair.place) as load:
        for begin in range(0, count, 10_000):
            stored = store.put_many({f"k{n}": b"%d" % n for n in range(begin, begin + 10_000)})
            assert all(stored)
        assert all(store.exists(f"k{n}") for n in range(0, count, count // 100))
        leader, standby = pair.members
        load.take_longest()
        begun = time.monotonic()
        standby.start()
        pair.in_sync(2)
        print(f"{count} objects: in sync after {time.monotonic() - begun:.1f} s", end=", ")
        print(f"longest calls meanwhile {load.take_longest()}")
        leader.kill()
        assert pair.leader() is standby
        for begin in range(0, count, 10_000):
            keys = [f"k{n}" for n in range(begin, begin + 10_000)]
            assert store.get_many(keys) == [key[1:].encode() for key in keys]
    assert not load.failures, (load.seed, load.failures)


def test_redis_that_comes_back_empty_elects_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    port, _ = free_ports()
    folder = tmp_path / "redis"
    folder.mkdir()
    flags = ["--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    flags += ["--appendonly", "yes", "--appendfsync", "always"]
    with ExitStack() as stack:
        redis = stack.enter_context(ExitStack())
        redis.enter_context(running(folder, port, "redis-server", *flags))
        place = f"redis://127.0.0.1:{port}"
        masters = stack.enter_context(elected_masters(place, tmp_path / "masters"))
        load = stack.enter_context(Load(masters.place))
        load.await_calls(20)
        # With its file, Redis may be restarted.
        redis.close()
        redis.enter_context(running(folder, port, "redis-server", *flags))
        leader = masters.in_sync(2)
        load.await_calls(20)
        redis.close()
        shutil.rmtree(folder)
        folder.mkdir()
        redis.enter_context(running(folder, port, "redis-server", *flags))
        awaited(lambda: all("lost the in-sync set" in reasons(m) for m in masters.members), masters)
        deadline = time.monotonic() + 2 * LEASE_S
        while time.monotonic() < deadline:
            assert not any(member.leads for member in masters.members)
            time.sleep(0.1)
        logged = re.findall(
            r"nobody is elected: .* member=(\S+) next_frame=(\d+)", capfd.readouterr().err
        )
        assert dict(logged).keys() == {m.status()["member"] for m in masters.members}
        assert all(int(frame) > 1 for _, frame in logged)
        leader.kill()
        leader.start("--force_leader")
        assert masters.in_sync(2) is leader
        load.await_calls(20)
    assert not load.failures, (load.seed, load.failures)


def reasons(member: Member) -> str:
    return " ".join(member.status().get("reasons", []))
