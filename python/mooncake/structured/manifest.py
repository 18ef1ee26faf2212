"""The manifest of a bundle: names, keys and lengths of its payloads, as JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

__all__ = [
    "BundleKeys",
    "Manifest",
    "PayloadSpec",
    "RemoteBundleRef",
    "checked_name",
    "checked_prefix",
    "decoded_json",
]

_VERSION: Final = 1
_LAYOUT: Final = "bundle"
_MANIFEST: Final = "/manifest"
# Longest payload that a manifest may claim: far above what a pool holds.
_PAYLOAD_BYTES_MAX: Final = 1 << 50


@dataclass
class RemoteBundleRef:
    """A bundle in the store.

    Attributes:
        manifest_key: Key of the manifest.
        manifest: Content of the manifest; empty if it must be read first.
    """

    manifest_key: str
    manifest: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BundleKeys:
    """The keys of one bundle.

    Attributes:
        base: Beginning of all keys: prefix, partition and id.
        object_id: Partition and id.
    """

    base: str
    object_id: str

    @classmethod
    def new(cls, prefix: str, partition: str) -> Self:
        """Return the keys of a new bundle in a partition."""
        object_id = f"{partition}/{uuid.uuid4().hex}"
        return cls(f"{prefix}/{object_id}", object_id)

    @property
    def manifest(self) -> str:
        """Key of the manifest."""
        return self.base + _MANIFEST

    @property
    def meta(self) -> str:
        """Key of the metadata."""
        return f"{self.base}/meta"

    def buffer(self, name: str) -> str:
        """Return the key of a named payload."""
        return f"{self.base}/buffer/{name}"


@dataclass(frozen=True, slots=True)
class PayloadSpec:
    """A payload: the objects that hold its bytes.

    Attributes:
        key: Key of the payload; the key of its only object, or the beginning of all keys.
        nbytes: Length in bytes.
        chunks: Key and length of each object; none for an empty payload.
        extra: Other entries of the manifest, such as those of a tensor.
    """

    key: str
    nbytes: int
    chunks: tuple[tuple[str, int], ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, name: str, raw: Any) -> Self:
        """Parse an entry of a manifest.

        Raises:
            ValueError: The entry is not valid.
        """
        try:
            key, nbytes = _text(raw["key"]), _length(raw["bytes"])
            chunks = tuple((_text(each["key"]), _length(each["bytes"])) for each in raw["chunks"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid bundle manifest: payload {name!r}: {error}") from error
        if sum(size for _, size in chunks) != nbytes or not all(size for _, size in chunks):
            raise ValueError(
                f"invalid bundle manifest: payload {name!r}: the chunks do not add up to "
                f"bytes={nbytes}"
            )
        known = ("key", "bytes", "chunks")
        return cls(key, nbytes, chunks, {at: raw[at] for at in raw if at not in known})

    def encode(self) -> dict[str, Any]:
        """Return the entry of a manifest."""
        chunks = [{"key": key, "bytes": size} for key, size in self.chunks]
        return {"key": self.key, "bytes": self.nbytes, "chunks": chunks, **self.extra}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a bundle.

    Attributes:
        object_id: Partition and id of the bundle.
        meta: Metadata of the bundle.
        buffers: Payload of each name.
    """

    object_id: str
    meta: PayloadSpec
    buffers: Mapping[str, PayloadSpec]

    @classmethod
    def decode(cls, raw: Any) -> Self:
        """Parse the content of a manifest.

        Raises:
            ValueError: The content is not a manifest.
        """
        if not isinstance(raw, dict) or raw.get("layout") != _LAYOUT:
            raise ValueError("invalid bundle manifest: it has no layout 'bundle'")
        if raw.get("version") != _VERSION:
            raise ValueError(f"unsupported bundle manifest version: {raw.get('version')!r}")
        buffers = raw.get("buffers")
        if not isinstance(buffers, dict):
            raise ValueError("invalid bundle manifest: buffers must be a mapping")
        return cls(
            str(raw.get("object_id", "")),
            PayloadSpec.decode("meta", raw.get("meta")),
            {name: PayloadSpec.decode(name, spec) for name, spec in buffers.items()},
        )

    def encode(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return {
            "version": _VERSION,
            "layout": _LAYOUT,
            "object_id": self.object_id,
            "meta": self.meta.encode(),
            "buffers": {name: spec.encode() for name, spec in self.buffers.items()},
        }

    def payload_keys(self) -> list[str]:
        """Return the keys of the objects of all payloads."""
        return [key for spec in (self.meta, *self.buffers.values()) for key, _ in spec.chunks]

    def select(self, names: Sequence[str]) -> dict[str, PayloadSpec]:
        """Return the payloads of some names.

        Raises:
            KeyError: There is no payload of a name.
        """
        unknown = [name for name in names if name not in self.buffers]
        if unknown:
            raise KeyError(f"unknown bundle buffers: {unknown}")
        return {name: self.buffers[name] for name in names}


def manifest_key_of(ref: Any) -> str:
    """Return the key of the manifest of a reference or of a handle with ``manifest_key``.

    Raises:
        TypeError: The argument is neither.
        ValueError: The handle has no key.
    """
    if isinstance(ref, RemoteBundleRef):
        return ref.manifest_key
    if not isinstance(ref, Mapping):
        raise TypeError(
            f"expected a RemoteBundleRef or a mapping with manifest_key, got {type(ref).__name__}"
        )
    key = ref.get("manifest_key")
    if not isinstance(key, str) or not key:
        raise ValueError("bundle ref must include manifest_key")
    return key


def base_of_manifest(key: str) -> str:
    """Return the beginning of the keys of a bundle whose manifest has a key.

    Raises:
        ValueError: The key is not one of a manifest.
    """
    base = key.removesuffix(_MANIFEST)
    if base == key or not base:
        raise ValueError(f"not the key of a bundle manifest: {key!r}")
    return base


def checked_name(kind: str, name: Any) -> str:
    """Return the name of a payload or partition.

    Raises:
        ValueError: The name is not text, or it is empty or has a slash.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"invalid bundle {kind}: {name!r}")
    return name


def checked_prefix(prefix: Any) -> str:
    """Return a prefix of keys without slashes at its ends.

    Raises:
        ValueError: Nothing is left.
    """
    stripped = prefix.strip("/") if isinstance(prefix, str) else ""
    if not stripped:
        raise ValueError("key_prefix must be a non-empty key prefix")
    return stripped


def decoded_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: The bytes are not a JSON object.
    """
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a key, got {value!r}")
    return value


def _length(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _PAYLOAD_BYTES_MAX:
        raise ValueError(f"expected a length from 0 to {_PAYLOAD_BYTES_MAX}, got {value!r}")
    return value
