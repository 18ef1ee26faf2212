"""The names of vLLM that the connector uses, wherever the installed version has them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "RequestStatus",
    "SupportsHMA",
    "get_ip",
    "tensor_parallel_rank",
]


class _NoHma:
    """Stands for `SupportsHMA` in versions of vLLM without it."""


def _module(*names: str) -> Any:
    """Returns the first of the modules that can be imported."""
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
SupportsHMA: Any = getattr(_base, "SupportsHMA", _NoHma)
RequestStatus: Any = _module("vllm.v1.request").RequestStatus


def get_ip() -> str:
    """Returns the address by which vLLM lets other hosts reach this one (``VLLM_HOST_IP``)."""
    return str(_module("vllm.utils.network_utils", "vllm.utils").get_ip())


def tensor_parallel_rank() -> int:
    """Returns the rank of this worker in its tensor-parallel group."""
    return int(_module("vllm.distributed.parallel_state").get_tensor_model_parallel_rank())
