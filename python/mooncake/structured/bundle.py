"""Bundles: named payloads that become visible together, when their manifest is written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from mooncake.structured.bundle_store import ObjectRead, Objects
from mooncake.structured.manifest import (
    BundleKeys,
    Manifest,
    PayloadSpec,
    RemoteBundleRef,
    base_of_manifest,
    checked_name,
    decoded_json,
    manifest_key_of,
)
from mooncake.structured.payloads import Payload, bytes_payload

if TYPE_CHECKING:
    from mooncake.structured.policy import WriteOptions

__all__ = ["DEFAULT_BUNDLE_CHUNK_BYTES", "BundlePayload", "Bundles"]

DEFAULT_BUNDLE_CHUNK_BYTES: Final = 64 << 20
# A manifest has a few hundred bytes for each payload.
_MANIFEST_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class BundlePayload:
    """A payload to put.

    Attributes:
        payload: Its bytes.
        extra: Further entries of its manifest.
        typed: Entries for a store that has calls for tensors, with which upstream then reads it.
        is_single: True if it must be one object of any length, as a tensor must.
    """

    payload: Payload
    extra: Mapping[str, Any] = field(default_factory=dict)
    typed: Mapping[str, Any] = field(default_factory=dict)
    is_single: bool = False


class Bundles:
    """The bundles under one prefix of keys."""

    def __init__(self, objects: Objects, prefix: str) -> None:
        """Use objects of a store.

        Args:
            objects: The objects.
            prefix: Beginning of all keys.
        """
        self.objects = objects
        self._prefix = prefix

    def put(
        self,
        meta: bytes,
        payloads: Mapping[str, BundlePayload],
        *,
        partition: str,
        chunk_bytes: int,
        options: WriteOptions,
        inherited: Mapping[str, PayloadSpec] | None = None,
    ) -> RemoteBundleRef:
        """Put payloads, then metadata, then the manifest.

        A reader therefore never finds a manifest whose payloads are missing. What was written is
        removed again if the put fails.

        Args:
            meta: Metadata of the bundle.
            payloads: Payload of each name.
            partition: Part of the keys, for instance a rank.
            chunk_bytes: Length of the objects that a long payload is cut into.
            options: Options of the puts.
            inherited: Payloads of another bundle that this one has too.

        Raises:
            RuntimeError: The store could not take an object.
        """
        checked_name("partition", partition)
        keys = BundleKeys.new(self._prefix, partition)
        named = [(checked_name("buffer name", name), payload) for name, payload in payloads.items()]
        parts = [(keys.buffer(name), payload) for name, payload in named]
        parts.append((keys.meta, BundlePayload(bytes_payload(meta, "meta"))))
        specs: list[PayloadSpec] = []
        objects: list[tuple[str, Payload]] = []
        for key, part in parts:
            extra = {**part.typed, **part.extra} if self.objects.has_tensors else part.extra
            spec, chunks = _cut(key, part, extra, chunk_bytes)
            specs.append(spec)
            objects += chunks
        buffers = {
            **(inherited or {}),
            **dict(zip([name for name, _ in named], specs, strict=False)),
        }
        manifest = Manifest(keys.object_id, specs[-1], buffers).encode()
        encoded = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False).encode()
        last = [(keys.manifest, bytes_payload(encoded, "manifest"))]
        try:
            self.objects.put(objects, options)
            self.objects.put(last, options)
        except BaseException:
            # The failure of the put is what the caller must see.
            with contextlib.suppress(Exception):
                self.objects.remove([keys.manifest, *(key for key, _ in objects)])
            raise
        return RemoteBundleRef(keys.manifest, manifest)

    def manifest(self, ref: Any) -> Manifest:
        """Return the manifest of a reference, which is read unless the reference holds it.

        Raises:
            ValueError: There is no manifest, or it is not valid.
        """
        if isinstance(ref, RemoteBundleRef) and ref.manifest:
            return Manifest.decode(ref.manifest)
        key = manifest_key_of(ref)
        data = self.objects.store.get(key)
        if not data:
            raise json.JSONDecodeError(f"there is no bundle manifest under the key {key!r}", "", 0)
        if len(data) > _MANIFEST_BYTES_MAX:
            raise ValueError(f"invalid bundle manifest: it has {len(data)} bytes")
        return Manifest.decode(decoded_json(data, "bundle manifest"))

    def meta(self, manifest: Manifest) -> bytes:
        """Return the metadata of a bundle."""
        chunks = manifest.meta.chunks
        keys, sizes = [key for key, _ in chunks], [size for _, size in chunks]
        self.objects.check_sizes(dict(chunks))
        return b"".join(self.objects.read_bytes(keys, sizes))

    def remove(self, refs: Iterable[Any], *, kept: Iterable[Any] = ()) -> None:
        """Remove bundles, their manifests first. A bundle that is gone already is fine.

        Args:
            refs: References or handles.
            kept: Bundles whose payloads are not removed, even if a removed bundle has them too.

        Raises:
            RuntimeError: An object could not be removed.
        """
        manifests, payloads = self._keys_of(refs)
        kept_manifests, kept_payloads = self._keys_of(kept)
        retained = {*kept_manifests, *kept_payloads}
        failed: list[tuple[str, int]] = []
        # Without its manifest a bundle is invisible, so a reader never finds half of one.
        for keys in (manifests, payloads):
            failed += self.objects.remove([key for key in keys if key not in retained])
        if failed:
            raise RuntimeError(f"failed to remove {len(failed)} Mooncake keys: {failed[:3]}")

    def orphans(self, keys: Iterable[str]) -> list[str]:
        """Return the keys of bundles under this prefix that no manifest in the store names.

        Args:
            keys: Keys to look at, as an operator lists them. Keys of other prefixes are ignored.
        """
        own = [key for key in keys if key.startswith(f"{self._prefix}/")]
        manifests = {key for key in own if key.endswith("/manifest")}
        named: set[str] = set()
        for key in manifests:
            with contextlib.suppress(ValueError):
                named.update(self.manifest({"manifest_key": key}).payload_keys())
        return [key for key in own if key not in manifests and key not in named]

    def _keys_of(self, refs: Iterable[Any]) -> tuple[list[str], list[str]]:
        """Return the keys of the manifests and of the payloads of bundles."""
        manifests: list[str] = []
        payloads: list[str] = []
        for ref in refs:
            key = manifest_key_of(ref)
            try:
                manifest = self.manifest(ref)
            except ValueError:
                if self.objects.store.is_exist(key) > 0:
                    raise
                continue
            # A false manifest must not make this process remove objects of others.
            root = base_of_manifest(key).rsplit("/", 2)[0] + "/"
            outside = [each for each in manifest.payload_keys() if not each.startswith(root)]
            if outside:
                raise ValueError(f"invalid bundle manifest: it names the key {outside[0]!r}")
            manifests.append(key)
            payloads += manifest.payload_keys()
        return manifests, payloads


def payload_reads(
    spec: PayloadSpec, offset: int, size: int, address: int, *, is_registered: bool = False
) -> list[ObjectRead]:
    """Return the reads of a range of a payload into memory.

    Args:
        spec: The payload.
        offset: First byte of the range.
        size: Length of the range.
        address: Address of the destination.
        is_registered: True if the destination is registered memory.

    Raises:
        ValueError: The range is not inside of the payload.
    """
    if offset < 0 or size < 0 or offset + size > spec.nbytes:
        raise ValueError(
            f"the range is outside of the payload key={spec.key} offset={offset} size={size} "
            f"bytes={spec.nbytes}"
        )
    reads: list[ObjectRead] = []
    begin = 0
    for key, length in spec.chunks:
        first, last = max(offset, begin), min(offset + size, begin + length)
        if first < last:
            to = address + first - offset
            reads.append(ObjectRead(key, length, first - begin, last - first, to, is_registered))
        begin += length
    return reads


def _cut(
    key: str, part: BundlePayload, extra: Mapping[str, Any], chunk_bytes: int
) -> tuple[PayloadSpec, Sequence[tuple[str, Payload]]]:
    """Return the entry of a payload in the manifest, and its objects."""
    total = part.payload.nbytes
    chunks = part.payload.chunks(max(total, 1) if part.is_single else chunk_bytes)
    keys = [key] if len(chunks) == 1 else [f"{key}/chunk/{at}" for at in range(len(chunks))]
    objects = list(zip(keys, chunks, strict=True))
    sizes = tuple((name, chunk.nbytes) for name, chunk in objects)
    return PayloadSpec(key, total, sizes, extra), objects
