"""The operations of a process group: tensors in, addresses to the native side, a work back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mooncake.errors import MooncakeError

from .codes import PREMUL_SUM, SUM, element_code, premultiplied, reduction_codes
from .memory import HostMemory, check_same, read_from, uses_of, write_to
from .settings import process_settings
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
        """Reduce one tensor over all ranks, in place."""
        tensor = _single(tensors, "allreduce")
        return self._reduction("allreduce", tensor, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Reduce each tensor over all ranks, in place."""
        return self._together([self.allreduce([tensor], opts) for tensor in tensors])

    def broadcast(self, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Send the tensor of the root to all ranks."""
        tensor = _single(tensors, "broadcast")
        root = self._root(opts, "broadcast")
        if self._pending.collectives:
            self._await_overlapping([tensor])
        memory = write_to(tensor, keeps_content=True)
        completion = self._begin(
            "broadcast", memory.address, memory.nbytes, root, element_code(tensor.dtype)
        )
        work = self._begun(completion, [memory], [tensor], opts)
        work._sender = root
        return work

    def reduce(self, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Reduce one tensor over all ranks, in place at the root."""
        tensor = _single(tensors, "reduce")
        return self._reduction("reduce", tensor, opts, (self._root(opts, "reduce"),))

    def _reduction(
        self, call: str, tensor: torch.Tensor, opts: Any, root: tuple[int, ...] = ()
    ) -> MooncakeWork:
        operation = _operation(opts)
        code, kind = reduction_codes(operation, tensor.dtype)
        if self._pending.collectives:
            self._await_overlapping([tensor])
        memory = write_to(tensor, keeps_content=True)
        source: HostMemory = memory
        sources: Sequence[HostMemory] = ()
        if code == PREMUL_SUM:
            code, source = SUM, read_from(premultiplied(tensor, operation))
            sources = [source]
        begin = getattr(self._native_group(), call)
        try:
            # As `_begin`, which small reductions notice.
            completion = begin(source.address, memory.address, memory.numel, kind, code, *root)
        except MooncakeError as error:
            raise dist.DistBackendError(str(error)) from error
        return self._begun(completion, [memory], [tensor], opts, sources)

    def allgather(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> MooncakeWork:
        """Gather one tensor of each rank at all ranks; slots without a rank stay untouched."""
        source = _single(tensors, "allgather")
        wanted = _single_list(outputs, "allgather")
        self._check_count(len(wanted), "allgather", "output tensors")
        check_same(wanted, source.dtype, "allgather")
        _check_sizes(wanted, source, "allgather")
        if self._pending.collectives:
            self._await_overlapping([source, *wanted])
        own = read_from(source)
        # A slot without a rank keeps its content.
        parts = [write_to(tensor, keeps_content=True) for tensor in wanted]
        completion = self._begin(
            "allgather",
            own.address,
            [part.address for part in parts],
            own.nbytes,
            element_code(source.dtype),
        )
        return self._begun(completion, parts, list(wanted), opts, [own])

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> Any:
        """Gather each tensor: `outputs[rank][i]` belongs to `tensors[i]` of that rank."""
        for row in outputs:
            if len(row) != len(tensors):
                raise ValueError(
                    "allgather_coalesced: each rank needs an output for each tensor: "
                    f"outputs={len(row)}, tensors={len(tensors)}"
                )
        columns = [[row[i] for row in outputs] for i in range(len(tensors))]
        works = [
            self.allgather([column], [tensor], opts)
            for column, tensor in zip(columns, tensors, strict=True)
        ]
        return self._together(works)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> MooncakeWork:
        """Gather one tensor of each rank into one tensor, in the order of ranks."""
        check_same([output], tensor.dtype, "all_gather_single")
        count = self._part_count(output, tensor, "all_gather_single: the output", "the input")
        if self._pending.collectives:
            self._await_overlapping([output, tensor])
        own = read_from(tensor)
        whole = write_to(output, keeps_content=True)
        addresses = [whole.address + i * own.nbytes for i in range(count)]
        completion = self._begin(
            "allgather", own.address, addresses, own.nbytes, element_code(tensor.dtype)
        )
        return self._begun(completion, [whole], [output], opts, [own])

    def all_gather_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Any:
        """Gather each tensor into its own output."""
        pairs = zip(outputs, tensors, strict=True)
        return self._together([self.all_gather_single(out, own, opts) for out, own in pairs])

    def reduce_scatter(
        self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None
    ) -> MooncakeWork:
        """Reduce a list of tensors over all ranks; each rank gets that of its place."""
        output = _single(outputs, "reduce_scatter")
        sources = _single_list(tensors, "reduce_scatter")
        self._check_count(len(sources), "reduce_scatter", "input tensors")
        check_same(sources, output.dtype, "reduce_scatter")
        operation = _operation(opts)
        code, kind = reduction_codes(operation, output.dtype)
        if self._pending.collectives:
            self._await_overlapping([output, *sources])
        memory = write_to(output, keeps_content=True)
        if code == PREMUL_SUM:
            code, sources = SUM, [premultiplied(tensor, operation) for tensor in sources]
        parts = [read_from(tensor) for tensor in sources]
        completion = self._begin(
            "reduce_scatter",
            [part.address for part in parts],
            [part.numel for part in parts],
            memory.address,
            memory.numel,
            kind,
            code,
        )
        return self._begun(completion, [memory], [output], opts, parts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> MooncakeWork:
        """Reduce one tensor over all ranks; each rank gets the part of its place."""
        check_same([tensor], output.dtype, "reduce_scatter_single")
        operation = _operation(opts)
        code, kind = reduction_codes(operation, output.dtype)
        count = self._part_count(tensor, output, "reduce_scatter_single: the input", "the output")
        if self._pending.collectives:
            self._await_overlapping([output, tensor])
        memory = write_to(output, keeps_content=True)
        if code == PREMUL_SUM:
            code, tensor = SUM, premultiplied(tensor, operation)
        whole = read_from(tensor)
        completion = self._begin(
            "reduce_scatter",
            [whole.address + i * memory.nbytes for i in range(count)],
            [memory.numel] * count,
            memory.address,
            memory.numel,
            kind,
            code,
        )
        return self._begun(completion, [memory], [output], opts, [whole])

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Any:
        """Reduce each tensor into its own output."""
        pairs = zip(outputs, tensors, strict=True)
        return self._together([self.reduce_scatter_single(out, own, opts) for out, own in pairs])

    def alltoall(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> MooncakeWork:
        """Send a tensor to each rank, and take one from each; their sizes may differ."""
        self._check_count(len(outputs), "alltoall", "output tensors")
        self._check_count(len(tensors), "alltoall", "input tensors")
        for tensor in (*outputs, *tensors):
            check_same([tensor], tensors[0].dtype, "alltoall")
        if self._pending.collectives:
            self._await_overlapping([*outputs, *tensors])
        sources = [read_from(tensor) for tensor in tensors]
        parts = [write_to(tensor, keeps_content=True) for tensor in outputs]
        completion = self._begin(
            "all_to_all",
            [source.address for source in sources],
            [source.nbytes for source in sources],
            [part.address for part in parts],
            [part.nbytes for part in parts],
            element_code(tensors[0].dtype),
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
        """Send rows of one tensor to each rank; no split sizes stand for equal parts.

        Equal parts are those for the number of ranks at the call. If it changes, ranks that saw it
        earlier divide otherwise, and the operation fails at all ranks.
        """
        check_same([output], tensor.dtype, "all_to_all_single")
        if self._pending.collectives:
            self._await_overlapping([output, tensor])
        source = read_from(tensor)
        memory = write_to(output, keeps_content=True)
        size = int(self._native_group().size())
        counts = (size, self._pending.max_group_size)
        outgoing = _split(tensor, source, input_split_sizes, counts, "input")
        incoming = _split(output, memory, output_split_sizes, counts, "output")
        completion = self._begin("all_to_all", *outgoing, *incoming, element_code(tensor.dtype))
        return self._begun(completion, [memory], [output], opts, [source])

    def gather(
        self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None
    ) -> MooncakeWork:
        """Gather one tensor of each rank at the root, which alone passes outputs."""
        source = _single(tensors, "gather")
        root = self._root(opts, "gather")
        wanted: Tensors = []
        if self.rank() == root:
            wanted = _single_list(outputs, "gather")
            self._check_count(len(wanted), "gather", "output tensors")
            check_same(wanted, source.dtype, "gather")
            _check_sizes(wanted, source, "gather")
        if self._pending.collectives:
            self._await_overlapping([source, *wanted])
        own = read_from(source)
        parts = [write_to(tensor, keeps_content=True) for tensor in wanted]
        completion = self._begin(
            "gather",
            own.address,
            [part.address for part in parts],
            own.nbytes,
            root,
            element_code(source.dtype),
        )
        return self._begun(completion, parts, list(wanted), opts, [own])

    def scatter(
        self, outputs: Tensors, tensors: Sequence[Tensors], opts: Any = None
    ) -> MooncakeWork:
        """Send a tensor of the root to each rank; the root alone passes inputs."""
        output = _single(outputs, "scatter")
        root = self._root(opts, "scatter")
        given: Tensors = []
        if self.rank() == root:
            given = _single_list(tensors, "scatter")
            self._check_count(len(given), "scatter", "input tensors")
            check_same(given, output.dtype, "scatter")
            _check_sizes(given, output, "scatter")
        if self._pending.collectives:
            self._await_overlapping([output, *given])
        memory = write_to(output, keeps_content=True)
        parts = [read_from(tensor) for tensor in given]
        completion = self._begin(
            "scatter",
            [part.address for part in parts],
            memory.address,
            memory.nbytes,
            root,
            element_code(output.dtype),
        )
        return self._begun(completion, [memory], [output], opts, parts)

    def barrier(self, opts: Any = None) -> MooncakeWork:
        """Wait until all ranks have called it."""
        return self._begun(self._begin("barrier"), [], [], opts)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> MooncakeWork:
        """Send a tensor to a rank; done when that rank has received it."""
        source = read_from(_single(tensors, "send"))
        completion = self._begin("send", source.address, source.nbytes, dst, _tag(tag))
        work = self._message(completion, [], [], [source])
        work._cancel = self._native_group().cancel_send
        return work

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> MooncakeWork:
        """Receive a tensor from a rank."""
        tensor = _single(tensors, "recv")
        memory = write_to(tensor, keeps_content=True)
        source = None if src < 0 else src
        completion = self._begin("recv", memory.address, memory.nbytes, source, _tag(tag))
        work = self._message(completion, [memory], [tensor])
        work._cancel, work._sender = self._native_group().cancel_receive, src
        return work

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> MooncakeWork:
        """Receive a tensor from whichever rank sends one; `source_rank` tells which."""
        return self.recv(tensors, -1, tag)

    def rank(self) -> int:
        """Return this process's in-group rank."""
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

    def _root(self, opts: Any, call: str) -> int:
        """Return the root of torch's options; a bare rank is accepted too."""
        root = 0 if opts is None else opts if isinstance(opts, int) else int(opts.rootRank)
        if not 0 <= root < self._pending.max_group_size:
            raise ValueError(
                f"{call}: the group has no such rank: root={root}, "
                f"max_group_size={self._pending.max_group_size}"
            )
        return root

    def _part_count(
        self, whole: torch.Tensor, part: torch.Tensor, whole_name: str, part_name: str
    ) -> int:
        """Return into how many parts a tensor falls.

        The number may differ from that of ranks: after a rank was lost at the end of the group, the
        survivors pass tensors for the smaller group. The operation fails if a rank that takes part
        in it has no part.
        """
        most, length, each = self._pending.max_group_size, whole.numel(), part.numel()
        if each:
            count, rest = divmod(length, each)
            if not rest and 0 < count <= most:
                return int(count)
        elif not length:
            return most
        size = int(self._native_group().size())
        raise ValueError(
            f"{whole_name} must have the elements of {part_name} for each rank: "
            f"elements={length}, expected={each} x {size}"
        )

    def _await_overlapping(self, tensors: Tensors) -> None:
        """Wait for earlier results in memory of these tensors, if an operation moves a copy.

        A copy is made when an operation is called, and written back when it has ended. Tensors that
        are their own memory are read and written in the order of calls.
        """
        self._pending.await_overlapping(uses_of(tensors))

    def _begin(self, operation: str, *arguments: Any) -> Any:
        """Begin an operation of the native group, and return its completion.

        Raises:
            DistBackendError: This rank is no member of the group any more, or the group is closed.
        """
        begin = getattr(self._native_group(), operation)
        try:
            return begin(*arguments)
        except MooncakeError as error:
            raise dist.DistBackendError(str(error)) from error

    def _message(
        self,
        completion: Any,
        memory: Sequence[HostMemory],
        results: list[torch.Tensor],
        sources: Sequence[HostMemory] = (),
    ) -> MooncakeWork:
        """Return the work of a message."""
        limit_us = process_settings.p2p_timeout_us
        timeout_s = self._timeout_s if limit_us is None else limit_us / 1e6
        work = MooncakeWork(
            completion, memory, sources, results, timeout_s, self._pending, is_ordered=False
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _begun(
        self,
        completion: Any,
        memory: Sequence[HostMemory],
        results: list[torch.Tensor],
        opts: Any,
        sources: Sequence[HostMemory] = (),
    ) -> MooncakeWork:
        """Return the work of an operation that writes `memory` and reads `sources`."""
        # Before torch 2.8, the options do not say whether the caller waits at once.
        is_awaited = not getattr(opts, "asyncOp", True)
        if not is_awaited:
            completion.start()
        timeout_s = self._timeout_s if opts is None else _timeout(opts, self._timeout_s)
        coalesced = self._coalesced
        if coalesced is not None:
            is_awaited = False
        work = MooncakeWork(
            completion, memory, sources, results, timeout_s, self._pending, True, is_awaited
        )
        if coalesced is not None:
            coalesced.append(work)
        return work

    def _together(self, works: list[MooncakeWork]) -> Any:
        return works[0] if len(works) == 1 else CombinedWork(works)


def _single(tensors: Any, call: str) -> torch.Tensor:
    """Return the one tensor of a list; a bare tensor is accepted too."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{call} takes one tensor per call: given={len(tensors)}")
    tensor: torch.Tensor = tensors[0]
    return tensor


def _single_list(lists: Any, call: str) -> Tensors:
    """Return the one list of a list of lists; a bare list of tensors is accepted too."""
    if lists and isinstance(lists[0], torch.Tensor):
        bare: Tensors = lists
        return bare
    if len(lists) != 1:
        raise ValueError(f"{call} takes one list of tensors per call: given={len(lists)}")
    inner: Tensors = lists[0]
    return inner


def _operation(opts: Any) -> Any:
    """Return the reduction of torch's options; a bare reduction is accepted too."""
    return dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def _tag(tag: int) -> int:
    if not -(1 << 31) <= tag < 1 << 32:
        raise ValueError(f"a tag has 32 bits: tag={tag}")
    return tag & 0xFFFF_FFFF


def _timeout(opts: Any, default_s: float) -> float:
    """Return the time limit of torch's options; a negative one stands for the group's."""
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


def _split(
    tensor: torch.Tensor,
    memory: HostMemory,
    sizes: Sequence[int],
    counts: tuple[int, int],
    side: str,
) -> tuple[list[int], list[int]]:
    """Return address and length of each rank's rows."""
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
