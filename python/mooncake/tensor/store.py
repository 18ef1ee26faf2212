"""Tensors and arrays in `Store` and `AsyncStore`: the methods, over operations shared by both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mooncake._values import encoded, key_list
from mooncake.tensor.calls import Operation, run, run_async
from mooncake.tensor.info import Info, describe
from mooncake.tensor.read import Arrays, Request, Tensors, read
from mooncake.tensor.write import Item, remove, write

if TYPE_CHECKING:
    import numpy as np
    import torch

    from mooncake._runtime import PutOptions, _native
    from mooncake.tensor.layout import Layout, Shard

__all__ = ["AsyncTensorCalls", "TensorCalls"]

T = TypeVar("T")
Key: TypeAlias = str | bytes
Items: TypeAlias = Mapping[Key, Any] | Iterable[tuple[Key, Any]]
Targets: TypeAlias = "Shard | Sequence[Shard | None] | None"


class TensorCalls:
    """The methods of `Store` for tensors and arrays."""

    __slots__ = ()

    _native: _native.Store

    def put_tensor(
        self,
        key: Key,
        tensor: torch.Tensor,
        *,
        layout: Layout | Shard | None = None,
        shape: Sequence[int] | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> bool:
        """Put a tensor of torch, with its dtype and shape.

        Args:
            key: Key of the tensor.
            tensor: Any dense or jagged tensor. Its memory is read in place if it is contiguous.
            layout: None stores the tensor as one object. A `Layout` splits it and stores every
                shard. With a `Shard` the tensor is that shard, and only it is stored: each rank
                puts its own.
            shape: Shape of the whole tensor, for a `Shard`; needed only if the ranks have shards of
                different shapes.
            overwrite: Replace existing objects; otherwise they are kept. A tensor that is put whole
                or with a `Layout` also replaces what is stored under the key in another layout.
            options: Number of copies, pins, placement.

        Returns:
            True if the tensor, or at least one shard that was missing, was stored; false if all of
            it existed and was kept.

        Raises:
            TypeError: The value is not a tensor, or of a kind that cannot be stored.
            InvalidArgumentError: The tensor does not have the dimension of the layout, or is not
                that shard of a tensor of `shape`.
            NoSpaceError: No segment has enough free space, and nothing may be evicted.

        Example:
            >>> store.put_tensor("w", torch.eye(4), layout=Layout(2, dim=0))
            True
            >>> store.get_tensor("w", target=Shard.tp(1, 4, dim=1)).shape
            torch.Size([4, 1])
        """
        item = _item(key, tensor, layout, shape)
        return _only(run(self._native, write([item], options, overwrite=overwrite)))

    def put_tensors(
        self,
        items: Items,
        *,
        layout: Layout | Shard | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> list[bool]:
        """Put many tensors in one batch.

        Args:
            items: Keys and tensors.
            layout: Layout or shard of all tensors, as for `put_tensor`.
            overwrite: Replace existing objects; otherwise they are kept.
            options: Number of copies, pins, placement; its groups are one for each tensor.

        Returns:
            For each tensor in order the result of `put_tensor`.

        Raises:
            MooncakeError: The first failure, after every tensor was tried.
        """
        batch = _items(items, layout)
        return _all(run(self._native, write(batch, options, overwrite=overwrite)))

    def get_tensor(
        self, key: Key, *, target: Shard | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Get a tensor or a shard of it, in whichever layout it is stored.

        Only the bytes of the wanted part are transferred, straight into the memory of the result.

        Args:
            key: Key of the tensor.
            target: The shard to get, which need not be one that was put; None gets the whole
                tensor.
            out: Contiguous tensor of the right dtype and shape to fill; None makes a new one.

        Raises:
            NotFoundError: The tensor, or a shard that is needed, does not exist; the message names
                the missing objects. Also a `KeyError`.
            InvalidArgumentError: The object is not a tensor, or `target` or `out` does not fit.
        """
        requests = [Request(encoded(key), target, out)]
        return _only(run(self._native, read(requests, Tensors())))

    def get_tensors(
        self,
        keys: Iterable[Key],
        *,
        target: Targets = None,
        out: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor]:
        """Get many tensors in one batch.

        Args:
            keys: Keys of the tensors.
            target: The shard to get of every tensor, or one for each.
            out: Tensors to fill, one for each key.

        Raises:
            MooncakeError: The first failure.
        """
        return _all(run(self._native, read(_requests(keys, target, out), Tensors())))

    def put_array(
        self,
        key: Key,
        array: np.ndarray[Any, Any],
        *,
        layout: Layout | Shard | None = None,
        shape: Sequence[int] | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> bool:
        """Put a numpy array; the arguments and results are those of `put_tensor`.

        Tensors and arrays of the same dtype are stored alike: one can be got as the other. Arrays
        of dtypes that torch lacks (structures, text of fixed length, dates) are stored whole.
        """
        item = _item(key, array, layout, shape)
        return _only(run(self._native, write([item], options, overwrite=overwrite)))

    def get_array(
        self, key: Key, *, target: Shard | None = None, out: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Get a numpy array or a shard of it; the arguments are those of `get_tensor`.

        Dtypes that numpy lacks, for instance bfloat16, need the package ml_dtypes.
        """
        requests = [Request(encoded(key), target, out)]
        array: np.ndarray[Any, Any] = _only(run(self._native, read(requests, Arrays())))
        return array

    def delete_tensor(self, key: Key, *, force: bool = False) -> None:
        """Remove a tensor with all of its shards.

        Args:
            key: Key of the tensor.
            force: Remove it even if it was read recently and is still leased.

        Raises:
            NotFoundError: Neither the tensor nor shards of it exist.
            BusyError: An object is leased by a recent read.
        """
        run(self._native, remove(encoded(key), force=force))

    def info(self, key: Key) -> Info:
        """Return the length of an object and, if it is a tensor, its dtype, shape and layout.

        For a tensor that is stored in shards the key is the one that it was put under; each shard
        also has a key of its own.

        Raises:
            NotFoundError: Neither the object nor shards of a tensor exist.
            InvalidArgumentError: Shards are stored that do not make up one tensor.

        Example:
            >>> store.put_tensor("w", torch.zeros(8, 3), layout=Layout(4))
            True
            >>> store.info("w").tensor.layout
            '4 shards along dimension 0'
        """
        return run(self._native, describe(encoded(key)))


class AsyncTensorCalls:
    """The methods of `AsyncStore` for tensors and arrays, as coroutines."""

    __slots__ = ()

    _call: Callable[[Callable[[_native.Pending], int]], Awaitable[Any]]

    async def put_tensor(
        self,
        key: Key,
        tensor: torch.Tensor,
        *,
        layout: Layout | Shard | None = None,
        shape: Sequence[int] | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> bool:
        """Put a tensor of torch; see `Store.put_tensor`. It must not change during the call."""
        item = _item(key, tensor, layout, shape)
        return _only(await self._run(write([item], options, overwrite=overwrite)))

    async def put_tensors(
        self,
        items: Items,
        *,
        layout: Layout | Shard | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> list[bool]:
        """Put many tensors in one batch; see `Store.put_tensors`."""
        batch = _items(items, layout)
        return _all(await self._run(write(batch, options, overwrite=overwrite)))

    async def get_tensor(
        self, key: Key, *, target: Shard | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Get a tensor or a shard of it; see `Store.get_tensor`.

        After a cancellation `out` may still be written until the transfer has ended.
        """
        return _only(await self._run(read([Request(encoded(key), target, out)], Tensors())))

    async def get_tensors(
        self,
        keys: Iterable[Key],
        *,
        target: Targets = None,
        out: Sequence[torch.Tensor | None] | None = None,
    ) -> list[torch.Tensor]:
        """Get many tensors in one batch; see `Store.get_tensors`."""
        return _all(await self._run(read(_requests(keys, target, out), Tensors())))

    async def put_array(
        self,
        key: Key,
        array: np.ndarray[Any, Any],
        *,
        layout: Layout | Shard | None = None,
        shape: Sequence[int] | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
    ) -> bool:
        """Put a numpy array; see `Store.put_array`. It must not change during the call."""
        item = _item(key, array, layout, shape)
        return _only(await self._run(write([item], options, overwrite=overwrite)))

    async def get_array(
        self, key: Key, *, target: Shard | None = None, out: np.ndarray[Any, Any] | None = None
    ) -> np.ndarray[Any, Any]:
        """Get a numpy array or a shard of it; see `Store.get_array`."""
        requests = [Request(encoded(key), target, out)]
        array: np.ndarray[Any, Any] = _only(await self._run(read(requests, Arrays())))
        return array

    async def delete_tensor(self, key: Key, *, force: bool = False) -> None:
        """Remove a tensor with all of its shards; see `Store.delete_tensor`."""
        await self._run(remove(encoded(key), force=force))

    async def info(self, key: Key) -> Info:
        """Return what is stored under a key; see `Store.info`."""
        return await self._run(describe(encoded(key)))

    def _run(self, operation: Operation[T]) -> Awaitable[T]:
        return run_async(self._call, operation)


def _item(key: Key, value: Any, layout: Layout | Shard | None, shape: Sequence[int] | None) -> Item:
    return Item(encoded(key), value, layout, None if shape is None else tuple(shape))


def _items(items: Items, layout: Layout | Shard | None) -> list[Item]:
    pairs = items.items() if isinstance(items, Mapping) else items
    return [Item(encoded(key), value, layout) for key, value in pairs]


def _requests(keys: Iterable[Key], target: Targets, out: Sequence[Any] | None) -> list[Request]:
    wanted = key_list(keys)
    targets = list(target) if isinstance(target, Sequence) else [target] * len(wanted)
    outs = [None] * len(wanted) if out is None else list(out)
    for name, given in (("target", targets), ("out", outs)):
        if len(given) != len(wanted):
            raise ValueError(f"the lists differ in length keys={len(wanted)} {name}={len(given)}")
    return [
        Request(encoded(key), shard, into)
        for key, shard, into in zip(wanted, targets, outs, strict=True)
    ]


def _only(outcomes: Sequence[T | Exception]) -> T:
    outcome = outcomes[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _all(outcomes: Sequence[T | Exception]) -> list[T]:
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if failures:
        failures[0].add_note(f"{len(failures)} of {len(outcomes)} items failed")
        raise failures[0]
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
