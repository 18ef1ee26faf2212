"""Several masters and etcd on hosts of their own, between which the network is cut."""

from __future__ import annotations

import itertools
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest
from checked_load import Load
from elected_masters import LEASE_S, Masters, Member, elected_masters
from metadata_servers import etcd_process

import mooncake

IS_LONG = os.environ.get("MOONCAKE_LONG_TESTS") == "1"
LONG = pytest.mark.skipif(not IS_LONG, reason="needs MOONCAKE_LONG_TESTS=1")
# For a lease, the election of another leader, and some calls at it.
CUT_S = 2 * LEASE_S + 1
HEALED_S = 10
PARTIES = ("leader", "first standby", "second standby", "etcd")
SHORT = {("leader", "first standby"), ("leader", "etcd")}
NOBODY = "02:00:00:00:00:99"

pytestmark = pytest.mark.timeout(300)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True, timeout=30)


@dataclass
class Hosts:
    """Network namespaces on a bridge, which is in the first of them; this process is there, too."""

    names: list[str]
    addresses: list[str]

    def entered(self, number: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[number]]

    @contextmanager
    def cut(self, one: int, other: int) -> Iterator[None]:
        """Send what two hosts send each other to an address that nobody has."""
        ways = [(one, other), (other, one)]
        for here, there in ways:
            nobody = ["lladdr", NOBODY, "dev", "port", "nud", "permanent"]
            ip("-n", self.names[here], "neigh", "replace", self.addresses[there], *nobody)
        try:
            yield
        finally:
            for here, there in ways:
                ip("-n", self.names[here], "neigh", "delete", self.addresses[there], "dev", "port")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Four hosts, 10.78.0.1 to 10.78.0.4; this process has 10.78.0.9."""
    names = [f"mc-{os.getpid()}-{number}" for number in range(1, 5)]
    hosts = Hosts(names, [f"10.78.0.{number}" for number in range(1, 5)])
    own = f"mc{os.getpid()}"
    with ExitStack() as stack:
        for name in names:
            try:
                ip("netns", "add", name)
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"needs root and network namespaces: run as root: {error}")
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", names[0], "link", "add", "port", "type", "bridge")
        ip("-n", names[0], "link", "set", "port", "up")
        for number, name in enumerate(names[1:], 1):
            cable = ["type", "veth", "peer", "name", f"to{number}", "netns", names[0]]
            ip("link", "add", "port", "netns", name, *cable)
            ip("-n", name, "link", "set", "port", "up")
            ip("-n", names[0], "link", "set", f"to{number}", "master", "port", "up")
        ip("link", "add", own, "type", "veth", "peer", "name", "to9", "netns", names[0])
        ip("-n", names[0], "link", "set", "to9", "master", "port", "up")
        ip("address", "add", "10.78.0.9/24", "dev", own)
        ip("link", "set", own, "up")
        for name, address in zip(names, hosts.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "port")
        yield hosts


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Iterator[Masters]:
    """etcd on the first host, and a master on each of the others."""
    folder = tmp_path_factory.mktemp("etcd")
    places = [(hosts.addresses[n], hosts.entered(n)) for n in (1, 2, 3)]
    with (
        etcd_process(folder, host=hosts.addresses[0], within=hosts.entered(0)) as (etcd, _),
        elected_masters(
            f"etcd://{etcd}", tmp_path_factory.mktemp("masters"), hosts=places
        ) as masters,
    ):
        yield masters


@dataclass
class Witness:
    """A client of one master, which notes when and in which view puts are acknowledged."""

    member: Member
    acknowledged: list[tuple[float, float, int]] = field(default_factory=list)

    def run(self, is_over: threading.Event) -> None:
        config = mooncake.StoreConfig(retry_s=0, rpc_timeout_s=1, connect_timeout_s=1)
        store = None
        try:
            while not is_over.wait(0.01):
                try:
                    store = store or mooncake.Store(self.member.address, config)
                    view = self.member.status().get("view_version")
                    begun = time.monotonic()
                    store.put(f"witness {self.member.address}", b"x", overwrite=True)
                    ended = time.monotonic()
                except mooncake.MooncakeError:
                    continue
                told = self.member.status()
                # Else the view of the acknowledgement is not certain.
                if told.get("state") == "serving" and told.get("view_version") == view:
                    self.acknowledged.append((begun, ended, view))
        finally:
            if store is not None:
                store.close()


@contextmanager
def witnesses(masters: Masters) -> Iterator[list[Witness]]:
    seen = [Witness(member) for member in masters.members]
    is_over = threading.Event()
    threads = [threading.Thread(target=witness.run, args=(is_over,)) for witness in seen]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def check_one_leader(seen: list[Witness]) -> None:
    """No call that begins after a leader of a later view has acknowledged one is acknowledged."""
    calls = sorted(call for witness in seen for call in witness.acknowledged)
    assert len(calls) > 20
    for begun, _, view in calls:
        later = [ended for _, ended, other in calls if other > view]
        assert begun <= min(later, default=begun), calls


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(pair, marks=[] if pair in SHORT else LONG, id=" - ".join(pair))
        for pair in itertools.combinations(PARTIES, 2)
    ],
)
def test_cut_between_two_hosts_makes_no_second_leader(
    masters: Masters, hosts: Hosts, pair: tuple[str, str]
):
    leader = masters.in_sync(3)
    standbys = [member for member in masters.members if member is not leader]
    numbers = [1 + masters.members.index(member) for member in (leader, *standbys)]
    places = dict(zip(PARTIES, [*numbers, 0], strict=True))
    with Load(masters.place) as load, witnesses(masters) as seen:
        load.await_calls(20)
        with hosts.cut(places[pair[0]], places[pair[1]]):
            cut = time.monotonic()
            if pair == ("leader", "etcd"):
                assert masters.leader(but=[leader]) is not leader
            load.await_calls(20)
            while time.monotonic() < cut + CUT_S:
                time.sleep(0.1)
        healed = time.monotonic()
        load.await_calls(20, within_s=HEALED_S)
        masters.leader(within_s=HEALED_S)
        print(f"service {time.monotonic() - healed:.1f} s after healing", end=", ")
        masters.in_sync(3)
        print(f"all in sync after {time.monotonic() - healed:.1f} s")
    check_one_leader(seen)
    assert not load.failures, (load.seed, load.failures)
