"""Requests as schedulers describe them to workers."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Finished", "RecvReqMeta", "RemotePrefill", "SendBlockMeta", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of pipeline parallelism: its rank, and how many there are."""

    rank: int = 0
    count: int = 1


@dataclass
class RecvReqMeta:
    """A request whose blocks a decode worker fetches.

    Attributes:
        local_block_ids: Blocks to fill; none tells the prefill worker that it may free its blocks.
        remote_host: Host of the prefill worker of rank 0.
        remote_port: Port of its side channel.
        remote_request_id: Id of the request over there, if it is another one.
    """

    local_block_ids: list[int]
    remote_host: str
    remote_port: int
    remote_request_id: str | None = None


@dataclass
class SendBlockMeta:
    """A request whose blocks a prefill worker hands over.

    Attributes:
        local_block_ids: The blocks; empty before the request finished here.
        ready: Set when the blocks are known, or when there will be none.
        expire_time: Time at which the blocks are freed, by the clock of the event loop.
    """

    local_block_ids: list[int]
    ready: asyncio.Event
    expire_time: float = math.inf


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """The prefill of a request, from the ``kv_transfer_params`` that the other vLLM returned."""

    host: str
    port: int
    request_id: str | None

    @classmethod
    def parse(cls, params: Mapping[str, Any], tp_size: int, stages: int = 1) -> RemotePrefill:
        """Read the parameters of a request.

        Args:
            params: The parameters.
            tp_size: Size of the tensor-parallel group here.
            stages: Number of pipeline stages here. A prefill that does not say its own has one, or
                does not compare the layers of the stages.

        Raises:
            ValueError: A parameter is missing or wrong, or the groups differ in size.
        """
        host, port = params.get("remote_host"), params.get("remote_port")
        request_id = params.get("remote_request_id")
        if not isinstance(host, str) or not host:
            raise ValueError(f"remote_host={host!r} is not a host")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise ValueError(f"remote_port={port!r} is not a port")
        if request_id is not None and not isinstance(request_id, str):
            raise ValueError(f"remote_request_id={request_id!r} is not text")
        remote_size = params.get("remote_tp_size", tp_size)
        if remote_size != tp_size:
            raise ValueError(
                f"the prefill has tensor_parallel_size {remote_size} and this process {tp_size}; "
                "start both with the same size"
            )
        remote_stages = params.get("remote_pp_size", 1)
        if remote_stages != stages:
            raise ValueError(
                f"the prefill has pipeline_parallel_size {remote_stages} and this process "
                f"{stages}; start both with the same size, from this package"
            )
        return cls(host, port, request_id)


class Finished:
    """Results that one thread adds and another takes."""

    def __init__(self) -> None:
        """Make an empty collection."""
        self._lock = threading.Lock()
        self._items: set[Any] = set()

    def add(self, items: Iterable[Any]) -> None:
        """Add results."""
        with self._lock:
            self._items.update(items)

    def take(self) -> set[Any]:
        """Return the results that were added since the last call."""
        with self._lock:
            taken, self._items = self._items, set()
        return taken
