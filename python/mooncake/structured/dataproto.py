"""Batches of columns in the store: puts, later fields, removal and description."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from mooncake.structured.columns.column import encode_column, private_dtypes
from mooncake.structured.envelope import Envelope, FieldSchemas, column_values, schema_of
from mooncake.structured.manifest import RemoteBundleRef, checked_name
from mooncake.structured.members import (
    STRUCTURED_FIELD_SPECS_KEY,
    encode_metadata,
    field_of,
)
from mooncake.structured.policy import WriteOptions
from mooncake.structured.references import (
    MooncakeDataProtoRef,
    StructuredFieldLocation,
)
from mooncake.structured.structured_object import StructuredObjects, encode_object

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

    def put(self, data: Envelope, rows: int, options: BatchOptions) -> MooncakeDataProtoRef:
        """Put a batch as one stage. One without fields stores nothing.

        Args:
            data: The batch.
            rows: Number of its rows, from `Envelope.check`.
            options: Options of the put.

        Raises:
            RuntimeError: The store could not take it.
            TypeError: A field is of a type that is not stored.
            ValueError: A field has no codec, or the fields differ in their number of rows.
        """
        checked_name("partition", options.partition)
        _check_stage(options.stage)
        ref = MooncakeDataProtoRef(
            rows,
            {},
            {},
            dict(data.meta_info),
            options.namespace,
            options.partition,
            _storage_group_id=options.write.storage_group_id,
        )
        if data.batch or data.non_tensor_batch:
            encoded = _encode_fields(data, options)
            ref.stage_refs[options.stage], _ = self._put_stage(encoded, rows, options)
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
        """Put more fields of a batch, as a new stage or in place of one, after `check_append`.

        Args:
            ref: The batch, which stays valid.
            data: The fields.
            options: Options of the put.
            overwrite: True to replace fields that exist. The stage of that name is then removed,
                so all its fields must be given.

        Returns:
            The batch with the new fields.

        Raises:
            RuntimeError: The store could not take the fields.
            TypeError: A field is of a type that is not stored.
            ValueError: A field has no codec.
        """
        _check_stage(options.stage)
        names = [*data.batch, *data.non_tensor_batch]
        old = ref.stage_refs.get(options.stage)
        appended = replace(
            ref,
            stage_refs=dict(ref.stage_refs),
            field_index=dict(ref.field_index),
            meta_info={**ref.meta_info, **data.meta_info},
            encoded_non_tensor={
                name: each for name, each in ref.encoded_non_tensor.items() if name not in names
            },
        )
        if not names:
            return appended
        encoded = _encode_fields(data, options)
        if old is None or overwrite:
            added, _ = self._put_stage(encoded, ref.batch_size, options)
        elif self._objects.bundles.objects.is_native:
            added = self._extend_stage(old, encoded, options)
        else:
            added, fields = self._put_stage(encoded, ref.batch_size, options)
            added = self._merge_stages(old, added, fields, options)
        appended.stage_refs[options.stage] = added
        appended.field_index.update(encoded.locations)
        appended.encoded_non_tensor.update(encoded.codecs)
        if old is not None and overwrite:
            try:
                self._objects.bundles.remove([old], may_be_old=True)
            except Exception as error:
                error.add_note(f"the new fields are stored under {added.manifest_key!r}")
                raise
        return appended

    @staticmethod
    def check_append(
        ref: MooncakeDataProtoRef,
        data: Envelope,
        schemas: FieldSchemas,
        stage: str,
        *,
        overwrite: bool,
    ) -> None:
        """Check more fields of a batch, before their options.

        Args:
            ref: The batch.
            data: The fields.
            schemas: How the fields are stored.
            stage: Name of the stage that they are put into.
            overwrite: True to replace fields that exist.

        Raises:
            ValueError: A field exists already, has another number of rows, or is missing.
        """
        rows = data.check(schemas)
        if rows != ref.batch_size:
            raise ValueError(
                f"DataProto append batch size {rows} does not match ref batch size {ref.batch_size}"
            )
        names = [*data.batch, *data.non_tensor_batch]
        existing = sorted((name for name in names if name in ref.field_index), key=str)
        if existing and not overwrite:
            raise ValueError(f"DataProto fields already exist: {existing}")
        if overwrite and stage in ref.stage_refs:
            _check_replaced(ref, stage, names)

    def remove(self, ref: MooncakeDataProtoRef) -> None:
        """Remove a batch. A batch that is gone already is fine.

        Raises:
            RuntimeError: An object could not be removed.
        """
        self._objects.bundles.remove(ref.stage_refs.values(), may_be_old=True)

    def remove_append(self, previous: MooncakeDataProtoRef, appended: MooncakeDataProtoRef) -> None:
        """Remove what an append added, and keep what the previous batch has.

        Raises:
            RuntimeError: An object could not be removed.
        """
        kept = {each.manifest_key for each in previous.stage_refs.values()}
        added = [each for each in appended.stage_refs.values() if each.manifest_key not in kept]
        self._objects.bundles.remove(added, kept=previous.stage_refs.values(), may_be_old=True)

    def view(self, ref: MooncakeDataProtoRef) -> dict[str, Any]:
        """Return a description of a batch: its fields, and the metadata of its stages."""
        stages = {
            name: self._objects.open(each, may_be_old=True) for name, each in ref.stage_refs.items()
        }
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
            "meta_info_keys": sorted(ref.meta_info, key=str),
            "stages": {
                name: {
                    "manifest_key": ref.stage_refs[name].manifest_key,
                    "dataproto": metadata.get("dataproto", {}),
                }
                for name, (_, metadata, _) in stages.items()
            },
        }

    def _put_stage(
        self, encoded: _EncodedFields, rows: int, options: BatchOptions
    ) -> tuple[RemoteBundleRef, Mapping[str, Any]]:
        """Put the object of a stage; return it, and the descriptions of its members.

        Args:
            encoded: The fields.
            rows: Number of rows.
            options: Options of the put.
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
        content = encode_object(metadata, encoded.members, _LAYOUT)
        ref = self._objects.bundles.put(
            content.meta,
            content.payloads,
            partition=options.partition,
            chunk_bytes=options.chunk_bytes,
            options=options.write,
        )
        return ref, content.fields

    def _extend_stage(
        self, old: RemoteBundleRef, encoded: _EncodedFields, options: BatchOptions
    ) -> RemoteBundleRef:
        """Put a stage with the members of an old one and with more fields, in one step.

        The old stage stays valid. On other stores the same is done by `_merge_stages`, with the
        calls that upstream makes.
        """
        before, metadata, fields = self._objects.open(old, may_be_old=True)
        _check_new(encoded.members, before.buffers)
        metadata.pop(STRUCTURED_FIELD_SPECS_KEY, None)
        content = encode_object(metadata, encoded.members, _LAYOUT, fields)
        return self._objects.bundles.put(
            content.meta,
            content.payloads,
            partition=options.partition,
            chunk_bytes=options.chunk_bytes,
            options=options.write,
            base=before,
        )

    def _merge_stages(
        self,
        old: RemoteBundleRef,
        added: RemoteBundleRef,
        added_fields: Mapping[str, Any],
        options: BatchOptions,
    ) -> RemoteBundleRef:
        """Put a stage with the members of an old one and of one that was just put.

        The old stage stays valid. Of the other one only the members are left, or nothing if the put
        fails.
        """
        bundles = self._objects.bundles
        try:
            before, metadata, fields = self._objects.open(old, may_be_old=True)
            after = bundles.manifest(added)
            _check_new(after.buffers, before.buffers)
            metadata.pop(STRUCTURED_FIELD_SPECS_KEY, None)
            meta = encode_metadata(metadata, {**fields, **added_fields}, _LAYOUT)
            merged = bundles.merge(
                before, after, meta, chunk_bytes=options.chunk_bytes, options=options.write
            )
        except BaseException:
            with contextlib.suppress(Exception):
                bundles.remove([added])
            raise
        bundles.discard_manifest(after)
        return merged


def _check_stage(stage: Any) -> None:
    """Check the name of a stage, without which no handle of the batch could be read.

    Raises:
        ValueError: It is no text, or empty.
    """
    if not isinstance(stage, str) or not stage:
        raise ValueError(f"DataProto stage must be a non-empty string, got {stage!r}")


def _check_replaced(ref: MooncakeDataProtoRef, stage: str, names: Collection[str]) -> None:
    """Check that all fields of a stage that is replaced are given.

    Raises:
        ValueError: One is not.
    """
    of_stage = (name for name, each in ref.field_index.items() if each.stage == stage)
    missing = sorted((name for name in of_stage if name not in names), key=str)
    if missing:
        raise ValueError(
            f"DataProto overwrite for stage {stage!r} must include existing fields: {missing}"
        )


def _check_new(members: Iterable[str], existing: Container[str]) -> None:
    """Check that members of later fields do not take the place of those of a stage.

    Fields of different names may have members of one name: the column ``a`` and the array
    ``a.data``.

    Raises:
        ValueError: One does.
    """
    both = sorted(member for member in members if member in existing)
    if both:
        raise ValueError(f"structured members already exist: {both}")


def _encode_fields(data: Envelope, options: BatchOptions) -> _EncodedFields:
    members: dict[str, Any] = {}
    locations: dict[str, StructuredFieldLocation] = {}
    codecs: dict[str, Any] = {}
    private: dict[str, list[str]] = {}
    for section, fields in data.sections():
        for name, value in fields.items():
            member = f"{section}.{name}"
            locations[name] = StructuredFieldLocation(options.stage, member, section)
            schema = schema_of(options.schemas, name, section)
            is_batch = section == "batch"
            values = None if is_batch else column_values(member, value, schema)
            if values is None:
                _add(members, member, value)
                continue
            column = encode_column(member, values, schema, name)
            payload_members = {payload: f"{member}.{payload}" for payload in column.payloads}
            for payload, array in column.payloads.items():
                _add(members, payload_members[payload], array)
            codecs[name] = {
                "codec": column.codec,
                "rows": column.rows,
                "metadata": column.metadata,
                "payload_members": payload_members,
            }
            dtypes = private_dtypes(column)
            if dtypes:
                private[name] = dtypes
    if private:
        named = ", ".join(f"{name} ({', '.join(dtypes)})" for name, dtypes in private.items())
        warnings.warn(
            f"columns that upstream's package cannot read, since numpy lacks their dtype: {named}",
            UserWarning,
            stacklevel=4,
        )
    return _EncodedFields(members, locations, codecs)


def _add(members: dict[str, Any], name: str, value: Any) -> None:
    if name in members:
        raise ValueError(f"two fields of the batch are stored under one name: {name!r}")
    members[name] = value
