"""The route of a request: prefill on one server, then decode on another, with repetitions."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .backend import Answer, Backend, BackendError, BackendPool, PrefillEngine, Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

__all__ = ["Proxy", "ProxyError", "Reply", "prefill_body"]

_log = logging.getLogger("mooncake.proxy")


class ProxyError(Exception):
    """A request failed; `status` and the text go to the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer for the client, whose first bytes are there."""

    status: int
    kind: str
    chunks: AsyncIterator[bytes]


@dataclass(slots=True)
class Proxy:
    """Prefill and decode servers, and what was counted."""

    prefill: BackendPool
    decode: BackendPool
    timeouts: Timeouts = field(default_factory=Timeouts)
    outcomes: Counter[str] = field(default_factory=Counter)
    repetitions: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0

    @asynccontextmanager
    async def request(
        self, path: str, body: Mapping[str, Any], authorization: str | None
    ) -> AsyncIterator[Reply]:
        """Prefill and decode a request, and give the answer as soon as it begins.

        A server that fails before the first byte of the answer is replaced by another one. When
        the block ends, by an exception or by cancellation, the calls to the servers end too.

        Raises:
            ProxyError: No server answered.
            BackendError: From the reply's chunks: the answer broke off.
        """
        headers = {"X-Request-Id": str(uuid.uuid4())}
        if authorization := _authorization(authorization):
            headers["Authorization"] = authorization
        self.in_flight += 1
        try:
            async with self._decoded(path, body, headers) as answer:
                kind = answer.head.headers.get("content-type", "application/json")
                yield Reply(answer.head.status, kind, _recorded(answer))
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def _decoded(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        decode_body: dict[str, Any] | None = None
        last = ""
        errors: list[tuple[Backend, str]] = []
        for backend in self.decode.candidates():
            if decode_body is None:
                decode_body = await self._prefilled(path, body, headers)
            async with AsyncExitStack() as stack:
                call = backend.call(path, decode_body, headers, self.timeouts)
                try:
                    answer = await stack.enter_async_context(call)
                except BackendError as error:
                    last = str(error)
                    self._record_failure(backend, error)
                    # A server that saw the request may have fetched the cache, which is sent once.
                    if error.was_sent:
                        decode_body = None
                    continue
                if answer.head.status >= 500:
                    last = f"{backend.name} answered {answer.head.status}"
                    self._record_error(backend, last, errors)
                    decode_body = None
                    continue
                backend.record_success()
                if answer.head.status < 400:
                    _record_faults(errors)
                yield answer
                return
        raise ProxyError(503, f"no decode server took the request: {last}")

    async def _prefilled(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Let a server fill the cache, and return the body for a decode server."""
        if not _is_one_sequence(body):
            return dict(body)
        last = ""
        errors: list[tuple[Backend, str]] = []
        for backend in self.prefill.candidates():
            # A transfer is fetched once, so that each repetition has a name of its own.
            transfer_id = f"xfer-{uuid.uuid4()}"
            try:
                engine = await backend.next_engine(self.timeouts)
                own = headers if engine is None else {**headers, **_rank_header(engine)}
                prefill = prefill_body(body, transfer_id if engine else None)
                status, text = await self._prefill_once(backend, path, prefill, own)
            except BackendError as error:
                last = str(error)
                self._record_failure(backend, error)
                continue
            if status >= 500:
                last = f"{backend.name} answered {status}"
                self._record_error(backend, last, errors)
                continue
            if status >= 400:
                raise ProxyError(status, text.decode("utf-8", "replace"))
            try:
                answer = json.loads(text)
                parameters = answer.get("kv_transfer_params")
            except (ValueError, AttributeError, RecursionError):
                last = f"{backend.name} answered no JSON object"
                self._record_failure(backend, last)
                continue
            backend.record_success()
            _record_faults(errors)
            if engine is not None:
                parameters = _fetch_parameters(engine, transfer_id)
            extra = {"kv_transfer_params": parameters} if parameters else {}
            return {**body, **extra}
        raise ProxyError(503, f"no prefill server took the request: {last}")

    async def _prefill_once(
        self, backend: Backend, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        async with backend.call(path, body, headers, self.timeouts) as answer:
            return answer.head.status, await answer.body()

    def _record_failure(self, backend: Backend, reason: object) -> None:
        self.repetitions[backend.role] += 1
        unreachable = isinstance(reason, BackendError) and not reason.was_sent
        backend.record_failure(reason, excludes=unreachable)
        _log.info("%s backend %s failed: %s", backend.role, backend.name, reason)

    def _record_error(
        self, backend: Backend, reason: str, errors: list[tuple[Backend, str]]
    ) -> None:
        """Note an answer 5xx, which is the server's fault only if another takes the request."""
        self.repetitions[backend.role] += 1
        backend.record_error()
        errors.append((backend, reason))
        _log.info("%s backend %s failed: %s", backend.role, backend.name, reason)

    async def check_backends(self, interval_s: float) -> None:
        """Check without end whether the servers answer."""
        while True:
            await asyncio.sleep(interval_s)
            pools = (self.prefill, self.decode)
            checks = (pool.check(self.timeouts) for pool in pools)
            for result in await asyncio.gather(*checks, return_exceptions=True):
                if isinstance(result, BaseException):
                    _log.error("a health check failed", exc_info=result)

    def metrics(self) -> str:
        """Return the counters as Prometheus text."""
        lines = ["# TYPE mooncake_proxy_requests_total counter"]
        lines += [
            f'mooncake_proxy_requests_total{{outcome="{outcome}"}} {count}'
            for outcome, count in sorted(self.outcomes.items())
        ]
        lines += [
            "# TYPE mooncake_proxy_in_flight gauge",
            f"mooncake_proxy_in_flight {self.in_flight}",
        ]
        lines.append("# TYPE mooncake_proxy_repetitions_total counter")
        lines += [
            f'mooncake_proxy_repetitions_total{{role="{role}"}} {count}'
            for role, count in sorted(self.repetitions.items())
        ]
        backends = [*self.prefill.backends, *self.decode.backends]
        for name, kind, values in (
            ("up", "gauge", [int(backend.is_up) for backend in backends]),
            ("in_flight", "gauge", [backend.in_flight for backend in backends]),
            ("requests_total", "counter", [backend.requests for backend in backends]),
            ("failures_total", "counter", [backend.failures for backend in backends]),
        ):
            lines.append(f"# TYPE mooncake_proxy_backend_{name} {kind}")
            lines += [
                f'mooncake_proxy_backend_{name}{{role="{backend.role}",backend="{backend.name}"}} '
                f"{value}"
                for backend, value in zip(backends, values, strict=True)
            ]
        return "\n".join([*lines, ""])


def _record_faults(errors: list[tuple[Backend, str]]) -> None:
    """Note that a server took a request, which others had answered with errors."""
    for backend, reason in errors:
        backend.record_fault(reason)


async def _recorded(answer: Answer) -> AsyncIterator[bytes]:
    """Yield the pieces of an answer, and count it as a failure if it breaks off."""
    try:
        async for piece in answer.chunks():
            yield piece
    except BackendError as error:
        answer.backend.record_failure(error, excludes=False)
        raise


_OF_THE_DECODE = frozenset({"best_of", "min_tokens", "stream_options"})
"""Fields that only the decode is asked for: more tokens than one are refused."""


def _is_one_sequence(body: Mapping[str, Any]) -> bool:
    """Return whether a request has one prompt and asks for one choice.

    The blocks of a prefill are fetched once. Of several sequences the others would get none, or
    those of another prompt.
    """
    prompt = body.get("prompt")
    has_prompts = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return not has_prompts and all(body.get(name) in (None, 1) for name in ("n", "best_of"))


def _rank_header(engine: PrefillEngine) -> dict[str, str]:
    return {} if engine.rank is None else {"X-data-parallel-rank": str(engine.rank)}


def _fetch_parameters(engine: PrefillEngine, transfer_id: str) -> dict[str, Any]:
    """Return what tells vLLM's own connector in a decode server where the cache is."""
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": engine.engine_id,
        "remote_bootstrap_addr": engine.bootstrap,
        "transfer_id": transfer_id,
    }


def prefill_body(body: Mapping[str, Any], transfer_id: str | None = None) -> dict[str, Any]:
    """Return the request that only fills the cache: one token of one choice, not streamed.

    vLLM's own connector keeps the blocks by `transfer_id`; others choose a name themselves.
    """
    changed = {name: value for name, value in body.items() if name not in _OF_THE_DECODE}
    changed["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    if transfer_id is not None:
        changed["kv_transfer_params"]["transfer_id"] = transfer_id
    changed["stream"] = False
    changed["max_tokens"] = 1
    if "max_completion_tokens" in changed:
        changed["max_completion_tokens"] = 1
    if "n" in changed:
        changed["n"] = 1
    return changed


def _authorization(given: str | None) -> str | None:
    """Return the header for the servers: the key of the environment, else the client's own."""
    key = os.environ.get("OPENAI_API_KEY")
    return f"Bearer {key}" if key else given
