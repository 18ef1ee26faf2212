"""The proxy in front of prefill and decode servers: route, repetitions, streaming, limits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
from proxy_backends import (
    DEADLINE_S,
    PARAMETERS,
    FakeBackend,
    cluster,
    receive,
    receive_chunk,
    request,
    send,
    until,
)

from mooncake import vllm_v1_proxy_server as module
from mooncake._proxy.backend import Backend, BackendError, BackendPool, Timeouts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.timeout(150)

STREAM = {"model": "m", "prompt": "p", "stream": True}


def in_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test, within a time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def timed() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)

        asyncio.run(timed())

    return run


# The route


@in_a_loop
async def test_request_is_prefilled_and_then_decoded(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    given = {**STREAM, "max_tokens": 9, "max_completion_tokens": 9, "stream_options": {"x": 1}}
    given |= {"min_tokens": 4, "n": 1, "best_of": 1}
    async with cluster() as peers:
        answer = await peers.post(given, headers={"Authorization": "Bearer mine"})
        assert (answer.status, answer.body) == (200, b"data: one\n\ndata: two\n\n")
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.is_whole
        (prefill,), (decode,) = peers.prefill, peers.decode
        assert prefill.seen == [
            {
                "model": "m",
                "prompt": "p",
                "stream": False,
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "n": 1,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "remote_engine_id": None,
                    "remote_block_ids": None,
                    "remote_host": None,
                    "remote_port": None,
                },
            }
        ]
        assert decode.seen == [{**given, "kv_transfer_params": PARAMETERS}]
        ids = {headers["x-request-id"] for headers in (*prefill.headers, *decode.headers)}
        assert len(ids) == 1
        assert decode.headers[0]["authorization"] == "bearer mine"


@pytest.mark.parametrize(
    ("fields", "is_prefilled"),
    [
        ({"n": None, "best_of": None}, True),
        ({"n": 2}, False),
        ({"n": 1, "best_of": 3}, False),
        ({"prompt": ["a"]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [1, 2]}, True),
        ({"prompt": [[1, 2], [3]]}, False),
    ],
)
@in_a_loop
async def test_blocks_of_a_prompt_go_to_one_choice(fields, is_prefilled):
    async with cluster() as peers:
        given = {**STREAM, **fields}
        assert (await peers.post(given)).status == 200
        extra = {"kv_transfer_params": PARAMETERS} if is_prefilled else {}
        assert peers.decode[0].seen == [{**given, **extra}]
        assert len(peers.prefill[0].seen) == is_prefilled


@in_a_loop
async def test_key_of_the_environment_goes_to_the_servers(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    async with cluster() as peers:
        await peers.post(headers={"Authorization": "Bearer mine"})
        assert peers.prefill[0].headers[0]["authorization"] == "bearer key"


@in_a_loop
async def test_servers_take_turns():
    async with cluster(("ok",) * 2, ("ok",) * 3) as peers:
        for _ in range(6):
            assert (await peers.post()).status == 200
        assert [len(fake.seen) for fake in peers.prefill] == [3, 3]
        assert [len(fake.seen) for fake in peers.decode] == [2, 2, 2]


@in_a_loop
async def test_pieces_arrive_as_they_are_made():
    async with cluster(decode=("wait",)) as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        send(writer, "POST", "/v1/completions", json.dumps(STREAM).encode())
        await reader.readuntil(b"\r\n\r\n")
        assert await receive_chunk(reader) == b"data: one\n\n"
        peers.decode[0].release.set()
        assert await receive_chunk(reader) == b"data: two\n\n"
        assert await receive_chunk(reader) == b""
        writer.close()


@in_a_loop
async def test_errors_of_the_request_are_passed_on():
    for roles in (("422", "ok"), ("ok", "422")):
        async with cluster((roles[0],) * 2, (roles[1],) * 2) as peers:
            answer = await peers.post()
            assert answer.status == 422
            assert answer.json()["error"]["message"] == "from the backend"
            refusing = peers.prefill if roles[0] == "422" else peers.decode
            assert sum(len(fake.seen) for fake in refusing) == 1


# Servers that fail


BEFORE_THE_FIRST_BYTE = ["refused", "close", "500", "hang"]
QUICK = Timeouts(connect=5, answer=0.5, idle=0.5)


@pytest.mark.parametrize("failure", [*BEFORE_THE_FIRST_BYTE, "no JSON"])
@in_a_loop
async def test_another_prefill_server_is_tried(failure):
    async with cluster((failure, "ok"), timeouts=QUICK) as peers:
        assert (await peers.post()).status == 200
        assert len(peers.prefill[1].seen) == 1
        assert peers.proxy.prefill.backends[0].failures == 1


@pytest.mark.parametrize("failure", BEFORE_THE_FIRST_BYTE)
@in_a_loop
async def test_another_decode_server_is_tried(failure):
    async with cluster(("ok",), (failure, "ok"), timeouts=QUICK) as peers:
        answer = await peers.post()
        assert (answer.status, answer.is_whole) == (200, True)
        assert len(peers.decode[1].seen) == 1
        # A server that saw the request may have fetched the cache: it is filled anew.
        assert len(peers.prefill[0].seen) == (1 if failure == "refused" else 2)


@in_a_loop
async def test_stream_that_breaks_off_ends_with_an_error():
    async with cluster(decode=("break off", "ok")) as peers:
        answer = await peers.post(STREAM)
        first, event = answer.body.split(b"\n\n")[:2]
        assert first == b"data: one"
        assert "broke off" in json.loads(event.removeprefix(b"data: "))["error"]["message"]
        assert not answer.is_whole
        assert peers.decode[1].seen == []
        assert peers.proxy.outcomes == {"broke off": 1}


@in_a_loop
async def test_body_that_breaks_off_is_not_completed():
    async with cluster(decode=("break off",)) as peers:
        answer = await peers.post()
        assert (answer.body, answer.is_whole) == (b"data: one\n\n", False)


@in_a_loop
async def test_server_that_stalls_is_given_up():
    async with cluster(decode=("wait",), timeouts=QUICK) as peers:
        answer = await peers.post(STREAM)
        assert b"nothing from" in answer.body
        assert not answer.is_whole
        await until(lambda: peers.decode[0].hang_ups == 1)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_a_loop
async def test_client_learns_that_no_server_is_there(role):
    async with cluster(**{role: ("refused",) * 2}) as peers:
        # A server that is left out is tried all the same where no other is up.
        for _ in range(2):
            answer = await peers.post()
            assert answer.status == 503
            message = answer.json()["error"]["message"]
            assert message.startswith(f"no {role} server took the request: no connection to")
        assert peers.proxy.outcomes == {"failed": 2}


@in_a_loop
async def test_dead_server_is_left_out_until_it_answers():
    async with cluster(("refused", "ok"), health_interval_s=0.02) as peers:
        first = peers.proxy.prefill.backends[0]
        await peers.post()
        assert not first.is_up
        for _ in range(4):
            assert (await peers.post()).status == 200
        assert first.requests == 1
        await peers.prefill[0].start(first.port)
        peers.prefill[0].behaviour = "ok"
        await until(lambda: first.is_up)
        for _ in range(2):
            assert (await peers.post()).status == 200
        assert len(peers.prefill[0].seen) == 1


@in_a_loop
async def test_health_checks_exclude_a_server():
    async with cluster(("ok", "ok"), health_interval_s=0.02) as peers:
        await peers.prefill[0].stop()
        await until(lambda: not peers.proxy.prefill.backends[0].is_up)
        assert peers.proxy.prefill.backends[1].is_up


@in_a_loop
async def test_server_with_errors_is_excluded_after_three():
    async with cluster(("500", "ok")) as peers:
        for _ in range(12):
            assert (await peers.post()).status == 200
        assert len(peers.prefill[0].seen) == 3
        assert not peers.proxy.prefill.backends[0].is_up


@pytest.mark.parametrize("role", ["prefill", "decode"])
@in_a_loop
async def test_request_that_all_answer_with_500_excludes_none(role):
    async with cluster(**{role: ("500",) * 3}) as peers:
        pool = getattr(peers.proxy, role)
        for _ in range(4):
            assert (await peers.post()).status == 503
        assert [backend.is_up for backend in pool.backends] == [True] * 3
        assert [backend.failures for backend in pool.backends] == [4] * 3
        for fake in getattr(peers, role):
            fake.behaviour = "ok"
        assert (await peers.post()).status == 200


@in_a_loop
async def test_excluded_servers_are_tried_where_none_is_up():
    async with cluster(("ok", "ok")) as peers:
        for backend in peers.proxy.prefill.backends:
            backend.is_up = False
        for _ in range(2):
            assert (await peers.post()).status == 200
        assert [len(fake.seen) for fake in peers.prefill] == [1, 1]


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
@in_a_loop
async def test_host_that_is_none_is_left_for_the_next(host):
    async with cluster(("ok", "ok"), health_interval_s=0.02) as peers:
        bad, good = peers.proxy.prefill.backends
        bad.host = host
        assert (await peers.post()).status == 200
        assert not bad.is_up
        # Health checks go on.
        good.is_up = False
        await until(lambda: good.is_up)
        assert not bad.is_up


@in_a_loop
async def test_health_checks_survive_an_error(monkeypatch, caplog):
    async with cluster(("ok",), health_interval_s=0.02) as peers:
        (backend,) = peers.proxy.decode.backends

        async def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(BackendPool, "check", fail)
            await until(lambda: "a health check failed" in caplog.text)
        backend.is_up = False
        await until(lambda: backend.is_up)


# Clients


@pytest.mark.parametrize(("prefill", "decode"), [("hang", "ok"), ("ok", "hang"), ("ok", "wait")])
@in_a_loop
async def test_hang_up_of_a_client_ends_the_calls(prefill, decode):
    async with cluster((prefill,), (decode,)) as peers:
        busy = peers.prefill[0] if prefill == "hang" else peers.decode[0]
        _, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        send(writer, "POST", "/v1/completions", json.dumps(STREAM).encode())
        await until(lambda: busy.seen)
        assert busy.hang_ups == 0
        writer.close()
        await until(lambda: busy.hang_ups == 1)
        await until(lambda: peers.proxy.outcomes == {"client hung up": 1})
        await until(lambda: peers.proxy.in_flight == 0)
        assert [backend.in_flight for backend in peers.proxy.decode.backends] == [0]


@in_a_loop
async def test_500_requests_are_served_at_once():
    async with cluster(("ok",) * 2, ("wait",) * 2) as peers:
        posts = [asyncio.create_task(peers.post(STREAM)) for _ in range(500)]
        await until(lambda: sum(fake.in_flight for fake in peers.decode) == 500)
        assert peers.proxy.in_flight == 500
        for fake in peers.decode:
            fake.release.set()
        answers = await asyncio.gather(*posts)
        assert {(answer.status, answer.body, answer.is_whole) for answer in answers} == {
            (200, b"data: one\n\ndata: two\n\n", True)
        }
        assert peers.proxy.outcomes == {"completed": 500}
        await until(lambda: peers.proxy.in_flight == 0)


@in_a_loop
async def test_connection_serves_many_requests():
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        for _ in range(2):
            send(writer, "POST", "/v1/chat/completions", b'{"model": "m"}')
            assert (await receive(reader)).is_whole
        # Two requests at once are answered in order.
        send(writer, "POST", "/v1/chat/completions", b'{"model": "m"}')
        send(writer, "GET", "/healthcheck")
        assert (await receive(reader)).body.startswith(b"data: one")
        assert (await receive(reader)).json()["status"] == "ok"
        send(writer, "GET", "/healthcheck", headers={"Connection": "close"})
        assert (await receive(reader)).status == 200
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("path", ["/healthcheck", "/metrics", "/v1/completions", "/none"])
@in_a_loop
async def test_answer_to_head_is_that_to_get_without_a_body(path):
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        heads = []
        for method in ("HEAD", "GET"):
            send(writer, method, path)
            heads.append(await reader.readuntil(b"\r\n\r\n"))
        length = int(heads[1].lower().split(b"content-length: ")[1].split(b"\r")[0])
        assert len(await reader.readexactly(length)) > 0
        assert heads[0].split(b" ")[1] == heads[1].split(b" ")[1]
        assert b"Content-Length: " in heads[0]
        writer.close()


@in_a_loop
async def test_answer_to_http_1_0_ends_with_its_connection():
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: 2\r\n\r\n{}")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert b"Connection: close" in head
        assert body == b"data: one\n\ndata: two\n\n"
        writer.close()


@in_a_loop
async def test_empty_lines_between_requests_are_skipped():
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        for between in (b"", b"\n", b"\r\n", b"\r\n\n"):
            writer.write(between)
            send(writer, "GET", "/healthcheck")
            assert (await receive(reader)).status == 200
        writer.close()


@pytest.mark.parametrize("target", ["http://h/v1/completions", "HTTP://h:80/v1/completions?x=1"])
@in_a_loop
async def test_target_may_be_a_url(target):
    async with cluster() as peers:
        assert (await request(peers.port, "POST", target, b"{}")).status == 200


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@in_a_loop
async def test_body_that_is_nested_too_deep_is_refused(monkeypatch):
    async def post(*_: object) -> None:
        raise RecursionError

    async with cluster() as peers:
        for body in (DEEP, b'{"a": 1}'):
            answer = await peers.post(body)
            assert answer.status == 400
            assert "inside one another" in answer.json()["error"]["message"]
            # As where a body can be read, but is too deep to be written.
            monkeypatch.setattr(Backend, "_post", post)
        assert all(backend.is_up for backend in peers.proxy.prefill.backends)


@pytest.mark.parametrize("status", [200, 422])
@in_a_loop
async def test_answer_of_a_server_may_be_nested_too_deep(status, monkeypatch):
    async with cluster(("422",)) as peers:
        monkeypatch.setattr(
            peers.prefill[0], "_send", lambda writer, *_: FakeBackend._send(writer, status, DEEP)
        )
        assert (await peers.post()).status == (503 if status == 200 else 422)


@in_a_loop
async def test_health_and_metrics_are_reported():
    async with cluster(("ok",) * 2, ("refused", "ok", "ok")) as peers:
        await peers.post()
        health = await request(peers.port, "GET", "/healthcheck")
        assert health.json() == {"status": "ok", "prefill_instances": 2, "decode_instances": 3}
        text = (await request(peers.port, "GET", "/metrics?x=1")).body.decode()
        dead = f'{{role="decode",backend="127.0.0.1:{peers.decode[0].port}"}}'
        for line in (
            'mooncake_proxy_requests_total{outcome="completed"} 1',
            'mooncake_proxy_repetitions_total{role="decode"} 1',
            "mooncake_proxy_in_flight 0",
            f"mooncake_proxy_backend_up{dead} 0",
            f"mooncake_proxy_backend_failures_total{dead} 1",
        ):
            assert line in text.splitlines()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /nothing HTTP/1.1\r\n\r\n", 404),
        (b"GET /v1/completions HTTP/1.1\r\n\r\n", 405),
        (b"POST /healthcheck HTTP/1.1\r\n\r\n", 404),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nname : x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1\r\n\r\n{", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\n\r\n[1]", 400),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (70 << 10) + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: x\r\n" * (20 << 10) + b"\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 9, None),
    ],
)
@in_a_loop
async def test_bad_requests_are_refused(raw, status):
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        writer.write(raw)
        if status is None:
            # A body that never ends is given up with its connection.
            writer.close()
        else:
            assert (await receive(reader)).status == status
            writer.close()
        assert (await peers.post()).status == 200
        assert len(peers.prefill[0].seen) == 1


@in_a_loop
async def test_chunked_requests_are_read():
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b'8;x=y\r\n{"model"\r\n5\r\n: 1 }\r\n0\r\nTrailer: x\r\n\r\n')
        assert (await receive(reader)).status == 200
        assert peers.decode[0].seen[0]["model"] == 1
        writer.close()


@in_a_loop
async def test_client_that_asks_may_send_its_body():
    async with cluster() as peers:
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n")
        writer.write(b"Expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await receive(reader)).status == 200
        writer.close()


@in_a_loop
async def test_stop_ends_open_streams():
    async with cluster(decode=("wait",)) as peers:
        decode = peers.decode[0]
        reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
        send(writer, "POST", "/v1/completions", json.dumps(STREAM).encode())
        await reader.readuntil(b"\r\n\r\n")
        assert await receive_chunk(reader) == b"data: one\n\n"
        idle, other = await asyncio.open_connection("127.0.0.1", peers.port)
    assert await receive_chunk(reader) is None
    assert await idle.read() == b""
    await until(lambda: decode.hang_ups == 1)
    writer.close()
    other.close()


# The module


def test_options_are_those_of_upstream():
    options = module.parse_args(
        ["--port", "1", "--prefiller-host", "a", "b", "--prefiller-ports", "2", "3"]
    )
    assert options.prefiller_instances == [("a", 2), ("b", 3)]
    assert options.decoder_instances == [("localhost", 8200)]
    assert (options.host, options.port) == ("127.0.0.1", 1)
    with pytest.raises(ValueError, match="decoder hosts must match number of decoder ports"):
        module.parse_args(["--decoder-hosts", "a", "b"])


@in_a_loop
async def test_functions_of_the_module_call_servers():
    async with cluster() as peers:
        arguments = ["--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1"]
        arguments += ["--prefiller-ports", str(peers.prefill[0].port)]
        arguments += ["--decoder-ports", str(peers.decode[0].port)]
        options = module.parse_args(arguments)
        with pytest.raises(RuntimeError, match="does not run"):
            module.get_next_client(module.app, "prefill")
        async with module.lifespan(module.app, options):
            prefill = module.get_next_client(module.app, "prefill")
            answer = await module.send_request_to_service(prefill, "/v1/completions", {}, "id")
            assert answer == {"kv_transfer_params": PARAMETERS}
            assert peers.prefill[0].headers[0]["x-request-id"] == "id"
            decode = module.get_next_client(module.app, "decode")
            pieces = [
                piece
                async for piece in module.stream_service_response(decode, "/v1/completions", {})
            ]
            assert b"".join(pieces) == b"data: one\n\ndata: two\n\n"
            with pytest.raises(ValueError, match="prefill or decode"):
                module.get_next_client(module.app, "other")
            peers.prefill[0].behaviour = "close"
            with pytest.raises(BackendError, match="no answer from"):
                await module.send_request_to_service(prefill, "/v1/completions", {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prefiller-hosts", "a..b"],
        ["--decoder-hosts", "x" * 64],
        ["--decoder-hosts", ""],
        ["--prefiller-ports", "0"],
        ["--decoder-ports", "65536"],
        ["--prefiller-bootstrap-ports", "-1"],
        ["--health-interval", "0"],
        ["--health-interval", "nan"],
        ["--answer-timeout", "-1"],
        ["--connect-timeout", "0"],
    ],
    ids=" ".join,
)
def test_options_that_cannot_be_used_are_refused(arguments):
    with pytest.raises(ValueError, match=f"^{arguments[0]}: "):
        module.parse_args(arguments)


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake.vllm_v1_proxy_server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_program_names_holder_of_a_taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_program(f"--port={port}")
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in line
    assert f"(pid {os.getpid()}): choose another --port" in line
    done = run_program("--port=99999")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "127.0.0.1:99999" in done.stderr


def test_program_refuses_hosts_without_ports():
    done = run_program("--prefiller-hosts", "a", "b")
    assert (done.returncode, done.stdout) == (2, "")
    [line] = done.stderr.splitlines()
    assert "Number of prefiller hosts must match number of prefiller ports: 2 and 1" in line
    assert "give --prefiller-ports a port for each host" in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_program_serves_until_it_is_stopped(number):
    command = [sys.executable, "-m", "mooncake.vllm_v1_proxy_server", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        port = int(ready.rsplit(":", 1)[1])
        health = asyncio.run(request(port, "GET", "/healthcheck"))
        assert health.json()["status"] == "ok"
        process.send_signal(number)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()
