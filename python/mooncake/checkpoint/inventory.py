"""What is stored of checkpoints: `list`, `verify` and `delete`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mooncake._api.async_store import AsyncStore
from mooncake._api.keywords import suggesting
from mooncake._api.store import Store
from mooncake._runtime import Buffer
from mooncake.checkpoint.manifest import Manifest, missing, read_manifest
from mooncake.checkpoint.marks import in_use, is_mark
from mooncake.checkpoint.names import MANIFEST, Keys, error_of, listed, native_of
from mooncake.checkpoint.removal import remove_unused
from mooncake.checkpoint.transfer import read_parts
from mooncake.errors import CorruptError, MooncakeError, NotFoundError, NotSupportedError

__all__ = ["Checkpoint", "delete", "list_checkpoints", "verify"]

_HAS_LEASE = -706
_WAIT = "Wait for its end; if its process was killed, until the lease is over; or use force."


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is stored.

    Attributes:
        prefix: Name of the checkpoint.
        nbytes: Length of its tensors in bytes; 0 if the manifest cannot be read.
        tensors: Number of its tensors.
        save: Id of the save that wrote it.
        is_readable: False if the manifest is damaged, or a newer release wrote it.
    """

    prefix: str
    nbytes: int
    tensors: int = 0
    save: str = ""
    is_readable: bool = True

    @classmethod
    def of(cls, prefix: str, manifest: Manifest) -> Checkpoint:
        """Return the description of what a manifest describes."""
        return cls(prefix, manifest.nbytes, len(manifest.tensors), manifest.save)


@suggesting
def list_checkpoints(store: Store | AsyncStore, prefix: str = "") -> list[Checkpoint]:
    """Return the checkpoints that are stored, in the order of their names.

    Args:
        store: The store.
        prefix: The checkpoint of this name and those below it: `run` has `run/1` but not `run2`.
            "" has all.

    Example:
        >>> [each.prefix for each in checkpoint.list(store, "run")]
        ['run/1', 'run/2']
    """
    native, found = native_of(store), []
    base = prefix.rstrip("/")
    if base:
        Keys(base)
    for key, _, is_complete in listed(native, f"{base}/" if base else ""):
        if not is_complete or not key.endswith(MANIFEST):
            continue
        name = key.removesuffix(MANIFEST)
        try:
            found.append(Checkpoint.of(name, read_manifest(native, Keys(name))))
        except NotFoundError:
            continue
        except (CorruptError, NotSupportedError):
            found.append(Checkpoint(name, 0, is_readable=False))
        except ValueError:
            # A key that only looks like that of a manifest.
            continue
    return sorted(found, key=lambda each: each.prefix)


@suggesting
def verify(
    store: Store | AsyncStore,
    prefix: str,
    *,
    progress: Callable[[int, int], object] | None = None,
) -> Checkpoint:
    """Read a checkpoint, and compare its parts with their versions and checksums.

    Args:
        store: The store.
        prefix: Name of the checkpoint.
        progress: Called with the bytes that are done, and all.

    Returns:
        The description of the checkpoint.

    Raises:
        NotFoundError: There is no such checkpoint, or a part is missing; the message names the
            tensor.
        CorruptError: The manifest is damaged, or a part is not what was saved; the message names
            the tensor.
    """
    native, keys = native_of(store), Keys(prefix)
    manifest = read_manifest(native, keys)
    parts, done = [*manifest.owners()], 0
    buffer = Buffer.allocate(max((part.nbytes for _, part in parts), default=1))
    for name, part in parts:
        read_parts(native, keys, [(name, part)], buffer)
        done += part.nbytes
        if progress is not None:
            progress(done, manifest.nbytes)
    return Checkpoint.of(prefix, manifest)


@suggesting
def delete(store: Store | AsyncStore, prefix: str, *, force: bool = False) -> None:
    """Remove a checkpoint, and what interrupted saves of that name have left.

    Args:
        store: The store.
        prefix: Name of the checkpoint; those below it stay.
        force: Remove it even if a save of that name runs, which then fails, or a client holds a
            lease on its manifest.

    Raises:
        NotFoundError: Nothing of that name is stored.
        BusyError: A save of that name runs, or was killed and its lease is not over yet; or the
            manifest is leased. Nothing was removed.
    """
    native, keys = native_of(store), Keys(prefix)
    saves: set[str] = set()
    marks = []
    for key, _, _ in listed(native, keys.saves):
        saves.add(keys.save_of(key) or "")
        marks += [key] if keys.save_of(key) and is_mark(key) else []
    # A mark is not on the manifest: a lease on that would outlast the save.
    if not force and (held := in_use(native, marks)):
        raise error_of(_HAS_LEASE, "a save of the checkpoint runs", key=held[0], remedy=_WAIT)
    # Without its manifest the checkpoint is not visible.
    (outcome,) = native.remove([keys.manifest], force=force)
    is_missing = isinstance(outcome, NotFoundError)
    if isinstance(outcome, MooncakeError) and not is_missing:
        raise outcome
    removed = remove_unused(native, keys, ended=saves if force else ())
    if removed == 0 and is_missing:
        raise missing(keys)
