"""The proxy's `app` as an application of ASGI servers."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from proxy_backends import PARAMETERS, cluster, until

from mooncake import vllm_v1_proxy_server as module
from mooncake._proxy.wire import BODY_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy_backends import Cluster

PATH = "/v1/completions"


class AsgiCall:
    """A request of an ASGI server, and what the application sends."""

    def __init__(self, method: str, path: str, *pieces: bytes) -> None:
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"authorization", b"Bearer mine")],
        }
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for number, piece in enumerate(pieces or (b"",), 1):
            more = number < len(pieces)
            self.messages.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        self.sent: list[dict[str, Any]] = []

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def run(self) -> None:
        await module.app(self.scope, self.messages.get, self.send)

    def hang_up(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return not self.sent[-1]["more_body"]


@asynccontextmanager
async def application(*decode: str) -> AsyncIterator[Cluster]:
    """Enter the application's context with the servers of a cluster."""
    async with cluster(decode=decode or ("ok",)) as peers:
        arguments = ["--prefiller-hosts", "127.0.0.1", "--decoder-hosts", "127.0.0.1"]
        arguments += ["--prefiller-ports", str(peers.prefill[0].port)]
        arguments += ["--decoder-ports", str(peers.decode[0].port)]
        async with module.lifespan(module.app, module.parse_args(arguments)):
            yield peers


def test_request_is_prefilled_and_decoded():
    async def run() -> None:
        async with application() as peers:
            text = json.dumps({"model": "m", "prompt": "p", "stream": True}).encode()
            call = AsgiCall("POST", PATH, text[:5], text[5:])
            await call.run()
            assert (call.status, call.is_whole) == (200, True)
            assert call.body == b"data: one\n\ndata: two\n\n"
            assert (b"content-type", b"text/event-stream") in call.sent[0]["headers"]
            assert peers.decode[0].seen[0]["kv_transfer_params"] == PARAMETERS
            assert peers.decode[0].headers[0]["authorization"] == "bearer mine"

    asyncio.run(run())


def test_paths_and_errors_are_those_of_the_program():
    async def run() -> None:
        async with application():
            for method, path, status in (
                ("GET", "/healthcheck", 200),
                ("GET", "/metrics", 200),
                ("GET", PATH, 405),
                ("GET", "/none", 404),
                ("POST", PATH, 400),
            ):
                call = AsgiCall(method, path)
                await call.run()
                assert (call.status, call.is_whole) == (status, True), path
            half = bytes(BODY_BYTES_MAX // 2 + 1)
            long = AsgiCall("POST", PATH, half, half)
            await long.run()
            assert long.status == 413

    asyncio.run(run())


def test_client_that_hangs_up_ends_the_calls_to_servers():
    async def run() -> None:
        async with application("wait") as peers:
            call = AsgiCall("POST", PATH, b'{"stream": true}')
            running = asyncio.create_task(call.run())
            await until(lambda: len(call.sent) == 2)
            call.hang_up()
            await running
            assert not call.is_whole
            await until(lambda: peers.decode[0].hang_ups == 1)
            assert module.app.proxy.outcomes == {"client hung up": 1}

    asyncio.run(run())


def test_answer_that_breaks_off_has_no_end():
    async def run() -> None:
        async with application("break off"):
            call = AsgiCall("POST", PATH, b'{"stream": true}')
            with pytest.raises(Exception, match="broke off"):
                await call.run()
            assert (call.status, call.is_whole) == (200, False)
            assert b'"code": 502' in call.body

    asyncio.run(run())


def test_server_enters_and_leaves_the_lifespan():
    async def run() -> None:
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        running = asyncio.create_task(module.app({"type": "lifespan"}, messages.get, send))
        messages.put_nowait({"type": "lifespan.startup"})
        await until(lambda: sent == [{"type": "lifespan.startup.complete"}])
        assert module.get_next_client(module.app, "decode").name == "localhost:8200"
        messages.put_nowait({"type": "lifespan.shutdown"})
        await running
        assert sent[1:] == [{"type": "lifespan.shutdown.complete"}]
        assert module.app.proxy is None
        with pytest.raises(RuntimeError, match="does not run"):
            await AsgiCall("GET", "/metrics").run()
        with pytest.raises(ValueError, match="websocket"):
            await module.app({"type": "websocket"}, messages.get, send)

    asyncio.run(run())


class Request:
    """A request as Starlette passes it to a route."""

    def __init__(self, app: object, body: bytes) -> None:
        self.app = app
        self.headers = {"Authorization": "Bearer mine"}
        self._body = body

    async def body(self) -> bytes:
        return self._body


@pytest.mark.parametrize("is_chat", [False, True])
def test_handlers_answer_as_the_routes(is_chat: bool):
    async def run() -> None:
        async with application() as peers:
            text = json.dumps({"model": "m", "prompt": "p", "stream": True}).encode()
            handle = module.handle_chat_completions if is_chat else module.handle_completions
            response = await handle(Request(module.app, text))
            call = AsgiCall("POST", "/of the program")
            await response(call.scope, call.messages.get, call.send)
            assert (call.status, call.is_whole) == (200, True)
            assert call.body == b"data: one\n\ndata: two\n\n"
            assert peers.decode[0].seen[0]["kv_transfer_params"] == PARAMETERS
            path = "/v1/chat/completions" if is_chat else PATH
            assert [each.paths for each in (*peers.prefill, *peers.decode)] == [[path], [path]]
            assert await module.healthcheck() == {
                "status": "ok",
                "prefill_instances": 1,
                "decode_instances": 1,
            }
            refused = await handle(Request(object(), b"[]"))
            call = AsgiCall("POST", PATH)
            await refused(call.scope, call.messages.get, call.send)
            assert call.status == 400
        with pytest.raises(RuntimeError, match="enter lifespan"):
            await module.handle_completions(Request(module.app, text))

    asyncio.run(run())
