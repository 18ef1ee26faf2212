"""Expert-parallel exchange: `Buffer` sends tokens to the ranks of their experts, and back.

It needs a process group of `mooncake.pg`. Tensors of a GPU pass through host memory.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

# Imported before torch: it says what to install where torch is missing.
from ._pg.device_links import DeviceLinks
from ._pg.expert_rows import BLOCK, Routing, combine_rows, quantize, rows_of_experts
from ._pg.row_memory import RowMemory
from .pg import MooncakeProcessGroup

# isort: split
import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Buffer", "EventOverlap"]

# A tag has 32 bits: 1, the number of the series of rounds (12), the round (17), and the kind of
# message (2).
_COUNTS, _ROWS, _RETURNED = range(3)
_EP_TAG = 1 << 31
_SERIES_MAX, _ROUNDS_MAX = 1 << 12, 1 << 17
# Rounds after which a rank that is silent is not expected to send its part any more. The number of
# receives of a group is limited.
_GIVEN_UP_ROUNDS = 512

# The latest series of rounds in each group, over all of its buffers.
_series: weakref.WeakKeyDictionary[MooncakeProcessGroup, int] = weakref.WeakKeyDictionary()

Handle = tuple[torch.Tensor, torch.Tensor, int, int, int]
# A work of a receive (None for no rows), its tensor, and the number of its round.
_Arrival = tuple[Any, torch.Tensor, int]


class EventOverlap:
    """Upstream's event. Results are complete when a call returns: `Buffer` gives no event."""

    def __init__(
        self, event: Any = None, extra_tensors: tuple[torch.Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Let torch's current stream wait for the event, if there is one."""
        if self.event is not None:
            stream_ptr = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
            self.event.current_stream_wait(stream_ptr)

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.current_stream_wait()


class Buffer(DeviceLinks):
    """Exchanges tokens between the ranks of a group, in rounds of `dispatch` and `combine`.

    All ranks make a buffer at the same point, as they call a collective: it runs one. A group may
    have several buffers; their rounds may overlap in any order.
    """

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
        # Counts the rounds of all series.
        self._count = 0
        self._given_up: defaultdict[int, deque[_Arrival]] = defaultdict(deque)
        self._memory = RowMemory()
        # Rows of `get_next_combine_buffer`, by the first tensor of the handle.
        self._combine_buffers = WeakTensorKeyDictionary()
        self.connect()

    @staticmethod
    def get_ep_buffer_size_hint(
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,  # noqa: ARG004 - upstream's
        num_experts: int,
    ) -> int:
        """Return upstream's size of the buffer; this one allocates what a round needs."""
        slots = num_experts * num_max_dispatch_tokens_per_rank
        return 16 * num_experts + 4 * slots * (32 + 2 * hidden)

    def connect(self, is_update: bool = False) -> None:  # noqa: ARG002 - upstream's
        """Begin a new series of rounds; a collective call, which all ranks make at the same point.

        The ranks agree on the number of the series and on their own number. Messages of earlier
        series and of other buffers are not taken for those of this one.
        """
        wanted = [_series.get(self.group, 0) + 1, self.group.size()]
        agreed = torch.tensor(wanted, dtype=torch.int64, device="cpu")
        self.group.allreduce([agreed], dist.ReduceOp.MAX).wait()
        series, self.group_size = agreed.tolist()
        _series[self.group] = series
        self._tag = _EP_TAG | series % _SERIES_MAX << 19
        self._round = 0

    def update_ep_member(self) -> None:
        """Take in the members of a new view; all ranks call it at the same point."""
        self.connect(is_update=True)

    def dispatch(  # noqa: PLR0913 (upstream's signature)
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
        """Send each token to the ranks of its experts.

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
        number = self._count
        routing = Routing.of(topk_idx.detach().cpu(), num_experts)
        bounds = routing.bounds(self.group_size)
        rows = self._selected(_as_bytes(x.detach().cpu(), is_fp8), routing.tokens)
        heads = self._send_rows(routing, bounds, rows, local + most * topk_idx.shape[1], tag)
        size = self.group_size * most
        kind = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        # Rows past the count are undefined.
        received = self._empty_rows((local, size, hidden), kind, device)
        scales = torch.empty(local, hidden // BLOCK, size, dtype=torch.float32, device=device)
        counts_out = torch.zeros(local, dtype=torch.int32, device=device)
        source_info = torch.zeros(local, size, dtype=torch.int32, device=device)
        layout = torch.zeros(local, self.group_size, dtype=torch.int64, device=device)
        arrivals = {
            rank: self._receive(torch.empty_like(heads[rank]), rank, tag | _COUNTS, number)
            for rank in range(self.group_size)
            if rank != self.rank
        }
        mask = self._mask(active_ranks)
        own = (None, rows[bounds[self.rank] : bounds[self.rank + 1]], number)
        row_words = received.flatten(0, 1).view(torch.int64)

        def receive() -> None:
            deadline = _deadline(timeout_us)
            # Rows are on their way from all ranks before the first ones are stored.
            parts = {
                rank: own
                if rank == self.rank
                else self._begin_rows(
                    rank, arrivals[rank], local, rows.shape[1], tag, mask, deadline
                )
                for rank in range(self.group_size)
            }
            begins = torch.zeros(local, dtype=torch.int64, device="cpu")
            for rank, part in parts.items():
                if part is None:
                    continue
                if rank != self.rank and not self._has_arrived(rank, part, mask, deadline):
                    continue
                head = heads[rank] if rank == self.rank else arrivals[rank][1]
                counts = head[:local].to(torch.int64)
                places = rows_of_experts(begins, counts, size)
                layout[:, rank] = (begins << 32 | counts).to(device)
                begins += counts
                target = places.to(device)
                tokens = head[local : local + len(places)]
                source_info.view(-1).index_copy_(0, target, tokens.to(device))
                data = part[1].to(device)
                length = hidden if is_fp8 else 2 * hidden
                row_words.index_copy_(0, target, data[:, :length].contiguous().view(torch.int64))
                if is_fp8:
                    scale = data[:, length:].contiguous().view(torch.float32)
                    scales[target // size, :, target % size] = scale
            counts_out.copy_(begins)

        handle = (source_info, layout, most, hidden, num_experts)
        result: Any = (received, scales.transpose(1, 2)) if is_fp8 else received
        if return_recv_hook:
            return result, counts_out, handle, EventOverlap(), receive
        receive()
        return result, counts_out, handle, EventOverlap(), None

    def combine(  # noqa: PLR0913 (upstream's signature)
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        active_ranks: torch.Tensor | None,
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
        """Send the rows of the experts back, and add them up by their weights.

        Args:
            x: Rows of the experts, bf16 [L, R * M, H], in the places of `dispatch`.
            topk_idx: As for `dispatch`.
            topk_weights: Weight of each expert, f32 [T, K].
            active_ranks: As for `dispatch`. Ranks that are late contribute nothing.
            timeout_us: Longest wait for a rank; -1 for none.
            handle: That of `dispatch`.
            zero_copy: Whether the rows are those in `get_next_combine_buffer(handle)`, and not `x`.
            async_finish: Accepted; the result is complete in any case.
            return_recv_hook: Whether the call only sends, and the returned function receives.
            out: Tensor for the result.

        Returns:
            The sums, an event, and the function that receives, or None.
        """
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other")
        source_info, layout, most, hidden, num_experts = handle
        if zero_copy:
            if source_info not in self._combine_buffers:
                raise ValueError("zero_copy needs rows in get_next_combine_buffer(handle)")
            x = self._combine_buffers[source_info]
        tag = self._next_round() | _RETURNED
        number = self._count
        rows = x.detach().to(torch.bfloat16).cpu().reshape(-1, hidden)
        parts = layout.cpu()
        routing = Routing.of(topk_idx.detach().cpu(), num_experts)
        bounds = routing.bounds(self.group_size)
        # The last row is zero; it stands for what no rank returns.
        returned = self._memory.take((bounds[-1] + 1, hidden), torch.bfloat16)
        returned[-1] = 0
        arrivals: dict[int, Any] = {}
        sends: dict[int, Any] = {}
        for rank in self._others_last():
            places = rows_of_experts(
                parts[:, rank] >> 32, parts[:, rank] & 0xFFFF_FFFF, self.group_size * most
            )
            target = returned[bounds[rank] : bounds[rank + 1]]
            if rank == self.rank:
                torch.index_select(rows, 0, places, out=target)
                continue
            if len(places):
                sends[rank] = self._send(self._selected(rows, places), rank, tag)
            if len(target):
                arrivals[rank] = self._receive(target, rank, tag, number)
        result = out
        if result is None:
            shape = (topk_idx.shape[0], hidden)
            result = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
        mask, weights = self._mask(active_ranks), topk_weights.detach().cpu()

        def receive() -> None:
            deadline = _deadline(timeout_us)
            places = routing.places.clone()
            for rank, arrival in arrivals.items():
                if not self._has_arrived(rank, arrival, mask, deadline):
                    is_lost = (places >= bounds[rank]) & (places < bounds[rank + 1])
                    places[is_lost] = bounds[-1]
            result.copy_(combine_rows(returned, places, weights))
            # A caller that leaves the group now does not take the rows of others with it.
            for rank, sent in sends.items():
                if int(mask[rank]):
                    sent[0]._completion.wait(_seconds_left(deadline))

        if return_recv_hook:
            return result, EventOverlap(), receive
        receive()
        return result, EventOverlap(), None

    def get_next_combine_buffer(self, handle: Handle) -> torch.Tensor:
        """Return the buffer whose rows `combine` takes for this handle with `zero_copy`.

        It is the same memory in each call, as long as the handle exists.
        """
        source_info, _, _, hidden, _ = handle
        if source_info not in self._combine_buffers:
            shape = (*source_info.shape, hidden)
            rows = self._empty_rows(shape, torch.bfloat16, source_info.device)
            self._combine_buffers[source_info] = rows
        kept: torch.Tensor = self._combine_buffers[source_info]
        return kept

    def _next_round(self) -> int:
        self._round = (self._round + 1) % _ROUNDS_MAX
        self._count += 1
        for rank in self._given_up:
            self._cancel_before(rank, self._count - _GIVEN_UP_ROUNDS)
        return self._tag | self._round << 2

    def _others_last(self) -> list[int]:
        """Return all ranks, the next one first, so that not all send to the first at once."""
        return [(self.rank + step) % self.group_size for step in range(self.group_size)]

    def _mask(self, active_ranks: torch.Tensor | None) -> torch.Tensor:
        """Return the mask of ranks to wait for; one of another length stands for all."""
        if active_ranks is None or active_ranks.numel() != self.group_size:
            return torch.ones(self.group_size, dtype=torch.int32, device="cpu")
        return active_ranks

    def _empty_rows(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        return self._memory.take(shape, dtype)

    def _selected(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        memory = self._memory.take((len(places), rows.shape[1]), rows.dtype)
        return torch.index_select(rows, 0, places, out=memory)

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> tuple[Any, torch.Tensor]:
        return self.group.send([tensor], rank, tag), tensor

    def _receive(self, tensor: torch.Tensor, rank: int, tag: int, number: int) -> _Arrival:
        return self.group.recv([tensor], rank, tag), tensor, number

    def _cancel_before(self, rank: int, number: int) -> None:
        """Cancel receives of earlier rounds: their tags come again after many rounds."""
        arrivals = self._given_up[rank]
        while arrivals and arrivals[0][2] < number:
            work, _, _ = arrivals.popleft()
            self.group._native_group().cancel_receive(work._completion)

    def _has_arrived(
        self,
        rank: int,
        arrival: _Arrival,
        mask: torch.Tensor,
        deadline: float | None,
    ) -> bool:
        """Wait for a message; a rank that is late or lost is cleared in the mask."""
        work, _, number = arrival
        if work is None:
            return True
        limit_s = 0.0
        if int(mask[rank]):
            limit_s = _seconds_left(deadline)
        if not work._completion.wait(limit_s):
            self._given_up[rank].append(arrival)
            mask[rank] = 0
            return False
        if work.failed_ranks():
            mask[rank] = 0
            return False
        # A rank sends its rounds in their order: it has sent nothing for earlier ones.
        self._cancel_before(rank, number)
        return bool(work.wait())

    def _send_rows(
        self, routing: Routing, bounds: list[int], rows: torch.Tensor, length: int, tag: int
    ) -> list[torch.Tensor]:
        """Send each rank its rows, and before them their number for each expert and their tokens.

        Returns:
            These heads, for each rank.
        """
        heads = []
        for rank, counts in enumerate(routing.counts.reshape(self.group_size, -1)):
            tokens = routing.tokens[bounds[rank] : bounds[rank + 1]]
            head = torch.zeros(length, dtype=torch.int32, device="cpu")
            head[: len(counts)] = counts
            head[len(counts) : len(counts) + len(tokens)] = tokens
            heads.append(head)
        for rank in self._others_last():
            if rank == self.rank:
                continue
            self.group.send([heads[rank]], rank, tag | _COUNTS)
            part = rows[bounds[rank] : bounds[rank + 1]]
            if len(part):
                self.group.send([part], rank, tag | _ROWS)
        return heads

    def _begin_rows(
        self,
        rank: int,
        arrival: _Arrival,
        local: int,
        width: int,
        tag: int,
        mask: torch.Tensor,
        deadline: float | None,
    ) -> _Arrival | None:
        """Begin to receive the rows that a head announces; return None if the rank is late."""
        if not self._has_arrived(rank, arrival, mask, deadline):
            return None
        count = int(arrival[1][:local].sum())
        rows = torch.empty(count, width, dtype=torch.uint8, device="cpu")
        number = arrival[2]
        return self._receive(rows, rank, tag | _ROWS, number) if count else (None, rows, number)


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
    """Return each row as bytes: bf16, or fp8 followed by its scales."""
    if not is_fp8:
        if not len(rows):
            # Without rows, strides may be any: such a tensor cannot be viewed by other elements.
            return torch.empty(0, 2 * rows.shape[1], dtype=torch.uint8, device="cpu")
        return rows.contiguous().view(torch.uint8)
    values, scales = quantize(rows)
    parts = [values.view(torch.uint8), scales.contiguous().view(torch.uint8)]
    return torch.cat(parts, dim=1)


def _seconds_left(deadline: float | None) -> float:
    return 1e9 if deadline is None else max(deadline - time.monotonic(), 0.0)


def _deadline(timeout_us: int) -> float | None:
    return None if timeout_us < 0 else time.monotonic() + timeout_us / 1e6
