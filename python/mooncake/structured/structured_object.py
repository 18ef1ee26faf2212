"""Structured objects: one bundle whose members are arrays, tensors and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from mooncake.structured.bundle import BundlePayload, Bundles
from mooncake.structured.leases import ResultMemory
from mooncake.structured.manifest import (
    Manifest,
    RemoteBundleRef,
    checked_name,
    embedded_manifest,
    manifest_key_of,
)
from mooncake.structured.members import (
    decode_metadata,
    encode_member,
    encode_metadata,
    field_of,
)
from mooncake.structured.policy import WriteOptions
from mooncake.structured.reading import MemberReads
from mooncake.structured.rows import StructuredMemberSlice

__all__ = [
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "StructuredObjects",
    "checked_payload",
]

_LAYOUT: Final = "structured"
BundleRefLike: TypeAlias = RemoteBundleRef | Mapping[str, Any]


@dataclass(frozen=True)
class StructuredObjectPayload:
    """An object to put.

    Attributes:
        metadata: Any JSON object of the caller; "layout" in it must be text.
        buffers: Value of each member: an array, a torch tensor, or bytes.
    """

    metadata: Mapping[str, Any] | None = None
    buffers: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise TypeError if there are no members; no metadata are empty metadata."""
        if self.buffers is None:
            raise TypeError("StructuredObjectPayload requires buffers")
        if self.metadata is None:
            object.__setattr__(self, "metadata", {})


@dataclass
class StructuredObjectResult:
    """An object that was read.

    Attributes:
        metadata: Metadata of the object, with the descriptions of its members under
            `STRUCTURED_FIELD_SPECS_KEY`.
        objects: Value of each member that was selected.
    """

    metadata: dict[str, Any]
    objects: dict[str, Any]


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What to read of an object. Each method returns a new one.

    Attributes:
        ref: The object.
        member_names: Members to read; None for all.
        member_slices: Rows to read of members.
    """

    ref: BundleRefLike
    member_names: tuple[str, ...] | None = None
    member_slices: tuple[tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Sequence[str] | None) -> StructuredObjectReadSpec:
        """Read only some members.

        Args:
            names: Names of the members; None for all.
        """
        return replace(self, member_names=None if names is None else tuple(names))

    def slice_member(
        self, name: str, axis: int, start: int, end: int, step: int = 1
    ) -> StructuredObjectReadSpec:
        """Read only some rows of a member.

        Args:
            name: Name of the member.
            axis: Always 0.
            start: First row.
            end: End of the rows.
            step: Distance of the rows.
        """
        others = tuple(each for each in self.member_slices if each[0] != name)
        chosen = (name, StructuredMemberSlice(axis, start, end, step))
        return replace(self, member_slices=(*others, chosen))

    def member_slice(self, name: str) -> StructuredMemberSlice | None:
        """Return the rows that are read of a member; None for all."""
        return dict(self.member_slices).get(name)


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """A structured object as the content of a bundle.

    Attributes:
        meta: Metadata with the descriptions of the members.
        payloads: Payload of each member.
        fields: Description of each member.
    """

    meta: bytes
    payloads: Mapping[str, BundlePayload]
    fields: Mapping[str, Any] = field(default_factory=dict)


def encode_object(
    metadata: Mapping[str, Any],
    members: Mapping[str, Any],
    layout: str = _LAYOUT,
    inherited: Mapping[str, Any] | None = None,
) -> EncodedObject:
    """Encode the metadata and the members of an object.

    Args:
        metadata: Metadata of the caller.
        members: Value of each member.
        layout: Layout, unless the metadata has one.
        inherited: Descriptions of members that another bundle has.

    Raises:
        TypeError: A value is of a type that is not stored.
        ValueError: A name or the metadata is not valid.
    """
    fields: dict[str, Any] = dict(inherited or {})
    payloads: dict[str, BundlePayload] = {}
    for name, value in members.items():
        checked_name("buffer name", name)
        fields[name], payloads[name] = encode_member(name, value)
    return EncodedObject(encode_metadata(metadata, fields, layout), payloads, fields)


def checked_payload(payload: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the metadata and the members of an object to put.

    Raises:
        TypeError: The argument is no such object, or its metadata have no JSON form.
        ValueError: The metadata have a reserved key, or a layout that is not text.
    """
    if not isinstance(payload, StructuredObjectPayload):
        raise TypeError(f"expected StructuredObjectPayload, got {type(payload).__name__}")
    metadata, buffers = payload.metadata, payload.buffers
    if not isinstance(metadata, Mapping):
        raise TypeError(f"structured metadata must be a mapping, not {type(metadata).__name__}")
    if not isinstance(buffers, Mapping):
        raise TypeError(f"structured buffers must be a mapping, not {type(buffers).__name__}")
    encode_metadata(metadata, {}, _LAYOUT)
    return metadata, buffers


class StructuredObjects:
    """The structured objects under one prefix of keys."""

    def __init__(self, bundles: Bundles, results: ResultMemory) -> None:
        """Use bundles.

        Args:
            bundles: The bundles.
            results: Allocates the memory of values that are read.
        """
        self.bundles = bundles
        self._results = results

    def put(
        self,
        payload: StructuredObjectPayload,
        *,
        partition: str,
        chunk_bytes: int,
        options: WriteOptions,
    ) -> RemoteBundleRef:
        """Put an object.

        Raises:
            RuntimeError: The store could not take it.
            TypeError: A member is of a type that is not stored.
            ValueError: A name or the metadata is not valid.
        """
        metadata, buffers = checked_payload(payload)
        encoded = encode_object(metadata, buffers)
        return self.bundles.put(
            encoded.meta,
            encoded.payloads,
            partition=partition,
            chunk_bytes=chunk_bytes,
            options=options,
        )

    def open(
        self, ref: BundleRefLike, *, may_be_old: bool = False
    ) -> tuple[Manifest, dict[str, Any], dict[str, Any]]:
        """Return the manifest of an object, its metadata, and the descriptions of its members.

        Args:
            ref: The object.
            may_be_old: True to accept merged bundles of the first version of this package.
        """
        manifest = self.bundles.manifest(ref, may_be_old=may_be_old)
        metadata, fields = decode_metadata(self.bundles.meta(manifest))
        return manifest, metadata, fields

    def reads(self) -> MemberReads:
        """Return a plan of reads without a read."""
        return MemberReads(self.bundles, self._results)

    def materialize(
        self, spec: StructuredObjectReadSpec, destinations: Mapping[str, Any] | None = None
    ) -> StructuredObjectResult:
        """Read what a specification selects.

        Args:
            spec: The specification.
            destinations: Memory that receives members, by name.

        Raises:
            KeyError: The object has no member that is selected, or that has a destination.
            RuntimeError: The object does not exist any more.
            ValueError: The specification or a destination does not fit the object.
        """
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("structured read spec selected no members")
        if embedded_manifest(spec.ref) is None:
            manifest_key_of(spec.ref)
        manifest, metadata, fields = self.open(spec.ref)
        names = list(manifest.buffers) if spec.member_names is None else list(spec.member_names)
        unknown = [name for name in destinations or () if name not in manifest.buffers]
        if unknown:
            raise KeyError(f"destinations of unknown structured members: {unknown}")
        reads = self.reads()
        pending = {
            name: reads.member(
                name,
                payload,
                field_of(fields, name),
                spec.member_slice(name),
                (destinations or {}).get(name),
            )
            for name, payload in manifest.select(names).items()
        }
        reads.run()
        return StructuredObjectResult(metadata, {name: each() for name, each in pending.items()})
