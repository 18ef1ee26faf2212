"""Reads of stored batches: of some fields, and of some rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake.structured.columns.column import (
    column_parts,
    decode_column,
    object_array,
    with_part_metadata,
)
from mooncake.structured.envelope import Envelope
from mooncake.structured.members import field_of
from mooncake.structured.payloads import Array
from mooncake.structured.references import MooncakeDataProtoRef
from mooncake.structured.structured_object import StructuredObjects

if TYPE_CHECKING:
    from mooncake.structured.columns.leaf import Payloads, Selection
    from mooncake.structured.manifest import Manifest
    from mooncake.structured.reading import MemberReads, Pending

__all__ = ["FieldSelection", "read_batch", "selected_fields"]


@dataclass(frozen=True, slots=True)
class FieldSelection:
    """What is read of a batch.

    Attributes:
        names: Fields, in the order of the result.
        rows: Numbers of the rows, as `rows_of` returns them; None for all.
        destinations: Memory that receives fields, by name.
        meta_info_keys: Keys of the metadata; None for all.
    """

    names: Sequence[str]
    rows: Array | None = None
    destinations: Mapping[str, Any] = field(default_factory=dict)
    meta_info_keys: Sequence[str] | None = None


def selected_fields(
    ref: MooncakeDataProtoRef,
    fields: Sequence[str] | None,
    batch_fields: Sequence[str] | None,
    non_tensor_fields: Sequence[str] | None,
) -> list[str]:
    """Return the fields that a caller selects, all of them by default.

    Raises:
        KeyError: The batch has no such field.
        ValueError: Both ways to select are used.
    """
    of_sections = batch_fields is not None or non_tensor_fields is not None
    if fields is not None and of_sections:
        raise ValueError("fields cannot be combined with batch_fields or non_tensor_fields")
    names = list(ref.field_index)
    if fields is not None:
        names = list(fields)
    elif of_sections:
        names = [*(batch_fields or ()), *(non_tensor_fields or ())]
    unknown = [name for name in names if name not in ref.field_index]
    if unknown:
        raise KeyError(f"unknown DataProto fields: {unknown}")
    return list(dict.fromkeys(names))


def read_batch(
    objects: StructuredObjects, ref: MooncakeDataProtoRef, selection: FieldSelection
) -> Envelope:
    """Read fields of a batch.

    Raises:
        KeyError: The batch has no field that has a destination.
        RuntimeError: The batch does not exist any more.
        ValueError: What is stored is not valid, or a destination does not fit.
    """
    unknown = [name for name in selection.destinations if name not in ref.field_index]
    if unknown:
        raise KeyError(f"destinations of unknown DataProto fields: {unknown}")
    rows = selection.rows
    stages = {
        name: _Stage(*objects.open(ref.stage_refs[name], may_be_old=True))
        for name in dict.fromkeys(ref.field_index[each].stage for each in selection.names)
    }
    reads = objects.reads()
    pending: dict[str, Pending] = {}
    columns: list[_ColumnRead] = []
    for name in selection.names:
        location = ref.field_index[name]
        stage = stages[location.stage]
        encoded = ref.encoded_non_tensor.get(name)
        if encoded is None:
            pending[name] = stage.member(
                reads, location.member, rows, selection.destinations.get(name)
            )
        else:
            column = _ColumnRead(name, stage, _description(name, encoded, ref.batch_size), rows)
            column.plan(reads)
            columns.append(column)
            pending[name] = column.values
    reads.run()
    for column in columns:
        column.plan_items(reads)
    reads.run()
    keys = ref.meta_info if selection.meta_info_keys is None else selection.meta_info_keys
    result = Envelope(meta_info={key: ref.meta_info[key] for key in keys if key in ref.meta_info})
    for name, value in pending.items():
        section = ref.field_index[name].section
        getattr(result, section)[name] = value()
    return result


@dataclass(frozen=True, slots=True)
class _Stage:
    """The open object of a stage."""

    manifest: Manifest
    metadata: Mapping[str, Any]
    fields: Mapping[str, dict[str, Any]]

    def member(
        self, reads: MemberReads, member: str, rows: Array | None = None, destination: Any = None
    ) -> Pending:
        """Plan the read of a member; bytes of a column are returned as an array."""
        spec = self.manifest.payload(member)
        return reads.member(member, spec, field_of(self.fields, member), rows, destination)

    def payload(self, reads: MemberReads, member: str) -> Callable[[], Any]:
        """Plan the read of a whole payload of a column."""
        spec = self.manifest.payload(member)
        described = field_of(self.fields, member)
        if described.get("encoding", "bytes") == "bytes":
            data = reads.data(spec)
            return lambda: data
        return reads.member(member, spec, described)

    def items(
        self, reads: MemberReads, member: str, starts: Array, ends: Array
    ) -> Callable[[], Any]:
        """Plan the read of ranges of items of a payload of a column."""
        spec = self.manifest.payload(member)
        return reads.items(member, spec, field_of(self.fields, member), starts, ends)


class _ColumnRead:
    """The read of a column of Python objects.

    For some rows, the payloads that tell where the rows are must be read first.
    """

    def __init__(
        self, name: str, stage: _Stage, description: Mapping[str, Any], rows: Array | None
    ) -> None:
        self._name = name
        self._stage = stage
        self._codec = description["codec"]
        self._metadata: Mapping[str, Any] = description["metadata"]
        self._members: Mapping[str, str] = description["payload_members"]
        self._total: int = description["rows"]
        self._rows = rows
        self._pending: dict[str, Callable[[], Any]] = {}
        self._parts = column_parts(self._codec, self._metadata)

    def plan(self, reads: MemberReads) -> None:
        """Plan the read of all payloads, or of those that tell where the rows are."""
        items = {part.payloads["data"] for part in self._parts}
        for payload, member in self._members.items():
            if self._rows is None or payload not in items:
                self._pending[payload] = self._stage.payload(reads, member)

    def plan_items(self, reads: MemberReads) -> None:
        """Plan the read of the items of the selected rows, after the first reads."""
        if self._rows is None:
            return
        rows = self._rows
        known: Payloads = {name: each() for name, each in self._pending.items()}
        selected: dict[str, Callable[[], Any]] = {}
        own_metadata: list[Mapping[str, Any]] = []
        for part in self._parts:
            own = {name: known[key] for name, key in part.payloads.items() if key in known}
            chosen = part.codec.select(own, self._total, part.metadata, rows)
            own_metadata.append(chosen.metadata)
            for name, array in chosen.payloads.items():
                selected[part.payloads[name]] = _constant(array)
            member = self._members.get(part.payloads["data"])
            if member is None:
                raise ValueError(f"DataProto field {self._name!r} has no data")
            selected[part.payloads["data"]] = self._stage.items(reads, member, *_bounds(chosen))
        for name, array in known.items():
            if name not in selected:
                if len(array) != self._total:
                    raise ValueError(
                        f"DataProto field {self._name!r}: the payload {name} has {len(array)} "
                        f"rows, expected {self._total}"
                    )
                selected[name] = _constant(array[rows])
        self._pending = selected
        self._metadata = with_part_metadata(self._codec, self._metadata, own_metadata)

    def values(self) -> Array:
        """Return the rows."""
        payloads = {name: each() for name, each in self._pending.items()}
        count = self._total if self._rows is None else len(self._rows)
        try:
            return object_array(decode_column(self._codec, payloads, count, self._metadata))
        except ValueError as error:
            raise ValueError(f"DataProto field {self._name!r} is not valid: {error}") from error


def _description(name: str, encoded: Any, rows: int) -> Mapping[str, Any]:
    """Return the description of a column, after checking its form."""
    if not isinstance(encoded, Mapping):
        raise ValueError(f"DataProto field {name!r} has no valid description")
    members, metadata = encoded.get("payload_members"), encoded.get("metadata")
    is_valid = (
        isinstance(members, Mapping)
        and all(isinstance(each, str) for pair in members.items() for each in pair)
        and isinstance(metadata, Mapping)
        and encoded.get("rows") == rows
    )
    if not is_valid:
        raise ValueError(
            f"DataProto field {name!r} has no valid description: rows={encoded.get('rows')!r}, "
            f"expected {rows}"
        )
    return encoded


def _bounds(selection: Selection) -> tuple[Array, Array]:
    return selection.starts, selection.ends


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value
