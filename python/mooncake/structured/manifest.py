"""The manifest of a bundle: names, keys and lengths of its payloads, as JSON."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

__all__ = [
    "BundleKeys",
    "Manifest",
    "PayloadSpec",
    "RemoteBundleRef",
    "checked_name",
    "checked_prefix",
    "decoded_json",
    "embedded_manifest",
    "encoded_json",
    "is_merged_without_ids",
    "manifest_key_of",
    "object_ids_of",
]

_VERSION: Final = 1
_LAYOUT: Final = "bundle"
_MANIFEST: Final = "/manifest"
_OBJECT_IDS: Final = "buffer_object_ids"
_CLEANUP_KEYS: Final = "cleanup_keys"
_PAYLOAD_ENTRIES: Final = ("key", "bytes", "chunks")
_CONTROL: Final = re.compile(r"[\x00-\x1f]")
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_NAME: Final = re.compile(r"[^\x00-\x1f/]+")
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


# Reads and puts make one for each payload: a named tuple takes a quarter of the time of a frozen
# dataclass.
class PayloadSpec(NamedTuple):
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
    extra: Mapping[str, Any]

    @classmethod
    def decode(cls, name: str, raw: Any, bases: tuple[str, ...]) -> Self:
        """Parse an entry of a manifest.

        Args:
            name: Name of the payload, for errors.
            raw: The entry.
            bases: Beginnings that the key may have.

        Raises:
            ValueError: The entry is not valid, or names objects of others.
        """
        try:
            key, nbytes = _text(raw["key"]), _length(raw["bytes"])
            chunks = tuple([(_text(each["key"]), _length(each["bytes"])) for each in raw["chunks"]])
            if not key.startswith(bases):
                raise ValueError(f"its key is outside the bundle namespace: {key!r}")
            # One chunk of the payload's own key and length is the common case.
            if not nbytes or chunks != ((key, nbytes),):
                _check_chunks(key, nbytes, chunks)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"invalid bundle manifest: payload {name!r}: {error}") from error
        extra = {at: raw[at] for at in raw if at not in _PAYLOAD_ENTRIES} if len(raw) > 3 else {}
        return cls(key, nbytes, chunks, extra)

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
        buffer_object_ids: Partition and id of all bundles whose keys this one has, if it was merged
            from several; None for any other bundle.
        cleanup_keys: Keys of the bundles that were merged, to remove with this one.
    """

    object_id: str
    meta: PayloadSpec
    buffers: Mapping[str, PayloadSpec]
    buffer_object_ids: tuple[str, ...] | None = None
    cleanup_keys: tuple[str, ...] = ()

    @classmethod
    def decode(cls, raw: Any, prefix: str) -> Self:
        """Parse the content of a manifest.

        Every key in it must belong to the bundle, or to one of those it was merged from.

        Args:
            raw: The content.
            prefix: Beginning of all keys.

        Raises:
            ValueError: The content is not a manifest, or names objects of others.
        """
        if not isinstance(raw, dict) or raw.get("layout") != _LAYOUT:
            raise ValueError("invalid bundle manifest: it has no layout 'bundle'")
        if raw.get("version") != _VERSION:
            raise ValueError(
                f"invalid bundle manifest: unsupported bundle manifest version: "
                f"{raw.get('version')!r}"
            )
        object_id, buffers = raw.get("object_id"), raw.get("buffers")
        if not isinstance(object_id, str) or not object_id:
            raise ValueError("invalid bundle manifest: object_id must be a string")
        if not isinstance(buffers, dict):
            raise ValueError(
                "invalid bundle manifest: buffers must be a mapping, as the dict of a bundle"
            )
        ids = raw.get(_OBJECT_IDS, [object_id])
        if not isinstance(ids, list) or not all(isinstance(each, str) and each for each in ids):
            raise ValueError(
                f"invalid bundle manifest: {_OBJECT_IDS} must be a list of strings, got {ids!r}"
            )
        bases = tuple(f"{prefix}/{each}/" for each in ids)
        cleanup = raw.get(_CLEANUP_KEYS, [])
        if not isinstance(cleanup, list) or not all(
            isinstance(key, str) and key.startswith(bases) for key in cleanup
        ):
            raise ValueError(
                f"invalid bundle manifest: {_CLEANUP_KEYS} are outside the bundle namespace"
            )
        return cls(
            object_id,
            PayloadSpec.decode("meta", raw.get("meta"), (f"{prefix}/{object_id}/",)),
            {name: PayloadSpec.decode(name, spec, bases) for name, spec in buffers.items()},
            tuple(ids) if _OBJECT_IDS in raw else None,
            tuple(cleanup),
        )

    def encode(self) -> dict[str, Any]:
        """Return the content for JSON."""
        content: dict[str, Any] = {
            "version": _VERSION,
            "layout": _LAYOUT,
            "object_id": self.object_id,
            "meta": self.meta.encode(),
            "buffers": {name: spec.encode() for name, spec in self.buffers.items()},
        }
        if self.buffer_object_ids is not None:
            content[_OBJECT_IDS] = list(self.buffer_object_ids)
        if self.cleanup_keys:
            content[_CLEANUP_KEYS] = list(self.cleanup_keys)
        return content

    def key(self, prefix: str) -> str:
        """Return the key of the manifest itself."""
        return f"{prefix}/{self.object_id}{_MANIFEST}"

    def own_keys(self, prefix: str) -> list[str]:
        """Return the keys of the manifest and of its metadata."""
        return [self.key(prefix), *(key for key, _ in self.meta.chunks)]

    def payload_keys(self) -> list[str]:
        """Return the keys of the objects of all payloads, and of what was merged."""
        specs = (self.meta, *self.buffers.values())
        return [*(key for spec in specs for key, _ in spec.chunks), *self.cleanup_keys]

    def payload(self, name: str) -> PayloadSpec:
        """Return the payload of a name.

        Raises:
            KeyError: There is none.
        """
        return self.buffers[name] if name in self.buffers else self.select([name])[name]

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


def embedded_manifest(ref: Any) -> Any:
    """Return the manifest that a reference or a handle has in it; None if it must be read."""
    raw = ref.manifest if isinstance(ref, RemoteBundleRef) else None
    if isinstance(ref, Mapping):
        raw = ref.get("manifest")
    return raw or None


def is_merged_without_ids(raw: Any, prefix: str) -> bool:
    """Return whether a manifest may be one of the first version of this package.

    That version did not name the bundles that others were merged from, so their keys must be told
    by their form, and then compared with the manifests of these bundles.
    """
    if not isinstance(raw, dict) or _OBJECT_IDS in raw or _CLEANUP_KEYS in raw:
        return False
    object_id, buffers = raw.get("object_id"), raw.get("buffers")
    if not isinstance(object_id, str) or not isinstance(buffers, dict):
        return False
    partition = object_id.split("/", maxsplit=1)[0]
    form = re.compile(f"{re.escape(f'{prefix}/{partition}')}/[0-9a-f]{{32}}/buffer/")
    specs = [spec if isinstance(spec, dict) else {} for spec in buffers.values()]
    keys = [str(spec.get("key")) for spec in specs]
    if not all(map(form.match, keys)):
        return False
    return any(not key.startswith(f"{prefix}/{object_id}/") for key in keys)


def object_ids_of(keys: Iterable[str], prefix: str) -> list[str]:
    """Return the partition and id of all bundles that some keys belong to."""
    found = {tuple(key.removeprefix(f"{prefix}/").split("/", 2)[:2]) for key in keys}
    return sorted("/".join(each) for each in found)


def checked_name(kind: str, name: Any) -> str:
    """Return the name of a payload or partition.

    Raises:
        ValueError: The name is not text, is empty, or has a slash or a control character.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"invalid bundle {kind}: {name!r}")
    return name


def checked_prefix(prefix: Any) -> str:
    """Return a prefix of keys without slashes at its ends.

    Raises:
        ValueError: Nothing is left, or there is a control character.
    """
    stripped = prefix.strip("/") if isinstance(prefix, str) else ""
    if not stripped or _CONTROL.search(stripped):
        raise ValueError("key_prefix must be a non-empty key prefix")
    return stripped


def encoded_json(value: Any) -> bytes:
    """Return a value as JSON without spaces.

    Raises:
        TypeError: The value has no JSON form.
        ValueError: The value contains itself.
    """
    return _ENCODER.encode(value).encode()


def decoded_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: The bytes are not a JSON object.
    """
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"{what} must be a JSON object, not {type(value).__name__}")
    return value


def _check_chunks(key: str, nbytes: int, chunks: Sequence[tuple[str, int]]) -> None:
    """Check that chunks are a payload.

    Raises:
        ValueError: They are of another payload, the same ones, or of another length.
    """
    for chunk, _ in chunks:
        if chunk != key and not chunk.startswith(f"{key}/"):
            raise ValueError(f"a chunk is outside the payload namespace: {chunk!r}")
    if len({chunk for chunk, _ in chunks}) != len(chunks):
        raise ValueError("the keys of its chunks must be unique")
    if sum(size for _, size in chunks) != nbytes:
        raise ValueError(f"the chunks do not add up to bytes={nbytes}")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a key, got {value!r}")
    return value


def _length(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _PAYLOAD_BYTES_MAX:
        raise ValueError(f"expected a length from 0 to {_PAYLOAD_BYTES_MAX}, got {value!r}")
    return value
