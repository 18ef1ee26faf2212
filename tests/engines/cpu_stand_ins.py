"""Stand-ins, on a machine without accelerator, for what vLLM and LMCache need one for.

vLLM calls them in each of its processes, as a plugin of the group `vllm.general_plugins`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1\n"


def write_plugin(folder: Path, function: str) -> None:
    """Write the metadata of a package whose plugin is a function of this file."""
    home = folder / f"{function}-1.dist-info"
    home.mkdir(parents=True)
    (home / "METADATA").write_text(_METADATA.format(name=function))
    entry = f"[vllm.general_plugins]\n{function} = cpu_stand_ins:{function}\n"
    (home / "entry_points.txt").write_text(entry)


def accelerator_index() -> None:
    """Give the number of an accelerator, which vLLM's MooncakeConnector asks for."""
    import torch

    torch.accelerator.current_device_index = lambda: 0


def lmcache_connector() -> None:
    """Give LMCache a connector for the KV cache of a vLLM on a CPU, which it lacks."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector

    def create_with_stand_in(*arguments: Any, **named: Any) -> Any:
        # Not earlier: vLLM does not start after an import of LMCache.
        from lmcache.v1 import gpu_connector

        connector = cpu_connector()
        gpu_connector.CreateGPUConnector = lambda *_, **__: connector
        return create(*arguments, **named)

    KVConnectorFactory.create_connector = create_with_stand_in


def cpu_connector() -> Any:
    """Return a connector that copies whole blocks as they are."""
    import torch
    from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface

    class CpuConnector(GPUConnectorInterface):
        """Copies chunks of whole blocks, as vLLM has them, to and from memory of LMCache."""

        def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for number, cache, blocks in self._blocks(start, end, **kwargs):
                part = memory_obj.tensor[:, number]
                part.copy_(cache[blocks].reshape(part.shape))

        def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            for number, cache, blocks in self._blocks(start, end, **kwargs):
                part = memory_obj.tensor[:, number]
                cache[blocks] = part.reshape(len(blocks), *cache.shape[1:])

        def _blocks(self, start: int, end: int, **kwargs: Any) -> Any:
            slots = kwargs["slot_mapping"][start:end].to(torch.long)
            for number, cache in enumerate(kwargs["kvcaches"]):
                # [blocks, heads, tokens of a block, keys and values]
                size = cache.shape[2]
                assert len(slots) % size == 0, f"{len(slots)} tokens are no whole blocks"
                yield number, cache, slots[::size] // size

        def batched_from_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            for each, start, end in zip(memory_objs, starts, ends, strict=True):
                self.from_gpu(each, start, end, **kwargs)

        def batched_to_gpu(
            self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
        ) -> None:
            for each, start, end in zip(memory_objs, starts, ends, strict=True):
                self.to_gpu(each, start, end, **kwargs)

        def get_shape(self, num_tokens: int) -> torch.Size:
            raise NotImplementedError

    return CpuConnector()
