"""`Writer` and `Reader`: storage of torch.distributed.checkpoint in a pool."""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError(
        "checkpoints of torch.distributed need torch; install it by "
        "`pip install 'mooncake-transfer-engine[tensor]'`"
    ) from error
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from mooncake._api.async_store import AsyncStore
from mooncake._api.store import Store
from mooncake.checkpoint.loading import new_tensor
from mooncake.checkpoint.local import Block
from mooncake.checkpoint.manifest import Manifest, Part, Tensor, check_boxes, read_manifest
from mooncake.checkpoint.names import INVALID, NOT_FOUND, Keys, error_of, native_of, part_name
from mooncake.checkpoint.nodes import decode, encode
from mooncake.checkpoint.publication import Pin, Publication
from mooncake.checkpoint.saving import put_parts
from mooncake.checkpoint.transfer import (
    Reader as PartReader,
    Request,
    Source,
    batched,
    checksum_threads,
    read_parts,
)
from mooncake.errors import MooncakeError
from mooncake.tensor.dtypes import DType

__all__ = ["Reader", "Writer"]

_PARTS_PER_RANK = 1_000_000


class Writer(StorageWriter):  # type: ignore[misc]
    """Writes the checkpoints of `torch.distributed.checkpoint` into a pool.

    Values that are no tensors are pickled by torch's planner; `Reader` gives them back to it.

    Example:
        >>> dcp.save(state_dict, storage_writer=checkpoint.Writer(store, "run/1"))
    """

    def __init__(
        self,
        store: Store | AsyncStore,
        prefix: str,
        *,
        pin: Pin = "soft",
        checksum: bool = True,
        replicas: int = 1,
    ) -> None:
        """Prepare a save.

        Args:
            store: The store.
            prefix: Name of the checkpoint; a ``checkpoint_id`` of torch takes its place.
            pin: What protects it from eviction, as for `mooncake.checkpoint.save`.
            checksum: Store a checksum of each part.
            replicas: Number of copies of each part.
        """
        super().__init__()
        self._store = store
        self._terms: dict[str, Any] = {"pin": pin, "replicas": replicas}
        self._has_checksums = checksum
        self._prefix = Keys(prefix).prefix
        self._publication: Publication | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, under another name if one is given."""
        self._end()
        if checkpoint_id is not None:
            self._prefix = Keys(os.fspath(checkpoint_id)).prefix

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 - the signature is torch's
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """Refuse a save in which each rank writes a checkpoint of its own."""
        if not kwargs.get("use_collectives", True):
            text = "a checkpoint has one manifest: save with use_collectives=True"
            raise error_of(INVALID, text, prefix=self._prefix)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan of this rank."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save at the coordinator, and tell its id to the ranks.

        Raises:
            NoSpaceError: The pool has not the memory.
        """
        sizes = [each.tensor_storage_size() or 0 for plan in plans for each in plan.items]
        publication = self._publication = self._new_publication()
        try:
            begun = publication.begin(sum(sizes), max(sizes, default=0), resumes=False)
        except BaseException:
            self._end()
            raise
        return [
            dataclasses.replace(plan, storage_data={**begun, "rank": rank})
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put the parts of this rank."""
        publication = self._publication or self._new_publication()
        publication.take(plan.storage_data)
        try:
            written = self._write(publication, plan, planner)
        except BaseException:
            self._end()
            raise
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Put the manifest at the coordinator, and remove what it replaces."""
        publication = self._publication
        if publication is None:
            raise error_of(INVALID, "the save has not begun", prefix=self._prefix)
        try:
            written = [each for own in results for each in own]
            publication.publish(_manifest_of(publication.save, metadata, written))
        except Exception:
            publication.abandon()
            raise
        finally:
            self._end()

    def storage_meta(self) -> StorageMeta:
        """Return the name of the checkpoint."""
        return StorageMeta(checkpoint_id=self._prefix)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether text is a name of a checkpoint."""
        return _is_name(checkpoint_id)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the save that runs, for asynchronous saves in another process."""
        return {**self.__dict__, "_publication": None}

    def __del__(self) -> None:
        if getattr(self, "_publication", None) is not None:
            self._end()

    def _new_publication(self) -> Publication:
        return Publication(native_of(self._store), Keys(self._prefix), **self._terms)

    def _end(self) -> None:
        publication, self._publication = self._publication, None
        if publication is not None:
            publication.end()

    def _write(
        self, publication: Publication, plan: SavePlan, planner: SavePlanner
    ) -> list[WriteResult]:
        first = plan.storage_data["rank"] * _PARTS_PER_RANK
        # Tensors come first: the lengths of others are known once they are resolved.
        items = sorted(plan.items, key=lambda each: each.type == WriteItemType.BYTE_IO)
        sizes = [each.tensor_storage_size() or 0 for each in items]
        written: list[WriteResult] = []
        with checksum_threads() as threads:
            pool = threads if self._has_checksums else None
            for piece in batched(sizes):
                rows = [
                    (first + at, item, *_resolved(item, planner))
                    for at, item in enumerate(items[piece], piece.start)
                ]
                full = [row for row in rows if row[3].nbytes]
                names = [part_name(publication.save, at, item.index.fqn) for at, item, *_ in full]
                sources = [source for *_, source in full]
                known = put_parts(publication, names, sources, pool, sum(sizes))
                stored = {at: each for (at, *_), each in zip(full, known, strict=True)}
                for at, item, box, source in rows:
                    name, version, xxh3 = stored.get(at, ("", 0, None))
                    part = Part(name, *box, source.nbytes, version, xxh3)
                    written.append(
                        WriteResult(item.index, source.nbytes, dataclasses.astuple(part))
                    )
        return written


class Reader(StorageReader):  # type: ignore[misc]
    """Reads checkpoints of a pool for `torch.distributed.checkpoint`.

    It reads the tensors of those that `mooncake.checkpoint.save` has saved, too.

    Example:
        >>> dcp.load(state_dict, storage_reader=checkpoint.Reader(store, "run/1"))
    """

    def __init__(self, store: Store | AsyncStore, prefix: str) -> None:
        """Prepare a load.

        Args:
            store: The store.
            prefix: Name of the checkpoint; a ``checkpoint_id`` of torch takes its place.
        """
        super().__init__()
        self._store = store
        self._prefix = Keys(prefix).prefix
        self._manifest: Manifest | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, of another name if one is given."""
        self._manifest = None
        if checkpoint_id is not None:
            self._prefix = Keys(os.fspath(checkpoint_id)).prefix

    def read_metadata(
        self,
        *args: Any,  # noqa: ARG002 - the signature is torch's
        **kwargs: Any,  # noqa: ARG002
    ) -> Metadata:
        """Read the manifest.

        Raises:
            NotFoundError: There is no such checkpoint.
            CorruptError: The manifest is damaged.
        """
        keys = Keys(self._prefix)
        native = native_of(self._store)
        manifest = read_manifest(native, keys)
        described: dict[str, Any] = {each.name: _metadata_of(each) for each in manifest.tensors}
        described |= {name: BytesStorageMetadata() for name in manifest.blobs}
        return Metadata(
            described,
            planner_data=decode(manifest.planner, _no_leaf),
            storage_data=manifest.encode().decode(),
            storage_meta=StorageMeta(checkpoint_id=self._prefix),
        )

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002 - the signature is torch's
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Take the manifest that the coordinator has read."""
        self._manifest = Manifest.decode(metadata.storage_data.encode(), Keys(self._prefix))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan of this rank."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of the ranks."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts that this rank needs.

        Raises:
            NotFoundError: A part is missing; the message names the tensor.
            CorruptError: A part is not the one that was saved.
        """
        manifest = self._manifest
        if manifest is None:
            raise error_of(INVALID, "the load has not begun", prefix=self._prefix)
        native, keys = native_of(self._store), Keys(self._prefix)
        tensors = {each.name: each for each in manifest.tensors}
        requests: list[Request] = []
        steps: list[Callable[[], object]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                if name not in manifest.blobs:
                    raise error_of(NOT_FOUND, "the checkpoint has no such value", value=name)
                data = bytearray(manifest.blobs[name].nbytes)
                read_parts(native, keys, [(name, manifest.blobs[name])], data)
                planner.load_bytes(item, io.BytesIO(bytes(data)))
            else:
                request, step = _target_of(item, tensors[name], planner)
                requests += [request] if request is not None else []
                steps.append(step)
        PartReader(native, keys).read(requests)
        for step in steps:
            step()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether text is a name of a checkpoint."""
        return _is_name(checkpoint_id)


def _resolved(item: WriteItem, planner: SavePlanner) -> tuple[tuple[Any, Any], Source]:
    """Return the box and the memory of an item to write."""
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        value = torch.frombuffer(bytearray(data.getbuffer()), dtype=torch.uint8)
        return ((0,), (value.nbytes,)), Source.of(Block((0,), (value.nbytes,), value))
    chunk = item.tensor_data.chunk
    box = tuple(chunk.offsets), tuple(chunk.sizes)
    return box, Source.of(Block(*box, data.detach()))


def _manifest_of(save: str, metadata: Metadata, written: Sequence[WriteResult]) -> Manifest:
    parts: dict[str, list[Part]] = {}
    for each in written:
        part = Part(*each.storage_data)
        if part.nbytes:
            parts.setdefault(each.index.fqn, []).append(part)
    tensors: list[Tensor] = []
    blobs: dict[str, Part] = {}
    pairs: list[Any] = []
    for name, described in metadata.state_dict_metadata.items():
        own = parts.get(name, [])
        if isinstance(described, TensorStorageMetadata):
            shape = tuple(described.size)
            dtype = DType.of_torch(described.properties.dtype)
            check_boxes(name, shape, [(part.offset, part.shape) for part in own])
            pairs.append([name, {"tensor": len(tensors)}])
            tensors.append(Tensor(name, dtype, shape, tuple(own)))
        else:
            blobs[name] = own[0]
            pairs.append([name, {"blob": name}])
    planner = encode(metadata.planner_data, _is_no_tensor)
    return Manifest(save, {"dict": pairs}, tuple(tensors), blobs, planner)


def _metadata_of(tensor: Tensor) -> TensorStorageMetadata:
    boxes = [(part.offset, part.shape) for part in tensor.parts]
    whole = [((0,) * len(tensor.shape), tensor.shape)]
    chunks = [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
        for offset, shape in boxes or whole
    ]
    properties = TensorProperties(dtype=tensor.dtype.torch())
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


def _target_of(
    item: ReadItem, tensor: Tensor, planner: LoadPlanner
) -> tuple[Request | None, Callable[[], object]]:
    """Return what is read for an item, and what is done when it is there."""
    target = planner.resolve_tensor(item)
    value = target.detach()
    index: MetadataIndex = item.storage_index
    start = index.offset or (0,) * len(tensor.shape)
    box = (
        tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True)),
        tuple(item.lengths),
    )
    if tuple(value.shape) != box[1]:
        text = "a tensor has another shape than the part that is loaded into it"
        raise error_of(INVALID, text, tensor=tensor.name, stored=box[1], given=(*value.shape,))
    is_in_place = value.device.type == "cpu" and value.is_contiguous()
    if is_in_place and DType.of_torch(value.dtype) is tensor.dtype:
        request = Request(tensor, box, value.data_ptr()) if math.prod(box[1]) else None
        return request, lambda: planner.commit_tensor(item, target)
    request, new = new_tensor(tensor, box)

    def copy() -> None:
        value.copy_(new)
        planner.commit_tensor(item, target)

    return request, copy


def _is_name(checkpoint_id: str | os.PathLike[str]) -> bool:
    try:
        Keys(os.fspath(checkpoint_id))
    except (MooncakeError, TypeError):
        return False
    return True


def _is_no_tensor(value: Any, path: Any) -> None:
    """Return the node of a tensor in the data of a planner, which has none."""
    del value, path


def _no_leaf(kind: str, inner: Any) -> Any:
    raise ValueError(f"a {kind} is no data of a planner: {inner!r:.60}")
