"""Tensors with axes of parallelism: upstream's calls over the operations of `mooncake.tensor`."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from mooncake._api.values import encoded
from mooncake._hints import torch
from mooncake._runtime import _native
from mooncake._variants import variants
from mooncake.errors import MooncakeError
from mooncake.store.batch import Key, as_codes, check_lists, have_same_length, invalid_argument
from mooncake.store.codes import INVALID_PARAMS
from mooncake.store.config import ReplicateConfig, put_options
from mooncake.store.tensors.axes import shard_of, target_of, writer_of
from mooncake.store.tensors.base import TensorBase, read_metadata, tensor_memory
from mooncake.tensor import memory
from mooncake.tensor.calls import Operation, ReadGrids, run
from mooncake.tensor.dtypes import load_torch
from mooncake.tensor.format import METADATA_BYTES, FormatError, TensorMetadata, shard_key
from mooncake.tensor.inventory import find, find_stored, records
from mooncake.tensor.layout import Layout, Shard
from mooncake.tensor.read import Request, Tensors, read, without_metadata
from mooncake.tensor.retries import Failure, Retries
from mooncake.tensor.search import Found, Search, State, Unsettled, find_all
from mooncake.tensor.transfer import Job, fill
from mooncake.tensor.write import Item, write

__all__ = ["ParallelTensorCalls"]


class ParallelTensorCalls(TensorBase):
    """Puts and gets of tensors that are split or replicated over ranks."""

    __slots__ = ()

    # Writes

    def _put_shard(
        self,
        is_upsert: bool,
        key: Key,
        tensor: torch.Tensor,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store a tensor or one shard of it{an existing object}.

        Args:
            key: Key of the tensor.
            tensor: With a single ``tp`` axis, or without one, the shard itself. With ``tp`` and
                other axes, and with a writer partition, the whole tensor, of which only the named
                shard is stored.
            parallelism: A `TensorParallelism`, or None to store the tensor whole.
            config: Number of copies, pins and placement.
            writer_partition: An object with the attributes rank, size and split_dim, as a short
                form for the shard of one of several writers; only without a parallelism.

        Returns:
            0, or a negative number: -600 if the axes are invalid, or do not divide the tensor.
        """
        lists = ([tensor], [parallelism], [writer_partition])
        return self._put_parallel([key], *lists, config, is_upsert=is_upsert)[0]

    put_tensor_with_parallelism, upsert_tensor_with_parallelism = variants(
        _put_shard, "put_tensor_with_parallelism", "upsert_tensor_with_parallelism"
    )

    def _put_tensor_shards(
        self,
        is_upsert: bool,
        keys: Sequence[Key],
        tensors_list: Sequence[torch.Tensor],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Store many tensors or shards in one batch{existing objects}.

        Args:
            keys: Keys of the tensors.
            tensors_list: A tensor for each key, as for `put_tensor_with_parallelism`; also named
                ``tensors``.
            parallelisms: For each key a `TensorParallelism` or None.
            config: Number of copies, pins and placement; its groups are one for each tensor.
            writer_partitions: For each key a writer partition or None.

        Returns:
            For each key 0 or a negative number; -600 for all if the lists differ in length.
        """
        lists = (tensors_list, parallelisms, writer_partitions)
        return self._put_parallel(keys, *lists, config, is_upsert=is_upsert)

    batch_put_tensor_with_parallelism, batch_upsert_tensor_with_parallelism = variants(
        _put_tensor_shards,
        "batch_put_tensor_with_parallelism",
        "batch_upsert_tensor_with_parallelism",
        tensors="tensors_list",
    )

    def _put_shard_from(
        self,
        is_upsert: bool,
        key: Key,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store a serialized whole tensor from memory, or shards of it{existing objects}.

        Args:
            key: Key of the tensor.
            buffer_ptr: Address of the metadata, which the elements follow.
            size: Length of both together.
            parallelism: A `TensorParallelism`, or None. With a single ``tp`` axis the shards of all
                ranks are stored, else only the named one.
            config: Number of copies, pins and placement.
            writer_partition: As for `put_tensor_with_parallelism`.

        Returns:
            0, or a negative number: -600 if the memory does not hold a tensor of exactly that
            length.
        """
        lists = ([buffer_ptr], [size], [parallelism], [writer_partition])
        return self._put_parallel_from([key], *lists, config, is_upsert=is_upsert)[0]

    put_tensor_with_parallelism_from, upsert_tensor_with_parallelism_from = variants(
        _put_shard_from, "put_tensor_with_parallelism_from", "upsert_tensor_with_parallelism_from"
    )

    def _put_tensor_shards_from(
        self,
        is_upsert: bool,
        keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        """Store many serialized whole tensors from memory, or shards of them{existing objects}.

        Args:
            keys: Keys of the tensors.
            buffer_ptrs: Address of each serialized tensor.
            sizes: Length of each serialized tensor.
            parallelisms: For each key a `TensorParallelism` or None.
            config: Number of copies, pins and placement; its groups are one for each tensor.
            writer_partitions: For each key a writer partition or None.

        Returns:
            For each key 0 or a negative number; -600 for all if the lists differ in length.
        """
        lists = (buffer_ptrs, sizes, parallelisms, writer_partitions)
        return self._put_parallel_from(keys, *lists, config, is_upsert=is_upsert)

    batch_put_tensor_with_parallelism_from, batch_upsert_tensor_with_parallelism_from = variants(
        _put_tensor_shards_from,
        "batch_put_tensor_with_parallelism_from",
        "batch_upsert_tensor_with_parallelism_from",
    )

    # Reads

    def get_tensor_with_parallelism(self, key: Key, target: Any = None) -> torch.Tensor | None:
        """Return a tensor as it is stored, whole, or any shard of it; None if that cannot be.

        Shards are made from whatever is stored: the whole tensor, shards of any number and
        dimension, or parts of writers.

        Args:
            key: Key of the tensor.
            target: A `ReadTarget`; None returns the object of that key.

        Raises:
            ImportError: torch is not installed.
        """
        return self.batch_get_tensor_with_parallelism([key], [target])[0]

    def batch_get_tensor_with_parallelism(
        self, keys: Sequence[Key], targets: Any = None
    ) -> list[torch.Tensor | None]:
        """Return many tensors or shards; None for each failure.

        Args:
            keys: Keys of the tensors.
            targets: For each key a `ReadTarget` or None.

        Raises:
            ImportError: torch is not installed.
        """
        check_lists(keys)
        wanted = _targets(keys, targets)
        if wanted is None:
            return [None] * (len(keys) if isinstance(targets, list | tuple) else 1)
        if self._native is None:
            return [None] * len(keys)
        load_torch()
        results: list[torch.Tensor | None] = [None] * len(keys)
        stored = {at: name for at, (mode, name) in wanted.items() if mode == "as_stored"}
        for at, tensor in zip(stored, self._get_tensors([*stored.values()]), strict=True):
            results[at] = tensor
        requests = {
            at: Request(encoded(keys[at]), each)
            for at, (mode, each) in wanted.items()
            if mode != "as_stored"
        }
        got = self._run_batch(
            len(requests), lambda: read([*requests.values()], Tensors(), lease=True)
        )
        for at, value in zip(requests, got, strict=True):
            results[at] = None if isinstance(value, Exception) else value
        return results

    def get_tensor_with_parallelism_into(
        self, key: Key, buffer_ptr: int, size: int, target: Any = None
    ) -> torch.Tensor | None:
        """Read a serialized tensor or shard into memory; return it, sharing that memory.

        Args:
            key: Key of the tensor.
            buffer_ptr: Address of the memory, which must be registered and outlive the tensor.
            size: Length of the memory: at least 304 bytes and the elements.
            target: A `ReadTarget`; None reads the object of that key.

        Returns:
            The tensor; None if there is none, or the memory is too small or not registered.

        Raises:
            ImportError: torch is not installed.
        """
        return self.batch_get_tensor_with_parallelism_into([key], [buffer_ptr], [size], [target])[0]

    def batch_get_tensor_with_parallelism_into(
        self,
        keys: Sequence[Key],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        targets: Any = None,
    ) -> list[torch.Tensor | None]:
        """Read many serialized tensors or shards into memory; None for each failure.

        Args:
            keys: Keys of the tensors.
            buffer_ptrs: Address of the memory for each tensor.
            sizes: Length of the memory for each tensor.
            targets: For each key a `ReadTarget` or None.

        Raises:
            ImportError: torch is not installed.
        """
        check_lists(keys, buffer_ptrs, sizes)
        wanted = _targets(keys, targets)
        if wanted is None:
            return [None] * (len(keys) if isinstance(targets, list | tuple) else 1)
        if self._native is None or not have_same_length(keys, buffer_ptrs, sizes):
            return [None] * len(keys)
        load_torch()
        results: list[torch.Tensor | None] = [None] * len(keys)
        searches: dict[int, tuple[Callable[[], Search], Shard | None]] = {}
        for at, (mode, each) in wanted.items():
            if mode == "as_stored":
                searches[at] = functools.partial(find_stored, encoded(each)), None
            else:
                searches[at] = functools.partial(find, encoded(keys[at]), each), each
        places = [(buffer_ptrs[at], sizes[at]) for at in searches]
        read = self._run_batch(len(places), lambda: _read_into([*searches.values()], places))
        for at, metadata in zip(searches, read, strict=True):
            if isinstance(metadata, TensorMetadata):
                length = metadata.total_bytes
                results[at] = self._tensor_at(keys[at], buffer_ptrs[at], length)
        return results

    # Shared parts

    def _put_parallel(
        self,
        keys: Sequence[Key],
        tensors: Sequence[Any],
        parallelisms: Any,
        partitions: Any,
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
        is_serialized: bool = False,
    ) -> list[int]:
        check_lists(keys, tensors)
        count = len(keys)
        axes, parts = _optional_list(parallelisms, count), _optional_list(partitions, count)
        if axes is None or parts is None or len(tensors) != count:
            invalid_argument(
                f"the lists differ in length or are no lists keys={count} tensors={len(tensors)}"
            )
            return [INVALID_PARAMS] * count
        codes = [INVALID_PARAMS] * count
        items: dict[int, Item] = {}
        for at, (key, tensor) in enumerate(zip(keys, tensors, strict=True)):
            try:
                items[at] = _item(encoded(key), tensor, axes[at], parts[at], is_serialized)
            except (TypeError, ValueError) as error:
                codes[at] = self._refuse(key, str(error))
        if self._native is None:
            return codes
        if len(items) == count or config is None or not config.group_ids:
            written = self._run_batch(
                len(items),
                lambda: write(
                    [*items.values()],
                    put_options(config),
                    overwrite=is_upsert,
                    is_exclusive=False,
                ),
            )
            for at, outcome in zip(items, written, strict=True):
                if isinstance(outcome, TypeError):
                    codes[at] = self._refuse(keys[at], str(outcome))
                else:
                    (codes[at],) = as_codes([outcome])
        return codes

    def _put_parallel_from(
        self,
        keys: Sequence[Key],
        addresses: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any,
        partitions: Any,
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        if self._native is None or not have_same_length(keys, addresses, sizes):
            return [INVALID_PARAMS] * len(keys)
        load_torch()
        tensors = [_serialized_at(*place) for place in zip(addresses, sizes, strict=True)]
        return self._put_parallel(
            keys,
            tensors,
            parallelisms,
            partitions,
            config,
            is_upsert=is_upsert,
            is_serialized=True,
        )

    def _run_batch(self, count: int, operation: Callable[[], Operation[list[Any]]]) -> list[Any]:
        """Carry out an operation on a batch; a failure of the whole counts for each item."""
        if count == 0:
            return []

        def call(native: _native.Store) -> list[Any]:
            return run(native, operation())

        return self._call_batch(count, call)


def _item(key: bytes, tensor: Any, parallelism: Any, partition: Any, is_serialized: bool) -> Item:
    """Return what is to be written.

    Raises:
        TypeError: The value is no tensor.
        ValueError: The axes are invalid, or do not divide the tensor.
    """
    if isinstance(tensor, FormatError):
        raise tensor
    shape = tensor_memory(tensor).shape
    if parallelism is None and partition is None:
        return Item(key, tensor)
    if partition is not None:
        if parallelism is not None:
            raise ValueError("give a parallelism or a writer partition, not both")
        shard = writer_of(partition)
        return Item(key, _own_part(tensor, shape, shard), shard, shape, is_writer=True)
    shard = shard_of(parallelism)
    axis = shard.axis("tp")
    if axis is None or axis.dim is None:
        return Item(key, tensor, shard, has_manifest=False)
    if len(shard.axes) > 1:
        return Item(key, _own_part(tensor, shape, shard), shard, shape)
    if not is_serialized:
        return Item(key, tensor, shard)
    _check_even(shape, shard)
    return Item(key, tensor, Layout(axis.size, axis.dim), has_manifest=False)


def _own_part(tensor: Any, shape: tuple[int, ...], shard: Shard) -> Any:
    _check_even(shape, shard)
    box = shard.box(shape)
    return tensor[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]


def _check_even(shape: tuple[int, ...], shard: Shard) -> None:
    shard.box(shape)
    axis = shard.axis("tp")
    if axis is not None and axis.dim is not None and shape[axis.dim] % axis.size != 0:
        raise ValueError(
            f"the dimension cannot be split evenly split_dim={axis.dim} size={axis.size} "
            f"shape={shape}"
        )


def _serialized_at(address: int, length: int) -> Any:
    """Return the whole tensor that is serialized at an address, or why there is none."""
    try:
        metadata = read_metadata(address, length)
        if metadata.axes:
            raise FormatError("the memory holds a shard, not a whole tensor")
        return memory.restore(memory.at_address(address, length), metadata)
    except FormatError as error:
        return error


def _optional_list(values: Any, count: int) -> list[Any] | None:
    """Return a list with a value or None for each item; None if the lists do not fit."""
    if values is None:
        return [None] * count
    if not isinstance(values, list | tuple) or len(values) != count:
        return None
    return list(values)


def _targets(keys: Sequence[Key], targets: Any) -> dict[int, tuple[str, Any]] | None:
    """Return for each valid target the mode, and the stored key or the wanted shard."""
    given = _optional_list(targets, len(keys))
    if given is None:
        invalid_argument(f"the targets are not a list of one for each key keys={len(keys)}")
        return None
    wanted: dict[int, tuple[str, Any]] = {}
    for at, (key, target) in enumerate(zip(keys, given, strict=True)):
        try:
            mode, shard = target_of(target)
        except ValueError as error:
            invalid_argument(f"{error} key={key!r}")
            continue
        if mode == "as_stored":
            wanted[at] = mode, key if shard is None else shard_key(key, records(shard))
        else:
            wanted[at] = mode, shard if mode == "shard" else _without_split(shard)
    return wanted


def _without_split(shard: Shard | None) -> Shard | None:
    """Return the shard that is the whole tensor of the same replica, expert and stage."""
    others = tuple(axis for axis in shard.axes if axis.kind != "tp") if shard is not None else ()
    return Shard(others) if others else None


def _read_into(
    wanted: Sequence[tuple[Callable[[], Search], Shard | None]],
    places: Sequence[tuple[int, int]],
) -> Operation[list[Any]]:
    """Read tensors into registered memory, behind their metadata; return that or the failures."""
    results: list[TensorMetadata | MooncakeError | None] = [None] * len(wanted)
    retries, pending = Retries(), list(range(len(wanted)))
    while pending:
        found = yield from find_all([wanted[at][0]() for at in pending], lease=True)
        failed: dict[int, Failure] = {}
        jobs: dict[int, tuple[Job, bytes, State]] = {}
        for at, each in zip(pending, found, strict=True):
            if isinstance(each, Unsettled):
                results[at], failed[at] = each.error, Failure.of_search(each)
            elif isinstance(each, MooncakeError):
                results[at] = each
            else:
                metadata, job, head = _job_of(each, wanted[at][1], places[at][0])
                results[at] = metadata
                if job is None or metadata.total_bytes > places[at][1]:
                    results[at] = invalid_argument(
                        f"the memory is too small size={places[at][1]} "
                        f"needed={metadata.total_bytes}"
                    )
                else:
                    jobs[at] = job, head, each.state
        failures = yield from _fill_registered([job for job, *_ in jobs.values()])
        for (at, (_, head, state)), failure in zip(jobs.items(), failures, strict=True):
            if failure is None:
                _native.write_memory(places[at][0], head, METADATA_BYTES)
            else:
                results[at], failed[at] = failure, Failure.of_read(failure, state)
        pending = yield from retries.choose(failed)
    return [retries.explained(at, result) for at, result in enumerate(results)]


def _job_of(
    found: Found, shard: Shard | None, address: int
) -> tuple[TensorMetadata, Job | None, bytes]:
    """Return the metadata of what is read, how to read it to an address, and its first bytes."""
    is_object = found.parts[0].metadata.local_shape == found.wanted.shape and len(found.parts) == 1
    metadata = found.metadata if is_object else _metadata_of(found, shard)
    head = found.parts[0].head if is_object else metadata.encode()
    if address == 0:
        return metadata, None, head
    whole = without_metadata(found) if is_object else found
    return metadata, Job(whole, address + METADATA_BYTES, None), head


def _fill_registered(jobs: Sequence[Job]) -> Operation[list[MooncakeError | None]]:
    """Fill registered memory, in front of which there is registered memory for the metadata."""
    heads = [[(job.address - METADATA_BYTES, 0, METADATA_BYTES, ())] for job in jobs]
    names = [job.found.parts[0].key for job in jobs]
    reserved = yield ReadGrids(names, heads, None, is_registered=True)
    failures = yield from fill(jobs, lease=True, is_registered=True)
    return [
        first if isinstance(first, MooncakeError) else second
        for first, second in zip(reserved, failures, strict=True)
    ]


def _metadata_of(found: Found, shard: Shard | None) -> TensorMetadata:
    """Return the metadata of a shard that was put together."""
    shape = found.wanted.shape
    axis = shard.axis("tp") if shard is not None else None
    extent = 0 if axis is None or axis.dim is None else shape[axis.dim]
    axes = tuple(records(shard, extent)) if shard is not None else ()
    return TensorMetadata(found.metadata.dtype, found.metadata.global_shape, shape, axes)
