"""Upstream's coroutines `handle_*` of the REST server, for applications of aiohttp."""

from __future__ import annotations

import asyncio
from email.message import Message
from typing import Any
from urllib.parse import quote

from mooncake._http import Reply, Request

__all__ = ["AiohttpHandlers"]


class AiohttpHandlers:
    """Answers requests of aiohttp as the service's own server answers them.

    Each `handle_*` takes an `aiohttp.web.Request` and returns an `aiohttp.web.Response`, at
    whatever path the application has it. A key is the request's ``match_info["key"]``.
    """

    def _admit(self, request: Request) -> int | Reply:
        raise NotImplementedError

    def _answer(self, request: Request) -> Reply:
        raise NotImplementedError

    async def handle_put(self, request: Any) -> Any:
        """Answer as ``PUT /api/put``."""
        return await self._handle(request, "PUT", "/api/put")

    async def handle_get(self, request: Any) -> Any:
        """Answer as ``GET /api/get/{key}``."""
        return await self._handle(request, "GET", f"/api/get/{_key(request)}")

    async def handle_exist(self, request: Any) -> Any:
        """Answer as ``GET /api/exist/{key}``."""
        return await self._handle(request, "GET", f"/api/exist/{_key(request)}")

    async def handle_remove(self, request: Any) -> Any:
        """Answer as ``DELETE /api/remove/{key}``."""
        return await self._handle(request, "DELETE", f"/api/remove/{_key(request)}")

    async def handle_remove_all(self, request: Any) -> Any:
        """Answer as ``DELETE /api/remove_all``."""
        return await self._handle(request, "DELETE", "/api/remove_all")

    async def handle_mount(self, request: Any) -> Any:
        """Answer as ``POST /api/mount``."""
        return await self._handle(request, "POST", "/api/mount")

    async def handle_unmount(self, request: Any) -> Any:
        """Answer as ``POST /api/unmount``."""
        return await self._handle(request, "POST", "/api/unmount")

    async def handle_mount_shm(self, request: Any) -> Any:
        """Answer as ``POST /api/mount_shm``."""
        return await self._handle(request, "POST", "/api/mount_shm")

    async def handle_unmount_shm(self, request: Any) -> Any:
        """Answer as ``POST /api/unmount_shm``."""
        return await self._handle(request, "POST", "/api/unmount_shm")

    async def handle_reconfigure(self, request: Any) -> Any:
        """Answer as ``POST /api/reconfigure``."""
        return await self._handle(request, "POST", "/api/reconfigure")

    async def handle_unmount_local_disk(self, request: Any) -> Any:
        """Answer as ``POST /api/unmount_local_disk``."""
        return await self._handle(request, "POST", "/api/unmount_local_disk")

    async def _handle(self, request: Any, method: str, path: str) -> Any:
        headers = Message()
        for name, value in request.headers.items():
            headers[name] = value
        socket_name = request.transport.get_extra_info("sockname") if request.transport else None
        host = str(socket_name[0]) if isinstance(socket_name, tuple) else ""
        query = request.query_string
        given = Request(method, path, query, b"", headers, request.remote or "", host)
        admitted = self._admit(given)
        if isinstance(admitted, Reply):
            return _response(admitted)
        body = await request.read()
        if len(body) > admitted:
            return _response(Reply(413, b'{"error": "the body is too long"}'))
        given = Request(method, path, query, body, headers, given.peer, host)
        return _response(await asyncio.to_thread(self._answer, given))


def _key(request: Any) -> str:
    """Return the key of a request, escaped as in a path."""
    return quote(request.match_info["key"], safe="", errors="surrogateescape")


def _response(reply: Reply) -> Any:
    # Only servers of aiohttp call the handlers, so that it is there.
    from aiohttp import web

    headers = {"Content-Type": reply.kind, **dict(reply.headers)}
    return web.Response(status=reply.status, body=reply.content(), headers=headers)
