"""`vllm_interface` with upstream's connector, whose package must be first on the path.

The connector is for vLLM before 0.13 and imports more of it than ours.
"""

from __future__ import annotations

import enum
import importlib.metadata
import logging
import os
import sys
import types
from typing import Any

import vllm_interface
import zmq.asyncio  # upstream's connector expects that vLLM has imported it


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "FLASH_ATTN"
    FLASHINFER = "FLASHINFER"
    FLASHINFER_MLA = "FLASHINFER_MLA"
    PALLAS = "PALLAS"


def make_zmq_path(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://{host}:{port}"


def make_zmq_socket(context: Any, path: str, socket_type: Any, **options: Any) -> Any:
    socket = context.socket(socket_type)
    if options.get("linger") is not None:
        socket.linger = options["linger"]
    is_bound = options.get("bind", socket_type != zmq.REQ)
    (socket.bind if is_bound else socket.connect)(path)
    return socket


def install() -> None:
    """Put the further interfaces where upstream's connector imports them from."""
    vllm_interface.install()
    backend = types.SimpleNamespace(get_name=lambda: AttentionBackendEnum.FLASH_ATTN.name)
    found: dict[str, dict[str, Any]] = {
        "vllm.attention.selector": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "get_attn_backend": lambda *arguments, **options: backend,
        },
        "vllm.config": {"VllmConfig": object},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: None},
        "vllm.forward_context": {"ForwardContext": object},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.utils": {
            "get_ip": lambda: "127.0.0.1",
            "make_zmq_path": make_zmq_path,
            "make_zmq_socket": make_zmq_socket,
        },
        "vllm.v1.attention.backends.utils": {"get_kv_cache_layout": lambda: "NHD"},
        "vllm.v1.core.sched.output": {"SchedulerOutput": object},
    }
    for name, values in found.items():
        vllm_interface.add_module(name, values)
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0.12.0" if name == "vllm" else version(name)


def main() -> None:
    # The answers go to the caller; whatever upstream prints goes to standard error.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import mooncake

    assert not hasattr(mooncake, "Store"), f"not upstream's package: {mooncake.__file__}"
    install()
    vllm_interface.main()


if __name__ == "__main__":
    main()
