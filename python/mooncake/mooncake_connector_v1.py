"""vLLM's connector for separate prefill and decode servers, under upstream's import name.

Start both servers with it; `mooncake.vllm_v1_proxy_server` sends each request to one of each:

    vllm serve MODEL --port 8100 --kv-transfer-config '{"kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "mooncake.mooncake_connector_v1", "kv_role": "kv_producer"}'
    vllm serve MODEL --port 8200 --kv-transfer-config '{"kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "mooncake.mooncake_connector_v1", "kv_role": "kv_consumer"}'

The module can be imported without vLLM. The names that need vLLM, msgspec or pyzmq raise
`ImportError` when they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._connector.blocks import group_concurrent_contiguous
from ._connector.requests import RecvReqMeta, SendBlockMeta
from ._connector.settings import settings

if TYPE_CHECKING:
    from ._connector.connector import MooncakeConnector
    from ._connector.messages import MooncakeAgentMetadata
    from ._connector.metadata import MooncakeConnectorMetadata
    from ._connector.scheduler import (
        MooncakeConnectorScheduler,
        get_mooncake_side_channel_port,
    )
    from ._connector.worker import MooncakeConnectorWorker

__all__ = [
    "TRANS_DONE",
    "TRANS_ERROR",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
    "VLLM_MOONCAKE_PROTOCOL",
    "VLLM_MOONCAKE_SENDER_WORKERS",
    "VLLM_MOONCAKE_SIDE_CHANNEL_PORT",
    "EngineId",
    "MooncakeAgentMetadata",
    "MooncakeConnector",
    "MooncakeConnectorMetadata",
    "MooncakeConnectorScheduler",
    "MooncakeConnectorWorker",
    "RecvReqMeta",
    "ReqId",
    "SendBlockMeta",
    "get_mooncake_side_channel_port",
    "group_concurrent_contiguous",
    "logger",
    "zmq_ctx",
]

logger = logging.getLogger("mooncake.connector")

EngineId = str
ReqId = str

TRANS_DONE = b"trans_done"
TRANS_ERROR = b"trans_error"

_settings = settings()
VLLM_MOONCAKE_SIDE_CHANNEL_PORT = _settings.side_channel_port
VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT = _settings.abort_request_timeout_s
VLLM_MOONCAKE_SENDER_WORKERS = _settings.sender_workers
VLLM_MOONCAKE_PROTOCOL = _settings.protocol

# The module of each name that needs other packages.
_LAZY = {
    "MooncakeAgentMetadata": "messages",
    "MooncakeConnector": "connector",
    "MooncakeConnectorMetadata": "metadata",
    "MooncakeConnectorScheduler": "scheduler",
    "MooncakeConnectorWorker": "worker",
    "get_mooncake_side_channel_port": "scheduler",
}
_REMEDY = "install it by `pip install 'mooncake-transfer-engine[vllm]'`"


def __getattr__(name: str) -> Any:
    """Import the module of a name when the name is first used."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"mooncake._connector.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs the package {error.name}; {_REMEDY}") from error


@contextmanager
def zmq_ctx(socket_type: Any, addr: str) -> Iterator[Any]:
    """Lend a ZMQ socket: a ``ROUTER`` bound to an address, or a ``REQ`` connected to it.

    Raises:
        ValueError: The type is another one.
        ImportError: pyzmq is not installed.
    """
    try:
        import zmq
    except ModuleNotFoundError as error:
        raise ImportError(f"zmq_ctx needs the package zmq; {_REMEDY}") from error

    if socket_type not in (zmq.ROUTER, zmq.REQ):
        raise ValueError(f"unexpected socket type {socket_type!r}; use zmq.ROUTER or zmq.REQ")
    context = zmq.Context()
    try:
        socket = context.socket(socket_type)
        # IPv4 addresses work as well.
        socket.ipv6 = True
        (socket.bind if socket_type == zmq.ROUTER else socket.connect)(addr)
        yield socket
    finally:
        context.destroy(linger=0)
