"""The REST service of a store: its endpoints, its errors, and its start and end."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from conftest import MIB, MasterProcess, start_master

from mooncake._http import Request
from mooncake._rest.access import Access, refusal
from mooncake.mooncake_store_service import (
    MooncakeStoreService,
    main as service_main,
    parse_arguments,
)


def settings(master: MasterProcess, **more: Any) -> dict[str, Any]:
    return {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master.address,
        "global_segment_size": "64mb",
        "local_buffer_size": "1mb",
        **more,
    }


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a configuration."""
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"):
        monkeypatch.delenv(name, raising=False)


class HttpClient:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def raw(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        self.connection.request(method, path, body, headers or {})
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def line(self, line: str) -> bytes:
        """Send one request line on a new connection, and return the whole response."""
        address = (self.connection.host, self.connection.port)
        with socket.create_connection(address, 60) as raw, raw.makefile("rb") as answer:
            raw.sendall(f"{line}\r\nConnection: close\r\n\r\n".encode())
            return answer.read()

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        sent = None if body is None else json.dumps(body).encode()
        status, text = self.raw(method, path, sent)
        return status, json.loads(text)


@pytest.fixture
def service(master: MasterProcess, tmp_path: Path) -> Iterator[MooncakeStoreService]:
    service = MooncakeStoreService(cli_config=settings(master), mount_root=str(tmp_path))
    assert asyncio.run(service.start_store_service(30))
    assert asyncio.run(service.start_http_service(0))
    yield service
    assert service.store is not None
    service.store.remove_all(force=True)
    asyncio.run(service.stop())
    asyncio.run(service.stop())


@pytest.fixture
def call(service: MooncakeStoreService) -> Iterator[HttpClient]:
    assert service.port is not None
    client = HttpClient(service.port)
    yield client
    client.connection.close()


def test_put_into_a_pool_without_memory_has_a_reason(master: MasterProcess) -> None:
    without = start_master()
    service = MooncakeStoreService(
        cli_config=settings(master)
        | {"master_server_address": without.address, "global_segment_size": 0}
    )
    try:
        assert asyncio.run(service.start_store_service(1))
        assert asyncio.run(service.start_http_service(0))
        assert service.port is not None
        client = HttpClient(service.port)
        status, answer = client("PUT", "/api/put", {"key": "k", "value": "v"})
        client.connection.close()
        assert (status, answer["error"]) == (500, "PUT operation failed")
        assert "no process lends memory" in answer["reason"]
        assert "mooncake_client" in answer["remedy"]
    finally:
        asyncio.run(service.stop())
        without.stop()


def test_objects_are_put_read_and_removed(call: HttpClient) -> None:
    assert call("PUT", "/api/put", {"key": "a/b", "value": "grüße"}) == (
        200,
        {"status": "success"},
    )
    assert call("PUT", "/api/put", {"key": "a/b", "value": "other"}) == (
        200,
        {"status": "success"},
    )
    for path in ("/api/get/a/b", "/api/get/a%2Fb"):
        assert call.raw("GET", path) == (200, "grüße".encode()), "the old value is kept"
    assert call("GET", "/api/exist/a/b") == (200, {"exists": True})
    assert call("GET", "/api/exist/none") == (200, {"exists": False})
    assert call("GET", "/api/get/none") == (404, {"error": "Key not found"})
    failed = (500, {"error": "Remove operation failed"})
    assert call("DELETE", "/api/remove/a/b") == failed, "the object was read and is leased"
    assert call("DELETE", "/api/remove/none") == failed
    assert call("PUT", "/api/put", {"key": "fresh", "value": "v"})[0] == 200
    assert call("DELETE", "/api/remove/fresh") == (200, {"status": "success"})
    assert call("PUT", "/api/put", {"key": "fresh", "value": "v"})[0] == 200
    status, result = call("DELETE", "/api/remove_all")
    assert status == 200
    assert re.fullmatch(r"success removed [1-9]\d* keys", result["status"]), result
    assert call("GET", "/api/exist/fresh") == (200, {"exists": False})


def test_rejects_invalid_puts(call: HttpClient) -> None:
    missing = (400, {"error": "Missing key or value"})
    for given in ({}, {"key": "k"}, {"value": "v"}, {"key": "", "value": "v"}):
        assert call("PUT", "/api/put", given) == missing
    assert call("PUT", "/api/put", {"key": "k", "value": ""})[0] == 500
    assert call("PUT", "/api/put", {"key": "k", "value": 1})[0] == 400
    assert call("PUT", "/api/put", [1]) == (400, {"error": "Request body must be a JSON object"})
    assert call.raw("PUT", "/api/put", b"{")[0] == 400
    assert call("GET", "/api/exist/k") == (200, {"exists": False})


def test_malformed_requests_get_json_errors(call: HttpClient) -> None:
    malformed = (400, {"error": "Malformed JSON body"})
    for body in (b"{", b"\xff", b"[" * 200_000):
        status, text = call.raw("PUT", "/api/put", body)
        assert (status, json.loads(text)) == malformed
    unwritable = {"error": "key and value must be encodable as UTF-8"}
    for given in ({"key": "\ud800", "value": "v"}, {"key": "k", "value": "\ud800"}):
        assert call("PUT", "/api/put", given) == (400, unwritable)
    assert call.line("GET http://[/ HTTP/1.1").endswith(b'{"error": "the path cannot be read"}')
    assert call("GET", "/api/exist/k") == (200, {"exists": False}), "the connection is kept"


def test_oversized_body_gets_a_json_error(service: MooncakeStoreService, call: HttpClient) -> None:
    refused = (413, {"error": "the body is too large"})
    # Many times the size of the socket buffers: the response arrives while the body is sent.
    assert call("PUT", "/api/put", {"key": "k", "value": "v" * (101 << 20)}) == refused
    assert call("PUT", "/api/put", {"key": "k", "value": "v"})[0] == 200, "on a new connection"
    call.connection.putrequest("PUT", "/api/put")
    call.connection.putheader("Transfer-Encoding", "chunked")
    call.connection.endheaders()
    answer = call.connection.getresponse()
    refusal = {"error": "a Content-Length is required"}
    assert (answer.status, json.load(answer)) == (411, refusal)


def test_keys_in_paths_may_be_escaped(service: MooncakeStoreService, call: HttpClient) -> None:
    assert service.store is not None
    assert service.store.put("grüße", b"text") == 0
    assert service.store.put(b"\xff", b"bytes") == 0
    assert call.line("GET /api/get/gr%C3%BC%C3%9Fe HTTP/1.1").endswith(b"\r\n\r\ntext")
    assert call.line("GET /api/get/grüße HTTP/1.1").endswith(b"\r\n\r\ntext")
    assert call.line("GET /api/get/%FF HTTP/1.1").endswith(b"\r\n\r\nbytes")


def test_unknown_endpoints_return_404_or_405(call: HttpClient) -> None:
    for path in ("/none", "/healthy", "/api", "/api/get", "/api/get/", "/api/put/x"):
        assert call.raw("GET", path)[0] == 404, path
    assert call.raw("POST", "/api/put")[0] == 405
    assert call.raw("GET", "/api/remove_all")[0] == 405


def test_memory_is_mounted_and_unmounted(call: HttpClient) -> None:
    status, mounted = call("POST", "/api/mount", {"size": 16 * MIB})
    assert (status, mounted["status"], mounted["allocated_size"]) == (200, "success", 16 * MIB)
    assert call("POST", "/api/unmount", {"segment_ids": mounted["segment_ids"]}) == (
        200,
        {"status": "success"},
    )
    wrong = (400, {"error": "Invalid size, must be a positive integer"})
    for size in (0, -1, "1", None, True, 1.5):
        assert call("POST", "/api/mount", {"size": size}) == wrong
    assert call("POST", "/api/unmount", {}) == (400, {"error": "Missing segment_ids"})
    unknown = {"segment_ids": "1-2"}
    assert call("POST", "/api/unmount", unknown) == (
        500,
        {"error": "Unmount and free failed, ret=-1"},
    )


def test_shared_memory_is_mounted_by_name(call: HttpClient) -> None:
    name = f"mooncake-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm", name)
    path.write_bytes(bytes(MIB))
    try:
        status, mounted = call("POST", "/api/mount_shm", {"name": f"/{name}", "size": MIB})
        assert status == 200
        ids = mounted["segment_ids"]
        assert call("POST", "/api/unmount_shm", {"segment_ids": [*ids, "1-2"]}) == (
            500,
            {
                "error": "Unmount failed for one or more segments",
                "failed_segment_ids": ["1-2"],
            },
        )
        for wrong in ("../x", "a/b", "..", ".", "", None):
            assert call("POST", "/api/mount_shm", {"name": wrong, "size": MIB}) == (
                400,
                {"error": "Missing or invalid name or size"},
            )
        assert call("POST", "/api/mount_shm", {"name": f"{name}x", "size": MIB})[0] == 500
    finally:
        path.unlink()


def test_reconfigure_changes_mode_and_memory(
    call: HttpClient, service: MooncakeStoreService, tmp_path: Path
) -> None:
    file = tmp_path / "memory"
    file.write_bytes(bytes(MIB))
    assert call("POST", "/api/reconfigure", {"mode": "decode"})[0] == 400
    assert call("POST", "/api/reconfigure", {"mode": "x"}) == (
        400,
        {"error": "Invalid mode. Use 'decode' or 'prefill'"},
    )
    lost = {"mode": "decode", "path": str(tmp_path / "none"), "size": MIB}
    assert call("POST", "/api/reconfigure", lost)[0] == 500
    assert service.current_mode == "prefill"
    given = {"mode": "decode", "path": str(file), "size": MIB}
    for _ in range(2):
        status, changed = call("POST", "/api/reconfigure", given)
        assert (status, changed["mode"]) == (200, "decode")
        assert service.mounted_segment_ids == changed["segment_ids"] != []
    assert service.last_mount_info == given
    assert call("POST", "/api/reconfigure", {"mode": "prefill"})[0] == 200
    assert service.mounted_segment_ids == []


CHANGES = [
    ("PUT", "/api/put", {"key": "k", "value": "v"}),
    ("DELETE", "/api/remove/k", None),
    ("DELETE", "/api/remove_all", None),
    ("POST", "/api/mount", {"size": 16 * MIB}),
    ("POST", "/api/unmount", {"segment_ids": "1-2"}),
    ("POST", "/api/mount_shm", {"name": "x", "size": MIB}),
    ("POST", "/api/unmount_shm", {"segment_ids": "1-2"}),
    ("POST", "/api/reconfigure", {"mode": "prefill"}),
    ("POST", "/api/unmount_local_disk", {}),
]
STRANGERS = [
    {"Origin": "http://evil.example", "Content-Type": "text/plain"},
    {"Origin": "null"},
    {"Host": "evil.example:8080"},
    {"Host": "127.0.0.1.evil.example"},
    {"X-Forwarded-For": "192.0.2.7"},
    {"Forwarded": "for=192.0.2.7"},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer "},
]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_may_read_and_change_nothing(
    service: MooncakeStoreService, call: HttpClient, stranger: dict[str, str]
) -> None:
    assert service.store is not None
    assert service.store.put("kept", b"value") == 0
    for method, path, body in CHANGES:
        status, text = call.raw(method, path, json.dumps(body).encode(), stranger)
        assert status == 403, (path, text)
        assert "MOONCAKE_REST_TOKEN" in json.loads(text)["error"]
    assert call.raw("GET", "/api/get/kept", headers=stranger) == (200, b"value")
    assert call.raw("GET", "/api/exist/k", headers=stranger) == (200, b'{"exists": false}')


def test_large_body_of_a_stranger_is_not_read(service: MooncakeStoreService) -> None:
    assert service.port is not None
    with socket.create_connection(("127.0.0.1", service.port), 20) as raw:
        head = "PUT /api/put HTTP/1.1\r\nOrigin: http://evil.example\r\nContent-Length: 100000000"
        raw.sendall(f"{head}\r\n\r\n".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 403 ")


def test_token_allows_changes_from_elsewhere(
    master: MasterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_REST_TOKEN", "open sesame")
    service = MooncakeStoreService(cli_config=settings(master))
    assert asyncio.run(service.start_store_service(30))
    assert asyncio.run(service.start_http_service(0))
    try:
        assert service.port is not None
        call = HttpClient(service.port)
        put = ("PUT", "/api/put", json.dumps({"key": "t", "value": "v"}).encode())
        elsewhere = {"X-Forwarded-For": "192.0.2.7", "Origin": "http://other.example"}
        right = {**elsewhere, "Authorization": "Bearer open sesame"}
        assert call.raw(*put, {**elsewhere, "Authorization": "Bearer open"})[0] == 403
        assert call.raw(*put, elsewhere)[0] == 403
        assert call.raw(*put, right) == (200, b'{"status": "success"}')
        for path in ("/api/get/t", "/api/exist/t", "/objects/t"):
            assert call.raw("GET", path, headers=elsewhere)[0] == 403, "reads need it, too"
            assert call.raw("GET", path, headers=right)[0] == 200, path
        assert call.raw("GET", "/health", headers=elsewhere)[0] == 200
        assert call.raw(*put)[0] == 200, "this host needs no token"
        call.connection.close()
    finally:
        asyncio.run(service.stop())


def test_token_of_the_pool_is_needed_from_this_host_too() -> None:
    def why_not(read: bool, **headers: str) -> str | None:
        message = Message()
        for name, value in headers.items():
            message[name] = value
        request = Request("GET", "/objects/k", "", b"", message, "127.0.0.1", "127.0.0.1")
        access = Access("rest secret", "TOKEN", "pool secret")
        return access.refusal_of_read(request) if read else access.refusal_of_change(request)

    for read in (True, False):
        assert "TOKEN" in (why_not(read) or "")
        assert why_not(read, Authorization="Bearer wrong")
        assert why_not(read, Authorization="Bearer rest secret") is None
        assert why_not(read, Authorization="Bearer pool secret") is None


def test_browsers_may_not_read_under_a_foreign_name() -> None:
    def why_not(host: str, agent: str) -> str | None:
        message = Message()
        message["Host"], message["User-Agent"] = host, agent
        request = Request("GET", "/objects/k", "", b"", message, "192.0.2.7", "192.0.2.1")
        return Access("", "TOKEN").refusal_of_read(request)

    assert why_not("evil.example:8081", "Mozilla/5.0")
    for host in ("192.0.2.1:8081", "localhost:8081", "[::1]:8081", socket.gethostname()):
        assert why_not(host, "Mozilla/5.0") is None, host
    assert why_not("evil.example:8081", "curl/8") is None


@pytest.mark.parametrize(
    ("peer", "host", "is_allowed"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("::1", "::1", True),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", True),
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.7", "192.0.2.1", False),
        ("", "192.0.2.1", False),
    ],
)
def test_changes_need_this_host_or_the_token(peer: str, host: str, is_allowed: bool) -> None:
    def why_not(token: str = "", **headers: str) -> str | None:
        message = Message()
        for name, value in headers.items():
            message[name] = value
        return refusal(Request("PUT", "/", "", b"", message, peer, host), token, "TOKEN")

    assert (why_not() is None) == is_allowed
    assert (why_not("secret") is None) == is_allowed
    assert why_not("secret", Authorization="Bearer secret") is None
    assert why_not("", Authorization="Bearer ") is not None
    assert why_not("secret", Authorization="Basic secret") is not None
    for own in (f"[{host}]:80" if ":" in host else f"{host}:80", "localhost", "LOCALHOST:1"):
        assert (why_not(Host=own, Origin=f"http://{own}") is None) == is_allowed
    assert why_not(Host="192.0.2.9:80") is not None
    assert why_not(Origin="http://[") is not None


def test_only_files_below_the_mount_roots_are_mounted(
    call: HttpClient, service: MooncakeStoreService, tmp_path: Path, tmp_path_factory: Any
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    secret = outside / "secret"
    secret.write_bytes(b"secret" * 1000)
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "folder").symlink_to(outside)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_bytes(bytes(MIB))
    os.mkfifo(tmp_path / "pipe")
    paths = [
        secret,
        secret.relative_to("/"),
        f"{tmp_path}/../{outside.name}/secret",
        tmp_path / "link",
        tmp_path / "folder" / "secret",
        tmp_path / "own",
        tmp_path / "own" / "file" / "x",
        tmp_path,
        tmp_path / "pipe",
        f"{tmp_path}x/secret",
        f"{tmp_path}/own/file\0",
        "/etc/passwd",
        "/proc/self/mem",
    ]
    for path in paths:
        given = {"mode": "decode", "path": str(path), "size": 4096}
        status, text = call("POST", "/api/reconfigure", given)
        assert status == 403, (path, text)
    assert service.mounted_segment_ids == []
    assert secret.read_bytes() == b"secret" * 1000
    good = {"mode": "decode", "path": f"{tmp_path}//own/./file", "size": MIB}
    assert call("POST", "/api/reconfigure", good)[0] == 200
    files = set(service._files.values())
    assert len(files) == 1
    assert call("POST", "/api/reconfigure", {"mode": "prefill"})[0] == 200
    assert service._files == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(files.pop())


def test_shared_memory_is_not_reached_through_a_link(call: HttpClient, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(MIB))
    name = f"mooncake-test-{uuid.uuid4().hex}"
    link = Path("/dev/shm", name)
    link.symlink_to(secret)
    try:
        assert call("POST", "/api/mount_shm", {"name": name, "size": MIB})[0] == 403
    finally:
        link.unlink()


def test_grace_periods_are_limited(call: HttpClient) -> None:
    assert call("POST", "/api/unmount_local_disk") == (200, {"status": "success"})
    for grace in (-1, 3601, "1", 1.5):
        assert call("POST", "/api/unmount_local_disk", {"grace_period_seconds": grace})[0] == 400


def test_startup_without_master_times_out_or_stops() -> None:
    config = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": "127.0.0.1:1",
        "global_segment_size": 0,
    }
    service = MooncakeStoreService(cli_config=config)
    assert not asyncio.run(service.start_store_service(0.01))

    async def start_and_stop() -> bool:
        event = asyncio.Event()
        event.set()
        return await service.start_store_service(60, event)

    assert not asyncio.run(start_and_stop())
    assert service.store is None


def test_command_line_needs_only_the_master(clean: None) -> None:
    config = MooncakeStoreService(cli_config={"master_server_address": "m:1"}).config
    assert (config.local_hostname, config.metadata_server) == ("localhost", "P2PHANDSHAKE")
    with pytest.raises(ValueError, match="field: master_server_address"):
        MooncakeStoreService(cli_config={"local_hostname": "h"})


def test_command_line_completes_a_file(clean: None, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"local_hostname": "h", "metadata_server": "P2PHANDSHAKE"}')
    given = {"master_server_address": "m:1"}
    config = MooncakeStoreService(str(file), given).config
    assert (config.local_hostname, config.master_server_address) == ("h", "m:1")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "Give --config=FILE or -D master_server_address=HOST:PORT, or set MOONCAKE_MASTER."),
        (["-D", "local_hostname=h"], "give it as -D master_server_address=HOST:PORT"),
        (["-D", "master_server_address=m:1", "-D", "global_segment_size=x"], "KB, MB, GB or TB"),
    ],
)
def test_hint_names_what_is_missing(
    clean: None, caplog: pytest.LogCaptureFixture, words: list[str], hint: str
) -> None:
    assert asyncio.run(service_main(words)) == 1
    assert caplog.messages[-1].endswith(hint)


def test_hint_names_a_field_that_a_file_lacks(
    clean: None, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"local_hostname": "h", "master_server_address": "m:1"}')
    assert asyncio.run(service_main([f"--config={file}"])) == 1
    assert caplog.messages[-1].endswith("give it as -D metadata_server=P2PHANDSHAKE")


def test_command_line_is_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_arguments(["-D", "tenant_id=t", "-D", "local_hostname=h", "--port", "1"])
    assert dict(options.define) == {"tenant_id": "t", "local_hostname": "h"}
    assert (options.port, options.max_wait_time, options.config) == (1, 60, None)
    for wrong in ("nonsense=1", "tenant_id"):
        with pytest.raises(SystemExit):
            parse_arguments(["-D", wrong])
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "no json", "{}", '{"local_hostname": 7}', "[]"])
def test_invalid_config_prints_one_line(tmp_path: Path, text) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    command = [sys.executable, "-m", "mooncake.mooncake_store_service", f"--config={file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the configuration cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_program_serves_until_signalled(master: MasterProcess, tmp_path: Path, number: int) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings(master)))
    command = [sys.executable, "-m", "mooncake.mooncake_store_service", f"--config={file}"]
    done = subprocess.Popen(
        [*command, "--port=0", "-D", "global_segment_size=16mb"],
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert done.stderr is not None
    with done, done.stderr:
        found = (re.search(r":(\d+)/api", line) for line in done.stderr)
        port = next(match[1] for match in found if match)
        client = HttpClient(int(port))
        assert client("PUT", "/api/put", {"key": f"p{number}", "value": "v"})[0] == 200
        assert client.raw("GET", f"/api/get/p{number}") == (200, b"v")
        client.connection.close()
        done.send_signal(number)
        assert done.wait(60) == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl: install the package curl")
def test_guide_curl_commands_work(master: MasterProcess, tmp_path: Path) -> None:
    guide = Path(__file__).resolve().parents[2] / "docs/guide/store.md"
    block = re.search(
        r"```bash\n(mc_store_rest_server .*?)```", guide.read_text("utf-8"), re.DOTALL
    )
    assert block is not None
    lines = block[1].replace("\\\n", " ").replace("localhost:50051", master.address).splitlines()
    _, *flags = shlex.split(lines[0])
    asked = "".join(f"{line}\nprintf '\\x1e'\n" for line in lines[1:])
    flags[flags.index("--port=8081")] = "--port=0"
    command = [sys.executable, "-m", "mooncake.mooncake_store_service", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            found = (re.search(r":(\d+)/api", line) for line in server.stderr)
            port = next(match[1] for match in found if match)
            script = asked.replace("localhost:8081", f"127.0.0.1:{port}")
            words = ["bash", "-e", "-o", "pipefail", "-c", script]
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
            )
            *answers, last = done.stdout.split("\x1e")
        finally:
            server.terminate()
    assert answers[:3] == ['{"status": "success"}', "Hello!", '{"exists": true}']
    listed, parts = answers.pop(-3), (tmp_path / "parts").read_bytes()
    assert [each["key"] for each in json.loads(listed)["objects"]] == ["blob"]
    assert parts.count(b"\r\nStatus: 200\r\n") == 2
    put, part, head, *changes = answers[3:]
    # A refused change has a body. These are one that expires, body and tag, a change of that
    # version, a batch, and the removal.
    assert (put, part, changes, last) == ("", "", [""] * 6, "")
    assert (tmp_path / "body").read_bytes() == Path("/usr/bin/env").read_bytes()
    assert head.startswith("HTTP/1.1 200 OK")
    assert "ETag: " in head
