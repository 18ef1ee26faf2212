"""Whether a checkpoint can fit into a pool, asked before the first byte is put."""

from __future__ import annotations

from typing import Any

from mooncake.checkpoint.manifest import Manifest
from mooncake.checkpoint.names import NO_SPACE, Keys, error_of, listed
from mooncake.errors import MooncakeError

__all__ = ["check_room", "pool_full"]

_DESCRIBED_MAX = 1024
_OBJECTS_MAX = 1 << 16


def check_room(
    native: Any,
    keys: Keys,
    nbytes: int,
    longest: int,
    replicas: int,
    old: Manifest | None,
    reusable: int,
) -> int:
    """Refuse a checkpoint that cannot fit, whatever is evicted.

    The checkpoint that it replaces must stay until the new one is whole, and hard-pinned objects
    stay anyway.

    Args:
        native: The native store.
        keys: Keys of the checkpoint.
        nbytes: Length of all parts in bytes.
        longest: Length of the longest part.
        replicas: Number of copies.
        old: The checkpoint that is replaced.
        reusable: Bytes that an interrupted save has stored.

    Returns:
        Bytes that are missing, unless objects are removed or evicted; 0 if all fits as it is.

    Raises:
        NoSpaceError: It does not fit; the message has the bytes needed and free.
    """
    if nbytes == 0:
        return 0
    segments = [
        each for each in native.segments() if each["takes_objects"] and each["is_connected"]
    ]
    copies = min(replicas, max(len(segments), 1))
    needed = nbytes * copies
    sizes = [each["capacity_bytes"] for each in segments]
    free = sum(sizes) - sum(each["used_bytes"] for each in segments)
    if needed <= free + reusable and longest <= max(sizes, default=0):
        return 0
    limit = sum(sizes) - _kept_bytes(native, keys, old)
    if needed > limit or longest > max(sizes, default=0):
        text = "the checkpoint does not fit into the pool: add memory, or delete checkpoints"
        raise error_of(
            NO_SPACE,
            text,
            key=keys.manifest,
            needed_bytes=needed,
            free_bytes=max(min(limit, sum(sizes)), 0),
            largest_part_bytes=longest,
            largest_segment_bytes=max(sizes, default=0),
        )
    missing: int = needed - free - reusable
    return max(missing, 1)


def pool_full(native: Any, key: str, needed: int) -> MooncakeError:
    """Return the error of a save that the pool has no memory for."""
    segments = [each for each in native.segments() if each["takes_objects"]]
    free = sum(each["capacity_bytes"] - each["used_bytes"] for each in segments)
    text = "the pool is full: nothing was saved, and an earlier checkpoint is unchanged"
    return error_of(NO_SPACE, text, key=key, needed_bytes=needed, free_bytes=free)


def _kept_bytes(native: Any, keys: Keys, old: Manifest | None) -> int:
    """Return the bytes of objects that are not evicted while the checkpoint is saved."""
    current = {keys.of(part.name) for part in old.parts()} if old is not None else set()
    kept, batch = 0, []
    for count, (key, _, is_complete) in enumerate(listed(native, "")):
        if not is_complete:
            continue
        batch.append(key)
        if len(batch) == _DESCRIBED_MAX:
            kept += _kept_of(native, batch, current)
            batch = []
        if count >= _OBJECTS_MAX:
            # The puts themselves find out; this many descriptions would take too long.
            break
    return kept + (_kept_of(native, batch, current) if batch else 0)


def _kept_of(native: Any, batch: list[str], current: set[str]) -> int:
    return sum(
        known["size"] * known["replicas"]
        for key, known in zip(batch, native.describe(batch), strict=True)
        if isinstance(known, dict) and (known["is_hard_pinned"] or key in current)
    )
