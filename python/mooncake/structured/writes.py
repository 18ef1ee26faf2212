"""Puts of many objects, with the fastest calls that a store has for each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeAlias

from mooncake.structured.bundle_store import BATCH_KEYS_MAX, Objects, check_codes
from mooncake.structured.payloads import Payload
from mooncake.structured.policy import (
    AUTO_PARALLEL_MIN_BYTES,
    AUTO_PARALLEL_MIN_CHUNKS,
    WriteOptions,
)

__all__ = ["Form", "ObjectPut", "Writes"]

Form: TypeAlias = Literal["meta", "data", "tensor", "memory"]
"""What an object is: of the bundle itself, an array or bytes, a tensor, or memory of the caller."""


class ObjectPut(NamedTuple):
    """An object to put.

    Attributes:
        key: Its key.
        payload: Its bytes.
        form: What it is.
        tensor: The tensor, for stores that take tensors; None for any other object.
    """

    key: str
    payload: Payload
    form: Form = "meta"
    tensor: Any = None


class Writes:
    """The puts of one call."""

    def __init__(self, objects: Objects, pool: Any, options: WriteOptions) -> None:
        """Put with some options.

        Args:
            objects: Objects of the store.
            pool: Pool of the caller that lends memory to stores that read none but its; or None.
            options: Options of the puts.
        """
        self._objects = objects
        self._pool: Any = None if objects.is_native else pool
        self._options = options
        self._tensor_call = self._find_tensor_call()
        # By the number of keys: making one takes as long as a put into a store in memory.
        self._configs: dict[int, dict[str, Any]] = {}

    @property
    def takes_tensors(self) -> bool:
        """True if the store will have tensors under the keys of tensors, not just bytes."""
        is_copied = self._options.policy.copy_mode == "copy"
        return self._tensor_call is not None or (self._objects.is_native and not is_copied)

    def check_config(self) -> None:
        """Check that the configuration of the caller can be used.

        Raises:
            TypeError: It needs a group, but can neither be copied nor made anew.
        """
        self._config(1)

    def put(self, objects: Sequence[ObjectPut]) -> None:
        """Put objects, in their order.

        Raises:
            RuntimeError: An object could not be stored; others may be stored.
        """
        batch: list[ObjectPut] = []
        for each in objects:
            # A batch refuses empty memory, which `put_from` takes.
            is_single = each.form == "memory" and not each.payload.nbytes
            if not self._objects.is_native:
                is_single = each.form == "memory" or (
                    each.form == "tensor" and self._tensor_call is not None
                )
            if not is_single:
                batch.append(each)
                continue
            self._put_batch(batch)
            batch = []
            if each.form == "memory":
                self._put_memory(each)
            elif self._tensor_call is not None:
                self._put_tensor(each, self._tensor_call)
        self._put_batch(batch)

    def _put_batch(self, objects: Sequence[ObjectPut]) -> None:
        put = self._putter()
        policy = self._options.policy
        if policy.max_inflight_put == 1 or len(objects) < 2 or not self._is_parallel(objects):
            for at in range(0, len(objects), BATCH_KEYS_MAX):
                put(objects[at : at + BATCH_KEYS_MAX])
            return
        count = min(policy.max_inflight_put, len(objects))
        # Neighbouring chunks go to different threads, so that each has about the same bytes.
        shares = [objects[first::count] for first in range(count)]
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(put, shares))

    def _is_parallel(self, objects: Sequence[ObjectPut]) -> bool:
        mode = self._options.policy.put_mode
        return mode == "parallel" or (
            mode == "auto"
            and len(objects) >= AUTO_PARALLEL_MIN_CHUNKS
            and sum(each.payload.nbytes for each in objects) >= AUTO_PARALLEL_MIN_BYTES
        )

    def _putter(self) -> Callable[[Sequence[ObjectPut]], None]:
        """Return the function that puts a batch with the fastest call of the store."""
        if self._options.policy.copy_mode == "copy":
            return self._put_copies
        if self._objects.is_native:
            return self._put_in_place
        return self._put_copies if self._pool is None else self._put_staged

    def _put_in_place(self, objects: Sequence[ObjectPut]) -> None:
        keys = [each.key for each in objects]
        addresses = [each.payload.addresses for each in objects]
        sizes = [each.payload.sizes for each in objects]
        store: Any = self._objects.store
        codes = store.batch_put_from_multi_buffers(
            keys, addresses, sizes, **self._config(len(keys))
        )
        check_codes("batch_put_from_multi_buffers", keys, [0] * len(keys), codes)

    def _put_copies(self, objects: Sequence[ObjectPut]) -> None:
        store = self._objects.store
        for each in objects:
            if each.form == "memory":
                self._put_in_place([each])
                continue
            code = store.put(each.key, each.payload.tobytes(), **self._config(1))
            _check("put", each.key, code)

    def _put_staged(self, objects: Sequence[ObjectPut]) -> None:
        """Put copies that lie in memory of the caller's pool, which the store reads in place."""
        many, one = self._objects.call("batch_put_from"), self._objects.call("put_from")
        for each in objects:
            size = each.payload.nbytes
            if each.form == "meta" or not size or (many is None and one is None):
                self._put_copies([each])
                continue
            try:
                lease = self._pool.acquire(size)
            except RuntimeError:  # the pool is exhausted
                self._put_copies([each])
                continue
            try:
                data = each.payload.tobytes()
                ctypes.memmove(lease.ptr, data, size)
                if many is not None:
                    codes = many([each.key], [lease.ptr], [size], **self._config(1))
                    check_codes("batch_put_from", [each.key], [0], codes)
                elif one is not None:
                    code = one(each.key, lease.ptr, size, **self._config(1))
                    _check("put_from", each.key, code)
            finally:
                lease.release()

    def _put_memory(self, each: ObjectPut) -> None:
        """Put memory that the caller has registered."""
        config = self._config(1)
        put = None if config else self._objects.call("put_tensor_from")
        call = "put_from" if put is None else "put_tensor_from"
        put = put or self._objects.call("put_from")
        if put is None:
            raise RuntimeError(
                "put_from is unavailable: the store cannot store memory of tensor_object_buffer"
            )
        (address,) = each.payload.addresses or (0,)
        _check(call, each.key, put(each.key, address, each.payload.nbytes, **config))

    def _put_tensor(self, each: ObjectPut, put: Callable[..., Any]) -> None:
        config = self._config(1)
        call = "pub_tensor" if config else "put_tensor"
        _check(call, each.key, put(each.key, each.tensor, **config))

    def _find_tensor_call(self) -> Callable[..., Any] | None:
        """Return the call that another store has for tensors."""
        options = self._options
        if self._objects.is_native or options.policy.copy_mode == "copy":
            return None
        is_default = options.config is None and options.group_ids is None
        return self._objects.call("put_tensor" if is_default else "pub_tensor")

    def _config(self, key_count: int) -> dict[str, Any]:
        found = self._configs.get(key_count)
        if found is None:
            config = self._options.config_for(key_count)
            found = {} if config is None else {"config": config}
            self._configs[key_count] = found
        return found


def _check(call: str, key: str, code: Any) -> None:
    if code not in (None, 0):
        raise RuntimeError(f"{call} failed for {key}: {code}")
