"""The names of vLLM that the connector uses, wherever the installed version has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "RequestStatus",
    "get_ip",
    "pipeline_stage",
    "reports_load_errors",
    "tensor_parallel_rank",
]


def _module(*names: str) -> Any:
    """Return the first of the modules that can be imported."""
    failure: ImportError | None = None
    for name in names:
        try:
            return import_module(name)
        except ImportError as error:
            failure = failure or error
    raise ImportError(
        f"mooncake.mooncake_connector_v1 runs inside vLLM, of which {names[0]} cannot be imported "
        f"({failure}); install it by `pip install 'mooncake-transfer-engine[vllm]'`"
    ) from failure


_base = _module("vllm.distributed.kv_transfer.kv_connector.v1.base")
KVConnectorBase_V1: Any = _base.KVConnectorBase_V1
KVConnectorMetadata: Any = _base.KVConnectorMetadata
KVConnectorRole: Any = _base.KVConnectorRole
RequestStatus: Any = _module("vllm.v1.request").RequestStatus


def get_ip() -> str:
    """Return the address by which vLLM lets other hosts reach this one (``VLLM_HOST_IP``)."""
    return str(_module("vllm.utils.network_utils", "vllm.utils").get_ip())


def reports_load_errors() -> bool:
    """Return whether vLLM asks workers for blocks that were not filled, as from 0.11 on."""
    return hasattr(KVConnectorBase_V1, "get_block_ids_with_load_errors")


def pipeline_stage() -> int:
    """Return the pipeline stage of this worker."""
    return int(_module("vllm.distributed.parallel_state").get_pp_group().rank_in_group)


def tensor_parallel_rank() -> int:
    """Return the rank of this worker in its tensor-parallel group."""
    return int(_module("vllm.distributed.parallel_state").get_tensor_model_parallel_rank())
