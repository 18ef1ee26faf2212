"""Expert-parallel exchange: `Buffer` sends tokens to the ranks of their experts, and back.

It needs a process group of `mooncake.pg`. Tensors of a GPU pass through host memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ._pg.expert_rows import BLOCK, combine_rows, quantize, route
from ._pg.membership import get_current_epoch
from .pg import MooncakeProcessGroup

__all__ = ["Buffer", "EventOverlap"]

_COUNTS, _ROWS, _RETURNED = range(3)
_EP_TAG = 1 << 31

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]


class EventOverlap:
    """Upstream's event. Results are complete when a call returns, so that nothing waits."""

    def __init__(
        self, event: Any = None, extra_tensors: tuple[torch.Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Does nothing: the results are complete."""

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


class Buffer:
    """Exchanges tokens between the ranks of a group, in rounds of `dispatch` and `combine`."""

    def __init__(self, group: Any, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False) -> None:
        if not isinstance(group, MooncakeProcessGroup):
            raise TypeError(
                f"Buffer needs a process group of mooncake.pg, not {type(group).__name__}"
            )
        self.group = group
        self.backend = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        self.runtime = None
        self._use_fallback = True
        self._disable_p2p = disable_p2p
        self._tag = 0
        self._round = 0
        self.connect()

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,  # noqa: ARG004 - upstream's
        num_experts: int,
    ) -> int:
        """Returns upstream's size of the buffer; this one allocates what a round needs."""
        slots = num_experts * num_max_dispatch_tokens_per_rank
        return 16 * num_experts + 4 * slots * (32 + 2 * hidden)

    def connect(self, is_update: bool = False) -> None:  # noqa: ARG002 - upstream's
        """Begins to count rounds anew, at the same view on all ranks."""
        self.group_size = self.group.size()
        self._tag = _EP_TAG | (get_current_epoch(self.group) & 0xFF) << 22
        self._round = 0

    def update_ep_member(self) -> None:
        """Takes in the members of a new view; all ranks call it at the same point."""
        self.connect(is_update=True)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        active_ranks: torch.Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool | None = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Handle, EventOverlap, Callable[[], None] | None]:
        """Sends each token to the ranks of its experts.

        Args:
            x: Tokens, bf16 [T, H].
            topk_idx: Experts of each token, int64 [T, K]; -1 for none.
            active_ranks: int32 mask of ranks to wait for; the call clears those that are late.
            num_max_dispatch_tokens_per_rank: Most tokens of a rank.
            num_experts: Number of experts of all ranks.
            timeout_us: Longest wait for a rank; -1 for none.
            use_fp8: Whether rows are sent as fp8 with scales; None stands for True.
            async_finish: Accepted; the results are complete in any case.
            return_recv_hook: Whether the call only sends, and the returned function receives.

        Returns:
            Received rows (with scales for fp8), their number per local expert, a handle for
            `combine`, an event, and the function that receives, or None.
        """
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        most, device = num_max_dispatch_tokens_per_rank, x.device
        hidden = _check_dispatch(x, topk_idx, most, num_experts, self.group_size)
        local = num_experts // self.group_size
        is_fp8 = use_fp8 is not False
        tag = self._next_round()
        rows = _as_bytes(x.detach().cpu(), is_fp8)
        experts = topk_idx.detach().cpu()
        own = None
        for rank in self._others_last():
            routed = route(experts, range(rank * local, (rank + 1) * local))
            counts = torch.tensor([len(one) for one in routed], dtype=torch.int64)
            chosen = torch.cat(routed)
            message = _message(chosen, rows)
            if rank == self.rank:
                own = (counts, message)
                continue
            self.group.send([counts], rank, tag | _COUNTS)
            self.group.send([message], rank, tag | _ROWS)
        size = self.group_size * most
        kind = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        received = torch.zeros(local, size, hidden, dtype=kind, device=device)
        scales = torch.zeros(local, hidden // BLOCK, size, dtype=torch.float32, device=device)
        counts_out = torch.zeros(local, dtype=torch.int32, device=device)
        source_info = torch.zeros(local, size, dtype=torch.int32, device=device)
        layout = torch.zeros(local, self.group_size, dtype=torch.int64, device=device)
        arrivals = {
            rank: self._receive(torch.zeros(local, dtype=torch.int64), rank, tag | _COUNTS)
            for rank in range(self.group_size)
            if rank != self.rank
        }
        mask = self._mask(active_ranks)
        width = rows.shape[1] + 8

        def receive() -> None:
            deadline = _deadline(timeout_us)
            places = [0] * local
            for rank in range(self.group_size):
                part = own if rank == self.rank else None
                if rank != self.rank:
                    part = self._rows_of(rank, arrivals[rank], width, tag, mask, deadline)
                if part is None:
                    continue
                counts, message = part
                begin = 0
                for expert, count in enumerate(counts.tolist()):
                    chunk = message[begin : begin + count]
                    begin += count
                    place = places[expert]
                    places[expert] += count
                    target = slice(place, place + count)
                    layout[expert, rank] = place << 32 | count
                    indexes = chunk[:, :8].contiguous().view(torch.int64).flatten()
                    source_info[expert, target] = indexes.to(torch.int32).to(device)
                    data = chunk[:, 8:].contiguous()
                    length = hidden if is_fp8 else 2 * hidden
                    values = data[:, :length].contiguous().view(kind)
                    received[expert, target] = values.to(device)
                    if is_fp8:
                        scale = data[:, length:].contiguous().view(torch.float32)
                        scales[expert, :, target] = scale.t().to(device)
            counts_out.copy_(torch.tensor(places, dtype=torch.int32))

        handle = (source_info, layout, most, hidden, num_experts)
        result: Any = (received, scales.transpose(1, 2)) if is_fp8 else received
        if return_recv_hook:
            return result, counts_out, handle, EventOverlap(), receive
        receive()
        return result, counts_out, handle, EventOverlap(), None

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = False,  # noqa: ARG002 - rows are sent from where they are in any case
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Sends the rows of the experts back, and adds them up by their weights.

        Args:
            x: Rows of the experts, bf16 [L, R * M, H], in the places of `dispatch`.
            topk_idx: As for `dispatch`.
            topk_weights: Weight of each expert, f32 [T, K].
            active_ranks: As for `dispatch`. Ranks that are late contribute nothing.
            timeout_us: Longest wait for a rank; -1 for none.
            handle: That of `dispatch`.
            zero_copy: Accepted.
            async_finish: Accepted; the result is complete in any case.
            return_recv_hook: Whether the call only sends, and the returned function receives.
            out: Tensor for the result.

        Returns:
            The sums, an event, and the function that receives, or None.
        """
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        _, layout, _, hidden, num_experts = handle
        local = num_experts // self.group_size
        tag = self._next_round() | _RETURNED
        rows, places = x.detach().to(torch.bfloat16).cpu(), layout.cpu().tolist()
        experts, weights = topk_idx.detach().cpu(), topk_weights.detach().cpu()
        own = None
        for rank in self._others_last():
            parts = []
            for expert in range(local):
                begin, count = places[expert][rank] >> 32, places[expert][rank] & 0xFFFF_FFFF
                parts.append(rows[expert, begin : begin + count])
            message = torch.cat(parts)
            if rank == self.rank:
                own = message
            elif len(message):
                self.group.send([message], rank, tag)
        arrivals: dict[int, Any] = {}
        counts: dict[int, list[int]] = {}
        for rank in range(self.group_size):
            routed = route(experts, range(rank * local, (rank + 1) * local))
            counts[rank] = [len(one) for one in routed]
            if rank != self.rank and sum(counts[rank]) > 0:
                target = torch.zeros(sum(counts[rank]), hidden, dtype=torch.bfloat16)
                arrivals[rank] = self._receive(target, rank, tag)
        result = out
        if result is None:
            shape = (topk_idx.shape[0], hidden)
            result = torch.zeros(shape, dtype=torch.bfloat16, device=x.device)
        mask = self._mask(active_ranks)

        def receive() -> None:
            deadline = _deadline(timeout_us)
            returned = {}
            for rank in range(self.group_size):
                message = own if rank == self.rank else None
                if rank in arrivals and self._has_arrived(rank, arrivals[rank], mask, deadline):
                    message = arrivals[rank][1]
                if message is not None:
                    for expert, part in enumerate(message.split(counts[rank])):
                        returned[rank * local + expert] = part
            result.copy_(combine_rows(returned, experts, weights, hidden))

        if return_recv_hook:
            return result, EventOverlap(), receive
        receive()
        return result, EventOverlap(), None

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Returns memory for the rows that the next `combine` takes."""
        source_info, _, _, hidden, _ = handle
        shape = (*source_info.shape, hidden)
        return torch.empty(shape, dtype=torch.bfloat16, device=source_info.device)

    def _next_round(self) -> int:
        self._round = (self._round + 1) % (1 << 20)
        return self._tag | self._round << 2

    def _others_last(self) -> list[int]:
        """Returns all ranks, the next one first, so that not all send to the first at once."""
        return [(self.rank + step) % self.group_size for step in range(self.group_size)]

    def _mask(self, active_ranks: torch.Tensor | None) -> torch.Tensor:
        """Returns the mask of ranks to wait for; one of another length stands for all."""
        if active_ranks is None or active_ranks.numel() != self.group_size:
            return torch.ones(self.group_size, dtype=torch.int32, device="cpu")
        return active_ranks

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Any, torch.Tensor]:
        return self.group.recv([tensor], rank, tag), tensor

    def _has_arrived(
        self,
        rank: int,
        arrival: tuple[Any, torch.Tensor],
        mask: torch.Tensor,
        deadline: float | None,
    ) -> bool:
        """Waits for a message; a rank that is late or lost is cleared in the mask."""
        work = arrival[0]
        limit_s = 0.0
        if int(mask[rank]):
            limit_s = 1e9 if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not work._completion.wait(limit_s) or work.failed_ranks():
            mask[rank] = 0
            return False
        return bool(work.wait())

    def _rows_of(
        self,
        rank: int,
        arrival: tuple[Any, torch.Tensor],
        width: int,
        tag: int,
        mask: torch.Tensor,
        deadline: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self._has_arrived(rank, arrival, mask, deadline):
            return None
        counts = arrival[1]
        message = torch.zeros(int(counts.sum()), width, dtype=torch.uint8)
        rows = self._receive(message, rank, tag | _ROWS)
        return (counts, message) if self._has_arrived(rank, rows, mask, deadline) else None


def _check_dispatch(
    x: torch.Tensor, topk_idx: torch.Tensor, most: int, experts: int, ranks: int
) -> int:
    if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] % BLOCK:
        raise ValueError(
            f"x must be bf16 [T, H] with H a multiple of {BLOCK}: shape={tuple(x.shape)}, "
            f"dtype={x.dtype}"
        )
    if topk_idx.dtype != torch.int64 or topk_idx.dim() != 2 or len(topk_idx) != len(x):
        raise ValueError(f"topk_idx must be int64 [T, K]: shape={tuple(topk_idx.shape)}")
    if len(x) > most:
        raise ValueError(f"too many tokens: tokens={len(x)}, limit={most}")
    if experts % ranks:
        raise ValueError(f"experts must be divisible by ranks: experts={experts}, ranks={ranks}")
    return int(x.shape[1])


def _as_bytes(rows: torch.Tensor, is_fp8: bool) -> torch.Tensor:
    """Returns each row as bytes: bf16, or fp8 followed by its scales."""
    if not is_fp8:
        return rows.contiguous().view(torch.uint8)
    values, scales = quantize(rows)
    parts = [values.view(torch.uint8), scales.contiguous().view(torch.uint8)]
    return torch.cat(parts, dim=1)


def _message(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of tokens, each behind the 8 bytes of its index."""
    indexes = tokens.to(torch.int64).reshape(-1, 1).contiguous().view(torch.uint8)
    return torch.cat([indexes, rows[tokens]], dim=1)


def _deadline(timeout_us: int) -> float | None:
    return None if timeout_us < 0 else time.monotonic() + timeout_us / 1e6
