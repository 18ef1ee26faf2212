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
    from collections.abc import AsyncIterator, Mapping

__all__ = ["Backend", "BackendError", "BackendPool", "PrefillEngine", "Timeouts"]

_log = logging.getLogger("mooncake.proxy")
# Failures in a row after which a backend that answers with errors is excluded.
_FAILURES_MAX = 3
_HEAD_BYTES_MAX = 64 << 10
_BOOTSTRAP_BYTES_MAX = 16 << 20


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


@dataclass(frozen=True, slots=True)
class PrefillEngine:
    """An engine of a prefill server, as its bootstrap server names it.

    Attributes:
        engine_id: The name by which decode servers find its workers.
        rank: Its rank among the data-parallel engines of the server; None if it is the only one.
        bootstrap: URL of the bootstrap server.
    """

    engine_id: str
    rank: int | None
    bootstrap: str


@dataclass(slots=True, eq=False)
class Backend:
    """A server that prefills or decodes.

    `bootstrap_port` is that of vLLM's own connector (0.13 and later) of a server that prefills.
    """

    role: str
    host: str
    port: int
    bootstrap_port: int | None = None
    is_up: bool = True
    failures_in_row: int = 0
    requests: int = 0
    failures: int = 0
    in_flight: int = 0
    _next_engine: int = 0

    @property
    def name(self) -> str:
        """The address, as it is written in URLs, metrics and errors."""
        return _address(self.host, self.port)

    @asynccontextmanager
    async def call(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], timeouts: Timeouts
    ) -> AsyncIterator[Answer]:
        """Post JSON, and give the answer as soon as its head and first bytes are there.

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
        """Return whether the server answers `GET /health` with a status below 500."""
        try:
            async with (
                asyncio.timeout(timeouts.health),
                self._get("/health", self.port, timeouts.health) as (head, _),
            ):
                return head.status < 500
        except (BackendError, HttpError, OSError, EOFError, TimeoutError):
            return False

    async def next_engine(self, timeouts: Timeouts) -> PrefillEngine | None:
        """Return the engine that is to prefill next, None for a server without bootstrap port.

        The bootstrap server is asked each time, since a server that restarts has other engines.

        Raises:
            BackendError: It did not answer, or names no engine.
        """
        if self.bootstrap_port is None:
            return None
        url = f"http://{_address(self.host, self.bootstrap_port)}"
        try:
            engines = await self._engine_ids(self.bootstrap_port, timeouts.connect)
        except BackendError as error:
            text = f"the bootstrap server of {self.name} does not answer: {error}"
            raise BackendError(text, was_sent=False) from error
        except (HttpError, OSError, EOFError, TimeoutError) as error:
            reason = str(error) or f"nothing within {timeouts.connect} s"
            text = f"no engines from {url}/query for {self.name}: {reason}"
            raise BackendError(text, was_sent=False) from error
        if not engines:
            text = (
                f"{url}/query names no engine of {self.name}: is this port the "
                "VLLM_MOONCAKE_BOOTSTRAP_PORT of that server, and has it loaded its model?"
            )
            raise BackendError(text, was_sent=False)
        rank, engine_id = engines[self._next_engine % len(engines)]
        self._next_engine += 1
        return PrefillEngine(engine_id, rank if len(engines) > 1 else None, url)

    async def _engine_ids(self, port: int, timeout: float) -> list[tuple[int, str]]:
        """Return ranks and names; an answer that is none of a bootstrap server has none."""
        async with (
            asyncio.timeout(timeout),
            self._get("/query", port, timeout) as (head, reader),
        ):
            text = b""
            async for piece in body_chunks(reader, head.headers, is_request=False):
                text += piece
                if len(text) > _BOOTSTRAP_BYTES_MAX:
                    raise HttpError(502, f"the answer is longer than {_BOOTSTRAP_BYTES_MAX} bytes")
            if head.status != 200:
                raise HttpError(502, f"the answer has status {head.status}")
        try:
            entries = json.loads(text)
            return sorted((int(rank), str(entry["engine_id"])) for rank, entry in entries.items())
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            return []

    def record_success(self) -> None:
        """Note that the server answered."""
        self.failures_in_row = 0

    def record_failure(self, reason: object, *, excludes: bool) -> None:
        """Note a failure, and exclude the server at once or after several in a row."""
        self.failures += 1
        self._record_fault(reason, excludes=excludes)

    def record_error(self) -> None:
        """Note an answer that is an error, of which the request may be the cause."""
        self.failures += 1

    def record_fault(self, reason: object) -> None:
        """Note that another server took the request that this one answered with an error."""
        self._record_fault(reason, excludes=False)

    def _record_fault(self, reason: object, *, excludes: bool) -> None:
        self.failures_in_row += 1
        if self.is_up and (excludes or self.failures_in_row >= _FAILURES_MAX):
            self.is_up = False
            _log.warning("%s backend %s is excluded: %s", self.role, self.name, reason)

    @asynccontextmanager
    async def _get(
        self, path: str, port: int, timeout: float
    ) -> AsyncIterator[tuple[ResponseHead, asyncio.StreamReader]]:
        async with self._connection(timeout, port) as (reader, writer):
            head = {"Host": _address(self.host, port), "Connection": "close"}
            write_head(writer, f"GET {path} HTTP/1.1", head)
            await writer.drain()
            yield await read_response_head(reader), reader

    @asynccontextmanager
    async def _connection(
        self, timeout: float, port: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        port = self.port if port is None else port
        name = _address(self.host, port)
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(
                    self.host, port, limit=_HEAD_BYTES_MAX
                )
        except TimeoutError as error:
            text = f"no connection to {name} within {timeout} s"
            raise BackendError(text, was_sent=False) from error
        except (OSError, ValueError, OverflowError) as error:
            # A host that cannot be encoded is a `ValueError`, a port of none an `OverflowError`.
            raise BackendError(f"no connection to {name}: {error}", was_sent=False) from error
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
        """Read the first piece of the body; none is there if the body is empty."""
        self._chunks = body_chunks(self.reader, self.head.headers, is_request=False)
        self._first = await anext(self._chunks, b"")

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body.

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
        """Return the whole body.

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

    def next(self) -> Backend:
        """Return the backend whose turn it is."""
        return self.candidates()[0]

    def candidates(self) -> list[Backend]:
        """Return the backends that are up, all if none is, from the one whose turn it is."""
        start = self._next
        self._next = (start + 1) % len(self.backends)
        in_turn = [*self.backends[start:], *self.backends[:start]]
        return [backend for backend in in_turn if backend.is_up] or in_turn

    async def check(self, timeouts: Timeouts) -> None:
        """Check all backends, and take back those that answer again."""
        results = await asyncio.gather(*(backend.is_healthy(timeouts) for backend in self.backends))
        for backend, is_healthy in zip(self.backends, results, strict=True):
            if is_healthy and not backend.is_up:
                _log.warning("%s backend %s answers again", self.role, backend.name)
                backend.is_up, backend.failures_in_row = True, 0
            elif not is_healthy and backend.is_up:
                backend.record_failure("the health check failed", excludes=False)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
