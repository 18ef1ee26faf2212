"""`load`: a state dict from a checkpoint, into new memory or into that of the caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mooncake._api.async_store import AsyncStore
from mooncake._api.keywords import suggesting
from mooncake._api.store import Store
from mooncake._hints import torch
from mooncake._runtime import Buffer, _native
from mooncake.checkpoint.destinations import Destinations
from mooncake.checkpoint.local import value_of
from mooncake.checkpoint.manifest import Manifest, Tensor, read_manifest
from mooncake.checkpoint.names import INVALID, Keys, error_of, native_of
from mooncake.checkpoint.ranks import Ranks
from mooncake.checkpoint.transfer import Reader, Request
from mooncake.errors import MooncakeError
from mooncake.tensor import memory

__all__ = ["again_if_replaced", "load", "new_tensor"]

T = TypeVar("T")

_ATTEMPTS_MAX = 16


@suggesting
def load(
    store: Store | AsyncStore,
    prefix: str,
    *,
    into: Any = None,
    map_location: torch.device | str | None = None,
    resume: bool = False,
    progress: Callable[[int, int], object] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
) -> Any:
    """Load a state dict.

    All of it is from one save, also if a save replaces the checkpoint meanwhile. Nothing is
    unpickled. If torch has a default process group, all its ranks call this together; each reads
    what it needs.

    Args:
        store: The store.
        prefix: Name of the checkpoint.
        into: A state dict to fill, for instance that of a model: its tensors are filled in place,
            also shards (`DTensor`) in any layout, and other values are replaced. It may lack values
            that the checkpoint has. None makes new tensors.
        map_location: Device of new tensors; None is the host.
        resume: Skip parts that the tensors of `into` have already, as after a load that was
            interrupted. Needs the checksums of the save.
        progress: Called with the bytes that are done, and all.
        process_group: The ranks that load together; None is torch's default group.
        no_dist: Load alone although there is a process group.

    Returns:
        The state dict; `into` itself if it is given.

    Raises:
        NotFoundError: There is no such checkpoint, a part is missing, or `into` has a value that
            the checkpoint lacks; the message names the tensor.
        ValueError: A tensor of `into` has another shape or dtype; the message names it.
        CorruptError: The manifest is damaged, or a part is not what was saved.
    """
    ranks = Ranks(process_group, no_dist=no_dist)
    native = ranks.at_each(lambda: native_of(store))

    def read_all(manifest: Manifest, keys: Keys) -> Any:
        if into is None:
            return _new_state_dict(native, keys, manifest, map_location, progress)
        destinations = Destinations(manifest, into)
        Reader(native, keys).read(destinations.requests, progress, resumes=resume)
        return destinations.finish()

    return again_if_replaced(native, prefix, read_all, ranks)


def again_if_replaced(
    native: Any, prefix: str, read: Callable[[Manifest, Keys], T], ranks: Ranks | None = None
) -> T:
    """Read a checkpoint; begin again if a save replaces it meanwhile.

    The ranks begin again together, or none does: they agree in the exchange that says who failed.

    Args:
        native: The native store.
        prefix: Name of the checkpoint.
        read: Reads the tensors of a manifest.
        ranks: The ranks that read together.
    """
    ranks = ranks or Ranks(no_dist=True)
    ranks.gather(lambda: Keys(prefix).prefix)
    keys = Keys(prefix)
    manifest = _shared_manifest(native, keys, ranks)
    for _ in range(_ATTEMPTS_MAX):
        try:
            return _read_together(read, manifest, keys, ranks)
        except MooncakeError:
            if not ranks.may_retry:
                raise
            now = _shared_manifest(native, keys, ranks)
            if now.save == manifest.save and now.version == manifest.version:
                raise
            manifest = now
    return _read_together(read, manifest, keys, ranks)


def _read_together(
    read: Callable[[Manifest, Keys], T], manifest: Manifest, keys: Keys, ranks: Ranks
) -> T:
    return ranks.at_each(lambda: read(manifest, keys))


def _shared_manifest(native: Any, keys: Keys, ranks: Ranks) -> Manifest:
    """Return the manifest that the first rank reads."""
    if ranks.size == 1:
        return read_manifest(native, keys)

    def text() -> tuple[str, int]:
        found = read_manifest(native, keys)
        return found.encode().decode(), found.version

    data, version = ranks.from_first(text)
    return Manifest.decode(data.encode(), keys, version)


def _new_state_dict(
    native: Any,
    keys: Keys,
    manifest: Manifest,
    map_location: Any,
    progress: Callable[[int, int], object] | None,
) -> Any:
    are_arrays = arrays_of(manifest.tree)
    requests, tensors = [], []
    for number, tensor in enumerate(manifest.tensors):
        request, value = new_tensor(tensor, as_array=number in are_arrays)
        tensors.append(value)
        if request is not None:
            requests.append(request)
    Reader(native, keys).read(requests, progress)
    if map_location is not None:
        tensors = [each.to(map_location) if hasattr(each, "to") else each for each in tensors]
    return value_of(manifest.tree, tensors, _refuse_blob)


def new_tensor(
    tensor: Tensor, box: Any = None, *, as_array: bool = False
) -> tuple[Request | None, Any]:
    """Return a new tensor or array for a box of a tensor, and the request that fills it."""
    offset, shape = box or ((0,) * len(tensor.shape), tensor.shape)
    nbytes = tensor.dtype.itemsize
    for length in shape:
        nbytes *= length
    buffer = Buffer.allocate(max(nbytes, 1))
    make = memory.as_numpy if as_array else memory.as_torch
    value = make(buffer, tensor.dtype, shape)
    if nbytes == 0:
        return None, value
    return Request(tensor, (tuple(offset), tuple(shape)), _native.writable_range(buffer)[0]), value


def arrays_of(node: Any) -> set[int]:
    """Return the numbers of the tensors that a tree has as arrays of numpy."""
    found: set[int] = set()
    nodes = [node]
    while nodes:
        each = nodes.pop()
        if isinstance(each, list):
            nodes += each
        elif isinstance(each, dict):
            for kind, inner in each.items():
                if kind in ("array", "number"):
                    found.add(inner)
                elif kind in ("dict", "ordered", "list", "tuple"):
                    nodes.append(inner)
    return found


def _refuse_blob(name: str) -> Any:
    text = "torch's planner has pickled the value; load with torch.distributed.checkpoint and"
    raise error_of(INVALID, f"{text} mooncake.checkpoint.Reader", value=name)
