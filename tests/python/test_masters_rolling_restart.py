"""A rolling restart of a pool under load: each master, and each daemon after it was drained."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checked_load import RETRY_S, Load
from elected_masters import DEADLINE_S, Masters, Member, awaited, elected_masters
from metadata_servers import etcd_process
from test_dummy_client import DaemonProcess, start_daemon

import mooncake

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1"),
]

OBJECTS = 2000
VALUES = {f"fixed-{number}": f"value {number} ".encode() * 300 for number in range(OBJECTS)}


@dataclass
class Reader:
    """Reads the fixed objects at random, and notes each read that does not find its value."""

    store: mooncake.Store
    is_over: threading.Event = field(default_factory=threading.Event)
    reads: int = 0
    longest_s: float = 0
    wrong: list[str] = field(default_factory=list)

    def run(self) -> None:
        chance, keys = random.Random(0), list(VALUES)
        while not self.is_over.is_set():
            key, begun = chance.choice(keys), time.monotonic()
            try:
                found = self.store.get(key, None)
            except mooncake.MooncakeError as error:
                self.wrong.append(f"{key}: {error!r}")
            else:
                if found != VALUES[key]:
                    self.wrong.append(f"{key}: {found and found[:20]!r}")
            self.reads += 1
            self.longest_s = max(self.longest_s, time.monotonic() - begun)


def restart_master(masters: Masters, member: Member) -> None:
    """Restart a master as an operator does: a leader hands over first."""
    masters.in_sync(3)
    if member.leads:
        code, content = member.page("/api/v1/handover", method="POST", timeout_s=20)
        assert code == 200, content
    assert member.running.stop() == 0
    member.master = None
    member.start()
    masters.in_sync(3)


def restart_daemon(store: mooncake.Store, daemon: DaemonProcess, place: str) -> DaemonProcess:
    """Drain a daemon, and start another one at its port."""
    drain = store.drain(daemon.name)
    info = drain.wait(DEADLINE_S)
    assert info.state == "succeeded", info
    assert daemon.stop() == 0
    started = start_daemon(place, port=daemon.port)
    awaited(lambda: any(each.name == started.name for each in store.segments()), started.name)
    return started


def test_fixed_objects_stay_readable_through_a_rolling_restart(tmp_path: Path) -> None:
    hosts = (("127.0.0.1", ()),) * 3
    with ExitStack() as stack:
        etcd, _ = stack.enter_context(etcd_process(tmp_path))
        masters = stack.enter_context(elected_masters(f"etcd://{etcd}", tmp_path, hosts=hosts))
        daemons: list[DaemonProcess] = []
        stack.callback(lambda: [daemon.process.kill() for daemon in daemons])
        daemons += [start_daemon(masters.place) for _ in range(3)]
        config = mooncake.StoreConfig(retry_s=RETRY_S, rpc_timeout_s=RETRY_S)
        store = stack.enter_context(mooncake.Store(masters.place, config))
        assert all(store.put_many(VALUES))
        reader = Reader(stack.enter_context(mooncake.Store(masters.place, config)))
        thread = threading.Thread(target=reader.run, daemon=True)
        with Load(masters.place) as load:
            thread.start()
            for index, member in enumerate(masters.members):
                load.await_calls(50)
                restart_master(masters, member)
                load.await_calls(50)
                daemons[index] = restart_daemon(store, daemons[index], masters.place)
            load.await_calls(50)
            reader.is_over.set()
            thread.join(DEADLINE_S)
            # A drain may have moved some into the memory of the clients of the load.
            assert store.get_many(list(VALUES)) == list(VALUES.values())
        print(f"{reader.reads} reads, the longest took {reader.longest_s:.2f} s")
        assert reader.reads > OBJECTS
        assert not reader.wrong, reader.wrong[:10]
        assert not load.failures, (load.seed, load.failures)
        assert all(daemon.stop() == 0 for daemon in daemons)
        daemons.clear()
