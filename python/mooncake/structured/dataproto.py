"""Batches of columns in the store: puts, later fields, removal and description."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from mooncake.structured.columns.column import encode_column
from mooncake.structured.envelope import Envelope, FieldSchemas, column_values, schema_of
from mooncake.structured.manifest import RemoteBundleRef, checked_name
from mooncake.structured.members import STRUCTURED_FIELD_SPECS_KEY, field_of
from mooncake.structured.references import (
    MooncakeDataProtoRef,
    Section,
    StructuredFieldLocation,
)
from mooncake.structured.structured_object import StructuredObjects, encode_object

if TYPE_CHECKING:
    from mooncake.structured.policy import WriteOptions

__all__ = ["BatchOptions", "DataProtos"]

_LAYOUT: Final = "dataproto_stage"
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Where and how a batch is stored.

    Attributes:
        namespace: Name that the caller chose; it is stored with the batch.
        partition: Part of the keys.
        stage: Name of the stage that the fields are put into.
        chunk_bytes: Length of the objects that long payloads are cut into.
        write: Options of the puts.
        schemas: How fields are stored.
    """

    namespace: str
    partition: str
    stage: str
    chunk_bytes: int
    write: WriteOptions
    schemas: FieldSchemas


@dataclass(frozen=True, slots=True)
class _EncodedFields:
    """The fields of a batch as members of an object."""

    members: dict[str, Any]
    locations: dict[str, StructuredFieldLocation]
    codecs: dict[str, Any]


class DataProtos:
    """The batches under one prefix of keys."""

    def __init__(self, objects: StructuredObjects) -> None:
        """Use structured objects.

        Args:
            objects: The objects.
        """
        self._objects = objects

    def put(self, data: Envelope, options: BatchOptions) -> MooncakeDataProtoRef:
        """Put a batch as one stage. A batch without fields stores nothing.

        Raises:
            RuntimeError: The store could not take it.
            TypeError: A field is of a type that is not stored.
            ValueError: A field has no codec, or the fields differ in their number of rows.
        """
        checked_name("partition", options.partition)
        data.check_names()
        rows = data.row_count
        ref = MooncakeDataProtoRef(
            rows,
            {},
            {},
            dict(data.meta_info),
            options.namespace,
            options.partition,
            _storage_group_id=options.write.group_id,
        )
        if data.batch or data.non_tensor_batch:
            encoded = _encode_fields(data, options)
            ref.stage_refs[options.stage] = self._put_stage(encoded, rows, options, None)
            ref.field_index.update(encoded.locations)
            ref.encoded_non_tensor.update(encoded.codecs)
        return ref

    def append(
        self,
        ref: MooncakeDataProtoRef,
        data: Envelope,
        options: BatchOptions,
        *,
        overwrite: bool,
    ) -> MooncakeDataProtoRef:
        """Put more fields of a batch, as a new stage or in place of one.

        Args:
            ref: The batch, which stays valid.
            data: The fields.
            options: Options of the put.
            overwrite: True to replace fields that exist.

        Returns:
            The batch with the new fields.

        Raises:
            RuntimeError: The store could not take the fields.
            ValueError: A field exists already, or has another number of rows.
        """
        data.check_names()
        names = [*data.batch, *data.non_tensor_batch]
        existing = sorted(name for name in names if name in ref.field_index)
        if existing and not overwrite:
            raise ValueError(f"DataProto fields already exist: {existing}")
        rows = data.row_count
        if names and ref.field_index and rows != ref.batch_size:
            raise ValueError(
                f"DataProto append batch size {rows} does not match ref batch size {ref.batch_size}"
            )
        appended = replace(
            ref,
            stage_refs=dict(ref.stage_refs),
            field_index=dict(ref.field_index),
            meta_info={**ref.meta_info, **data.meta_info},
            encoded_non_tensor={
                name: each for name, each in ref.encoded_non_tensor.items() if name not in existing
            },
        )
        if names:
            appended.batch_size = rows
            encoded = _encode_fields(data, options)
            old = ref.stage_refs.get(options.stage)
            appended.stage_refs[options.stage] = self._put_stage(encoded, rows, options, old)
            appended.field_index.update(encoded.locations)
            appended.encoded_non_tensor.update(encoded.codecs)
        return appended

    def remove(self, ref: MooncakeDataProtoRef) -> None:
        """Remove a batch. A batch that is gone already is fine.

        Raises:
            RuntimeError: An object could not be removed.
        """
        self._objects.bundles.remove(ref.stage_refs.values())

    def remove_append(self, previous: MooncakeDataProtoRef, appended: MooncakeDataProtoRef) -> None:
        """Remove what an append added, and keep what the previous batch has.

        Raises:
            RuntimeError: An object could not be removed.
        """
        kept = {each.manifest_key for each in previous.stage_refs.values()}
        added = [each for each in appended.stage_refs.values() if each.manifest_key not in kept]
        self._objects.bundles.remove(added, kept=previous.stage_refs.values())

    def view(self, ref: MooncakeDataProtoRef) -> dict[str, Any]:
        """Return a description of a batch: its fields, and the metadata of its stages."""
        stages = {name: self._objects.open(each) for name, each in ref.stage_refs.items()}
        sections: dict[str, dict[str, Any]] = {"batch": {}, "non_tensor_batch": {}}
        for name, location in ref.field_index.items():
            fields = stages[location.stage][2]
            encoded = ref.encoded_non_tensor.get(name)
            spec = dict(field_of(fields, location.member))
            if encoded is not None:
                members = encoded["payload_members"]
                spec = {
                    "encoding": "structured_non_tensor",
                    "codec": encoded["codec"],
                    "metadata": encoded["metadata"],
                    "payload_members": dict(members),
                    "payload_specs": {
                        payload: dict(field_of(fields, member))
                        for payload, member in members.items()
                    },
                }
            sections[location.section][name] = {
                "section": location.section,
                "stage": location.stage,
                "member": location.member,
                "spec": spec,
            }
        return {
            "namespace": ref.namespace,
            "partition": ref.partition,
            "batch_size": ref.batch_size,
            "batch_fields": sections["batch"],
            "non_tensor_fields": sections["non_tensor_batch"],
            "meta_info_keys": sorted(ref.meta_info),
            "stages": {
                name: {
                    "manifest_key": ref.stage_refs[name].manifest_key,
                    "members": list(manifest.buffers),
                    "dataproto": metadata.get("dataproto", {}),
                }
                for name, (manifest, metadata, _) in stages.items()
            },
        }

    def _put_stage(
        self,
        encoded: _EncodedFields,
        rows: int,
        options: BatchOptions,
        old: RemoteBundleRef | None,
    ) -> RemoteBundleRef:
        """Put the object of a stage.

        Args:
            encoded: The new fields.
            rows: Number of rows.
            options: Options of the put.
            old: Stage of the same name whose members the new one has, too.
        """
        metadata: dict[str, Any] = {
            "layout": _LAYOUT,
            "dataproto": {
                "version": _VERSION,
                "namespace": options.namespace,
                "partition": options.partition,
                "stage": options.stage,
                "batch_size": rows,
            },
        }
        inherited = None
        fields: Mapping[str, Any] = {}
        if old is not None:
            manifest, metadata, fields = self._objects.open(old)
            metadata.pop(STRUCTURED_FIELD_SPECS_KEY, None)
            inherited = manifest.buffers
        content = encode_object(metadata, encoded.members, _LAYOUT, fields)
        return self._objects.bundles.put(
            content.meta,
            content.payloads,
            partition=options.partition,
            chunk_bytes=options.chunk_bytes,
            options=options.write,
            inherited=inherited,
        )


def _encode_fields(data: Envelope, options: BatchOptions) -> _EncodedFields:
    members: dict[str, Any] = {}
    locations: dict[str, StructuredFieldLocation] = {}
    codecs: dict[str, Any] = {}
    sections: tuple[tuple[Section, dict[str, Any]], ...] = (
        ("batch", data.batch),
        ("non_tensor_batch", data.non_tensor_batch),
    )
    for section, fields in sections:
        for name, value in fields.items():
            member = f"{section}.{name}"
            locations[name] = StructuredFieldLocation(options.stage, member, section)
            schema = schema_of(options.schemas, name, section)
            values = column_values(member, value) if section == "non_tensor_batch" else None
            if values is None:
                _add(members, member, value)
                continue
            column = encode_column(member, values, schema)
            payload_members = {payload: f"{member}.{payload}" for payload in column.payloads}
            for payload, array in column.payloads.items():
                _add(members, payload_members[payload], array)
            codecs[name] = {
                "codec": column.codec,
                "rows": column.rows,
                "metadata": column.metadata,
                "payload_members": payload_members,
            }
    return _EncodedFields(members, locations, codecs)


def _add(members: dict[str, Any], name: str, value: Any) -> None:
    if name in members:
        raise ValueError(f"two fields of the batch are stored under one name: {name!r}")
    members[name] = value
