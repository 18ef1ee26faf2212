"""Removals of objects, and times after which they are removed, as coroutines."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mooncake._api.asynchronous.sharded import explained, sharded_keys
from mooncake._api.limits import limited
from mooncake._api.native_calls import AsyncNative, async_pause
from mooncake._api.outcomes import only
from mooncake._api.removals import LeaseWait, removal_outcome
from mooncake._api.types import Cleared, Deleted, Key
from mooncake._api.values import Seconds, check_version, encoded, key_list, milliseconds
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor.calls import run_async
from mooncake.tensor.sharded import OF_SHARDS, internal_pattern, manifest_pattern, refusal
from mooncake.tensor.write import remove

__all__ = ["AsyncRemovalCalls"]


class AsyncRemovalCalls:
    """The methods of `AsyncStore` that remove objects."""

    __slots__ = ()

    _native: AsyncNative

    async def delete(
        self,
        key: Key,
        *,
        force: bool = False,
        pinned: bool = False,
        missing_ok: bool = False,
        if_version: int | None = None,
        wait: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Remove an object, or a tensor with all of its shards.

        Args:
            key: Key of the object or of the tensor.
            force: Remove the object even if a client holds a lease on it, as `lease` and reads
                through upstream's API do.
            pinned: Remove the object even if it is hard-pinned.
            missing_ok: Do not raise if the object does not exist.
            if_version: Remove the object only if it has this version, which `info` returns.
            wait: Wait until leases on the object are over: at most a minute, unless `timeout_s`
                says otherwise.
            timeout_s: Longest duration of the call, with the wait.

        Raises:
            NotFoundError: The object does not exist.
            BusyError: The object is leased, hard-pinned, or being copied.
            VersionDiffersError: The object has another version than `if_version`.
            DeadlineError: The object was still leased at the end of the wait.
        """
        check_version(if_version)
        native, lease = limited(self._native, timeout_s), LeaseWait(key, timeout_s)
        while True:
            outcome = await _removed(native, key, force=force, pinned=pinned, if_version=if_version)
            if not wait or (pause_s := lease.pause_s(outcome)) is None:
                break
            await async_pause(pause_s)
        if not (missing_ok and isinstance(outcome, NotFoundError)):
            only([outcome])

    async def delete_many(
        self,
        keys: Iterable[Key],
        *,
        force: bool = False,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> Deleted:
        """Remove many objects in one batch, but for those that something protects.

        Args:
            keys: Keys of objects, or of tensors in shards, which are removed as a whole.
            force: Remove objects even if a client holds a lease on them.
            pinned: Remove hard-pinned objects, too.
            timeout_s: Longest duration of the call.

        Returns:
            For each key in order true if the object was removed, else false. Its attributes
            `removed`, `missing` and `kept` have the keys; `kept` has the reason for each: a
            `BusyError` (leased, hard-pinned, being copied) or `NotReadyError` (being written).

        Raises:
            MooncakeError: The first other failure, after every object was tried. Its attribute
                `outcomes` has the result or the failure of each.
        """
        wanted, native = key_list(keys), limited(self._native, timeout_s)
        outcomes = await native().remove(wanted, force=force, spare_pinned=not pinned)
        missing = [at for at, each in enumerate(outcomes) if isinstance(each, NotFoundError)]
        found = await sharded_keys(native, [wanted[at] for at in missing])
        for at in [at for at, is_sharded in zip(missing, found, strict=True) if is_sharded]:
            outcomes[at] = await _tensor_removed(native, wanted[at], force=force, pinned=pinned)
        return Deleted.of(wanted, outcomes)

    async def expire(self, key: Key, ttl_s: Seconds, *, timeout_s: float | None = None) -> None:
        """Remove an object a while from now, even if it is leased then.

        Args:
            key: Key of the object.
            ttl_s: Time from now, in seconds or as a `timedelta`; replaces the one that the object
                had.
            timeout_s: Longest duration of the call.

        Raises:
            NotFoundError: The object does not exist.
        """
        native, ttl_ms = limited(self._native, timeout_s), milliseconds(ttl_s)
        outcomes = await native().set_expiry([key], ttl_ms)
        only(await explained(native, [key], outcomes, OF_SHARDS))

    async def persist(self, key: Key, *, timeout_s: float | None = None) -> None:
        """Keep an object that would expire. It may still be evicted.

        Raises:
            NotFoundError: The object does not exist.
        """
        native = limited(self._native, timeout_s)
        outcomes = await native().set_expiry([key], None)
        only(await explained(native, [key], outcomes, OF_SHARDS))

    async def clear(
        self,
        prefix: Key = b"",
        *,
        force: bool = False,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> Cleared:
        """Remove the objects whose key has a prefix, but for those that something protects.

        Args:
            prefix: Beginning of the keys; b"" removes all objects.
            force: Remove objects even if a client holds a lease on them, or they are being copied.
            pinned: Remove hard-pinned objects, too.
            timeout_s: Longest duration of the call.

        Returns:
            Number of removed objects, of which a tensor in shards is one, with the numbers of those
            that stayed by the reason.
        """
        native, start = limited(self._native, timeout_s), encoded(prefix)

        async def swept(regex: str | None) -> tuple[int, int, int, int]:
            chosen = None if regex else start or None
            return await native().remove_matching(
                regex=regex, prefix=chosen, force=force, spare_pinned=not pinned
            )

        manifests = await swept(manifest_pattern(start))
        # Without a manifest nothing else has the name of a shard by design.
        shards = await swept(internal_pattern(start)) if any(manifests) else (0, 0, 0, 0)
        return Cleared.of(manifests, shards, await swept(None))


async def _removed(
    native: Callable[[], AsyncNative],
    key: Key,
    *,
    force: bool,
    pinned: bool,
    if_version: int | None,
) -> bool | MooncakeError:
    """Try to remove an object or a tensor; return true, or the failure."""
    outcomes = await native().remove(
        [key], force=force, spare_pinned=not pinned, if_version=if_version
    )
    if isinstance(outcomes[0], NotFoundError) and (await sharded_keys(native, [key]))[0]:
        if if_version is not None:
            text = "shards of a tensor have versions of their own"
            return refusal(key, "Call delete without if_version to remove all of it.", text=text)
        return await _tensor_removed(native, key, force=force, pinned=pinned)
    return removal_outcome(outcomes[0])


async def _tensor_removed(
    native: Callable[[], AsyncNative], key: Key, *, force: bool, pinned: bool
) -> bool | MooncakeError:
    """Try to remove a tensor with all of its shards; return true, or the failure."""
    try:
        await run_async(native(), remove(encoded(key), force=force, spare_pinned=not pinned))
    except MooncakeError as failure:
        return failure
    return True
