"""The part of the connector in a worker of vLLM: moves blocks. Needs vLLM, pyzmq and msgspec."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import mooncake
from mooncake._connector.blocks import Region, regions_of
from mooncake._connector.event_loop import BackgroundLoop
from mooncake._connector.metadata import MooncakeConnectorMetadata
from mooncake._connector.receiver import BlockReceiver, Fetch
from mooncake._connector.requests import SendBlockMeta, Stage
from mooncake._connector.scheduler import get_mooncake_side_channel_port, pipeline_stages
from mooncake._connector.sender import BlockSender
from mooncake._connector.settings import settings
from mooncake._connector.vllm_types import (
    get_ip,
    pipeline_stage,
    reports_load_errors,
    tensor_parallel_rank,
)
from mooncake.engine import TransferEngine
from mooncake.engine.timeout import transfer_timeout_s

__all__ = ["MooncakeConnectorWorker"]

_CLOSE_S = 5.0
_log = logging.getLogger("mooncake.connector")


class MooncakeConnectorWorker:
    """Hands blocks of a KV cache to decode workers, and fetches blocks from prefill workers."""

    def __init__(self, vllm_config: Any, engine_id: str, blocks: int | None = None) -> None:
        """Start the transfer engine and the thread of the side channel.

        Args:
            vllm_config: Configuration of vLLM.
            engine_id: Id of this vLLM.
            blocks: Number of blocks of the KV cache, if vLLM has said it.

        Raises:
            RuntimeError: The transfer engine does not start.
            ValueError: A variable has a wrong value.
        """
        configured = settings()
        self.engine_id = engine_id
        self.kv_role: str = vllm_config.kv_transfer_config.kv_role
        self.hostname = get_ip()
        self.tp_rank = tensor_parallel_rank()
        stages = pipeline_stages(vllm_config)
        self.stage = Stage(pipeline_stage() if stages > 1 else 0, stages)
        # Workers of one host have a port each, in the order of their ranks.
        self._rank = (
            self.stage.rank * int(vllm_config.parallel_config.tensor_parallel_size) + self.tp_rank
        )
        self.side_channel_port = get_mooncake_side_channel_port(vllm_config)
        self.engine = TransferEngine()
        if self.engine.initialize(self.hostname, "P2PHANDSHAKE", configured.protocol, "") != 0:
            raise RuntimeError(
                f"the transfer engine does not start at {self.hostname}: {mooncake.last_error()}; "
                "VLLM_HOST_IP sets the address, VLLM_MOONCAKE_PROTOCOL the protocol"
            )
        self.rpc_port = self.engine.get_rpc_port()
        self._cache_config = vllm_config.cache_config
        self._blocks = blocks
        self._regions: list[Region] = []
        self._loop = BackgroundLoop("mooncake-connector")
        transfer_s = transfer_timeout_s()
        self._sender = BlockSender(
            self._loop,
            self.engine,
            workers=configured.sender_workers,
            expiry_s=configured.abort_request_timeout_s,
            transfer_s=transfer_s,
            stage=self.stage,
        )
        self._receiver = BlockReceiver(
            self._loop,
            self.hostname,
            self.rpc_port,
            configured.abort_request_timeout_s + transfer_s,
            stage=self.stage,
            reports_failures=reports_load_errors(),
        )
        self._is_closed = False

    @property
    def kv_caches_base_addr(self) -> list[int]:
        """Address of block 0 in each region of the KV cache."""
        return [region.address for region in self._regions]

    @property
    def reqs_need_send(self) -> Mapping[str, SendBlockMeta]:
        """The requests whose blocks wait for a decode worker."""
        return self._sender.requests

    @property
    def is_sender(self) -> bool:
        """Whether this worker hands over blocks."""
        return self.kv_role != "kv_consumer"

    @property
    def is_receiver(self) -> bool:
        """Whether this worker fetches blocks."""
        return self.kv_role != "kv_producer"

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the KV cache with the engine, and serve calls for its blocks.

        Args:
            kv_caches: Tensor of each layer.

        Raises:
            ValueError: A layer is not stored block by block, or the number of blocks is not known
                and cannot be told from the tensors.
            RuntimeError: The memory cannot be registered, or is registered already.
            OSError: The port of the side channel is in use.
        """
        if self._regions:
            raise RuntimeError("the KV caches are registered already")
        config = self._cache_config
        names = ("num_gpu_blocks", "num_gpu_blocks_override")
        blocks = self._blocks or next(filter(None, (getattr(config, n, None) for n in names)), None)
        regions = regions_of(kv_caches, blocks, getattr(config, "block_size", None))
        addresses = [region.address for region in regions]
        if self.engine.batch_register_memory(addresses, [each.length for each in regions]) != 0:
            raise RuntimeError(
                f"{len(regions)} regions of the KV cache cannot be registered: "
                f"{mooncake.last_error()}"
            )
        self._regions = regions
        self._receiver.use(regions)
        if self.is_sender:
            try:
                self._sender.start(regions, self.hostname, self.side_channel_port + self._rank)
            except BaseException:
                self._unregister()
                raise
        _log.info("registered %d regions of %d blocks", len(regions), regions[0].blocks)

    def start_load_kv(self, metadata: MooncakeConnectorMetadata) -> None:
        """Start what a step asks for, and return at once."""
        if self.is_sender and (metadata.reqs_to_send or metadata.reqs_aborted):
            self._loop.call(self._sender.record, metadata.reqs_to_send, metadata.reqs_aborted)
        if not self.is_receiver:
            return
        peers: defaultdict[tuple[str, int], list[Fetch]] = defaultdict(list)
        for request_id, meta in metadata.reqs_to_recv.items():
            peers[meta.remote_host, meta.remote_port + self._rank].append((request_id, meta))
        for (host, port), fetches in peers.items():
            self._loop.call(self._receiver.fetch, host, port, fetches)

    def get_finished(self) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that were handed over or freed, and those that were fetched.

        Each request is returned once; None stands for no requests.
        """
        return self._sender.finished.take() or None, self._receiver.finished.take() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were to be fetched and were not. Each is returned once."""
        return self._receiver.failed_blocks.take()

    def shutdown(self) -> None:
        """End the calls in flight, unregister the KV cache, and stop the threads."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._loop.result(self._receiver.close(), _CLOSE_S)
        except TimeoutError:
            _log.error("the side channel did not close within %g s", _CLOSE_S)
        self._loop.close()
        self._sender.close()
        self._unregister()

    def _unregister(self) -> None:
        addresses = self.kv_caches_base_addr
        self._regions = []
        if addresses and self.engine.batch_unregister_memory(addresses) != 0:
            _log.error("the KV cache is still registered: %s", mooncake.last_error())
