"""The part of the connector in the scheduler of vLLM: decides which blocks move. Needs vLLM."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mooncake._connector.metadata import MooncakeConnectorMetadata
from mooncake._connector.requests import RemotePrefill
from mooncake._connector.settings import settings
from mooncake._connector.vllm_types import RequestStatus, get_ip

__all__ = ["MooncakeConnectorScheduler", "get_mooncake_side_channel_port", "pipeline_stages"]

_log = logging.getLogger("mooncake.connector")


def get_mooncake_side_channel_port(vllm_config: Any) -> int:
    """Return the port of the side channel of rank 0 in the data-parallel replica of a process."""
    parallel = vllm_config.parallel_config
    # Newer versions of vLLM keep 0 in `data_parallel_rank` of dense models.
    replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    workers = int(parallel.tensor_parallel_size) * pipeline_stages(vllm_config)
    return settings().side_channel_port + int(replica) * workers


def pipeline_stages(vllm_config: Any) -> int:
    """Return the number of pipeline stages."""
    return int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1))


class MooncakeConnectorScheduler:
    """Decides for each request whether its blocks are fetched, handed over, or neither."""

    def __init__(self, vllm_config: Any, engine_id: str) -> None:
        """Read the configuration.

        Args:
            vllm_config: Configuration of vLLM.
            engine_id: Id of this vLLM.
        """
        self.engine_id = engine_id
        self.kv_role: str = vllm_config.kv_transfer_config.kv_role
        self.side_channel_host = get_ip()
        self.side_channel_port = get_mooncake_side_channel_port(vllm_config)
        self._tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
        self._stages = pipeline_stages(vllm_config)
        self._block_size = int(vllm_config.cache_config.block_size)
        # For the workers' next step.
        self._to_recv: dict[str, tuple[dict[str, Any], list[int]]] = {}
        self._to_send: dict[str, list[int]] = {}
        self._aborted: set[str] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens of a prompt are fetched, and whether that happens meanwhile.

        Args:
            request: The request; it is not changed.
            num_computed_tokens: Tokens whose blocks are here already.
        """
        if self._remote_prefill(request) is None:
            return 0, False
        missing = _prompt_tokens(request) - num_computed_tokens
        return (missing, True) if missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record a request that vLLM has given its blocks.

        Args:
            request: The request.
            blocks: Blocks of the request.
            num_external_tokens: Tokens to fetch.
        """
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_prefill"):
            if self._remote_prefill(request) is not None:
                # No blocks to fetch: the call only lets the prefill worker free its blocks.
                wanted = self._blocks_of(num_external_tokens)
                unfilled = blocks.get_unhashed_block_ids() if wanted else []
                self._to_recv[request.request_id] = dict(params), list(unfilled[:wanted])
            params["do_remote_prefill"] = False
        elif params.get("do_remote_decode") and self.kv_role != "kv_consumer":
            self._to_send.setdefault(request.request_id, [])

    def build_connector_meta(self, scheduler_output: Any) -> MooncakeConnectorMetadata:  # noqa: ARG002
        """Return what the workers have to do for the step, once."""
        metadata = MooncakeConnectorMetadata()
        for request_id, (params, blocks) in self._to_recv.items():
            metadata.add_new_req(request_id, blocks, params)
        for request_id, blocks in self._to_send.items():
            metadata.add_new_req(request_id, blocks, {}, load_remote_cache=False)
        metadata.reqs_aborted = self._aborted
        self._to_recv, self._to_send, self._aborted = {}, {}, set()
        return metadata

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide about the blocks of a request that finished.

        Args:
            request: The request.
            block_ids: Blocks of the request.

        Returns:
            Whether the blocks stay until `get_finished` returns the request, and the parameters
            with which another vLLM fetches them.
        """
        params = request.kv_transfer_params
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            # Aborted before it had blocks here: the prefill worker may free its own.
            if self._remote_prefill(request) is not None:
                self._to_recv[request.request_id] = dict(params), []
            params["do_remote_prefill"] = False
            return False, None
        if not params.get("do_remote_decode") or self.kv_role == "kv_consumer":
            return False, None
        is_prefilled = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        # Blocks behind those of the prompt are for tokens that were not computed.
        blocks = list(block_ids)[: self._blocks_of(_prompt_tokens(request))]
        if not is_prefilled or not blocks:
            self._to_send.pop(request.request_id, None)
            self._aborted.add(request.request_id)
            return False, None
        self._to_send[request.request_id] = blocks
        stages = {"remote_pp_size": self._stages} if self._stages > 1 else {}
        return True, {
            **stages,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "remote_request_id": request.request_id,
            "remote_tp_size": self._tp_size,
        }

    def _remote_prefill(self, request: Any) -> RemotePrefill | None:
        """Return where a request was prefilled, or None if its prompt is computed here."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        if self.kv_role == "kv_producer":
            _log.warning(
                "request %s was prefilled elsewhere, but this vLLM is a kv_producer and computes "
                "its prompt",
                request.request_id,
            )
            return None
        try:
            return RemotePrefill.parse(params, self._tp_size, self._stages)
        except ValueError as error:
            _log.warning("request %s: %s; its prompt is computed here", request.request_id, error)
            return None

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size)


def _prompt_tokens(request: Any) -> int:
    tokens = getattr(request, "num_prompt_tokens", None)
    return len(request.prompt_token_ids) if tokens is None else int(tokens)
