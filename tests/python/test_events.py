"""Events of objects, as a ZeroMQ subscriber sees them."""

from __future__ import annotations

import re
import struct
import time
from typing import Any

import pytest
from conftest import set_up, start_master

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

zmq = pytest.importorskip("zmq", reason="pyzmq is not installed")
msgpack = pytest.importorskip("msgpack", reason="msgpack is not installed")

DEADLINE = 20


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


def test_a_subscriber_hears_of_objects_in_order() -> None:
    master = start_master(
        "--enable_kv_events",
        "--kv_events_bind_endpoint=tcp://127.0.0.1:*",
        "--kv_events_backend_id=pool-a",
        "--kv_events_model_name=some/model",
        "--default_kv_lease_ttl=1ms",
    )
    store = MooncakeDistributedStore()
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        assert set_up(store, master.address) == 0
        found = re.search(r" events=(\S+)", master.ready)
        assert found is not None
        subscriber.connect(f"tcp://{found[1]}")
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        # A subscription is not answered: knock until something comes.
        end = time.monotonic() + DEADLINE
        knocks = 0
        while not subscriber.poll(50):
            assert time.monotonic() < end
            assert store.put(f"knock-{knocks}", b"x") == 0
            knocks += 1
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
    finally:
        subscriber.close(0)
        context.term()
        store.close()
        master.kill()
