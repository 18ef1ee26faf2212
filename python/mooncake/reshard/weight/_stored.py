"""Weights that lie in a store: which objects hold which parts of which tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from .._checks import (
    canonical_json,
    parse_json_object,
    require_distinct,
    require_fields,
    require_integers,
    require_items,
    require_sequence,
    require_sha256,
    require_text,
    require_u64,
    set_fields,
    sha256_hex,
)
from ..contracts import ResourceId, ResourceKind, RevisionId, StoredFragmentId, TensorId
from ..geometry import boxes_exactly_cover
from ._tensor import TensorDescriptor, checked_aliases, validate_fragment_geometry
from ._wire import tensor_from_record, tensor_record

__all__ = [
    "StoredFragment",
    "StoredManifestIdentity",
    "WeightManifest",
]


@dataclass(frozen=True)
class StoredFragment:
    """A box of a tensor, as a dense array in a byte range of an object.

    `aliases` are the tensors with equal content, the tensor itself among them.

    Raises:
        ValueError: A field is out of its limits.
    """

    fragment_id: StoredFragmentId
    tensor_id: TensorId
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    object_key: str
    object_offset: int
    nbytes: int
    aliases: tuple[TensorId, ...] = ()

    def __post_init__(self) -> None:
        for name in ("fragment_id", "tensor_id", "object_key"):
            require_text(getattr(self, name), f"stored fragment {name}")
        require_u64(self.object_offset, "stored fragment object_offset")
        require_u64(self.nbytes, "stored fragment nbytes", minimum=1)
        offset = require_integers(self.global_offset, "stored fragment global_offset")
        set_fields(
            self,
            global_offset=offset,
            local_shape=require_integers(
                self.local_shape, "stored fragment local_shape", minimum=1
            ),
            aliases=checked_aliases(self.aliases, self.tensor_id),
        )


@dataclass(frozen=True)
class StoredManifestIdentity:
    """The name and the content's digest of a manifest of stored weights."""

    namespace: str
    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    group_id: str
    manifest_key: str
    content_sha256: str

    def __post_init__(self) -> None:
        for name in ("namespace", "resource_id", "revision", "group_id", "manifest_key"):
            require_text(getattr(self, name), name)
        require_u64(self.weight_generation, "weight_generation")
        require_sha256(self.content_sha256, "content_sha256")


@dataclass(frozen=True)
class WeightManifest:
    """The stored fragments of a revision of a model's weights.

    The manifest is the object `<group_id>/manifest`, the fragments lie in objects below
    `<group_id>/payload/`. `manifest_digest` is the SHA-256 digest of the canonical JSON.

    Raises:
        ValueError: A field is out of its limits, an object is outside the group, fragments
            overlap in an object or in a tensor, or a tensor is not fully covered.
    """

    namespace: str
    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    group_id: str
    manifest_key: str
    tensors: tuple[TensorDescriptor, ...]
    fragments: tuple[StoredFragment, ...]
    created_at: str
    manifest_digest: str = field(init=False)

    def __post_init__(self) -> None:
        for name in (
            "namespace", "resource_id", "revision", "group_id", "manifest_key", "created_at",
        ):  # fmt: skip
            require_text(getattr(self, name), name)
        require_u64(self.weight_generation, "weight_generation")
        set_fields(
            self,
            tensors=require_items(self.tensors, "WeightManifest tensors", TensorDescriptor),
            fragments=require_items(self.fragments, "WeightManifest fragments", StoredFragment),
        )
        self._validate_keys()
        self._validate_fragments()
        set_fields(self, manifest_digest=sha256_hex(self.to_json()))

    @property
    def resource_kind(self) -> ResourceKind:
        """The kind of the resource: model weights."""
        return ResourceKind.MODEL_WEIGHT

    @property
    def manifest_identity(self) -> StoredManifestIdentity:
        """The name and the digest of the manifest."""
        return StoredManifestIdentity(
            namespace=self.namespace,
            resource_id=self.resource_id,
            revision=self.revision,
            weight_generation=self.weight_generation,
            group_id=self.group_id,
            manifest_key=self.manifest_key,
            content_sha256=self.manifest_digest,
        )

    def to_json(self) -> str:
        """Return the canonical JSON text of the manifest."""
        record = {name: getattr(self, name) for name in _TEXT_FIELDS}
        return canonical_json(
            {
                **record,
                "resource_kind": self.resource_kind.value,
                "tensors": [tensor_record(tensor) for tensor in self.tensors],
                "fragments": [
                    {name: getattr(fragment, name) for name in _FRAGMENT_FIELDS}
                    for fragment in self.fragments
                ],
            },
            is_ascii=False,
        )

    @classmethod
    def from_json(cls, value: str | bytes | bytearray) -> WeightManifest:
        """Return the manifest of a JSON text.

        Raises:
            ValueError: The text is no JSON, has other fields, or describes no complete weights.
        """
        return cls.from_dict(parse_json_object(value, "weight manifest"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, object]) -> WeightManifest:
        """Return the manifest of a JSON record.

        Raises:
            ValueError: As `from_json`.
        """
        record = dict(require_fields(raw, "weight manifest", _MANIFEST_FIELDS))
        kind = record.pop("resource_kind")
        if kind != ResourceKind.MODEL_WEIGHT.value:
            raise ValueError(f"resource_kind must be {ResourceKind.MODEL_WEIGHT.value}: {kind!r}")
        tensors = tuple(
            tensor_from_record(item, f"tensor {index}")
            for index, item in enumerate(
                require_sequence(record.pop("tensors"), "WeightManifest tensors")
            )
        )
        fragments = tuple(
            StoredFragment(**require_fields(item, f"fragment {index}", _FRAGMENT_FIELDS))
            for index, item in enumerate(
                require_sequence(record.pop("fragments"), "WeightManifest fragments")
            )
        )
        return cls(**record, tensors=tensors, fragments=fragments)

    def _validate_keys(self) -> None:
        wanted = f"{self.group_id}/manifest"
        if self.manifest_key != wanted:
            raise ValueError(
                "manifest_key does not belong to manifest group, whose manifest is "
                f"{wanted}: {self.manifest_key}"
            )
        prefix = f"{self.group_id}/payload/"
        for fragment in self.fragments:
            if not fragment.object_key.startswith(prefix):
                raise ValueError(
                    "payload object_key does not belong to manifest group, whose payloads lie "
                    f"below {prefix}: {fragment.object_key}"
                )

    def _validate_fragments(self) -> None:
        require_distinct([tensor.tensor_id for tensor in self.tensors], "tensor_id")
        tensors = {tensor.tensor_id: tensor for tensor in self.tensors}
        held: dict[TensorId, list[Any]] = defaultdict(list)
        for fragment in self.fragments:
            tensor = tensors.get(fragment.tensor_id)
            if tensor is None:
                raise ValueError(f"a fragment names an unknown tensor: {fragment.tensor_id}")
            validate_fragment_geometry(tensor, fragment)
        require_distinct([fragment.fragment_id for fragment in self.fragments], "fragment_id")
        for fragment in self.fragments:
            held[fragment.tensor_id].append((fragment.global_offset, fragment.local_shape))
        for tensor in self.tensors:
            require_distinct(held[tensor.tensor_id], f"fragment geometry of {tensor.tensor_id}")
            whole = (0,) * len(tensor.global_shape)
            if not boxes_exactly_cover(whole, tensor.global_shape, held[tensor.tensor_id]):
                raise ValueError(f"the tensor is not fully covered: tensor_id={tensor.tensor_id}")
        _validate_aliases(tensors, self.fragments)
        _validate_object_ranges(self.fragments)


_TEXT_FIELDS = (
    "namespace", "resource_id", "revision", "weight_generation", "group_id", "manifest_key",
    "created_at",
)  # fmt: skip
_MANIFEST_FIELDS = frozenset({*_TEXT_FIELDS, "resource_kind", "tensors", "fragments"})
_FRAGMENT_FIELDS = frozenset(StoredFragment.__dataclass_fields__)


def _validate_aliases(
    tensors: Mapping[TensorId, TensorDescriptor], fragments: Iterable[StoredFragment]
) -> None:
    """Refuse aliases with another description, or without a fragment of the same box."""
    boxes: dict[object, set[TensorId]] = defaultdict(set)
    for fragment in fragments:
        for alias in fragment.aliases:
            if alias not in tensors:
                raise ValueError(f"an alias group references unknown tensor: alias={alias}")
            described = replace(tensors[alias], tensor_id=fragment.tensor_id)
            if described != tensors[fragment.tensor_id]:
                raise ValueError(
                    "stored aliases must be described alike: "
                    f"tensor_id={fragment.tensor_id} alias={alias}"
                )
        box = (fragment.aliases, fragment.global_offset, fragment.local_shape)
        boxes[box].add(fragment.tensor_id)
    for fragment in fragments:
        box = (fragment.aliases, fragment.global_offset, fragment.local_shape)
        if fragment.aliases and boxes[box] != set(fragment.aliases):
            raise ValueError(
                "each alias must have a fragment of the same box: "
                f"fragment_id={fragment.fragment_id} aliases={fragment.aliases}"
            )


def _validate_object_ranges(fragments: Iterable[StoredFragment]) -> None:
    objects: dict[str, list[StoredFragment]] = defaultdict(list)
    for fragment in fragments:
        objects[fragment.object_key].append(fragment)
    for key, group in objects.items():
        group.sort(key=lambda fragment: fragment.object_offset)
        for first, second in pairwise(group):
            if first.object_offset + first.nbytes > second.object_offset:
                raise ValueError(
                    f"object ranges overlap: {first.fragment_id} and "
                    f"{second.fragment_id} object_key={key} offset={second.object_offset}"
                )
