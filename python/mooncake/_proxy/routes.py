"""The HTTP paths of the proxy, apart from how a response is sent."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Protocol

from .backend import BackendError
from .proxy import Proxy, ProxyError, Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .wire import Head

__all__ = ["ResponseWriter", "answer", "health", "send_error"]

_log = logging.getLogger("mooncake.proxy")

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
_TOO_DEEP = "the body has too many arrays and objects inside one another"


class ResponseWriter(Protocol):
    """A response that is sent in pieces."""

    async def begin(self, status: int, kind: str, length: int | None) -> None:
        """Send the head.

        Args:
            status: Status code.
            kind: Content type.
            length: Length of the body; None if it is not known.
        """

    async def write(self, piece: bytes) -> None:
        """Send a piece of the body."""

    async def end(self) -> None:
        """Mark the end of the body; a body without it is seen to be broken off."""


class _WithoutBody:
    """The answer to HEAD: the head of the answer to GET."""

    def __init__(self, response: ResponseWriter) -> None:
        self._response = response

    async def begin(self, status: int, kind: str, length: int | None) -> None:
        await self._response.begin(status, kind, length)

    async def write(self, piece: bytes) -> None:
        pass

    async def end(self) -> None:
        await self._response.end()


async def answer(proxy: Proxy, head: Head, body: bytes, response: ResponseWriter) -> bool:
    """Answer a request; return whether the answer is whole."""
    if head.method == "HEAD":
        response = _WithoutBody(response)
    if head.path in _COMPLETIONS:
        if head.method != "POST":
            return await send_error(response, 405, "use POST")
        return await _complete(proxy, head, body, response)
    if head.method not in ("GET", "HEAD"):
        return await send_error(response, 404, f"there is no {head.method} {head.path}")
    if head.path == "/healthcheck":
        return await _send(response, 200, json.dumps(health(proxy)).encode(), "application/json")
    if head.path == "/metrics":
        text = proxy.metrics().encode()
        return await _send(response, 200, text, "text/plain; version=0.0.4")
    return await send_error(response, 404, f"there is no {head.path}")


def health(proxy: Proxy) -> dict[str, object]:
    """Return how many servers a proxy has."""
    sizes = (len(proxy.prefill.backends), len(proxy.decode.backends))
    return {"status": "ok", "prefill_instances": sizes[0], "decode_instances": sizes[1]}


async def send_error(response: ResponseWriter, status: int, text: str) -> bool:
    """Send an error as OpenAI's clients read it; return True: the answer is whole."""
    body = json.dumps(_error_record(status, text)).encode()
    return await _send(response, status, body, "application/json")


async def _complete(proxy: Proxy, head: Head, body: bytes, response: ResponseWriter) -> bool:
    try:
        request = json.loads(body)
    except RecursionError:
        return await send_error(response, 400, _TOO_DEEP)
    except ValueError:
        request = None
    if not isinstance(request, dict):
        return await send_error(response, 400, "the body must be a JSON object")
    authorization = head.headers.get("authorization")
    try:
        async with proxy.request(head.path, request, authorization) as reply:
            is_whole = await _stream(response, reply, is_events=bool(request.get("stream")))
    except ProxyError as error:
        proxy.outcomes["refused" if error.status < 500 else "failed"] += 1
        return await send_error(response, error.status, str(error))
    except RecursionError:
        # A body that could just be read may be too deep to be written.
        proxy.outcomes["refused"] += 1
        return await send_error(response, 400, _TOO_DEEP)
    proxy.outcomes["completed" if is_whole else "broke off"] += 1
    return is_whole


async def _stream(response: ResponseWriter, reply: Reply, *, is_events: bool) -> bool:
    """Send an answer as it arrives; return False if it broke off."""
    await response.begin(reply.status, reply.kind, None)
    try:
        async for piece in reply.chunks:
            await response.write(piece)
    except BackendError as error:
        _log.warning("an answer broke off: %s", error)
        if is_events:
            event = json.dumps(_error_record(502, str(error)))
            await response.write(f"data: {event}\n\n".encode())
        # Without an end the client sees that the answer is not whole.
        return False
    await response.end()
    return True


async def _send(response: ResponseWriter, status: int, body: bytes, kind: str) -> bool:
    await response.begin(status, kind, len(body))
    await response.write(body)
    await response.end()
    return True


def _error_record(status: int, text: str) -> Mapping[str, object]:
    """Return an error as OpenAI's clients read it; a text that is one already is passed on."""
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(text)
        if isinstance(given, dict):
            return given
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "code": status}}
