"""The operations of a process group: tensors in, addresses to the native side, a work back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .codes import dtype_code, operation_code
from .memory import HostMemory, check_same, read_from, write_to
from .work import CombinedWork, MooncakeWork, PendingWorks

__all__ = ["Collectives"]

Tensors = Sequence[torch.Tensor]


class Collectives:
    """Operations over the native group, which `_native_group` returns.

    Each method takes the arguments that torch passes, and returns a work.
    """

    _pending: PendingWorks
    _timeout_s: float
    _coalesced: list[MooncakeWork] | None

    def _native_group(self) -> Any:
        raise NotImplementedError

    def allreduce(self, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Reduces one tensor over all ranks, in place."""
        tensor = _single(tensors, "allreduce")
        code = operation_code(_operation(opts), tensor.dtype)
        memory = write_to(tensor, keeps_content=True)
        completion = self._native_group().allreduce(
            memory.address, memory.address, memory.numel, dtype_code(tensor.dtype), code
        )
        return self._begun(completion, [memory], [tensor], opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduces each tensor over all ranks, in place."""
        return self._together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Sends the tensor of the root to all ranks."""
        tensor = _single(tensors, "broadcast")
        memory = write_to(tensor, keeps_content=True)
        completion = self._native_group().broadcast(memory.address, memory.nbytes, _root(opts))
        return self._begun(completion, [memory], [tensor], opts)

    def reduce(self, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Reduces one tensor over all ranks, in place at the root."""
        tensor = _single(tensors, "reduce")
        code = operation_code(_operation(opts), tensor.dtype)
        memory = write_to(tensor, keeps_content=True)
        completion = self._native_group().reduce(
            memory.address,
            memory.address,
            memory.numel,
            dtype_code(tensor.dtype),
            code,
            _root(opts),
        )
        return self._begun(completion, [memory], [tensor], opts)

    def allgather(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> MooncakeWork:
        """Gathers one tensor of each rank at all ranks; slots without a rank stay untouched."""
        source = _single(tensors, "allgather")
        wanted = _single_list(outputs, "allgather")
        self._check_count(len(wanted), "allgather", "output tensors")
        check_same(wanted, source.dtype, "allgather")
        _check_sizes(wanted, source, "allgather")
        own = read_from(source)
        # A slot without a rank keeps its content.
        parts = [write_to(tensor, keeps_content=True) for tensor in wanted]
        completion = self._native_group().allgather(
            own.address, [part.address for part in parts], own.nbytes
        )
        return self._begun(completion, parts, list(wanted), opts, [own])

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> Any:
        """Gathers each tensor: `outputs[rank][i]` belongs to `tensors[i]` of that rank."""
        columns = [[row[i] for row in outputs] for i in range(len(tensors))]
        works = [
            self.allgather([column], [tensor], opts)
            for column, tensor in zip(columns, tensors, strict=True)
        ]
        return self._together(works)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> MooncakeWork:
        """Gathers one tensor of each rank into one tensor, in the order of ranks."""
        check_same([output], tensor.dtype, "all_gather_single")
        own = read_from(tensor)
        whole = write_to(output, keeps_content=True)
        count = _part_count(whole.nbytes, own.nbytes, "all_gather_single")
        addresses = [whole.address + i * own.nbytes for i in range(count)]
        completion = self._native_group().allgather(own.address, addresses, own.nbytes)
        return self._begun(completion, [whole], [output], opts, [own])

    def all_gather_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Any:
        """Gathers each tensor into its own output."""
        pairs = zip(outputs, tensors, strict=True)
        return self._together([self.all_gather_single(out, own, opts) for out, own in pairs])

    def reduce_scatter(
        self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None
    ) -> MooncakeWork:
        """Reduces a list of tensors over all ranks; each rank gets that of its place."""
        output = _single(outputs, "reduce_scatter")
        sources = _single_list(tensors, "reduce_scatter")
        self._check_count(len(sources), "reduce_scatter", "input tensors")
        check_same(sources, output.dtype, "reduce_scatter")
        memory = write_to(output, keeps_content=True)
        parts = [read_from(tensor) for tensor in sources]
        completion = self._native_group().reduce_scatter(
            [part.address for part in parts],
            [part.numel for part in parts],
            memory.address,
            memory.numel,
            dtype_code(output.dtype),
            operation_code(_operation(opts), output.dtype),
        )
        return self._begun(completion, [memory], [output], opts, parts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> MooncakeWork:
        """Reduces one tensor over all ranks; each rank gets the part of its place."""
        check_same([tensor], output.dtype, "reduce_scatter_single")
        memory = write_to(output, keeps_content=True)
        whole = read_from(tensor)
        count = _part_count(whole.nbytes, memory.nbytes, "reduce_scatter_single")
        completion = self._native_group().reduce_scatter(
            [whole.address + i * memory.nbytes for i in range(count)],
            [memory.numel] * count,
            memory.address,
            memory.numel,
            dtype_code(output.dtype),
            operation_code(_operation(opts), output.dtype),
        )
        return self._begun(completion, [memory], [output], opts, [whole])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Any:
        """Reduces each tensor into its own output."""
        pairs = zip(outputs, tensors, strict=True)
        return self._together([self.reduce_scatter_single(out, own, opts) for out, own in pairs])

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Sends a tensor to each rank, and takes one from each; their sizes may differ."""
        self._check_count(len(outputs), "alltoall", "output tensors")
        self._check_count(len(tensors), "alltoall", "input tensors")
        for tensor in (*outputs, *tensors):
            check_same([tensor], tensors[0].dtype, "alltoall")
        sources = [read_from(tensor) for tensor in tensors]
        parts = [write_to(tensor, keeps_content=True) for tensor in outputs]
        completion = self._native_group().all_to_all(
            [source.address for source in sources],
            [source.nbytes for source in sources],
            [part.address for part in parts],
            [part.nbytes for part in parts],
        )
        return self._begun(completion, parts, list(outputs), opts, sources)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> MooncakeWork:
        """Sends rows of one tensor to each rank; no split sizes stand for equal parts.

        Equal parts are those for the number of ranks at the call. If it changes, ranks that saw it
        earlier divide otherwise, and the operation fails at all ranks.
        """
        check_same([output], tensor.dtype, "all_to_all_single")
        source = read_from(tensor)
        memory = write_to(output, keeps_content=True)
        size = int(self._native_group().size())
        counts = (size, self._pending.max_group_size)
        outgoing = _split(tensor, source, input_split_sizes, counts, "input")
        incoming = _split(output, memory, output_split_sizes, counts, "output")
        completion = self._native_group().all_to_all(*outgoing, *incoming)
        return self._begun(completion, [memory], [output], opts, [source])

    def gather(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> MooncakeWork:
        """Gathers one tensor of each rank at the root, which alone passes outputs."""
        source = _single(tensors, "gather")
        wanted: Tensors = []
        if self.rank() == _root(opts):
            wanted = _single_list(outputs, "gather")
            self._check_count(len(wanted), "gather", "output tensors")
            check_same(wanted, source.dtype, "gather")
            _check_sizes(wanted, source, "gather")
        own = read_from(source)
        parts = [write_to(tensor, keeps_content=True) for tensor in wanted]
        completion = self._native_group().gather(
            own.address, [part.address for part in parts], own.nbytes, _root(opts)
        )
        return self._begun(completion, parts, list(wanted), opts, [own])

    def scatter(
        self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None
    ) -> MooncakeWork:
        """Sends a tensor of the root to each rank; the root alone passes inputs."""
        output = _single(outputs, "scatter")
        given: Tensors = []
        if self.rank() == _root(opts):
            given = _single_list(tensors, "scatter")
            self._check_count(len(given), "scatter", "input tensors")
            check_same(given, output.dtype, "scatter")
            _check_sizes(given, output, "scatter")
        memory = write_to(output, keeps_content=True)
        parts = [read_from(tensor) for tensor in given]
        completion = self._native_group().scatter(
            [part.address for part in parts], memory.address, memory.nbytes, _root(opts)
        )
        return self._begun(completion, [memory], [output], opts, parts)

    def barrier(self, opts: Any = None) -> MooncakeWork:
        """Waits until all ranks have called it."""
        return self._begun(self._native_group().barrier(), [], [], opts)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> MooncakeWork:
        """Sends a tensor to a rank; done when that rank has received it."""
        source = read_from(_single(tensors, "send"))
        completion = self._native_group().send(source.address, source.nbytes, dst, _tag(tag))
        return self._begun(completion, [], [], None, [source])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> MooncakeWork:
        """Receives a tensor from a rank."""
        tensor = _single(tensors, "recv")
        memory = write_to(tensor, keeps_content=True)
        source = None if src < 0 else src
        completion = self._native_group().recv(memory.address, memory.nbytes, source, _tag(tag))
        return self._begun(completion, [memory], [tensor], None)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MooncakeWork:
        """Receives a tensor from whichever rank sends one; `source_rank` tells which."""
        return self.recv(tensors, -1, tag)

    def rank(self) -> int:
        """Returns this process's in-group rank."""
        raise NotImplementedError

    def _start_coalescing(self, device: Any = None) -> None:  # noqa: ARG002 - torch's
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Any:  # noqa: ARG002 - torch's
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    def _check_count(self, count: int, call: str, what: str) -> None:
        # A rank at the end may be lost between the caller's look at the size and this call: the
        # entries of slots without a rank are left alone.
        size = int(self._native_group().size())
        if not size <= count <= self._pending.max_group_size:
            raise ValueError(
                f"{call}: {what} must be as many as ranks: given={count}, ranks={size}"
            )

    def _begun(
        self,
        completion: Any,
        memory: Sequence[HostMemory],
        results: list[torch.Tensor],
        opts: Any,
        sources: Sequence[HostMemory] = (),
    ) -> MooncakeWork:
        """Returns the work of an operation that writes `memory` and reads `sources`."""
        # Before torch 2.8, the options do not say whether the caller waits at once.
        if getattr(opts, "asyncOp", True):
            completion.start()
        timeout_s = self._timeout_s if opts is None else _timeout(opts, self._timeout_s)
        work = MooncakeWork(completion, memory, sources, results, timeout_s, self._pending)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, works: list[MooncakeWork]) -> Any:
        return works[0] if len(works) == 1 else CombinedWork(works)


def _single(tensors: Any, call: str) -> torch.Tensor:
    """Returns the one tensor of a list; a bare tensor is accepted too."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{call} takes one tensor per call: given={len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def _single_list(lists: Any, call: str) -> Tensors:
    """Returns the one list of a list of lists; a bare list of tensors is accepted too."""
    if lists and isinstance(lists[0], torch.Tensor):
        bare: Tensors = lists
        return bare
    if len(lists) != 1:
        raise ValueError(f"{call} takes one list of tensors per call: given={len(lists)}")
    inner: Tensors = lists[0]
    return inner


def _operation(opts: Any) -> Any:
    """Returns the reduction of torch's options; a bare reduction is accepted too."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _root(opts: Any) -> int:
    """Returns the root of torch's options; a bare rank is accepted too."""
    if opts is None:
        return 0
    return opts if isinstance(opts, int) else int(opts.rootRank)


def _tag(tag: int) -> int:
    if not -(1 << 31) <= tag < 1 << 32:
        raise ValueError(f"a tag has 32 bits: tag={tag}")
    return tag & 0xFFFF_FFFF


def _timeout(opts: Any, default_s: float) -> float:
    """Returns the time limit of torch's options; a negative one stands for the group's."""
    timeout = getattr(opts, "timeout", None)
    if not isinstance(timeout, timedelta):
        return default_s
    limit_s = timeout.total_seconds()
    return limit_s if limit_s > 0 else default_s


def _check_sizes(tensors: Tensors, like: torch.Tensor, call: str) -> None:
    for tensor in tensors:
        if tensor.numel() != like.numel():
            raise ValueError(
                f"{call}: tensors differ in their number of elements: {tensor.numel()} and "
                f"{like.numel()}"
            )


def _part_count(whole_bytes: int, part_bytes: int, call: str) -> int:
    """Returns into how many parts a buffer falls.

    The number may differ from that of ranks: after a rank was lost at the end of the group, the
    survivors pass buffers for the smaller group.
    """
    if part_bytes == 0:
        return 0
    if whole_bytes % part_bytes:
        raise ValueError(
            f"{call}: the large tensor is no multiple of the small one: "
            f"large={whole_bytes} bytes, small={part_bytes} bytes"
        )
    return whole_bytes // part_bytes


def _split(
    tensor: torch.Tensor,
    memory: HostMemory,
    sizes: Sequence[int],
    counts: tuple[int, int],
    side: str,
) -> tuple[list[int], list[int]]:
    """Returns address and length of each rank's rows."""
    ranks, most = counts
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % ranks:
            raise ValueError(
                f"all_to_all_single: rows cannot be divided by the ranks: rows={rows}, "
                f"ranks={ranks}; pass {side}_split_sizes"
            )
        sizes = [rows // ranks] * ranks
    if not ranks <= len(sizes) <= most or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(
            f"all_to_all_single: {side}_split_sizes must name the rows of each rank: "
            f"sizes={list(sizes)}, rows={rows}, ranks={ranks}"
        )
    row_bytes = memory.nbytes // rows if rows else 0
    addresses, lengths = [], []
    position = memory.address
    for size in sizes:
        addresses.append(position)
        lengths.append(size * row_bytes)
        position += size * row_bytes
    return addresses, lengths
