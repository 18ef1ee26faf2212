"""The metadata that a scheduler sends to its workers with each step. Needs vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mooncake._connector.requests import RecvReqMeta
from mooncake._connector.vllm_types import KVConnectorMetadata

__all__ = ["MooncakeConnectorMetadata"]


class MooncakeConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the workers have to do for a step of the scheduler.

    Attributes:
        reqs_to_recv: Requests whose blocks are fetched.
        reqs_to_send: Blocks to hand over, by request; no blocks before a request finished.
        reqs_aborted: Requests that were to be handed over, and will not be.
    """

    def __init__(self) -> None:
        """Make metadata without requests."""
        self.reqs_to_recv: dict[str, RecvReqMeta] = {}
        self.reqs_to_send: dict[str, list[int]] = {}
        self.reqs_aborted: set[str] = set()

    def add_new_req(
        self,
        request_id: str,
        local_block_ids: list[int],
        kv_transfer_params: Mapping[str, Any],
        load_remote_cache: bool = True,
    ) -> None:
        """Add a request.

        Args:
            request_id: Id of the request here.
            local_block_ids: Blocks to fill, or to hand over.
            kv_transfer_params: Parameters of the request, which name the prefill worker.
            load_remote_cache: Whether blocks are fetched. If not, they are handed over.
        """
        if not load_remote_cache:
            self.reqs_to_send[request_id] = local_block_ids
            return
        self.reqs_to_recv[request_id] = RecvReqMeta(
            local_block_ids=local_block_ids,
            remote_host=kv_transfer_params["remote_host"],
            remote_port=kv_transfer_params["remote_port"],
            remote_request_id=kv_transfer_params.get("remote_request_id"),
        )
