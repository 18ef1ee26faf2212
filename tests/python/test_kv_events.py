"""Events of objects (kv events), as a ZeroMQ subscriber receives them."""

from __future__ import annotations

import json
import re
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import MasterProcess, set_up, start_master
from elected_masters import elected_masters
from metadata_servers import etcd_process

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

pytestmark = pytest.mark.timeout(4 * 60)
zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
msgpack = pytest.importorskip("msgpack", reason="needs msgpack: pip install msgpack")

DEADLINE = 60


def receive(subscriber: Any, count: int) -> tuple[list[int], list[dict[str, Any]]]:
    """Receive `count` events or more, and return their sequence numbers and the events."""
    sequences: list[int] = []
    events: list[dict[str, Any]] = []
    end = time.monotonic() + DEADLINE
    while len(events) < count:
        left = max(1, int((end - time.monotonic()) * 1000))
        assert subscriber.poll(left), f"received only {events}"
        topic, sequence, payload = subscriber.recv_multipart()
        assert topic == b""
        sequences.append(struct.unpack(">Q", sequence)[0])
        timestamp, batch, rank = msgpack.unpackb(payload)
        assert rank == 0
        assert abs(timestamp / 1000 - time.time()) < 3600
        events.extend(batch)
    return sequences, events


@contextmanager
def publishing(
    endpoint: str = "tcp://127.0.0.1:*", *flags: str
) -> Iterator[tuple[MasterProcess, MooncakeDistributedStore]]:
    """Run a master that publishes events and a store that joined it, until the block ends."""
    master = start_master(
        "--enable_kv_events",
        f"--kv_events_bind_endpoint={endpoint}",
        "--kv_events_backend_id=pool-a",
        "--default_kv_lease_ttl=1ms",
        *flags,
    )
    store = MooncakeDistributedStore()
    try:
        assert set_up(store, master.address) == 0
        yield master, store
    finally:
        store.close()
        master.kill()


def endpoint_of(master: MasterProcess) -> str:
    found = re.search(r" events=(\S+)", master.ready)
    assert found is not None
    return f"tcp://{found[1]}"


def status_of(master: MasterProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"{master.admin}/kv_events/status", timeout=DEADLINE) as answer:
        status: dict[str, Any] = json.load(answer)
    return status


def put_until_received(subscriber: Any, store: MooncakeDistributedStore) -> int:
    """Put objects until an event arrives, because ZeroMQ does not confirm subscriptions."""
    end = time.monotonic() + DEADLINE
    probes = 0
    while not subscriber.poll(50):
        assert time.monotonic() < end
        assert store.put(f"probe-{probes}", b"x") == 0
        probes += 1
    return probes


Subscribe = Callable[..., Any]


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    """Make subscribers, and close them after the test."""
    with zmq.Context() as context, ExitStack() as stack:

        def connect(endpoint: str, **options: int) -> Any:
            subscriber = stack.enter_context(context.socket(zmq.SUB))
            subscriber.setsockopt(zmq.LINGER, 0)
            for name, value in options.items():
                subscriber.setsockopt(getattr(zmq, name), value)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(endpoint)
            return subscriber

        yield connect


def test_subscriber_receives_events_in_order(subscribe: Subscribe) -> None:
    with publishing("tcp://127.0.0.1:*", "--kv_events_model_name=some/model") as (master, store):
        subscriber = subscribe(endpoint_of(master))
        probes = put_until_received(subscriber, store)
        assert store.put("last-probe", b"x") == 0
        before: list[int] = []
        while True:
            sequences, events = receive(subscriber, 1)
            before += sequences
            if events[-1]["object_key"] == "last-probe":
                break

        config = ReplicateConfig()
        config.group_ids = ["g"]
        assert store.put_batch(["a"], [b"1"], config) == 0
        assert store.upsert("a", b"22") == 0
        assert store.remove("a", True) == 0
        sequences, events = receive(subscriber, 4)
        seen = [(event["event_type"], event["object_key"], event["group_id"]) for event in events]
        assert seen == [
            ("stored", "a", "g"),
            ("removed", "a", "g"),
            ("stored", "a", None),
            ("removed", "a", None),
        ]
        numbers = before + sequences
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        ids = [event["event_id"] for event in events]
        assert ids == list(range(ids[0], ids[0] + 4))
        first = events[0]
        assert {
            "backend_id": "pool-a",
            "tenant_id": "default",
            "medium": "cpu",
            "model_name": "some/model",
            "block_size": None,
            "type": "BlockStored",
            "seq_hashes": [],
            "block_hashes": [],
            "parent_hash": None,
            "parent_block_hash": None,
            "token_ids": None,
            "base_block_idx": None,
        }.items() <= first.items()
        assert events[1]["type"] == "BlockRemoved"
        assert "token_ids" not in events[1]

        assert store.remove_all(True) == probes + 1
        _, events = receive(subscriber, probes + 2)
        assert [event["event_type"] for event in events] == ["removed"] * (probes + 1) + ["cleared"]
        assert events[-1]["medium"] is None
        assert "object_key" not in events[-1]


def test_slow_subscriber_does_not_block_others(
    subscribe: Subscribe,
) -> None:
    with publishing() as (master, store):
        slow = subscribe(endpoint_of(master), RCVHWM=1, RCVBUF=1 << 16)
        put_until_received(slow, store)
        quick = subscribe(endpoint_of(master))
        put_until_received(quick, store)
        assert status_of(master)["subscribers"] == 2
        # Long keys soon fill the buffers of the sockets and the queue of the master.
        long = "k" * 60_000
        sequences: list[int] = []
        seen: set[str] = set()
        for turn in range(500):
            key = f"{turn}/{long}"
            assert store.put(key, b"x") == 0
            while key not in seen:
                numbers, events = receive(quick, 1)
                sequences += numbers
                seen |= {event["object_key"] for event in events}
            assert store.remove(key, True) == 0
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))

        received: list[int] = []
        keys: set[str] = set()
        end = time.monotonic() + DEADLINE
        while not any(key.startswith("last") for key in keys):
            assert time.monotonic() < end
            assert store.put(f"last-{len(received)}", b"x") == 0
            while slow.poll(50):
                numbers, events = receive(slow, 1)
                received += numbers
                keys = {event["object_key"] for event in events}
        assert received == sorted(set(received))
        assert received[-1] - received[0] >= len(received), (
            "missed events leave a gap in the sequence numbers"
        )
        assert status_of(master)["missed_by_slow_subscribers"] > 0
        assert status_of(master)["dropped_events"] == 0, "no event was lost for every subscriber"


def test_subscriber_reconnects_to_a_new_master(
    subscribe: Subscribe,
) -> None:
    with publishing() as (master, store):
        endpoint = endpoint_of(master)
        subscriber = subscribe(endpoint)
        probes = put_until_received(subscriber, store)
        [first, *_], _ = receive(subscriber, 1)
        assert 1 <= first <= probes
        # A second subscriber starts at the current sequence number, not at the first.
        other = subscribe(endpoint)
        put_until_received(other, store)
        [later, *_], _ = receive(other, 1)
        assert later > first
    while subscriber.poll(0):
        subscriber.recv_multipart()
    with publishing(endpoint) as (_, store):
        probes = put_until_received(subscriber, store)
        [again, *_], events = receive(subscriber, 1)
        assert 1 <= again <= probes
        assert events[0]["event_type"] == "stored"


def test_next_leader_skips_sequence_numbers(subscribe: Subscribe, tmp_path: Path) -> None:
    flags = ["--enable_kv_events", "--kv_events_bind_endpoint=tcp://127.0.0.1:*"]
    flags.append("--kv_events_backend_id=pool-a")
    with (
        etcd_process(tmp_path) as (etcd, _),
        elected_masters(f"etcd://{etcd}", tmp_path, *flags) as masters,
    ):
        leader = masters.leader()
        subscriber = subscribe(endpoint_of(leader.running))
        for member in masters.members:
            if member is not leader:
                subscriber.connect(endpoint_of(member.running))
        store = MooncakeDistributedStore()
        try:
            assert set_up(store, masters.place) == 0
            put_until_received(subscriber, store)
            sequences, events = receive(subscriber, 1)
            last, last_event = sequences[-1], events[-1]["event_id"]
            assert leader.page("/api/v1/handover", method="POST", timeout_s=DEADLINE)[0] == 200
            successor = masters.leader(but=[leader])
            while subscriber.poll(0):
                last = struct.unpack(">Q", subscriber.recv_multipart()[1])[0]
            # A gap tells the subscriber to ask for the keys, whatever it has missed.
            first = status_of(successor.running)["first_sequence"]
            assert first > last + 1
            put_until_received(subscriber, store)
            sequences, events = receive(subscriber, 1)
            assert sequences[0] >= first
            assert events[0]["event_id"] >= first > last_event
        finally:
            store.close()
