"""The proxy as an application of ASGI servers."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from .routes import answer, send_error
from .wire import BODY_BYTES_MAX, Head, HttpError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping
    from contextlib import AbstractAsyncContextManager

    from .proxy import Proxy

__all__ = ["ProxyResponse", "Receive", "Scope", "Send", "respond", "serve_http", "serve_lifespan"]

Scope: TypeAlias = "MutableMapping[str, Any]"
Receive: TypeAlias = "Callable[[], Awaitable[MutableMapping[str, Any]]]"
Send: TypeAlias = "Callable[[MutableMapping[str, Any]], Awaitable[None]]"


class BrokenOffError(Exception):
    """An answer broke off after its head was sent; the server closes the connection."""


async def serve_lifespan(
    receive: Receive, send: Send, life: AbstractAsyncContextManager[None]
) -> None:
    """Enter a context when the server starts, and leave it when the server stops."""
    await receive()
    try:
        await life.__aenter__()
    except Exception as error:
        await send({"type": "lifespan.startup.failed", "message": str(error)})
        raise
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await life.__aexit__(None, None, None)
    await send({"type": "lifespan.shutdown.complete"})


async def serve_http(proxy: Proxy, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request.

    Raises:
        BrokenOffError: The answer broke off after its head was sent.
    """
    response = _AsgiResponse(send)
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    head = Head(scope["method"], scope["path"], headers, keeps_alive=True)
    try:
        body = await _read_body(receive)
    except HttpError as error:
        await send_error(response, error.status, str(error))
        return
    if body is not None:
        await _answer(proxy, head, body, receive, response)


class ProxyResponse:
    """The answer to a request whose body was read: an application of ASGI that sends it.

    Routes of Starlette return it as it is. For FastAPI, which looks at the class of what a route
    returns, `respond` makes it a response of Starlette.
    """

    status_code = 200
    background: Any = None

    def __init__(self, proxy: Proxy, head: Head, body: bytes) -> None:
        """Take the request."""
        self._request = proxy, head, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the answer.

        Raises:
            BrokenOffError: The answer broke off after its head was sent.
        """
        proxy, head, body = self._request
        await _answer(proxy, head, body, receive, _AsgiResponse(send))


async def respond(proxy: Proxy, path: str, request: Any) -> ProxyResponse:
    """Return the answer to a request for a path, as Starlette and FastAPI pass it."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    head = Head("POST", path, headers, keeps_alive=True)
    kind: type[ProxyResponse] = ProxyResponse
    if (starlette := sys.modules.get("starlette.responses")) is not None:
        kind = type(kind.__name__, (ProxyResponse, starlette.Response), {})
    return kind(proxy, head, await request.body())


async def _answer(
    proxy: Proxy, head: Head, body: bytes, receive: Receive, response: _AsgiResponse
) -> None:
    """Answer a request until the client hangs up.

    Raises:
        BrokenOffError: The answer broke off after its head was sent.
    """
    serving = asyncio.ensure_future(answer(proxy, head, body, response))
    watching = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            proxy.outcomes["client hung up"] += 1
            return
        if not serving.result():
            raise BrokenOffError("the answer of a decode server broke off")
    except OSError:
        proxy.outcomes["client hung up"] += 1
    finally:
        for task in (serving, watching):
            task.cancel()
        await asyncio.gather(serving, watching, return_exceptions=True)


class _AsgiResponse:
    def __init__(self, send: Send) -> None:
        self._send = send

    async def begin(self, status: int, kind: str, length: int | None) -> None:
        headers = [(b"content-type", kind.encode("latin-1"))]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _read_body(receive: Receive) -> bytes | None:
    """Read a whole body, None if the client hung up.

    Raises:
        HttpError: The body is longer than `BODY_BYTES_MAX`.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece = message.get("body", b"")
        if len(body) + len(piece) > BODY_BYTES_MAX:
            raise HttpError(413, f"the body is longer than {BODY_BYTES_MAX} bytes")
        body += piece
        if not message.get("more_body", False):
            return bytes(body)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
