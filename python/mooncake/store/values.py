"""Puts and gets of values: a value is a bytes-like object."""
# ruff: noqa: D417 - `variants` takes the decision out of the arguments

from __future__ import annotations

from collections.abc import Sequence

from mooncake._api.buffers import check_value
from mooncake._hints import Readable
from mooncake._runtime import Buffer as BufferHandle, _native
from mooncake._variants import variants
from mooncake.errors import MooncakeError
from mooncake.store.base import StoreBase
from mooncake.store.batch import Key, as_bytes, as_codes, check_lists, contiguous, invalid_argument
from mooncake.store.codes import OK
from mooncake.store.config import ReplicateConfig, put_options

__all__ = ["ValueCalls"]

# Exceptions of the native calls for memory that they cannot read in place.
_UNREADABLE = (BufferError, ValueError)


class ValueCalls(StoreBase):
    """Puts and gets of values."""

    __slots__ = ()

    def put(self, key: Key, value: Readable, config: ReplicateConfig | None = None) -> int:
        """Store bytes under a key. An existing object is kept, which counts as success.

        Args:
            key: Key of the object.
            value: Any object with the buffer protocol, stored whole; copied first only if it is not
                contiguous.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number.
        """
        check_value(value)
        return self._put([key], [value], config, is_upsert=False)[0]

    def upsert(self, key: Key, value: Readable, config: ReplicateConfig | None = None) -> int:
        """Store bytes under a key, replacing an existing object.

        Args:
            key: Key of the object.
            value: Any object with the buffer protocol, stored whole.
            config: Number of copies, pins and placement.

        Returns:
            0, or a negative number; the old object is kept after a failure.
        """
        check_value(value)
        return self._put([key], [value], config, is_upsert=True)[0]

    def _put_all(
        self,
        is_upsert: bool,
        keys: Sequence[Key],
        values: Sequence[Readable],
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store many objects{existing objects}.

        Args:
            keys: Keys of the objects.
            values: One value for each key; none may be empty.
            config: Number of copies, pins and placement.

        Returns:
            0{, also if objects are kept,|} or the first failure.
        """
        check_lists(keys, values)
        if len(keys) != len(values):
            return invalid_argument(
                f"the lists differ in length keys={len(keys)} values={len(values)}"
            ).code

        def call(native: _native.Store) -> tuple[list[int], MooncakeError | None]:
            options = put_options(config)
            try:
                return _native.put_values(native, keys, values, options, is_upsert)
            except MooncakeError:
                raise
            except _UNREADABLE:
                copies = [contiguous(value) for value in values]
                return _native.put_values(native, keys, copies, options, is_upsert)

        try:
            codes = self._call_codes(len(keys), call)
        except _native.ObjectItemsError as error:
            return invalid_argument(str(error)).code
        return next((code for code in codes if code != OK), OK)

    put_batch, upsert_batch = variants(_put_all, "put_batch", "upsert_batch")

    def _put_parts(
        self, is_upsert: bool, key: Key, *parts: Readable, config: ReplicateConfig | None = None
    ) -> int:
        """Store the concatenation of parts under a key{|, replacing an existing object}.

        Args:
            key: Key of the object.
            parts: One-dimensional bytes-like objects; empty ones are skipped.
            config: Number of copies, pins and placement.

        Returns:
            0 (also if there was nothing to store), or a negative number.

        Raises:
            RuntimeError: A part is not one-dimensional or its items are not bytes.
        """
        views = [memoryview(part) for part in parts]
        if any(view.ndim != 1 or view.itemsize != 1 for view in views):
            raise RuntimeError("parts must be 1-D bytes-like")
        if self._native is not None and all(view.nbytes == 0 for view in views):
            return self._skip_empty(key)
        return self._put([key], [[*map(contiguous, views)]], config, is_upsert=is_upsert)[0]

    put_parts, upsert_parts = variants(_put_parts, "put_parts", "upsert_parts")

    def get(self, key: Key) -> bytes:
        """Return the bytes of an object; ``b""`` if it does not exist or could not be read."""
        return as_bytes(self._call_batch(1, lambda native: native.get([key]))[0])

    def get_batch(self, keys: Sequence[Key]) -> list[bytes]:
        """Return the bytes of many objects; ``b""`` for each that could not be read.

        For an empty list of keys the result is ``[b""]``, as in upstream.
        """
        if len(keys) == 0:
            return [b""]
        nothing = [b""] * len(keys)
        return self._call_with_failure(nothing, lambda native: _native.get_values(native, keys))[0]

    def get_buffer(self, key: Key) -> BufferHandle | None:
        """Return an object as a `BufferHandle` that owns its memory; None for a failure."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[Key]) -> list[BufferHandle | None]:
        """Return many objects as buffers that own their memory; None for each failure."""
        fetched = self._call_batch(
            len(keys), lambda native: native.get_buffers(keys, is_signed=True)
        )
        return [value if isinstance(value, BufferHandle) else None for value in fetched]

    def _put(
        self,
        keys: Sequence[Key],
        values: Sequence[Readable | Sequence[Readable]],
        config: ReplicateConfig | None,
        *,
        is_upsert: bool,
    ) -> list[int]:
        def call(native: _native.Store) -> list[bool | MooncakeError]:
            options = put_options(config)
            try:
                return native.put(keys, values, options=options, is_upsert=is_upsert)
            except MooncakeError:
                raise
            except _UNREADABLE:
                copies = [contiguous(value) for value in values]
                return native.put(keys, copies, options=options, is_upsert=is_upsert)

        try:
            return as_codes(self._call_batch(len(keys), call))
        except _native.ObjectItemsError as error:
            return [invalid_argument(str(error)).code] * len(keys)
