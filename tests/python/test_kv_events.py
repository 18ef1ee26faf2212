"""Events of objects, as a ZeroMQ subscriber sees them."""

from __future__ import annotations

import json
import re
import struct
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from conftest import MasterProcess, set_up, start_master

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

pytestmark = pytest.mark.timeout(4 * 60)
zmq = pytest.importorskip("zmq", reason="needs pyzmq: pip install pyzmq")
msgpack = pytest.importorskip("msgpack", reason="needs msgpack: pip install msgpack")

DEADLINE = 60


def receive(subscriber: Any, count: int) -> tuple[list[int], list[dict[str, Any]]]:
    """The next so many events, and the sequence numbers they came under."""
    sequences: list[int] = []
    events: list[dict[str, Any]] = []
    end = time.monotonic() + DEADLINE
    while len(events) < count:
        left = max(1, int((end - time.monotonic()) * 1000))
        assert subscriber.poll(left), f"only {events}"
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
    """A master that publishes, and a store that joined it; both end with the block."""
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


def knock(subscriber: Any, store: MooncakeDistributedStore) -> int:
    """Puts objects until the subscriber hears of one: a subscription is not answered."""
    end = time.monotonic() + DEADLINE
    knocks = 0
    while not subscriber.poll(50):
        assert time.monotonic() < end
        assert store.put(f"knock-{knocks}", b"x") == 0
        knocks += 1
    return knocks


Subscribe = Callable[..., Any]


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    """Makes subscribers, and closes them."""
    with zmq.Context() as context, ExitStack() as stack:

        def made(endpoint: str, **options: int) -> Any:
            subscriber = stack.enter_context(context.socket(zmq.SUB))
            subscriber.setsockopt(zmq.LINGER, 0)
            for name, value in options.items():
                subscriber.setsockopt(getattr(zmq, name), value)
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(endpoint)
            return subscriber

        yield made


def test_subscriber_receives_events_in_order(subscribe: Subscribe) -> None:
    with publishing("tcp://127.0.0.1:*", "--kv_events_model_name=some/model") as (master, store):
        subscriber = subscribe(endpoint_of(master))
        knocks = knock(subscriber, store)
        assert store.put("last-knock", b"x") == 0
        before: list[int] = []
        while True:
            sequences, events = receive(subscriber, 1)
            before += sequences
            if events[-1]["object_key"] == "last-knock":
                break

        config = ReplicateConfig()
        config.group_ids = ["g"]
        assert store.put_batch(["a"], [b"1"], config) == 0
        assert store.upsert("a", b"22") == 0
        assert store.remove("a", True) == 0
        sequences, events = receive(subscriber, 4)
        told = [(event["event_type"], event["object_key"], event["group_id"]) for event in events]
        assert told == [
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

        assert store.remove_all(True) == knocks + 1
        _, events = receive(subscriber, knocks + 2)
        assert [event["event_type"] for event in events] == ["removed"] * (knocks + 1) + ["cleared"]
        assert events[-1]["medium"] is None
        assert "object_key" not in events[-1]


def test_slow_subscriber_does_not_block_others(
    subscribe: Subscribe,
) -> None:
    with publishing() as (master, store):
        slow = subscribe(endpoint_of(master), RCVHWM=1, RCVBUF=1 << 16)
        knock(slow, store)
        quick = subscribe(endpoint_of(master))
        knock(quick, store)
        assert status_of(master)["subscribers"] == 2
        # Long keys soon fill what lies between: what kernels hold, and what waits at the master.
        long = "k" * 60_000
        sequences: list[int] = []
        told: set[str] = set()
        for turn in range(500):
            key = f"{turn}/{long}"
            assert store.put(key, b"x") == 0
            while key not in told:
                numbers, events = receive(quick, 1)
                sequences += numbers
                told |= {event["object_key"] for event in events}
            assert store.remove(key, True) == 0
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))

        heard: list[int] = []
        keys: set[str] = set()
        end = time.monotonic() + DEADLINE
        while not any(key.startswith("last") for key in keys):
            assert time.monotonic() < end
            assert store.put(f"last-{len(heard)}", b"x") == 0
            while slow.poll(50):
                numbers, events = receive(slow, 1)
                heard += numbers
                keys = {event["object_key"] for event in events}
        assert heard == sorted(set(heard))
        assert heard[-1] - heard[0] >= len(heard), "a gap in the numbers tells of what was missed"
        assert status_of(master)["missed_by_slow_subscribers"] > 0
        assert status_of(master)["dropped_events"] == 0, "none was lost for all"


def test_subscriber_reconnects_to_a_new_master(
    subscribe: Subscribe,
) -> None:
    with publishing() as (master, store):
        endpoint = endpoint_of(master)
        subscriber = subscribe(endpoint)
        knocks = knock(subscriber, store)
        [first, *_], _ = receive(subscriber, 1)
        assert 1 <= first <= knocks
        # A second one goes on from where the first is, not from the beginning.
        other = subscribe(endpoint)
        knock(other, store)
        [later, *_], _ = receive(other, 1)
        assert later > first
    while subscriber.poll(0):
        subscriber.recv_multipart()
    with publishing(endpoint) as (_, store):
        knocks = knock(subscriber, store)
        [again, *_], events = receive(subscriber, 1)
        assert 1 <= again <= knocks
        assert events[0]["event_type"] == "stored"
