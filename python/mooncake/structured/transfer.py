"""`MooncakeBundleTransfer`: bundles, structured objects and batches of one store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from mooncake._api.keywords import suggesting_methods
from mooncake.structured.bundle import DEFAULT_BUNDLE_CHUNK_BYTES, BundlePayload, Bundles
from mooncake.structured.bundle_store import BundleStore, Objects
from mooncake.structured.columns.leaf import FieldSchema
from mooncake.structured.dataproto import BatchOptions, DataProtos
from mooncake.structured.dataproto_read import FieldSelection, read_batch, selected_fields
from mooncake.structured.envelope import (
    Envelope,
    build_result,
    envelope_of,
    flat_envelope,
    flat_result,
)
from mooncake.structured.leases import ResultMemory, release
from mooncake.structured.manifest import RemoteBundleRef, checked_name, checked_prefix
from mooncake.structured.payloads import bytes_payload
from mooncake.structured.policy import (
    BundleTransferPolicy,
    checked_policy,
    options_of_append,
    options_of_batch,
    options_of_bundle,
)
from mooncake.structured.references import (
    DataProtoRefLike,
    MooncakeDataProtoRef,
    resolved_ref,
)
from mooncake.structured.rows import rows_of
from mooncake.structured.structured_object import (
    BundleRefLike,
    StructuredObjectPayload,
    StructuredObjectReadSpec,
    StructuredObjectResult,
    StructuredObjects,
    checked_payload,
)

__all__ = ["MooncakeBundleTransfer"]

PayloadType = Literal["dataproto", "dict"]

# Marks an object that is one value; the value is a member of this name.
_WRAPPED: Final = "__mooncake_wrapped_object__"
_VALUE: Final = "value"


@suggesting_methods
class MooncakeBundleTransfer:
    """Stores objects of many members under one prefix of keys.

    Any number of threads may use one. A process that is forked must make its own.

    Attributes:
        store: The store.
        key_prefix: Beginning of all keys.
        default_chunk_bytes: Length of the objects that long payloads are cut into.
    """

    def __init__(
        self,
        store: BundleStore,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_BUNDLE_CHUNK_BYTES,
        buffer_pool: Any = None,
    ) -> None:
        """Use a store.

        Args:
            store: A `MooncakeDistributedStore`, or any object with the calls of `BundleStore`.
            key_prefix: Beginning of all keys.
            default_chunk_bytes: Length of the objects that long payloads are cut into.
            buffer_pool: Pool for the memory of results: a `BufferPool`, or an object whose
                ``acquire(nbytes)`` returns a lease with ``ptr``, ``size``, ``buffer`` and
                ``release()``. None makes one for large results of a store with a local buffer.

        Raises:
            ValueError: The prefix is empty or has a control character, or the length is not
                positive.
        """
        self.store = store
        self.key_prefix = checked_prefix(key_prefix)
        self.default_chunk_bytes = _checked_chunk_bytes(default_chunk_bytes)
        self._objects = Objects(store)
        self._bundles = Bundles(self._objects, self.key_prefix, buffer_pool)
        self._structured = StructuredObjects(self._bundles, ResultMemory(store, buffer_pool))
        self._batches = DataProtos(self._structured)

    # Bundles

    def put_bundle(
        self,
        meta: bytes | bytearray | memoryview,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Put named payloads and metadata, which become visible together.

        Args:
            meta: Metadata.
            buffers: Bytes-like object or array of each name.
            partition: Part of the keys, for instance a rank.
            chunk_bytes: Length of the objects that long payloads are cut into.
            policy: How payloads are put.
            max_inflight_put: Replaces that of the policy.
            config: `ReplicateConfig` for all keys, with at most one group.

        Raises:
            RuntimeError: The store could not take an object; nothing is left in the store.
            TypeError: A payload is not bytes-like.
            ValueError: A name or an option is not valid.
        """
        checked_name("partition", partition)
        data = bytes_payload(meta, "meta").tobytes()
        chunks = self._chunks(chunk_bytes)
        options = options_of_bundle(checked_policy(policy, max_inflight_put), config)
        payloads = {
            checked_name("buffer name", name): BundlePayload(bytes_payload(value, name))
            for name, value in buffers.items()
        }
        return self._bundles.put(
            data, payloads, partition=partition, chunk_bytes=chunks, options=options
        )

    def remove_bundle(self, ref: BundleRefLike) -> None:
        """Remove a bundle or a structured object. One that is gone already is fine.

        Args:
            ref: The reference, or a mapping with its ``manifest_key``.

        Raises:
            RuntimeError: An object could not be removed; another call tries it again.
            ValueError: The manifest is not valid, or names objects of others.
        """
        self._bundles.remove([ref])

    # Structured objects

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Put an object of named members: arrays, torch tensors and bytes.

        The other arguments are those of `put_bundle`.

        Args:
            payload: The object.
            partition: Part of the keys.
            chunk_bytes: Length of the objects that long payloads are cut into.
            policy: How payloads are put.
            max_inflight_put: Replaces that of the policy.
            config: `ReplicateConfig` for all keys, with at most one group.

        Raises:
            RuntimeError: The store could not take an object; nothing is left in the store.
            TypeError: A member is of a type that is not stored, or the metadata has no JSON form.
            ValueError: A name, the metadata or an option is not valid.
        """
        chosen = checked_policy(policy, max_inflight_put)
        checked_payload(payload)
        checked_name("partition", partition)
        return self._structured.put(
            payload,
            partition=partition,
            chunk_bytes=self._chunks(chunk_bytes),
            options=options_of_bundle(chosen, config),
        )

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        max_inflight_put: int | None = None,
        config: Any = None,
    ) -> RemoteBundleRef:
        """Put a mapping of members, or one array, tensor or bytes-like object.

        Args:
            obj: The value.
            partition: Part of the keys.
            chunk_bytes: Length of the objects that long payloads are cut into.
            policy: How payloads are put.
            max_inflight_put: Replaces that of the policy.
            config: `ReplicateConfig` for all keys, with at most one group.
        """
        is_mapping = isinstance(obj, Mapping)
        payload = StructuredObjectPayload(
            {} if is_mapping else {_WRAPPED: True}, obj if is_mapping else {_VALUE: obj}
        )
        return self.put_structured_object(
            payload, partition, chunk_bytes, policy, max_inflight_put, config
        )

    def get_object(self, ref: BundleRefLike) -> Any:
        """Return what `put_object` stored."""
        result = self.materialize(self.read_spec(ref))
        return result.objects[_VALUE] if result.metadata.get(_WRAPPED) else result.objects

    def read_spec(self, ref: BundleRefLike) -> StructuredObjectReadSpec:
        """Return the specification of a read of a whole object, which can be narrowed.

        Args:
            ref: The reference, or a mapping with its ``manifest_key`` or its ``manifest``.
        """
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Read what a specification selects.

        Raises:
            KeyError: The object has no such member.
            RuntimeError: The object does not exist any more.
            ValueError: There is no such object, it is not valid, or the specification does not fit
                it.
        """
        return self._structured.materialize(spec)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None
    ) -> StructuredObjectResult:
        """Read what a specification selects, some members into memory of the caller.

        Args:
            spec: The specification.
            destinations: For members an array in C order, a torch tensor, or what
                `raw_destination` or `tensor_object_buffer` returned. Other members are allocated.

        Raises:
            KeyError: The object has no member of the name of a destination.
            TypeError: A destination is of a wrong type.
            ValueError: A destination does not fit its member.
        """
        return self._structured.materialize(spec, destinations)

    @staticmethod
    def release_result(result: Any) -> None:
        """Return the memory of a result to the pool that the caller gave to the transfer.

        The result itself is not changed. Arrays over memory of a `BufferPool` stay valid: the pool
        gives that memory away, instead of lending it again. Those over memory of another pool are
        invalid afterwards. Without a pool of the caller, memory is reused when the last array over
        it is gone, and this method does nothing.

        Args:
            result: What `materialize`, `get_object` or `get` returned, or anything else.
        """
        release(result)

    # Batches

    def put(  # noqa: PLR0913 (upstream's signature)
        self,
        data: Any,
        *,
        type: PayloadType = "dataproto",  # noqa: A002
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
    ) -> MooncakeDataProtoRef:
        """Put a batch.

        Args:
            data: For ``dataproto`` an object or a dictionary with `batch`, `non_tensor_batch` and
                `meta_info` and nothing else, or a dictionary of arrays and tensors. For ``dict`` a
                dictionary of arrays, tensors, lists (columns) and other values (metadata).
            type: ``dataproto`` or ``dict``.
            namespace: Name that is stored with the batch.
            partition: Part of the keys.
            stage: Name of the stage, for later `append_dataproto_fields`.
            chunk_bytes: Length of the objects that long payloads are cut into.
            policy: How payloads are put.
            config: `ReplicateConfig` for all keys, with at most one group. Without a group, the
                keys get a new one, so that the store evicts them together; with the group ``""``
                they get none.
            field_schemas: How columns are stored; by default it is inferred from the rows.

        Raises:
            RuntimeError: The store could not take an object; nothing is left in the store.
            TypeError: A field is of a type that is not stored.
            ValueError: A column has no codec, or the fields differ in their number of rows.
        """
        schemas = field_schemas or {}
        batch = _envelope(data, type, schemas)
        rows = batch.check(schemas)
        write = options_of_batch(checked_policy(policy), config)
        options = BatchOptions(
            namespace, partition, stage, self._chunks(chunk_bytes), write, schemas
        )
        return self._batches.put(batch, rows, options)

    def get(  # noqa: PLR0913 (upstream's signature)
        self,
        ref: DataProtoRefLike,
        *,
        type: PayloadType = "dataproto",  # noqa: A002
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Any = None,
    ) -> Any:
        """Read a batch, or some fields and rows of it.

        Args:
            ref: The batch, or its handle.
            type: Form of the result: ``dataproto`` or ``dict``.
            fields: Names of the fields; None for all.
            batch_fields: Names of fields, instead of `fields`.
            non_tensor_fields: Names of fields, instead of `fields`.
            meta_info_keys: Keys of the metadata; None for all.
            data_cls: Class of the result; its ``from_dict`` or itself is called with the sections.
            destinations: Memory that receives fields, as for `materialize_into`.
            rows: A slice, or row numbers in the order of the result; None for all rows.

        Raises:
            IndexError: There is no such row.
            KeyError: The batch has no such field.
            RuntimeError: The batch does not exist any more.
            TypeError: The reference is none, or `data_cls` cannot be constructed.
            ValueError: What is stored is not valid, a destination does not fit, or a name would be
                twice in the dictionary of ``dict``.
        """
        _check_type(type)
        found = resolved_ref(ref)
        chosen = rows_of(rows, found.batch_size)
        names = selected_fields(found, fields, batch_fields, non_tensor_fields)
        selection = FieldSelection(names, chosen, destinations or {}, meta_info_keys)
        result = read_batch(self._structured, found, selection)
        if type == "dict":
            return flat_result(result, found.encoded_non_tensor)
        return build_result(result, data_cls)

    def put_dataproto(
        self,
        data: Any,
        *,
        namespace: str = "default",
        partition: str = "default",
        stage: str = "default",
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        config: Any = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
    ) -> MooncakeDataProtoRef:
        """Call `put` with ``type="dataproto"``."""
        return self.put(
            data,
            namespace=namespace,
            partition=partition,
            stage=stage,
            chunk_bytes=chunk_bytes,
            policy=policy,
            config=config,
            field_schemas=field_schemas,
        )

    def get_dataproto(
        self,
        ref: DataProtoRefLike,
        *,
        fields: Sequence[str] | None = None,
        batch_fields: Sequence[str] | None = None,
        non_tensor_fields: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        data_cls: Any = None,
        destinations: Mapping[str, Any] | None = None,
        rows: Any = None,
    ) -> Any:
        """Call `get` with ``type="dataproto"``."""
        return self.get(
            ref,
            fields=fields,
            batch_fields=batch_fields,
            non_tensor_fields=non_tensor_fields,
            meta_info_keys=meta_info_keys,
            data_cls=data_cls,
            destinations=destinations,
            rows=rows,
        )

    def append_dataproto_fields(
        self,
        ref: DataProtoRefLike,
        data: Any,
        *,
        stage: str,
        overwrite: bool = False,
        chunk_bytes: int | None = None,
        policy: BundleTransferPolicy | None = None,
        field_schemas: Mapping[str, FieldSchema] | None = None,
        config: Any = None,
    ) -> MooncakeDataProtoRef:
        """Put more fields of a batch.

        Args:
            ref: The batch, which stays valid, or its handle.
            data: The fields, as for `put`.
            stage: Name of the stage. For an existing stage, the result has a new one with the
                members of both, and the old one stays valid.
            overwrite: True to replace fields that exist. An existing stage is replaced as a whole
                and removed, so all its fields must be given.
            chunk_bytes: Length of the objects that long payloads are cut into.
            policy: How payloads are put.
            field_schemas: How columns are stored.
            config: `ReplicateConfig` for all keys. The keys get the group of the batch.

        Returns:
            The batch with the new fields.

        Raises:
            RuntimeError: The store could not take an object, of which nothing is left then; or it
                could not remove the stage that is replaced.
            ValueError: A field exists already, has another number of rows, or is missing; or the
                group of `config` is not that of the batch.
        """
        found, batch, schemas = resolved_ref(ref), envelope_of(data), field_schemas or {}
        self._batches.check_append(found, batch, schemas, stage, overwrite=overwrite)
        write = options_of_append(checked_policy(policy), config, found._storage_group_id)
        chunks = self._chunks(chunk_bytes)
        options = BatchOptions(found.namespace, found.partition, stage, chunks, write, schemas)
        return self._batches.append(found, batch, options, overwrite=overwrite)

    def dataproto_manifest_view(self, ref: DataProtoRefLike) -> dict[str, Any]:
        """Return a description of a batch: its fields with their types, and its stages."""
        return self._batches.view(resolved_ref(ref))

    def cleanup_dataproto(self, ref: DataProtoRefLike) -> None:
        """Remove a batch with all stages. One that is gone already is fine.

        Raises:
            RuntimeError: An object could not be removed.
        """
        self._batches.remove(resolved_ref(ref))

    def cleanup_dataproto_append(
        self, previous: DataProtoRefLike, appended: DataProtoRefLike
    ) -> None:
        """Remove what an append added, and keep the previous batch.

        Args:
            previous: The batch before `append_dataproto_fields`.
            appended: Its result.

        Raises:
            RuntimeError: An object could not be removed.
        """
        self._batches.remove_append(resolved_ref(previous), resolved_ref(appended))

    # Unfinished puts

    def orphaned_keys(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of payloads under the prefix that no manifest names.

        A process that ends during a put leaves such payloads. A put that is in progress has them,
        too, so remove only those that are orphaned for longer than a put takes.

        Args:
            keys: Keys of the store, for instance of `mooncake.Store.keys`.
        """
        return self._bundles.orphans(keys)

    def remove_orphans(self, keys: Iterable[str], before: Iterable[str]) -> list[str]:
        """Remove payloads that are orphaned now and were orphaned before; return their keys.

        Args:
            keys: Keys of the store.
            before: What `orphaned_keys` returned longer ago than any put takes.

        Raises:
            RuntimeError: An object could not be removed.
        """
        earlier = set(before)
        orphans = [key for key in self._bundles.orphans(keys) if key in earlier]
        self._objects.remove(orphans)
        return orphans

    def _chunks(self, chunk_bytes: int | None) -> int:
        return (
            self.default_chunk_bytes if chunk_bytes is None else _checked_chunk_bytes(chunk_bytes)
        )


def _envelope(data: Any, type: str, schemas: Mapping[str, FieldSchema]) -> Envelope:  # noqa: A002
    _check_type(type)
    return flat_envelope(data, schemas) if type == "dict" else envelope_of(data)


def _check_type(type: str) -> None:  # noqa: A002
    if type not in ("dataproto", "dict"):
        raise ValueError(f"unsupported Mooncake payload type: {type!r}")


def _checked_chunk_bytes(chunk_bytes: int) -> int:
    if chunk_bytes <= 0:
        raise ValueError("chunk_bytes must be positive")
    return chunk_bytes
