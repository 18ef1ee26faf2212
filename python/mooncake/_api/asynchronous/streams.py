"""Objects that are put in pieces, as these arrive, as coroutines."""

from __future__ import annotations

from collections.abc import Mapping

from mooncake._api.asynchronous.puts import put_bytes
from mooncake._api.buffers import readable
from mooncake._api.files import FileWriter, Target
from mooncake._api.limits import limited
from mooncake._api.native_calls import AsyncNative, async_apart, async_each, blocking
from mooncake._api.outcomes import only
from mooncake._api.pieces import AsyncSource, Pieces, check_size, check_source
from mooncake._api.types import Key
from mooncake._api.values import Seconds, with_terms
from mooncake._runtime import PutOptions
from mooncake.errors import AlreadyExistsError

__all__ = ["AsyncStreamCalls"]


class AsyncStreamCalls:
    """The methods of `AsyncStore` for streams of bytes."""

    __slots__ = ()

    _native: AsyncNative

    def _within(self, timeout_s: float | None) -> AsyncNative:
        return self._native if timeout_s is None else self._native.within(timeout_s)

    async def put_stream(
        self,
        key: Key,
        pieces: AsyncSource,
        *,
        size: int | None = None,
        overwrite: bool = False,
        options: PutOptions | None = None,
        ttl_s: Seconds | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Put the pieces of an iterator, in their order, as one object.

        The object is published when the iterator has ended, whole. If the iterator raises, nothing
        is stored. Until then readers find the object that was there before.

        Args:
            key: Key of the object.
            pieces: Bytes-like objects, of which none need be kept after the next one was asked for.
            size: Number of bytes of all pieces. They then go to the pool as they come, without a
                checksum; otherwise they stay in this process until the last one has come: ``bytes``
                as they are, other memory as a copy.
            overwrite: Replace an existing object; otherwise it is kept.
            options: Number of copies, pins, placement.
            ttl_s: Time after which the object is removed, even if it is leased; None: never.
            tags: Text stored beside the object.
            timeout_s: Longest duration of each call to the pool; an iterator may take any time,
                unless the size is known: the master discards a put that was begun and has not ended
                within ``--put_start_discard_timeout_sec``.

        Returns:
            True if the object was stored; false if an existing object was kept, which may be one
            that another client is still writing.

        Raises:
            InvalidArgumentError: There is no byte, or not the number of bytes that `size` says.
            NoSpaceError: No segment has enough free space, and nothing may be evicted. If the size
                is known, that is before the first piece is asked for.

        Example:
            >>> await store.put_stream("log", (line.encode() for line in lines))
        """
        check_source(pieces)
        options = with_terms(options, ttl_s=ttl_s, tags=tags)
        if size is not None:
            target = Target(blocking(self._within(timeout_s)), key, options, overwrite=overwrite)
            return await _put_as_they_come(pieces, target, size)
        gathered = Pieces()
        async for piece in async_each(pieces):
            gathered.append(readable(piece, key))
        parts = gathered.parts() or [memoryview(b"")]
        calls = limited(self._native, timeout_s)
        return only(await put_bytes(calls, [key], [parts], options=options, is_upsert=overwrite))


async def _put_as_they_come(pieces: AsyncSource, target: Target, size: int) -> bool:
    """Put pieces whose number of bytes is known; return whether they were stored."""
    check_size(size)
    try:
        file = await async_apart(FileWriter, target, size)
    except AlreadyExistsError:
        return False
    try:
        async for piece in async_each(pieces):
            await async_apart(file.write, readable(piece, target.key))
        await async_apart(file.close)
    except BaseException:
        await async_apart(file.discard)
        raise
    return True
