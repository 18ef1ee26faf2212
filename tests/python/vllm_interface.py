"""The interfaces of vLLM that the connector uses, and a small engine that calls it as vLLM does.

The engine has the parts that matter here: a scheduler's and a worker's connector, whose metadata is
pickled between them, a pool of blocks, and KV caches of torch.
"""

from __future__ import annotations

import enum
import json
import os
import pickle
import sys
import time
import types
from abc import ABC
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK_SIZE = 4
# The group of pipeline parallelism of the worker that is made next.
PIPELINE = types.SimpleNamespace(rank_in_group=0)
HEADS, HEAD_SIZE = 2, 8


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024
    pass


class SupportsHMA(ABC):  # noqa: B024
    pass


class KVConnectorBaseV1(ABC):  # noqa: B024
    def __init__(self, vllm_config, role, kv_cache_config=None):
        self._connector_metadata = None
        self._role = role

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def get_block_ids_with_load_errors(self):
        return set()


class RequestStatus(enum.IntEnum):
    RUNNING = 2
    FINISHED_STOPPED = 7
    FINISHED_LENGTH_CAPPED = 8
    FINISHED_ABORTED = 9


def install() -> None:
    """Put the interfaces where the connector imports them from."""
    found: dict[str, Any] = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": KVConnectorBaseV1,
            "KVConnectorMetadata": KVConnectorMetadata,
            "KVConnectorRole": KVConnectorRole,
            "SupportsHMA": SupportsHMA,
        },
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_pp_group": lambda: PIPELINE,
        },
        "vllm.utils.network_utils": {"get_ip": lambda: os.environ.get("VLLM_HOST_IP", "127.0.0.1")},
        "vllm.v1.request": {"RequestStatus": RequestStatus},
    }
    for name, values in found.items():
        add_module(name, values)


def add_module(name: str, values: dict[str, Any]) -> None:
    """Put values into a module, which is made with its parents where there is none."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        module = sys.modules.setdefault(path, types.ModuleType(path))
        module.__path__ = []
    vars(sys.modules[name]).update(values)


def config(role: str, blocks: int | None, tp_size: int = 1, stages: int = 1) -> Any:
    """The part of vLLM's configuration that the connector reads."""
    return types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(engine_id="engine", kv_role=role),
        parallel_config=types.SimpleNamespace(
            data_parallel_rank=0, tensor_parallel_size=tp_size, pipeline_parallel_size=stages
        ),
        cache_config=types.SimpleNamespace(
            block_size=BLOCK_SIZE, num_gpu_blocks=blocks, cache_dtype="auto"
        ),
        model_config=types.SimpleNamespace(
            use_mla=False, dtype=None, get_head_size=lambda: HEAD_SIZE
        ),
    )


@dataclass
class Request:
    request_id: str
    prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None
    status: RequestStatus = RequestStatus.RUNNING

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(range(self.prompt_tokens))

    @property
    def num_prompt_tokens(self) -> int:
        return self.prompt_tokens


@dataclass
class Blocks:
    """`KVCacheBlocks`: the blocks of a request, of which the first were found in the cache."""

    ids: list[int]
    cached: int = 0

    def get_unhashed_block_ids(self) -> list[int]:
        return self.ids[self.cached :]


def content(seed: int, layer: int, index: int) -> torch.Tensor:
    """Keys and values of a block of a prompt."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer * 1009 + index)
    shape = (2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


@dataclass
class Engine:
    """A vLLM with one worker."""

    role: str
    layers: int = 3
    blocks: int = 64
    is_split: bool = True
    heads: int = HEADS
    # vLLM may add blocks for the tokens that come.
    spare_tokens: int = BLOCK_SIZE
    # Pipeline stage of the worker, and number of stages.
    stage: int = 0
    stages: int = 1
    free: list[int] = field(default_factory=list)
    owned: dict[str, list[int]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        install()
        from mooncake.mooncake_connector_v1 import MooncakeConnector

        # Neighbouring blocks of a request are apart for the most part, as after some use.
        self.free = [*range(0, self.blocks, 2), *range(1, self.blocks, 2)]
        block = (BLOCK_SIZE, self.heads, HEAD_SIZE)
        shape = (2, self.blocks, *block) if self.is_split else (self.blocks, 2, *block)
        self.caches = {
            self.layer_name(number): torch.zeros(shape, dtype=torch.int32)
            for number in range(self.layers)
        }
        settings = config(self.role, self.blocks, stages=self.stages)
        PIPELINE.rank_in_group = self.stage
        self.scheduler = MooncakeConnector(settings, KVConnectorRole.SCHEDULER)
        self.connector = MooncakeConnector(settings, KVConnectorRole.WORKER)
        self.worker = self.connector.connector_worker
        self.connector.register_kv_caches(self.caches)

    def layer_name(self, number: int) -> str:
        return f"layer.{self.stage * self.layers + number}"

    def block(self, layer: int, block: int) -> torch.Tensor:
        cache = self.caches[self.layer_name(layer)]
        return cache[:, block] if self.is_split else cache[block]

    def allocate(self, request_id: str, tokens: int) -> list[int]:
        wanted = blocks_of(tokens)
        assert wanted <= len(self.free), "the pool of blocks is full"
        self.owned[request_id], self.free = self.free[:wanted], self.free[wanted:]
        return self.owned[request_id]

    def release(self, request_id: str) -> None:
        self.free += self.owned.pop(request_id)

    # A prefill

    def start_prefill(self, request_id: str, tokens: int, seed: int) -> None:
        request = Request(request_id, tokens, {"do_remote_decode": True})
        self.requests[request_id] = request
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        ids = self.allocate(request_id, tokens)
        self.scheduler.update_state_after_alloc(request, Blocks(ids), 0)
        self.step()
        for layer in range(self.layers):
            for index, block in enumerate(ids):
                self.block(layer, block).copy_(content(seed, layer, index))

    def finish_prefill(
        self, request_id: str, status: str = "FINISHED_LENGTH_CAPPED", *, is_stepping: bool = True
    ) -> dict[str, Any] | None:
        request = self.requests.pop(request_id)
        request.status = RequestStatus[status]
        is_kept, params = self.scheduler.request_finished(request, self.owned[request_id])
        if not is_kept:
            self.release(request_id)
        if is_stepping:
            self.step()
        return params

    def prefill(self, request_id: str, tokens: int, seed: int) -> dict[str, Any]:
        self.start_prefill(request_id, tokens, seed)
        params = self.finish_prefill(request_id)
        assert params is not None
        return params

    # A decode

    def start_decode(
        self, request_id: str, tokens: int, params: dict[str, Any], cached: int = 0
    ) -> tuple[int, bool]:
        """Schedule a request whose first `cached` blocks are here already."""
        request = Request(request_id, tokens, dict(params))
        answer = self.scheduler.get_num_new_matched_tokens(request, cached * BLOCK_SIZE)
        assert answer == self.scheduler.get_num_new_matched_tokens(request, cached * BLOCK_SIZE)
        ids = self.allocate(request_id, tokens + self.spare_tokens)
        self.scheduler.update_state_after_alloc(request, Blocks(ids, cached), answer[0])
        return answer

    def abort_unscheduled(self, request_id: str, tokens: int, params: dict[str, Any]) -> None:
        request = Request(request_id, tokens, dict(params), RequestStatus.FINISHED_ABORTED)
        assert self.scheduler.request_finished(request, []) == (False, None)

    def mismatches(self, request_id: str, tokens: int, seed: int, cached: int = 0) -> list[str]:
        """Name the blocks that differ from the prompt."""
        return [
            f"layer {layer}, block {index}"
            for layer in range(self.layers)
            for index in range(cached, blocks_of(tokens))
            if not torch.equal(
                self.block(layer, self.owned[request_id][index]), content(seed, layer, index)
            )
        ]

    def receive(self, request_id: str, tokens: int, seed: int) -> list[str]:
        """Wait for a prompt, and name the blocks that differ from it."""
        self.until(lambda engine: request_id in engine.received)
        return self.mismatches(request_id, tokens, seed)

    # Both

    def step(self) -> None:
        metadata = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(None)))
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)
        sent, received = self.connector.get_finished(set())
        self.failed |= self.connector.get_block_ids_with_load_errors()
        self.connector.clear_connector_metadata()
        for request_id in sent or ():
            assert request_id not in self.sent, f"{request_id} was reported twice"
            self.release(request_id)
        assert not self.received & (received or set()), "a request was reported twice"
        self.sent |= sent or set()
        self.received |= received or set()

    def until(self, condition: Any, timeout_s: float = 40) -> None:
        limit = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < limit, self.state()
            self.step()
            time.sleep(0.002)

    def state(self) -> dict[str, Any]:
        return {
            "free": len(self.free),
            "sent": sorted(self.sent),
            "received": sorted(self.received),
            "failed": sorted(self.failed),
            "waiting": sorted(self.worker.reqs_need_send),
        }

    def shutdown(self) -> int:
        """Return the answer of the engine to a registration of the same memory: 0 if free."""
        regions = list(self.caches.values())
        self.connector.shutdown()
        self.connector.shutdown()
        addresses = [cache.data_ptr() for cache in regions]
        engine = self.worker.engine
        answer = engine.batch_register_memory(addresses, [cache.nbytes for cache in regions])
        engine.batch_unregister_memory(addresses)
        return answer

    # Faults

    def hang_in_write(self) -> None:
        """Let the next write move the first half of its copies, and then hang."""
        engine = self.worker.engine

        class Half:
            def batch_transfer_sync_write(self, peer, sources, targets, lengths):
                half = len(sources) // 2
                result = engine.batch_transfer_sync_write(
                    peer, sources[:half], targets[:half], lengths[:half]
                )
                assert result == 0
                print(json.dumps("half written"), flush=True)
                time.sleep(600)

        self.worker._sender._engine = Half()


def main() -> None:
    """A child process that runs an engine and takes calls, one in each line."""
    engine = Engine(**json.loads(sys.argv[1]))
    print(json.dumps(os.getpid()), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        if name == "until_free":
            # The worker hears of a request that was aborted after its blocks were freed.
            engine.until(
                lambda each: len(each.free) == each.blocks and not each.worker.reqs_need_send
            )
            answer = engine.state()
            engine.sent.clear()
        else:
            answer = getattr(engine, name)(*arguments)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
