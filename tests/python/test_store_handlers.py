"""The REST service's coroutines for applications of aiohttp."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("aiohttp", reason="needs aiohttp: pip install -r scripts/test-tools.txt")

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

from mooncake.mooncake_store_service import MooncakeStoreService

if TYPE_CHECKING:
    from conftest import MasterProcess

# Paths of an application; they need not be those of the service's own server.
ROUTES = (
    ("PUT", "/v2/objects", "handle_put"),
    ("GET", "/v2/objects/{key}", "handle_get"),
    ("GET", "/v2/exist/{key}", "handle_exist"),
    ("DELETE", "/v2/objects/{key}", "handle_remove"),
    ("DELETE", "/v2/objects", "handle_remove_all"),
    ("POST", "/v2/mount", "handle_mount"),
    ("POST", "/v2/unmount", "handle_unmount"),
    ("POST", "/v2/mount_shm", "handle_mount_shm"),
    ("POST", "/v2/unmount_shm", "handle_unmount_shm"),
    ("POST", "/v2/reconfigure", "handle_reconfigure"),
    ("POST", "/v2/unmount_local_disk", "handle_unmount_local_disk"),
)


def serve(master: MasterProcess, calls: Callable[[TestClient[Any, Any]], Awaitable[None]]) -> None:
    """Run calls of a client against an application with the handlers."""

    async def run() -> None:
        service = MooncakeStoreService(
            cli_config={
                "local_hostname": "localhost",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master.address,
                "global_segment_size": "64mb",
                "local_buffer_size": "1mb",
            }
        )
        assert await service.start_store_service(30)
        application = web.Application(client_max_size=200 << 20)
        for method, path, name in ROUTES:
            application.router.add_route(method, path, getattr(service, name))
        try:
            async with TestClient(TestServer(application)) as client:
                await calls(client)
        finally:
            await service.stop()

    asyncio.run(run())


async def outcome(response: ClientResponse) -> tuple[int, Any]:
    return response.status, await response.json()


def test_handlers_answer_as_the_server(master):
    async def calls(client: TestClient[Any, Any]) -> None:
        put = await client.put("/v2/objects", json={"key": "a/ü", "value": "grüße"})
        assert await outcome(put) == (200, {"status": "success"})
        got = await client.get("/v2/objects/a%2F%C3%BC")
        assert (got.status, got.content_type) == (200, "application/octet-stream")
        assert await got.read() == "grüße".encode()
        exists = await client.get("/v2/exist/a%2F%C3%BC")
        assert await outcome(exists) == (200, {"exists": True})
        missing = await client.get("/v2/objects/none")
        assert await outcome(missing) == (404, {"error": "Key not found"})
        removed = await client.delete("/v2/objects/none")
        assert await outcome(removed) == (500, {"error": "Remove operation failed"})
        no_key = await client.put("/v2/objects", json={"value": "v"})
        assert await outcome(no_key) == (400, {"error": "Missing key or value"})
        mounted = await client.post("/v2/mount", json={"size": 1 << 20})
        status, body = await outcome(mounted)
        assert status == 200
        ids = {"segment_ids": body["segment_ids"]}
        assert (await client.post("/v2/unmount", json=ids)).status == 200
        for path in ("mount_shm", "unmount_shm", "reconfigure"):
            assert (await client.post(f"/v2/{path}", json={})).status == 400, path
        late = await client.post("/v2/unmount_local_disk", json={"grace_period_seconds": -1})
        assert late.status == 400
        status, body = await outcome(await client.delete("/v2/objects"))
        assert status == 200
        assert "removed" in body["status"]

    serve(master, calls)


def test_handlers_refuse_changes_of_strangers_and_long_bodies(master):
    async def calls(client: TestClient[Any, Any]) -> None:
        forwarded = {"X-Forwarded-For": "192.0.2.1"}
        refused = await client.delete("/v2/objects", headers=forwarded)
        assert refused.status == 403
        assert "MOONCAKE_REST_TOKEN" in (await refused.json())["error"]
        too_long = await client.post("/v2/mount", data=io.BytesIO(b" " * (1 << 20) + b"{}"))
        assert too_long.status == 413

    serve(master, calls)
