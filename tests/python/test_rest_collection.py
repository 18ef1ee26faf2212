"""The REST server's routes for many objects: pages of keys, and batches as multipart."""

from __future__ import annotations

import asyncio
import email
import email.policy
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import pytest
from conftest import MIB, MasterProcess, start_master

import mooncake
from mooncake._rest import collection
from mooncake.mooncake_store_service import MooncakeStoreService
from mooncake.tensor import Layout


@pytest.fixture(scope="module")
def pool() -> Iterator[MasterProcess]:
    master = start_master()
    yield master
    master.stop()


@pytest.fixture(scope="module")
def store(pool: MasterProcess) -> Iterator[mooncake.Store]:
    with mooncake.Store(pool.address, mooncake.StoreConfig(segment_bytes=64 * MIB)) as store:
        store.put_many({f"many/{at:03}": b"%d" % at for at in range(25)})
        store.put(b"raw/\xff", b"bytes")
        store.put("raw/ü ?&", b"text")
        store.put("large", bytes(range(256)) * 20_000)
        yield store


@pytest.fixture(scope="module")
def service(pool: MasterProcess, store: mooncake.Store) -> Iterator[MooncakeStoreService]:
    settings = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": pool.address,
        "global_segment_size": "0",
        "local_buffer_size": "1mb",
    }
    service = MooncakeStoreService(cli_config=settings)
    assert asyncio.run(service.start_store_service(30))
    assert asyncio.run(service.start_http_service(0))
    yield service
    asyncio.run(service.stop())


def call(
    service: MooncakeStoreService, method: str, path: str, body: bytes | None = None
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", service.port or 0, timeout=60)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def listed(service: MooncakeStoreService, path: str) -> dict[str, Any]:
    status, _, body = call(service, "GET", path)
    assert status == 200, body
    return json.loads(body)


def batch(service: MooncakeStoreService, *keys: str) -> list[tuple[str, str, bytes]]:
    body = json.dumps({"keys": keys}).encode()
    status, headers, content = call(service, "POST", "/objects", body)
    assert status == 200, content
    assert len(content) == int(headers["Content-Length"])
    whole = f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + content
    message = email.message_from_bytes(whole, policy=email.policy.HTTP)
    parts = [
        (part["Status"], part["Content-Location"], part.get_payload(decode=True))
        for part in message.iter_parts()
    ]
    lengths = [int(part["Content-Length"]) for part in message.iter_parts()]
    assert lengths == [len(payload) for _, _, payload in parts]
    return parts


def test_pages_have_all_keys_once(service: MooncakeStoreService) -> None:
    path, keys, pages = "/objects?prefix=many/&limit=10", [], 0
    while path:
        page = listed(service, path)
        keys += [each["key"] for each in page["objects"]]
        pages += 1
        assert ("next" in page) == ("continuation" in page)
        path = page.get("next", "")
    assert keys == [f"many/{at:03}" for at in range(25)]
    assert pages == 3
    assert listed(service, "/objects?prefix=none") == {"objects": []}


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_tensor_in_shards_is_one_of_a_page(
    service: MooncakeStoreService, store: mooncake.Store, limit: int
) -> None:
    array = np.arange(12.0)
    store.put_many({"split/a": b"1", "split/w_between": b"2", "split/x": b"3"})
    store.put_array("split/w", array, layout=Layout(3))
    store.put_array("split/x_y", array, layout=Layout(2))
    path, found = f"/objects?prefix=split/&limit={limit}", []
    while path:
        page = listed(service, path)
        assert 0 < len(page["objects"]) <= limit
        found += [(each["key"], each["size"]) for each in page["objects"]]
        path = page.get("next", "")
    assert found == [(each.key, each.size) for each in store.objects("split/")]
    assert sorted(key for key, _ in found) == [
        *("split/a", "split/w", "split/w_between", "split/x", "split/x_y"),
    ]
    path, keys = f"/objects?prefix=split/&limit={limit}&internal=true", []
    while path:
        page = listed(service, path)
        keys += [each["key"] for each in page["objects"]]
        path = page.get("next", "")
    assert keys == list(store.keys("split/", internal=True))


def test_listed_paths_lead_to_the_objects(service: MooncakeStoreService) -> None:
    found = listed(service, "/objects?prefix=raw/")["objects"]
    assert [each["size"] for each in found] == [4, 5]
    keys = [unquote_to_bytes(each["path"].removeprefix("/objects/")) for each in found]
    assert keys == ["raw/ü ?&".encode(), b"raw/\xff"]
    assert [call(service, "GET", each["path"])[2] for each in found] == [b"text", b"bytes"]
    assert listed(service, "/objects?prefix=raw/%FF")["objects"] == found[1:]


def test_objects_that_are_being_written_are_not_listed(
    service: MooncakeStoreService, store: mooncake.Store
) -> None:
    file = store.file("writing/2", "wb", size=3)
    assert listed(service, "/objects?prefix=writing/") == {"objects": []}
    store.put_many({"writing/1": b"1", "writing/3": b"3"})
    page = listed(service, "/objects?prefix=writing/&limit=2")
    assert [each["key"] for each in page["objects"]] == ["writing/1", "writing/3"]
    file.discard()


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("limit=0", "limit must be a number from 1 to 10000"),
        ("limit=10001", "limit"),
        ("limit=x", "limit"),
        ("limit=%C2%B2", "limit"),
        ("continuation=", "continuation must be that of the page before"),
        ("continuation=*", "continuation"),
        ("continuation=%FF", "continuation"),
        ("continuation=YQ==", "continuation"),
        ("continuation=W10=", "continuation"),
        ("internal=1", "internal must be true or false"),
        ("after=x", "unknown parameter 'after'; GET takes: prefix, limit, continuation, internal"),
    ],
)
def test_wrong_parameters_are_refused(service: MooncakeStoreService, query, text) -> None:
    status, _, body = call(service, "GET", f"/objects?{query}")
    assert status == 400
    assert text in json.loads(body)["error"]


def test_batch_has_a_part_for_each_key(
    service: MooncakeStoreService, store: mooncake.Store
) -> None:
    parts = batch(service, "many/003", "missing", "large", "many/003")
    assert [part[:2] for part in parts] == [
        ("200", "/objects/many%2F003"),
        ("404", "/objects/missing"),
        ("200", "/objects/large"),
        ("200", "/objects/many%2F003"),
    ]
    assert parts[0][2] == b"3"
    assert json.loads(parts[1][2])["code"] == "OBJECT_NOT_FOUND"
    assert parts[2][2] == store.get("large")


def test_batch_takes_keys_of_any_bytes(service: MooncakeStoreService) -> None:
    parts = batch(service, "raw/\udcff", "raw/ü ?&", "a/\r\nStatus: 200")
    assert [part[2] for part in parts[:2]] == [b"bytes", b"text"]
    assert parts[2][:2] == ("404", "/objects/a%2F%0D%0AStatus%3A%20200")


def test_long_batches_are_read_while_they_are_sent(
    service: MooncakeStoreService, monkeypatch
) -> None:
    monkeypatch.setattr(collection, "_EAGER_TOTAL_BYTES", 0)
    parts = batch(service, *(f"many/{at:03}" for at in range(25)))
    assert [part[2] for part in parts] == [b"%d" % at for at in range(25)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"keys": []}',
        b'{"keys": "abc"}',
        b'{"keys": [1]}',
        b'{"keys": ["a"], "x": 1}',
        b'{"keys": ["\\ud800"]}',
        json.dumps({"keys": ["a"] * 1001}).encode(),
        b"[" * 100_000,
    ],
    ids=lambda body: body[:12].decode(),
)
def test_wrong_bodies_are_refused(service: MooncakeStoreService, body: bytes) -> None:
    status, _, answer = call(service, "POST", "/objects", body)
    assert status == 400
    assert "the body must be JSON" in json.loads(answer)["error"]


def test_tensor_in_shards_has_the_failure_of_a_get(service, store) -> None:
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    store.put_tensor("sharded", torch.ones(4, 2), layout=Layout(2, dim=0))
    whole, empty = batch(service, "sharded", "")
    assert whole[0] == str(call(service, "GET", "/objects/sharded")[0]) == "409"
    assert empty[0] == "404"


def test_other_methods_are_refused(service: MooncakeStoreService) -> None:
    status, headers, _ = call(service, "PATCH", "/objects", b"x")
    assert (status, headers["Allow"]) == (405, "GET, HEAD, POST")
    status, headers, body = call(service, "HEAD", "/objects?prefix=many/")
    assert (status, body) == (200, b"")


def test_routes_are_described(service: MooncakeStoreService) -> None:
    described = listed(service, "/openapi.json")["paths"]["/objects"]
    assert set(described) == {"get", "post"}
    assert listed(service, "/")["links"]["list"] == "/objects"
