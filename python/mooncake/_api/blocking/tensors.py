"""Tensors and arrays: the methods of stores, over operations on tensors."""

# Generated from asynchronous/tensors.py by scripts/generate_blocking_api.py; do not edit.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mooncake._api.native_calls import Native
from mooncake._api.outcomes import all_of, only
from mooncake._api.types import Key
from mooncake._api.values import Seconds, encoded, key_list, with_terms
from mooncake._hints import np, torch
from mooncake._runtime import PutOptions
from mooncake.errors import NotFoundError
from mooncake.tensor.calls import run
from mooncake.tensor.info import Info, describe
from mooncake.tensor.layout import Layout, Shard
from mooncake.tensor.read import Arrays, Request, Tensors, read
from mooncake.tensor.requests import Items, Targets, item, item_list, request_list
from mooncake.tensor.write import remove, write

__all__ = ["TensorCalls"]


class TensorCalls:
    """The methods of `Store` for tensors and arrays."""

    __slots__ = ()

    _native: Native

    def put_tensor(  # noqa: PLR0913 (a public signature)
        self,
        key: Key,
        tensor: torch.Tensor,
        *,
        layout: Layout | Shard | None = None,
        shape: Sequence[int] | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        if_version: int | None = None,
        generation: str | None = None,
        timeout_s: float | None = None,
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
                Readers get the old version or the new one, never a mixture.
            options: Number of copies, pins, placement.
            ttl_s: Time after which the objects are removed; None: never.
            tags: Text stored beside each object.
            if_version: Replace the tensor only if it has this version, which `info` returns. Only
                for a tensor that is stored whole: shards have versions of their own.
            generation: Name of the version of the tensor, the same at all ranks that put a `Shard`
                of it, such as the step of a training. Shards of different generations are never
                read as one tensor. Without it, a shard that a rank replaces counts beside the
                others at once.
            timeout_s: Longest duration of the call; None uses the limits of the configuration.

        Returns:
            True if the tensor, or at least one shard that was missing, was stored; false if all of
            it existed and was kept, or did not have the version `if_version`.

        Raises:
            TypeError: The value is not a tensor, or of a kind that cannot be stored.
            InvalidArgumentError: The tensor does not have the dimension of the layout, or is not
                that shard of a tensor of `shape`; or there is a layout and `if_version`.
            AlreadyExistsError: The tensor is stored in another layout, and not overwritten. The
                context of the error has both layouts, `stored` and `given`.
            NotReadyError: The shards that would be completed are of different versions, or of
                another one than `generation`.
            NoSpaceError: No segment has enough free space, and nothing may be evicted.

        Example:
            >>> store.put_tensor("w", torch.eye(4), layout=Layout(2, dim=0))
            True
            >>> store.get_tensor("w", target=Shard.tp(1, 4, dim=1)).shape
            torch.Size([4, 1])
        """
        given = item(key, tensor, layout, shape)
        options = with_terms(options, ttl_s=ttl_s, tags=tags, if_version=if_version)
        operation = write([given], options, overwrite=overwrite, generation=generation)
        return only(run(self._native, operation, timeout_s))

    def put_tensors(  # noqa: PLR0913 (a public signature)
        self,
        items: Items,
        *,
        prefix: Key = "",
        layout: Layout | Shard | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        generation: str | None = None,
        timeout_s: float | None = None,
    ) -> list[bool]:
        """Put many tensors in one batch.

        Args:
            items: Keys and tensors, such as a flat state dict.
            prefix: Text in front of each key, for instance ``"weights/"``.
            layout: Layout or shard of all tensors, as for `put_tensor`.
            overwrite: Replace existing objects; otherwise they are kept.
            options: Number of copies, pins, placement; its groups and versions are one for each
                tensor.
            ttl_s: Time after which the objects are removed; None: never.
            tags: Text stored beside each object.
            generation: Name of the version of all tensors, as for `put_tensor`.
            timeout_s: Longest duration of the call.

        Returns:
            For each tensor in order the result of `put_tensor`.

        Raises:
            MooncakeError: The first failure, after every tensor was tried.
        """
        options = with_terms(options, ttl_s=ttl_s, tags=tags)
        given = item_list(items, layout, prefix)
        operation = write(given, options, overwrite=overwrite, generation=generation)
        return all_of(run(self._native, operation, timeout_s))

    def get_tensor(
        self,
        key: Key,
        *,
        target: Shard | None = None,
        rows: slice | None = None,
        out: torch.Tensor | None = None,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Get a tensor or a shard of it, in whichever layout it is stored.

        Only the bytes of the wanted part are transferred, straight into the memory of the result.

        Args:
            key: Key of the tensor.
            target: The shard to get, which need not be one that was put; None gets the whole
                tensor.
            rows: The part of its first dimension to get, as in ``tensor[rows]``; without a step.
            out: Contiguous tensor of the right dtype and shape to fill; None makes a new one.
            timeout_s: Longest duration of the call; None uses the limits of the configuration.

        Raises:
            NotFoundError: The tensor, or a shard that is needed, does not exist; the message names
                the missing objects. Also a `KeyError`.
            InvalidArgumentError: The object is not a tensor, or `target`, `rows` or `out` does not
                fit.
            NotReadyError: The stored shards are of different versions, and the writer that replaces
                them did not end within the time.
        """
        requests = [Request(encoded(key), target, out, rows)]
        return only(run(self._native, read(requests, Tensors()), timeout_s))

    def get_tensors(
        self,
        keys: Iterable[Key],
        *,
        target: Targets = None,
        out: Sequence[torch.Tensor | None] | None = None,
        timeout_s: float | None = None,
    ) -> list[torch.Tensor]:
        """Get many tensors in one batch.

        Args:
            keys: Keys of the tensors.
            target: The shard to get of every tensor, or one for each.
            out: Tensors to fill, one for each key.
            timeout_s: Longest duration of the call.

        Raises:
            MooncakeError: The first failure.
        """
        operation = read(request_list(keys, target, out), Tensors())
        return all_of(run(self._native, operation, timeout_s))

    def put_array(  # noqa: PLR0913 (a public signature)
        self,
        key: Key,
        array: np.ndarray[Any, Any],
        *,
        layout: Layout | Shard | None = None,
        shape: Sequence[int] | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        if_version: int | None = None,
        generation: str | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Put a numpy array; the arguments and results are those of `put_tensor`.

        Tensors and arrays of the same dtype are stored alike: one can be got as the other. Arrays
        of dtypes that torch lacks (structures, text of fixed length, dates) are stored whole.
        """
        given = item(key, array, layout, shape)
        options = with_terms(options, ttl_s=ttl_s, tags=tags, if_version=if_version)
        operation = write([given], options, overwrite=overwrite, generation=generation)
        return only(run(self._native, operation, timeout_s))

    def get_array(
        self,
        key: Key,
        *,
        target: Shard | None = None,
        rows: slice | None = None,
        out: np.ndarray[Any, Any] | None = None,
        timeout_s: float | None = None,
    ) -> np.ndarray[Any, Any]:
        """Get a numpy array, a shard of it or some of its rows; the arguments of `get_tensor`.

        Dtypes that numpy lacks, for instance bfloat16, need the package ml_dtypes.

        Example:
            >>> store.put_array("table", np.arange(12).reshape(6, 2))
            True
            >>> store.get_array("table", rows=slice(1, 3))
            array([[2, 3],
                   [4, 5]])
        """
        requests = [Request(encoded(key), target, out, rows)]
        operation = read(requests, Arrays())
        array: np.ndarray[Any, Any] = only(run(self._native, operation, timeout_s))
        return array

    def delete_tensor(
        self, key: Key, *, force: bool = False, timeout_s: float | None = None
    ) -> None:
        """Remove a tensor with all of its shards.

        Args:
            key: Key of the tensor.
            force: Remove it even if a client holds a lease on it.
            timeout_s: Longest duration of the call.

        Raises:
            NotFoundError: Neither the tensor nor shards of it exist.
            BusyError: An object is leased.
        """
        run(self._native, remove(encoded(key), force=force), timeout_s)

    def info(self, key: Key, *, timeout_s: float | None = None) -> Info:
        """Return length, version, expiry and tags of an object, and what tensor it is.

        For a tensor that is stored in shards the key is the one that it was put under; each shard
        also has a key of its own, with a version and tags of its own. No object is leased.

        Args:
            key: Key of the object or of the tensor.
            timeout_s: Longest duration of the call; None uses the limits of the configuration.

        Raises:
            NotFoundError: Neither the object nor shards of a tensor exist.
            InvalidArgumentError: Shards are stored that do not make up one tensor.

        Example:
            >>> store.put_tensor("w", torch.zeros(8, 3), layout=Layout(4))
            True
            >>> store.info("w").tensor.layout
            '4 shards along dimension 0'
        """
        return only(run(self._native, describe([encoded(key)]), timeout_s))

    def info_many(
        self, keys: Iterable[Key], *, timeout_s: float | None = None
    ) -> list[Info | None]:
        """Do what `info` does for many keys in one batch; None for a key that does not exist.

        Args:
            keys: Keys of the objects or tensors.
            timeout_s: Longest duration of the call.

        Raises:
            MooncakeError: The first failure other than a missing object.
        """
        operation = describe([encoded(key) for key in key_list(keys)])
        found = run(self._native, operation, timeout_s)
        return all_of([None if isinstance(each, NotFoundError) else each for each in found])
