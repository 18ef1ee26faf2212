"""The prefill side of a hand-over: writes blocks to the worker that asks. Needs pyzmq."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import zmq
import zmq.asyncio

import mooncake
from mooncake._connector import messages
from mooncake._connector.blocks import Copies, Region, plan_copies
from mooncake._connector.requests import Finished, SendBlockMeta, Stage

if TYPE_CHECKING:
    from mooncake._connector.event_loop import BackgroundLoop
    from mooncake.engine import TransferEngine

__all__ = ["TRANS_DONE", "TRANS_ERROR", "BlockSender"]

TRANS_DONE = b"trans_done"
TRANS_ERROR = b"trans_error"

# Upstream's decode workers wait for this time and do not say so.
_TIMEOUT_OF_UPSTREAM_S = 60.0
_CALLS_MAX = 4096
_CALL_BYTES_MAX = 64 << 20
_START_S = 10.0

_log = logging.getLogger("mooncake.connector")


class _RefusedError(Exception):
    """A call for blocks that cannot be served; the text is the reason."""


class BlockSender:
    """Requests whose blocks wait for a decode worker, and the socket at which it asks for them.

    All methods but `start`, `close` and `finished` run in the thread of the event loop.
    """

    def __init__(
        self,
        loop: BackgroundLoop,
        engine: TransferEngine,
        *,
        workers: int,
        expiry_s: float,
        transfer_s: float,
        stage: Stage,
    ) -> None:
        """Make a sender that serves nobody yet.

        Args:
            loop: Event loop.
            engine: Engine that writes the blocks.
            workers: Number of threads that write.
            expiry_s: Time after which blocks that nobody asked for are freed.
            transfer_s: Longest time that a write takes.
            stage: Pipeline stage of this worker.
        """
        self.finished = Finished()
        self.requests: dict[str, SendBlockMeta] = {}
        self._loop = loop
        self._engine = engine
        self._expiry_s = expiry_s
        self._transfer_s = transfer_s
        self._stage = stage
        self._claimed: set[str] = set()
        self._regions: Sequence[Region] = ()
        self._calls = 0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="mooncake-sender")

    def start(self, regions: Sequence[Region], host: str, port: int) -> None:
        """Serve calls for blocks of the regions.

        Raises:
            OSError: The port is in use, or the host has no such address.
            TimeoutError: The thread of the event loop is stuck.
        """
        self._regions = regions
        self._loop.result(self._listen(host, port), _START_S)

    def close(self) -> None:
        """Wait for writes that have begun. The event loop must be closed first."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    # Requests

    def record(self, requests: Mapping[str, list[int]], aborted: Iterable[str]) -> None:
        """Add requests and blocks of those that finished here; drop those that were aborted."""
        now = asyncio.get_running_loop().time()
        for request_id, blocks in requests.items():
            meta = self.requests.setdefault(request_id, SendBlockMeta([], asyncio.Event()))
            if blocks and not meta.ready.is_set():
                meta.local_block_ids = blocks
                meta.ready.set()
                self._expire_at(request_id, meta, now + self._expiry_s)
        for request_id in aborted:
            meta_aborted = self.requests.pop(request_id, None)
            if meta_aborted is not None:
                meta_aborted.ready.set()

    def _expire_at(self, request_id: str, meta: SendBlockMeta, when: float) -> None:
        meta.expire_time = when
        asyncio.get_running_loop().call_at(when, self._expire, request_id, meta)

    def _expire(self, request_id: str, meta: SendBlockMeta) -> None:
        """Free the blocks of a request, unless they are claimed or were handed over."""
        is_due = meta.expire_time <= asyncio.get_running_loop().time()
        if is_due and self.requests.get(request_id) is meta:
            del self.requests[request_id]
            self.finished.add([request_id])
            _log.warning(
                "request %s: nobody fetched its %d blocks within %g s; they are freed",
                request_id,
                len(meta.local_block_ids),
                self._expiry_s,
            )

    def _claim(self, request_ids: Sequence[str]) -> list[SendBlockMeta]:
        """Take requests for a call; meanwhile they do not expire, and no other call gets them.

        Raises:
            _RefusedError: One of them is unknown, or another call has it.
        """
        for request_id in request_ids:
            if request_id not in self.requests:
                raise _RefusedError(
                    f"request {request_id} is unknown: it was aborted, handed over, or freed "
                    f"because nobody asked for it within {self._expiry_s:g} s"
                )
            if request_id in self._claimed:
                raise _RefusedError(f"request {request_id} is being handed over already")
        self._claimed.update(request_ids)
        claimed = [self.requests[request_id] for request_id in request_ids]
        for meta in claimed:
            meta.expire_time = math.inf
        return claimed

    def _release(self, request_ids: Sequence[str], claimed: Sequence[SendBlockMeta]) -> None:
        """End a claim. Requests that were not handed over may be asked for again, or expire."""
        self._claimed.difference_update(request_ids)
        again = asyncio.get_running_loop().time() + self._expiry_s
        for request_id, meta in zip(request_ids, claimed, strict=True):
            if self.requests.get(request_id) is meta and meta.ready.is_set():
                self._expire_at(request_id, meta, again)

    # Calls

    async def _listen(self, host: str, port: int) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.maxmsgsize = _CALL_BYTES_MAX
        socket.ipv6 = True
        endpoint = messages.endpoint(host, port)
        try:
            socket.bind(f"tcp://{endpoint}")
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise OSError(
                error.errno,
                f"the side channel cannot listen at {endpoint} ({error.strerror}); set "
                "VLLM_MOONCAKE_SIDE_CHANNEL_PORT to a free port, VLLM_HOST_IP to an address here",
            ) from error
        self._loop.start(self._serve(context, socket))

    async def _serve(self, context: Any, socket: Any) -> None:
        try:
            while True:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or frames[1]:
                    _log.warning("the side channel ignores a message of %d frames", len(frames))
                elif self._calls >= _CALLS_MAX:
                    _log.error("the side channel has %d calls at once and refuses one", _CALLS_MAX)
                    await socket.send_multipart([frames[0], b"", TRANS_ERROR])
                else:
                    self._calls += 1
                    self._loop.start(self._answer(socket, frames[0], frames[2]))
        finally:
            context.destroy(linger=0)

    async def _answer(self, socket: Any, caller: bytes, payload: bytes) -> None:
        answer = TRANS_ERROR
        try:
            await self._hand_over(messages.decode(payload))
            answer = TRANS_DONE
        except (ValueError, _RefusedError) as error:
            _log.error("a call for blocks failed: %s", error)
        finally:
            self._calls -= 1
            if not socket.closed:
                await socket.send_multipart([caller, b"", answer])

    async def _hand_over(self, call: Any) -> None:
        """Write the blocks of all requests of a call, or fail for all of them.

        Raises:
            _RefusedError: A request cannot be served, or the write failed.
            ValueError: The call does not fit the blocks.
        """
        self._check_shape(call)
        # The caller gives the blocks to others once it stops waiting: no write may begin so late
        # that it could end after that.
        start_max = time.monotonic() + (call.timeout_s or _TIMEOUT_OF_UPSTREAM_S) - self._transfer_s
        request_ids = call.request_ids
        claimed = self._claim(request_ids)
        try:
            await self._until_ready(request_ids, claimed, start_max)
            here = [meta.local_block_ids for meta in claimed]
            pairs = list(zip(here, call.block_ids, strict=True))
            copies = plan_copies(self._regions, call.kv_caches_base_addr, pairs)
            if copies.lengths:
                peer = messages.endpoint(call.remote_hostname, call.remote_port)
                await asyncio.get_running_loop().run_in_executor(
                    self._pool, self._write, peer, copies, start_max
                )
            for request_id in request_ids:
                self.requests.pop(request_id, None)
            self.finished.add(request_ids)
        finally:
            self._release(request_ids, claimed)

    def _check_shape(self, call: Any) -> None:
        own = self._stage
        if (call.stages or 1) != own.count or call.stage != own.rank:
            raise _RefusedError(
                f"the decode worker is stage {call.stage} of {call.stages or 1}, this worker stage "
                f"{own.rank} of {own.count}; both servers need the same pipeline_parallel_size, "
                "and all stages of a server run on one host"
            )
        if call.layers and call.layers != [region.layer for region in self._regions]:
            raise _RefusedError(
                f"the decode worker has the layers {_ends(call.layers)}, this worker "
                f"{_ends([region.layer for region in self._regions])}; both must serve one model"
            )
        if own.count > 1 and not call.layers:
            raise _RefusedError(
                "the decode worker does not name its layers, without which those of several "
                "pipeline stages cannot be told apart; both servers need this package"
            )
        here = [region.block_bytes for region in self._regions]
        if len(call.kv_caches_base_addr) != len(here):
            raise _RefusedError(
                f"the decode worker has {len(call.kv_caches_base_addr)} regions of KV cache, this "
                f"worker {len(here)}; both must serve one model in one layout"
            )
        if call.block_bytes and call.block_bytes != here:
            raise _RefusedError(
                "the decode worker has blocks of another length; both must serve one model, with "
                "the same block size, type of the KV cache and tensor_parallel_size"
            )

    async def _until_ready(
        self, request_ids: Sequence[str], claimed: Sequence[SendBlockMeta], start_max: float
    ) -> None:
        try:
            async with asyncio.timeout(max(0.0, start_max - time.monotonic())):
                for meta in claimed:
                    await meta.ready.wait()
        except TimeoutError:
            raise _RefusedError(
                "its requests did not finish here before it was too late to start a write of up to "
                f"{self._transfer_s:g} s (MC_TRANSFER_TIMEOUT)"
            ) from None
        for request_id, meta in zip(request_ids, claimed, strict=True):
            if self.requests.get(request_id) is not meta:
                raise _RefusedError(f"request {request_id} was aborted here")

    def _write(self, peer: str, copies: Copies, start_max: float) -> None:
        """Write blocks to a decode worker. Runs in a thread of the pool."""
        if time.monotonic() > start_max:
            raise _RefusedError(
                "all VLLM_MOONCAKE_SENDER_WORKERS were busy until it was too late to start"
            )
        result = self._engine.batch_transfer_sync_write(
            peer, copies.sources, copies.targets, copies.lengths
        )
        if result != 0:
            raise _RefusedError(
                f"the write of {sum(copies.lengths)} bytes to {peer} failed: "
                f"{mooncake.last_error() or result}"
            )


def _ends(layers: Sequence[str]) -> str:
    """Return the first and the last layer as text."""
    return f"{layers[0]} to {layers[-1]} ({len(layers)} regions)" if layers else "of no name"
