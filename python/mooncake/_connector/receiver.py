"""The decode side of a hand-over: asks prefill workers to write blocks. Needs pyzmq."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from mooncake._connector import messages
from mooncake._connector.requests import Finished, RecvReqMeta, Stage
from mooncake._connector.sender import TRANS_DONE

if TYPE_CHECKING:
    from mooncake._connector.blocks import Region
    from mooncake._connector.event_loop import BackgroundLoop

__all__ = ["BlockReceiver", "Fetch"]

_CONNECT_S = 3.0
_HEARTBEAT_MS = 2_000
_SILENCE_MS = 10_000
# Bytes that a dead peer has sent may still be on their way into the blocks.
_DRAIN_S = 1.0
_CALLS_MAX = 128
_ANSWER_BYTES_MAX = 1 << 16

_log = logging.getLogger("mooncake.connector")

# A request: its id here, and its description.
Fetch = tuple[str, RecvReqMeta]


class BlockReceiver:
    """Calls for blocks, of which each ends with the blocks filled or reported as failed."""

    def __init__(
        self,
        loop: BackgroundLoop,
        host: str,
        port: int,
        timeout_s: float,
        *,
        stage: Stage,
        reports_failures: bool,
    ) -> None:
        """Make a receiver.

        Args:
            loop: Event loop.
            host: Host of the engine of this worker.
            port: Port of that engine.
            timeout_s: Longest time to wait for an answer.
            stage: Pipeline stage of this worker.
            reports_failures: vLLM asks for the blocks that were not filled. If it does not, it
                would decode from them, so that their requests are never reported as fetched.
        """
        self.finished = Finished()
        self.failed_blocks = Finished()
        self._loop = loop
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._stage = stage
        self._reports_failures = reports_failures
        self._regions: Sequence[Region] = ()
        self._context: Any = None
        self._slots = asyncio.Semaphore(_CALLS_MAX)

    def use(self, regions: Sequence[Region]) -> None:
        """Set the regions that prefill workers write to."""
        self._regions = regions

    def fetch(self, host: str, port: int, fetches: Sequence[Fetch]) -> None:
        """Fetch blocks from one prefill worker. Called in the thread of the event loop."""
        self._loop.start(self._fetch(host, port, fetches))

    async def close(self) -> None:
        """Close the sockets; calls in flight fail."""
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _fetch(self, host: str, port: int, fetches: Sequence[Fetch]) -> None:
        is_done = await self._ask(host, port, fetches)
        if not is_done and len(fetches) > 1:
            # The prefill worker serves all requests of a call or none: ask for each alone.
            await asyncio.gather(*(self._fetch(host, port, [each]) for each in fetches))
            return
        # vLLM does not wait for a request without blocks; its call freed the blocks over there.
        waiting = [(request_id, meta) for request_id, meta in fetches if meta.local_block_ids]
        if not is_done:
            for request_id, meta in waiting:
                _log.error(
                    "request %s: its %d blocks were not loaded from %s:%d",
                    request_id,
                    len(meta.local_block_ids),
                    host,
                    port,
                )
                self.failed_blocks.add(meta.local_block_ids)
            if not self._reports_failures:
                _log.error("this vLLM cannot be told of it: these requests wait until aborted")
                return
        self.finished.add(request_id for request_id, _ in waiting)

    async def _ask(self, host: str, port: int, fetches: Sequence[Fetch]) -> bool:
        """Send one call and return whether all of its blocks were written."""
        call = messages.encode(
            messages.MooncakeAgentMetadata(
                remote_hostname=self._host,
                remote_port=self._port,
                request_ids=[meta.remote_request_id or request_id for request_id, meta in fetches],
                kv_caches_base_addr=[region.address for region in self._regions],
                block_ids=[meta.local_block_ids for _, meta in fetches],
                timeout_s=self._timeout_s,
                block_bytes=[region.block_bytes for region in self._regions],
                layers=[region.layer for region in self._regions],
                stage=self._stage.rank,
                stages=self._stage.count,
            )
        )
        async with self._slots:
            try:
                if self._context is None:
                    self._context = zmq.asyncio.Context()
                with _monitored_socket(self._context) as (socket, events):
                    address = f"tcp://{messages.endpoint(host, port)}"
                    return await self._exchange(socket, events, address, call)
            except zmq.ZMQError as error:
                _log.error("the call for blocks to %s:%d failed: %s", host, port, error)
                return False

    async def _exchange(self, socket: Any, events: Any, address: str, call: bytes) -> bool:
        socket.ipv6 = True
        socket.maxmsgsize = _ANSWER_BYTES_MAX
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _SILENCE_MS
        socket.connect(address)
        try:
            async with asyncio.timeout(_CONNECT_S):
                event = await recv_monitor_message(events)
        except TimeoutError:
            _log.error("nothing answers at %s within %g s", address, _CONNECT_S)
            return False
        if event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            _log.error("%s does not answer as a side channel", address)
            return False
        await socket.send(call)
        return await self._answer(socket, events, address)

    async def _answer(self, socket: Any, events: Any, address: str) -> bool:
        answer = asyncio.ensure_future(socket.recv())
        lost = asyncio.ensure_future(recv_monitor_message(events))
        try:
            done, _ = await asyncio.wait(
                (answer, lost), timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answer in done:
                is_done = bool(answer.result() == TRANS_DONE)
                if not is_done:
                    _log.error("%s could not send the blocks; its log says why", address)
                return is_done
            if lost in done:
                _log.error("the connection to %s was lost", address)
                await asyncio.sleep(_DRAIN_S)
            else:
                _log.error("%s did not send the blocks within %g s", address, self._timeout_s)
            return False
        finally:
            for waiting in (answer, lost):
                waiting.cancel()


_monitor_numbers = itertools.count()


@contextlib.contextmanager
def _monitored_socket(context: Any) -> Iterator[tuple[Any, Any]]:
    """Make a socket for one call, and one for the events of its connection; close both.

    `disable_monitor` of pyzmq closes neither end. The socket for events is made first and closed
    last, since libzmq blocks, with the GIL held, where it sends an event that nobody can receive.

    Raises:
        ZMQError: There are too many sockets or open files.
    """
    events = context.socket(zmq.PAIR)
    try:
        socket = context.socket(zmq.REQ)
        try:
            address = f"inproc://mooncake-events-{next(_monitor_numbers)}"
            socket.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            events.connect(address)
            yield socket, events
        finally:
            # `BlockReceiver.close` has closed both where the worker shuts down.
            if not socket.closed:
                socket.monitor(None, 0)
                socket.close(linger=0)
    finally:
        events.close(linger=0)
