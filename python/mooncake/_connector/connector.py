"""`MooncakeConnector`: the connector as vLLM calls it. Needs vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mooncake._connector.metadata import MooncakeConnectorMetadata
from mooncake._connector.scheduler import MooncakeConnectorScheduler
from mooncake._connector.vllm_types import KVConnectorBase_V1, KVConnectorRole
from mooncake._connector.worker import MooncakeConnectorWorker

__all__ = ["MooncakeConnector"]


class MooncakeConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Hands the KV cache of a prompt from the vLLM that computed it to the vLLM that decodes.

    vLLM makes one in its scheduler and one in each worker.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        """Make the part for one role.

        Args:
            vllm_config: Configuration of vLLM.
            role: `KVConnectorRole`.
            kv_cache_config: Configuration of the KV cache, which newer versions of vLLM pass.

        Raises:
            ValueError: The configuration names no role or id, or several groups of KV caches.
        """
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise ValueError("MooncakeConnector needs --kv-transfer-config with a kv_role")
        groups = getattr(kv_cache_config, "kv_cache_groups", ())
        if len(groups) > 1:
            raise ValueError(
                f"the model has {len(groups)} groups of KV caches and MooncakeConnector moves one; "
                "start vLLM with --disable-hybrid-kv-cache-manager"
            )
        if kv_cache_config is None:
            super().__init__(vllm_config, role)
        else:
            super().__init__(vllm_config, role, kv_cache_config)
        self.engine_id: str = transfer.engine_id
        self.connector_scheduler: MooncakeConnectorScheduler | None = None
        self.connector_worker: MooncakeConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = MooncakeConnectorScheduler(vllm_config, self.engine_id)
        else:
            blocks = getattr(kv_cache_config, "num_blocks", None)
            self.connector_worker = MooncakeConnectorWorker(vllm_config, self.engine_id, blocks)

    @property
    def _scheduler(self) -> MooncakeConnectorScheduler:
        if self.connector_scheduler is None:
            raise RuntimeError("this call belongs to the connector of the scheduler")
        return self.connector_scheduler

    @property
    def _worker(self) -> MooncakeConnectorWorker:
        if self.connector_worker is None:
            raise RuntimeError("this call belongs to the connector of a worker")
        return self.connector_worker

    # In the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """See `MooncakeConnectorScheduler`."""
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `MooncakeConnectorScheduler`."""
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> MooncakeConnectorMetadata:
        """See `MooncakeConnectorScheduler`."""
        return self._scheduler.build_connector_meta(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `MooncakeConnectorScheduler`."""
        return self._scheduler.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Call `request_finished` for the only group of KV caches.

        vLLM makes this call for connectors of several groups only, of which this is none.

        Raises:
            ValueError: There are several groups.
        """
        if len(block_ids) != 1:
            raise ValueError(
                f"MooncakeConnector moves one group of KV caches, not {len(block_ids)}"
            )
        return self._scheduler.request_finished(request, block_ids[0])

    # In a worker

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """See `MooncakeConnectorWorker`."""
        self._worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Start what the step asks for; blocks move while the model runs."""
        metadata = self._connector_metadata
        if isinstance(metadata, MooncakeConnectorMetadata):
            self._worker.start_load_kv(metadata)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """See `MooncakeConnectorWorker`."""
        return self._worker.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See `MooncakeConnectorWorker`."""
        return self._worker.get_block_ids_with_load_errors()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM runs a request only once all of its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are handed over from where the model left them."""

    def wait_for_save(self) -> None:
        """Do nothing: see `save_kv_layer`."""

    def shutdown(self) -> None:
        """End the transfers and unregister the KV cache. May be called twice."""
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
