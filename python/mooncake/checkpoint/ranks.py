"""Agreement between the ranks of a process group, by JSON texts: nothing is pickled."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from mooncake._runtime import _native
from mooncake.errors import MooncakeError

__all__ = ["Ranks"]

T = TypeVar("T")

_INTERNAL = -1


class Ranks:
    """The processes that save or load one checkpoint together; often that is this one alone.

    Attributes:
        rank: Number of this process.
        size: Number of processes.
        may_retry: True unless a rank failed in the last exchange with something else than a
            `MooncakeError`. All ranks have the same value.
    """

    def __init__(self, process_group: Any = None, *, no_dist: bool = False) -> None:
        """Take part in a process group.

        Args:
            process_group: The group; None is the default group of torch, if there is one.
            no_dist: This process acts alone, whatever groups there are.
        """
        self.rank, self.size, self.may_retry = 0, 1, True
        self._group = process_group
        torch = sys.modules.get("torch")
        if no_dist or torch is None or not torch.distributed.is_available():
            return
        if process_group is not None or torch.distributed.is_initialized():
            self.rank = torch.distributed.get_rank(process_group)
            self.size = torch.distributed.get_world_size(process_group)
            if self.rank < 0:
                raise ValueError("this process is no member of the process group")

    @property
    def is_first(self) -> bool:
        """True for the process that decides."""
        return self.rank == 0

    def gather(self, produce: Callable[[], Any]) -> list[Any]:
        """Return what the function returns at each rank, as JSON has it.

        Raises:
            Exception: The function raised here.
            MooncakeError: It raised at another rank.
        """
        if self.size == 1:
            return [produce()]
        failure: Exception | None = None
        try:
            text = json.dumps({"value": produce()})
        except Exception as error:  # noqa: BLE001 - the other ranks are told, then it is raised
            failure, text = error, json.dumps(_described(error))
        answers = [json.loads(each) for each in self._exchange(text.encode())]
        failed = [(rank, each) for rank, each in enumerate(answers) if "error" in each]
        self.may_retry = all(each["may_retry"] for _, each in failed)
        if failure is not None:
            raise failure
        for rank, answer in failed:
            text = f"rank {rank} failed: {answer['error']}"
            raise _native.failure(answer["code"], text, key=answer["key"], remedy="")
        return [answer["value"] for answer in answers]

    def at_each(self, produce: Callable[[], T]) -> T:
        """Return what the function returns here, once it has returned at all ranks.

        Raises:
            Exception: The function raised here.
            MooncakeError: It raised at another rank.
        """
        own: list[T] = []
        self.gather(lambda: own.append(produce()))
        return own[0]

    def from_first(self, produce: Callable[[], Any]) -> Any:
        """Return what the function returns at the first rank, as JSON has it."""
        return self.gather(lambda: produce() if self.is_first else None)[0]

    def _exchange(self, own: bytes) -> list[bytes]:
        """Return the text of each rank."""
        import torch
        import torch.distributed as dist

        backend = dist.get_backend(self._group)
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
        lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(self.size)]
        length = torch.tensor([len(own)], dtype=torch.int64, device=device)
        dist.all_gather(lengths, length, group=self._group)
        counts = [int(each) for each in lengths]
        padded = torch.zeros(max(counts), dtype=torch.uint8)
        padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        rows = [torch.empty_like(padded, device=device) for _ in range(self.size)]
        dist.all_gather(rows, padded.to(device), group=self._group)
        return [bytes(row[:count].tolist()) for row, count in zip(rows, counts, strict=True)]


def _described(error: Exception) -> dict[str, Any]:
    """Return a failure as the other ranks are told of it."""
    key = error.key if isinstance(error, MooncakeError) else None
    return {
        "error": f"{type(error).__name__}: {error}",
        "code": error.code if isinstance(error, MooncakeError) else _INTERNAL,
        "key": key.decode("utf-8", "surrogateescape") if isinstance(key, bytes) else key,
        "may_retry": isinstance(error, MooncakeError),
    }
