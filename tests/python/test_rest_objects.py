"""The REST server's routes for objects: binary bodies, ranges, codes, and its description."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MIB, MasterProcess, start_master

import mooncake
from mooncake._rest.objects import ObjectRoutes
from mooncake.mooncake_store_service import MooncakeStoreService, parse_arguments
from mooncake.tensor import Layout

SCHEMATHESIS = shutil.which("schemathesis")


@pytest.fixture(scope="module")
def pool() -> Iterator[MasterProcess]:
    """A master with leases that outlast the tests."""
    master = start_master("--default_kv_lease_ttl=600s")
    yield master
    master.stop()


@pytest.fixture(scope="module")
def service(pool: MasterProcess) -> Iterator[MooncakeStoreService]:
    settings = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": pool.address,
        "global_segment_size": "64mb",
        "local_buffer_size": "1mb",
    }
    service = MooncakeStoreService(cli_config=settings)
    assert asyncio.run(service.start_store_service(30))
    assert asyncio.run(service.start_http_service(0))
    yield service
    asyncio.run(service.stop())


class Answer:
    """A response and its body."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = answer.status, answer.headers, answer.read()

    @property
    def error(self) -> str:
        text: str = json.loads(self.body)["error"]
        return text


def call(
    service: MooncakeStoreService,
    method: str,
    path: str,
    body: bytes | None = None,
    **headers: str,
) -> Answer:
    assert service.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def test_binary_objects_are_stored_read_and_removed(service: MooncakeStoreService):
    value = bytes(range(256)) * 5000
    path = "/objects/blob%2F%FF%00"
    assert call(service, "PUT", path, value).status == 204
    answer = call(service, "GET", path)
    assert (answer.status, answer.body) == (200, value)
    assert answer.headers["Content-Type"] == "application/octet-stream"
    head = call(service, "HEAD", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(value))
    assert head.headers["ETag"] == answer.headers["ETag"]
    assert call(service, "DELETE", f"{path}?force=true").status == 204
    assert call(service, "GET", path).status == 404


@pytest.mark.parametrize(
    ("asked", "status", "begin", "end"),
    [
        ("bytes=2-5", 206, 2, 6),
        ("bytes=7-", 206, 7, 10),
        ("bytes=-3", 206, 7, 10),
        ("bytes=0-99", 206, 0, 10),
        ("bytes=-99", 206, 0, 10),
        ("bytes=5-2", 200, 0, 10),
        ("bytes=0-1,3-4", 200, 0, 10),
        ("lines=1-2", 200, 0, 10),
        ("bytes=-", 200, 0, 10),
    ],
)
def test_ranges_are_those_of_http(service: MooncakeStoreService, asked, status, begin, end):
    call(service, "PUT", "/objects/ten", b"0123456789")
    answer = call(service, "GET", "/objects/ten", Range=asked)
    assert answer.status == status
    assert answer.headers["Content-Length"] == str(end - begin)
    if status == 206:
        assert answer.headers["Content-Range"] == f"bytes {begin}-{end - 1}/10"
    assert answer.body == b"0123456789"[begin:end]


@pytest.mark.parametrize("asked", ["bytes=2-5", "bytes=99-"])
def test_head_has_no_range(service: MooncakeStoreService, asked):
    call(service, "PUT", "/objects/ten", b"0123456789")
    answer = call(service, "HEAD", "/objects/ten", Range=asked)
    assert (answer.status, answer.headers["Content-Length"]) == (200, "10")
    assert "Content-Range" not in answer.headers


def test_range_is_of_the_version_of_if_range(service: MooncakeStoreService):
    path = "/objects/resumed"
    old = call(service, "PUT", path, b"0123456789").headers["ETag"]
    same = call(service, "GET", path, Range="bytes=5-", If_Range=old)
    assert (same.status, same.body) == (206, b"56789")
    call(service, "PUT", path, b"abcdefghij")
    new = call(service, "HEAD", path).headers["ETag"]
    for other in (old, f"W/{new}", f"{old}, {new}", "*", "Sat, 29 Oct 1994 19:43:31 GMT", ""):
        answer = call(service, "GET", path, Range="bytes=5-", If_Range=other)
        assert (answer.status, answer.body) == (200, b"abcdefghij"), other
    beyond = call(service, "GET", path, Range="bytes=50-", If_Range=old)
    assert (beyond.status, beyond.body) == (200, b"abcdefghij")


@pytest.mark.parametrize("asked", ["bytes=10-", "bytes=99-100", "bytes=-0"])
def test_range_outside_of_the_object_is_refused(service: MooncakeStoreService, asked):
    call(service, "PUT", "/objects/ten", b"0123456789")
    answer = call(service, "GET", "/objects/ten", Range=asked)
    assert (answer.status, answer.headers["Content-Range"]) == (416, "bytes */10")
    assert "10 bytes" in answer.error


def test_versions_are_compared(service: MooncakeStoreService):
    call(service, "PUT", "/objects/v", b"1")
    tag = call(service, "HEAD", "/objects/v").headers["ETag"]
    for known in (tag, f"W/{tag}", f'W/"0", W/{tag}', "*"):
        assert call(service, "GET", "/objects/v", If_None_Match=known).status == 304
    assert call(service, "GET", "/objects/v", If_Match=f"W/{tag}").status == 412
    call(service, "PUT", "/objects/v", b"2")
    assert call(service, "GET", "/objects/v", If_None_Match=tag).body == b"2"
    assert call(service, "PUT", "/objects/v", b"3", If_None_Match="*").status == 412
    assert call(service, "PUT", "/objects/v?overwrite=false", b"3").status == 409
    assert call(service, "GET", "/objects/v").body == b"2"


def test_changes_are_made_for_one_version(service: MooncakeStoreService):
    path = "/objects/counter"
    old = call(service, "PUT", path, b"1").headers["ETag"]
    changed = call(service, "PUT", path, b"2", If_Match=old)
    assert changed.status == 204
    assert call(service, "PUT", path, b"x", If_Match=old).status == 412
    assert call(service, "GET", path, If_Match=old).status == 412
    assert call(service, "DELETE", f"{path}?force=true", If_Match=old).status == 412
    refused = [
        call(service, "PUT", path, b"x", If_Match=old),
        call(service, "GET", path, If_Match=old),
        call(service, "DELETE", f"{path}?force=true", If_Match=old),
    ]
    assert {json.loads(answer.body)["code"] for answer in refused} == {"VERSION_DIFFERS"}
    new = call(service, "HEAD", path).headers["ETag"]
    assert new == changed.headers["ETag"]
    assert call(service, "GET", path, If_Match=new).body == b"2"
    assert call(service, "DELETE", f"{path}?force=true", If_Match=new).status == 204
    assert call(service, "PUT", path, b"x", If_Match=new).status == 412
    for tag in ("*", 'W/"1"', "1", '"1", "2"', '"99999999999999999999"'):
        answer = call(service, "PUT", path, b"x", If_Match=tag)
        assert (answer.status, "ETag" in answer.error) == (400, True)
    assert call(service, "PUT", path, b"x", If_Match=new, If_None_Match="*").status == 400
    assert call(service, "HEAD", path).status == 404


@pytest.mark.parametrize("replacements", [1, 100])
def test_body_has_the_version_of_its_etag(
    service: MooncakeStoreService,
    pool: MasterProcess,
    monkeypatch: pytest.MonkeyPatch,
    replacements: int,
):
    """Another client replaces the object by one of the same size while it is read."""
    left, versions = replacements, dict[str, bytes]()
    read = ObjectRoutes.get_buffer

    def replace(store: mooncake.Store, value: bytes) -> None:
        store.put("raced", value, overwrite=True)
        versions[f'"{store.reader("raced").version}"'] = value

    with mooncake.Store(pool.address) as other:
        replace(other, b"000")

        def read_late(routes: ObjectRoutes, key: bytes) -> mooncake.Buffer:
            nonlocal left
            if left > 0:
                left -= 1
                replace(other, b"%03d" % (replacements - left))
            return read(routes, key)

        monkeypatch.setattr(ObjectRoutes, "get_buffer", read_late)
        answer = call(service, "GET", "/objects/raced")
        assert (answer.status, answer.body) == (200, versions[answer.headers["ETag"]])
        left = 1
        first = next(iter(versions))
        replace(other, b"new")
        now = list(versions)[-1]
        assert call(service, "GET", "/objects/raced", If_Match=now).status == 412
        assert call(service, "GET", "/objects/raced", If_Match=first).status == 412


def test_put_replaces_a_leased_object_unless_told_otherwise(service: MooncakeStoreService):
    path = "/objects/in-use"
    call(service, "PUT", path, b"1")
    assert call(service, "GET", "/api/get/in-use").status == 200
    assert call(service, "DELETE", path).status == 409, "upstream's route leases it"
    kept = call(service, "PUT", f"{path}?overwrite=false", b"2")
    assert (kept.status, json.loads(kept.body)["code"]) == (409, "OBJECT_ALREADY_EXISTS")
    replaced = call(service, "PUT", path, b"2")
    assert replaced.status == 204
    got = call(service, "GET", path)
    assert (got.body, got.headers["ETag"]) == (b"2", replaced.headers["ETag"])


def test_put_replaces_a_tensor_in_shards_unless_told_otherwise(
    service: MooncakeStoreService, pool: MasterProcess
):
    path, parts = "/objects/split", np.arange(12.0)
    with mooncake.Store(pool.address) as store:
        store.put_array("split", parts, layout=Layout(2))
        kept = call(service, "PUT", f"{path}?overwrite=false", b"2")
        assert (kept.status, json.loads(kept.body)["code"]) == (409, "OBJECT_ALREADY_EXISTS")
        assert call(service, "PUT", path, b"2", If_None_Match="*").status == 412
        assert call(service, "PUT", path, b"2", If_Match='"7"').status == 412
        np.testing.assert_array_equal(store.get_array("split"), parts)
        replaced = call(service, "PUT", path, b"2")
        assert (replaced.status, list(store.keys("split", internal=True))) == (204, ["split"])
        got = call(service, "GET", path)
        assert (got.body, got.headers["ETag"]) == (b"2", replaced.headers["ETag"])


@pytest.mark.parametrize(
    "header",
    [
        {"Content-Range": "bytes 0-3/10"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "identity, gzip"},
    ],
)
def test_parts_and_encoded_bodies_are_no_object(service: MooncakeStoreService, header):
    path = "/objects/entire"
    assert call(service, "PUT", path, b"0123456789", Content_Encoding="identity").status == 204
    answer = call(service, "PUT", path, b"part", **header)
    assert (answer.status, next(iter(header)) in answer.error) == (400, True)
    assert call(service, "GET", path).body == b"0123456789"


def test_body_of_unknown_length_is_refused(service: MooncakeStoreService):
    assert service.port is not None
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    try:
        connection.request("PUT", "/objects/piped", iter([b"1", b"2"]), encode_chunked=True)
        answer = Answer(connection.getresponse())
    finally:
        connection.close()
    assert (answer.status, "Content-Length" in answer.error) == (411, True)
    assert call(service, "HEAD", "/objects/piped").status == 404


def test_object_expires(service: MooncakeStoreService):
    assert call(service, "PUT", "/objects/short?ttl_s=0.05", b"1").status == 204
    deadline = time.monotonic() + 60
    while call(service, "HEAD", "/objects/short").status != 404:
        assert time.monotonic() < deadline
    for wrong in ("soon", "-1", "nan", "inf", "", "1e99"):
        answer = call(service, "PUT", f"/objects/short?ttl_s={wrong}", b"1")
        assert answer.status == 400
    assert call(service, "HEAD", "/objects/short").status == 404


@pytest.mark.parametrize(
    ("method", "query", "taken"),
    [("PUT", "ttl=3", "overwrite, ttl_s"), ("DELETE", "ttl_s=3", "force"), ("GET", "a=", "none")],
)
def test_unknown_parameters_are_refused(
    service: MooncakeStoreService, method: str, query: str, taken: str
):
    call(service, "PUT", "/objects/stays", b"1")
    answer = call(service, method, f"/objects/stays?{query}", b"2" if method == "PUT" else None)
    assert answer.status == 400
    assert f"{method} takes: {taken}" in answer.error
    assert call(service, "GET", "/objects/stays").body == b"1"


def test_failures_have_their_status(service: MooncakeStoreService):
    call(service, "PUT", "/objects/leased", b"1")
    call(service, "GET", "/api/get/leased")
    leased = call(service, "DELETE", "/objects/leased")
    assert (leased.status, "lease" in leased.error) == (409, True)
    assert call(service, "DELETE", "/objects/none").status == 404
    assert call(service, "HEAD", "/objects/none").status == 404
    assert call(service, "PUT", "/objects/empty", b"").status == 400
    assert call(service, "GET", "/objects/").status == 400
    assert call(service, "DELETE", "/objects/leased?force=perhaps").status == 400
    large = call(service, "PUT", "/objects/large", bytes(100 * MIB + 1))
    assert large.status == 413
    full = call(service, "PUT", "/objects/full", bytes(65 * MIB))
    assert (full.status, json.loads(full.body)["code"]) == (507, "NO_AVAILABLE_HANDLE")
    wrong = call(service, "POST", "/objects/k", b"1")
    assert (wrong.status, wrong.headers["Allow"]) == (405, "GET, HEAD, PUT, DELETE")


def test_pages_say_where_to_go(service: MooncakeStoreService, pool: MasterProcess):
    links = json.loads(call(service, "GET", "/").body)["links"]
    assert links["objects"] == "/objects/{key}"
    health = call(service, "GET", "/health")
    assert (health.status, json.loads(health.body)["master"]) == (200, pool.address)
    metrics = call(service, "GET", "/metrics")
    assert b"mooncake_client_served_bytes_total" in metrics.body
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    described = json.loads(call(service, "GET", "/openapi.json").body)
    assert set(described["paths"]["/objects/{key}"]) == {
        "parameters",
        *("get", "head", "put", "delete"),
    }
    assert call(service, "POST", "/health", b"").headers["Allow"] == "GET, HEAD"


def test_upstream_routes_keep_their_codes(service: MooncakeStoreService):
    assert call(service, "GET", "/api/get/none").status == 404
    wrong = call(service, "POST", "/api/get/none", b"")
    assert (wrong.status, wrong.headers["Allow"]) == (405, "GET")
    assert wrong.error == "the method is not GET"


def test_unknown_paths_get_json(service: MooncakeStoreService):
    answer = call(service, "GET", "/nope")
    assert (answer.status, answer.headers["Content-Type"]) == (404, "application/json")
    assert answer.error == "there is no /nope; GET / and /openapi.json list the routes"


def test_misspelled_field_gets_a_suggestion(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["-D", "masterserver_address=localhost:1"])
    assert ended.value.code == 2
    assert "did you mean master_server_address=...?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_arguments(["-D", "nonsense"])
    assert "the keys are local_hostname, metadata_server, " in capsys.readouterr().err


def own_memory() -> int:
    """Return the bytes of memory of this process that belong to no file and nobody else."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def test_slow_readers_do_not_hold_whole_objects(service: MooncakeStoreService):
    stored = call(service, "PUT", "/objects/slow", bytes(32 * MIB)).status
    assert stored == 204
    before = own_memory()
    readers = []
    try:
        for _ in range(12):
            reader = socket.create_connection(("127.0.0.1", service.port), 30)
            readers.append(reader)
            reader.sendall(b"GET /objects/slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert reader.recv(12) == b"HTTP/1.1 200"
        assert own_memory() - before < 5 * 32 * MIB
    finally:
        for reader in readers:
            reader.close()
    assert call(service, "DELETE", "/objects/slow").status == 204


def answers_to(service: MooncakeStoreService, sent: bytes) -> bytes:
    """Return all that comes back on a connection until the server ends it."""
    assert service.port is not None
    with socket.create_connection(("127.0.0.1", service.port), 60) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        with raw.makefile("rb") as file:
            return file.read()


def test_unreadable_requests_get_json(service: MooncakeStoreService):
    for line in ("GET / HTTP/9.9", "nonsense", f"GET /{'x' * 70_000} HTTP/1.1"):
        answer = answers_to(service, f"{line}\r\n\r\n".encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"application/json" in head, answer
        assert json.loads(body)["error"]


@pytest.mark.parametrize("byte", [b"#", b"\t", b"\0", b"\x0b", b"\x1c"])
@pytest.mark.parametrize("after", [b"", b"y"])
def test_raw_bytes_do_not_cut_the_key(service: MooncakeStoreService, byte: bytes, after: bytes):
    call(service, "PUT", "/objects/cut", b"kept")
    target = b"/objects/cut" + byte + after
    for sent in (b"PUT %s HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", b"DELETE %s HTTP/1.1\r\n\r\n"):
        assert answers_to(service, sent % target).startswith(b"HTTP/1.1 400")
    assert call(service, "GET", "/objects/cut").body == b"kept"


def test_raw_utf8_names_the_key_that_its_escapes_name(service: MooncakeStoreService):
    call(service, "PUT", "/objects/%C3", b"other")
    for raw, escaped in ((b"\xc3\xa0", "%C3%A0"), (b"\xc3\x85k", "%C3%85k")):
        sent = b"PUT /objects/%s HTTP/1.1\r\nContent-Length: 1\r\n\r\nx" % raw
        assert answers_to(service, sent).startswith(b"HTTP/1.1 204")
        assert call(service, "GET", f"/objects/{escaped}").body == b"x"
    assert call(service, "GET", "/objects/%C3").body == b"other"


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 1\r\nContent-Length: 66\r\n",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: +1\r\n",
        b"Content-Length: 1, 1\r\n",
        b"Content-Length: \r\n",
        b"Content-Length : 1\r\n",
        b"Content-Length: 1\r\nA : b\r\n",
        b"Content-Length:\r\n 1\r\n",
        b"Content-Length: 1\r\nA: b\r\n folded\r\n",
        b" A: b\r\nContent-Length: 1\r\n",
        b"A: b\rContent-Length: 1\r\n",
        b"A: b\nContent-Length: 1\r\n",
        b"From b\r\nContent-Length: 1\r\n",
        b": b\r\nContent-Length: 1\r\n",
        b"Content-Length: 1\r\nA: b\0\r\n",
    ],
)
def test_ambiguous_heads_are_refused(service: MooncakeStoreService, fields: bytes):
    """The server in front could take another part of the bytes for the body."""
    call(service, "PUT", "/objects/safe", b"kept")
    second = b"DELETE /objects/safe?force=true HTTP/1.1\r\n\r\n"
    answer = answers_to(service, b"PUT /objects/safe HTTP/1.1\r\n" + fields + b"\r\nx" + second)
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert (answer.count(b"HTTP/1.1"), b"Connection: close" in answer) == (1, True)
    assert call(service, "GET", "/objects/safe").body == b"kept"


def test_heads_that_are_cut_off_are_refused(service: MooncakeStoreService):
    call(service, "PUT", "/objects/safe", b"kept")
    sent = b'DELETE /objects/safe?force=true HTTP/1.1\r\nHost: localhost\r\nIf-Match: "0"\r\n\r\n'
    for end in (len(sent) - 18, len(sent) - 8, len(sent) - 2):
        assert answers_to(service, sent[:end]).startswith(b"HTTP/1.1 400")
    assert call(service, "GET", "/objects/safe").body == b"kept"


def test_heads_of_plain_line_ends_and_equal_lengths(service: MooncakeStoreService):
    for sent in (
        b"PUT /objects/plain HTTP/1.1\nContent-Length: 1\n\nx",
        b"PUT /objects/plain HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx",
    ):
        assert answers_to(service, sent).startswith(b"HTTP/1.1 204")


def test_objects_of_strangers_are_refused(service: MooncakeStoreService):
    headers = {"Origin": "http://evil.example"}
    assert call(service, "PUT", "/objects/k", b"1", **headers).status == 403
    assert call(service, "DELETE", "/objects/k", **headers).status == 403
    assert call(service, "GET", "/objects/k", **headers).status == 404


@pytest.mark.skipif(
    os.environ.get("MOONCAKE_LONG_TESTS") != "1", reason="needs MOONCAKE_LONG_TESTS=1"
)
@pytest.mark.skipif(
    SCHEMATHESIS is None,
    reason="needs schemathesis: install it in an environment of its own and add its bin to PATH",
)
@pytest.mark.timeout(600)
def test_description_is_true(service: MooncakeStoreService, tmp_path: Path):
    """Generated requests get the answers that the description promises."""
    assert SCHEMATHESIS is not None
    url = f"http://127.0.0.1:{service.port}/openapi.json"
    words = [SCHEMATHESIS, "run", url, "--checks=all", "--max-examples=100", "--seed=1"]
    words += ["--exclude-checks=positive_data_acceptance"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout
