"""Bytes that change on the way from the leader to a standby are noticed, and sent again."""

from __future__ import annotations

import itertools
import re
from contextlib import ExitStack
from pathlib import Path

from conftest import MIB
from elected_masters import LEASE_S, Masters, Member, awaited, distinct_ports
from flipping_proxy import FlippingProxy
from metadata_servers import etcd_process

import mooncake

# Keys of this length soon fill 64 MiB of the log, which a snapshot then replaces.
LONG_KEY = 60_000
SNAPSHOT_MARKER = "in-the-snapshot-" * 8
FRAME_MARKER = "in-a-frame-" * 8


def metric(member: Member, name: str) -> int:
    """Return the value of a metric without labels."""
    _, text = member.page("/metrics")
    found = re.search(rf"^{name} (\d+)$", text.decode(), re.MULTILINE)
    assert found is not None, name
    return int(found[1])


def fill_log_until_snapshot(store: mooncake.Store, leader: Member) -> None:
    """Change the pool until the leader has replaced its log by a snapshot."""
    names = itertools.count()

    def has_snapshot() -> bool:
        keys = [f"{next(names)}" + "x" * LONG_KEY for _ in range(100)]
        assert all(store.put_many(dict.fromkeys(keys, b"x")))
        store.delete_many(keys, force=True)
        return any(leader.state.glob("snapshot-*"))

    awaited(has_snapshot, leader.state)


def test_flipped_bytes_between_masters_are_refused(tmp_path: Path) -> None:
    with ExitStack() as stack:
        etcd, _ = stack.enter_context(etcd_process(tmp_path))
        options = ["--enable_ha=true", f"--etcd_endpoints={etcd}", f"--ha_lease_ttl={LEASE_S}s"]
        leader, standby = (
            Member(port, tmp_path / str(port), options) for port in distinct_ports(2)
        )
        proxy = stack.enter_context(FlippingProxy(leader.port))
        leader.advertised = f"127.0.0.1:{proxy.port}"
        masters = Masters(f"{leader.address},{standby.address}", [leader, standby])
        for member in masters.members:
            stack.callback(member.stop)
        leader.start()
        masters.leader()
        config = mooncake.StoreConfig(segment_bytes=16 * MIB, retry_s=20)
        store = stack.enter_context(mooncake.Store(masters.place, config))
        kept = {f"{number} {SNAPSHOT_MARKER}": f"{number}".encode() for number in range(100)}
        assert all(store.put_many(kept))
        fill_log_until_snapshot(store, leader)

        proxy.damage(SNAPSHOT_MARKER.encode())
        standby.start()
        masters.in_sync(2)
        assert proxy.damaged == 1
        assert metric(standby, "ha_oplog_checksum_failures") == 1
        attempts = metric(standby, "ha_oplog_gap_resolve_attempts")
        assert metric(standby, "ha_oplog_gap_resolve_success") == attempts - 1 == 1

        proxy.damage(FRAME_MARKER.encode())
        more = {f"{number} {FRAME_MARKER}": f"{number}".encode() for number in range(100)}
        assert all(store.put_many(more))
        masters.in_sync(2)
        assert proxy.damaged == 2
        assert metric(standby, "ha_oplog_checksum_failures") == 2
        assert metric(standby, "ha_oplog_gap_resolve_attempts") == attempts, (
            "it goes on from its place"
        )
        last = awaited(lambda: caught_up(leader, standby), masters)
        assert metric(standby, "ha_oplog_applied_entries") > 0
        assert metric(standby, "ha_oplog_watch_disconnections") >= 2
        assert metric(leader, "ha_shipped_bytes_total") > last

        assert leader.page("/api/v1/handover", method="POST", timeout_s=20)[0] == 200
        assert masters.leader() is standby
        kept |= more
        assert dict(zip(kept, store.get_many(list(kept)), strict=True)) == kept
        assert set(store.keys()) == set(kept), "no key has changed"


def caught_up(leader: Member, standby: Member) -> int:
    """Return the last frame if both masters have it and the leader knows that; otherwise 0."""
    last = metric(leader, "ha_oplog_last_sequence_id")
    durable = metric(leader, "ha_batch_record_durable_sequence")
    applied = metric(standby, "ha_oplog_applied_sequence_id")
    pending = metric(leader, "ha_oplog_pending_entries")
    return last if (durable, applied, pending) == (last, last, 0) else 0
