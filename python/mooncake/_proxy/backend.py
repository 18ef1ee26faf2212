"""Backends: one HTTP server each, whether it answers, and the choice among several."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .wire import HttpError, ResponseHead, body_chunks, read_response_head, write_head

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

__all__ = ["Backend", "BackendError", "BackendPool", "Timeouts"]

_log = logging.getLogger("mooncake.proxy")
# Failures in a row after which a backend that answers with errors is excluded.
_FAILURES_MAX = 3
_HEAD_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time-outs of calls to backends, in seconds.

    Attributes:
        connect: Until a connection is made.
        answer: From the request to the first byte of the body: queueing and prefill.
        idle: Between two pieces of a body.
        health: For a health check.
    """

    connect: float = 5.0
    answer: float = 600.0
    idle: float = 120.0
    health: float = 2.0


class BackendError(Exception):
    """A call to a backend failed.

    `was_sent` says whether the backend may have seen the request.
    """

    def __init__(self, text: str, *, was_sent: bool) -> None:
        super().__init__(text)
        self.was_sent = was_sent


@dataclass(slots=True, eq=False)
class Backend:
    """A server that prefills or decodes."""

    role: str
    host: str
    port: int
    is_up: bool = True
    failures_in_row: int = 0
    requests: int = 0
    failures: int = 0
    in_flight: int = 0

    @property
    def name(self) -> str:
        """The address, as it is written in URLs, metrics and errors."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @asynccontextmanager
    async def call(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], timeouts: Timeouts
    ) -> AsyncIterator[Answer]:
        """Posts JSON, and gives the answer as soon as its head and first bytes are there.

        The connection is closed when the block ends, by which the server notices that nobody
        wants the rest.

        Raises:
            BackendError: No answer came.
        """
        self.requests += 1
        self.in_flight += 1
        try:
            async with self._connection(timeouts.connect) as (reader, writer):
                yield await self._post(reader, writer, path, body, headers, timeouts)
        finally:
            self.in_flight -= 1

    async def is_healthy(self, timeouts: Timeouts) -> bool:
        """Returns whether the server answers `GET /health` with a status below 500."""
        try:
            async with asyncio.timeout(timeouts.health):
                async with self._connection(timeouts.health) as (reader, writer):
                    head = {"Host": self.name, "Connection": "close"}
                    write_head(writer, "GET /health HTTP/1.1", head)
                    await writer.drain()
                    return (await read_response_head(reader)).status < 500
        except (BackendError, HttpError, OSError, EOFError, TimeoutError):
            return False

    def record_success(self) -> None:
        """Notes that the server answered."""
        self.failures_in_row = 0

    def record_failure(self, reason: object, *, excludes: bool) -> None:
        """Notes a failure, and excludes the server at once or after several in a row."""
        self.failures += 1
        self.failures_in_row += 1
        if self.is_up and (excludes or self.failures_in_row >= _FAILURES_MAX):
            self.is_up = False
            _log.warning("%s backend %s is excluded: %s", self.role, self.name, reason)

    @asynccontextmanager
    async def _connection(
        self, timeout: float
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(
                    self.host, self.port, limit=_HEAD_BYTES_MAX
                )
        except TimeoutError as error:
            text = f"no connection to {self.name} within {timeout} s"
            raise BackendError(text, was_sent=False) from error
        except OSError as error:
            raise BackendError(f"no connection to {self.name}: {error}", was_sent=False) from error
        try:
            yield reader, writer
        finally:
            # Without waiting: a server that does not read must not hold up the proxy.
            writer.transport.abort()

    async def _post(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        timeouts: Timeouts,
    ) -> Answer:
        payload = json.dumps(body).encode()
        head: dict[str, object] = {
            "Host": self.name,
            "Connection": "close",
            "Content-Type": "application/json",
            "Content-Length": len(payload),
            **headers,
        }
        try:
            async with asyncio.timeout(timeouts.answer):
                write_head(writer, f"POST {path} HTTP/1.1", head)
                writer.write(payload)
                await writer.drain()
                answer_head = await read_response_head(reader)
                answer = Answer(self, reader, answer_head, timeouts)
                await answer.read_first()
        except TimeoutError as error:
            text = f"no answer from {self.name} within {timeouts.answer} s"
            raise BackendError(text, was_sent=True) from error
        except (OSError, EOFError, HttpError) as error:
            raise BackendError(f"no answer from {self.name}: {error}", was_sent=True) from error
        return answer


@dataclass(slots=True)
class Answer:
    """An answer whose head and first bytes are there."""

    backend: Backend
    reader: asyncio.StreamReader
    head: ResponseHead
    timeouts: Timeouts
    _chunks: AsyncIterator[bytes] | None = None
    _first: bytes = b""

    async def read_first(self) -> None:
        """Reads the first piece of the body; none is there if the body is empty."""
        self._chunks = body_chunks(self.reader, self.head.headers, is_request=False)
        self._first = await anext(self._chunks, b"")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the pieces of the body.

        Raises:
            BackendError: The answer broke off, or nothing came for the idle time.
        """
        piece = self._first
        assert self._chunks is not None, "read_first was awaited"
        while piece:
            yield piece
            try:
                async with asyncio.timeout(self.timeouts.idle):
                    piece = await anext(self._chunks, b"")
            except TimeoutError as error:
                text = f"nothing from {self.backend.name} for {self.timeouts.idle} s"
                raise BackendError(text, was_sent=True) from error
            except (OSError, EOFError, HttpError) as error:
                text = f"the answer of {self.backend.name} broke off: {error}"
                raise BackendError(text, was_sent=True) from error

    async def body(self) -> bytes:
        """Returns the whole body.

        Raises:
            BackendError: The answer broke off.
        """
        return b"".join([piece async for piece in self.chunks()])


@dataclass(slots=True)
class BackendPool:
    """The backends of one role; takes them in turn, those that are up."""

    role: str
    backends: list[Backend]
    _next: int = field(default=0)

    def next(self) -> Backend | None:
        """Returns the backend whose turn it is, None if none is up."""
        return next(self.candidates(), None)

    def candidates(self) -> Iterator[Backend]:
        """Yields each backend that is up, once, from the one whose turn it is."""
        start = self._next
        self._next = (start + 1) % len(self.backends)
        for offset in range(len(self.backends)):
            backend = self.backends[(start + offset) % len(self.backends)]
            if backend.is_up:
                yield backend

    async def check(self, timeouts: Timeouts) -> None:
        """Checks all backends, and takes back those that answer again."""
        results = await asyncio.gather(*(backend.is_healthy(timeouts) for backend in self.backends))
        for backend, is_healthy in zip(self.backends, results, strict=True):
            if is_healthy and not backend.is_up:
                _log.warning("%s backend %s answers again", self.role, backend.name)
                backend.is_up, backend.failures_in_row = True, 0
            elif not is_healthy and backend.is_up:
                backend.record_failure("the health check failed", excludes=False)
