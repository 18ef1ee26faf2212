"""Bundles: named payloads that become visible together, when their manifest is written."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from mooncake.structured.bundle_store import ObjectRead, Objects
from mooncake.structured.manifest import (
    BundleKeys,
    Manifest,
    PayloadSpec,
    RemoteBundleRef,
    checked_name,
    decoded_json,
    embedded_manifest,
    encoded_json,
    is_merged_without_ids,
    manifest_key_of,
    object_ids_of,
)
from mooncake.structured.payloads import Payload, bytes_payload
from mooncake.structured.policy import WriteOptions
from mooncake.structured.writes import Form, ObjectPut, Writes

__all__ = ["DEFAULT_BUNDLE_CHUNK_BYTES", "BundlePayload", "Bundles", "payload_reads"]

DEFAULT_BUNDLE_CHUNK_BYTES: Final = 64 << 20
# A manifest has a few hundred bytes for each payload.
_MANIFEST_BYTES_MAX: Final = 256 << 20
_NO_ENTRIES: Final[Mapping[str, Any]] = MappingProxyType({})


class BundlePayload(NamedTuple):
    """A payload to put.

    Attributes:
        payload: Its bytes.
        form: What it is. Tensors and memory of the caller are one object of any length.
        extra: Further entries of its manifest.
        tensor: The tensor of a payload that is one.
        typed: Entries instead of `extra` for a store that has a tensor under the key afterwards.
        pickled: Bytes instead of `payload` for a store that has just bytes, with their entries; for
            tensors without dimensions, which upstream stores so.
    """

    payload: Payload
    form: Form = "data"
    extra: Mapping[str, Any] = _NO_ENTRIES
    tensor: Any = None
    typed: Mapping[str, Any] = _NO_ENTRIES
    pickled: tuple[Payload, Mapping[str, Any]] | None = None


class _MissingManifestError(json.JSONDecodeError):
    """There is nothing under the key of a manifest."""


class Bundles:
    """The bundles under one prefix of keys."""

    def __init__(self, objects: Objects, prefix: str, pool: Any = None) -> None:
        """Use objects of a store.

        Args:
            objects: The objects.
            prefix: Beginning of all keys.
            pool: Pool of the caller for puts, or None.
        """
        self.objects = objects
        self._prefix = prefix
        self._pool = pool

    def put(
        self,
        meta: bytes,
        payloads: Mapping[str, BundlePayload],
        *,
        partition: str,
        chunk_bytes: int,
        options: WriteOptions,
        base: Manifest | None = None,
    ) -> RemoteBundleRef:
        """Put metadata, then payloads, then the manifest.

        A reader therefore never finds a manifest whose payloads are missing. What was written is
        removed again if the put fails.

        Args:
            meta: Metadata of the bundle.
            payloads: Payload of each name, after `checked_name`.
            partition: Part of the keys, for instance a rank.
            chunk_bytes: Length of the objects that a long payload is cut into.
            options: Options of the puts.
            base: Bundle whose payloads the new one has too, except those of the same names. It
                stays valid, until the new one is removed with everything.

        Raises:
            RuntimeError: The store could not take an object.
            ValueError: The policy does not allow to copy a tensor.
        """
        checked_name("partition", partition)
        keys = BundleKeys.new(self._prefix, partition)
        writes = Writes(self.objects, self._pool, options)
        specs: dict[str, PayloadSpec] = {}
        objects: list[ObjectPut] = []
        is_typed = writes.takes_tensors
        _check_copies(payloads, options)
        for name, part in payloads.items():
            specs[name], chunks = _cut(keys.buffer(name), part, chunk_bytes, is_typed=is_typed)
            objects += chunks
        if base is None:
            return self._write(keys, meta, specs, objects, writes, chunk_bytes)
        cleanup = [*base.cleanup_keys, *base.own_keys(self._prefix)]
        buffers = {**base.buffers, **specs}
        return self._write(keys, meta, buffers, objects, writes, chunk_bytes, cleanup)

    def merge(
        self,
        old: Manifest,
        added: Manifest,
        meta: bytes,
        *,
        chunk_bytes: int,
        options: WriteOptions,
    ) -> RemoteBundleRef:
        """Put a bundle that has the payloads of two others; no payload is written again.

        The other two stay valid, until the new one is removed with everything.

        Args:
            old: A bundle.
            added: Another one, whose payloads replace those of the same names.
            meta: Metadata of the new bundle.
            chunk_bytes: Length of the objects that long metadata is cut into.
            options: Options of the puts.

        Raises:
            RuntimeError: The store could not take an object.
        """
        cleanup = [*old.cleanup_keys, *old.own_keys(self._prefix), *added.own_keys(self._prefix)]
        buffers = {**old.buffers, **added.buffers}
        keys = BundleKeys.new(self._prefix, added.object_id.split("/", maxsplit=1)[0])
        writes = Writes(self.objects, self._pool, options)
        return self._write(keys, meta, buffers, [], writes, chunk_bytes, cleanup)

    def discard_manifest(self, manifest: Manifest) -> None:
        """Remove the manifest and the metadata of a bundle that was merged, if that is possible."""
        self.objects.discard(manifest.own_keys(self._prefix))

    def manifest(self, ref: Any, *, may_be_old: bool = False) -> Manifest:
        """Return the manifest of a reference, which is read unless the reference holds it.

        Args:
            ref: The reference.
            may_be_old: True to accept merged bundles of the first version of this package.

        Raises:
            ValueError: There is no manifest, or it is not valid.
        """
        raw = embedded_manifest(ref)
        if raw is None:
            raw = self._stored(manifest_key_of(ref))
        try:
            return Manifest.decode(raw, self._prefix)
        except ValueError:
            # Merged bundles of the first version name payloads of others, which is refused.
            if not may_be_old or not is_merged_without_ids(raw, self._prefix):
                raise
        return Manifest.decode(self._with_ids(raw), self._prefix)

    def meta(self, manifest: Manifest) -> bytes:
        """Return the metadata of a bundle."""
        chunks = manifest.meta.chunks
        keys, sizes = [key for key, _ in chunks], [size for _, size in chunks]
        self.objects.check_sizes(chunks, manifest.meta.nbytes)
        if chunks and self.objects.can_read_into:
            data = np.empty(manifest.meta.nbytes, dtype=np.uint8)
            address = data.__array_interface__["data"][0]
            self.objects.read(payload_reads(manifest.meta, 0, data.nbytes, address))
            return data.tobytes()
        return b"".join(self.objects.read_bytes(keys, sizes))

    def remove(
        self, refs: Iterable[Any], *, kept: Iterable[Any] = (), may_be_old: bool = False
    ) -> None:
        """Remove bundles, their manifests last. A bundle that is gone already is fine.

        What could not be removed is still named by the manifest, so that another call finds it.

        Args:
            refs: References or handles.
            kept: Bundles whose objects are not removed, even if a removed bundle has them too.
            may_be_old: True to accept merged bundles of the first version of this package.

        Raises:
            RuntimeError: An object could not be removed, or the store does not answer.
            ValueError: A manifest is not valid, or not the one of its key.
        """
        retained: set[str] = set()
        for manifest in self._found(kept, may_be_old=may_be_old):
            retained.update((manifest.key(self._prefix), *manifest.payload_keys()))
        found = self._found(refs, may_be_old=may_be_old)
        payloads = [key for manifest in found for key in manifest.payload_keys()]
        manifests = [manifest.key(self._prefix) for manifest in found]
        for keys in (payloads, manifests):
            self.objects.remove([key for key in keys if key not in retained])

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
                manifest = self.manifest({"manifest_key": key}, may_be_old=True)
                named.update(manifest.payload_keys())
        return [key for key in own if key not in manifests and key not in named]

    def _write(
        self,
        keys: BundleKeys,
        meta: bytes,
        buffers: Mapping[str, PayloadSpec],
        objects: Sequence[ObjectPut],
        writes: Writes,
        chunk_bytes: int,
        cleanup: Sequence[str] | None = None,
    ) -> RemoteBundleRef:
        """Put objects, then the manifest.

        Args:
            keys: Keys of the bundle.
            meta: Its metadata.
            buffers: Entries of its payloads.
            objects: Objects of its payloads that are not stored yet.
            writes: The puts.
            chunk_bytes: Length of the objects that long metadata is cut into.
            cleanup: For a merged bundle the keys that are removed with it.
        """
        part = BundlePayload(bytes_payload(meta, "meta"), "meta")
        spec, chunks = _cut(keys.meta, part, chunk_bytes, is_typed=False)
        whole = Manifest(keys.object_id, spec, buffers)
        if cleanup is not None:
            named = [chunk for each in buffers.values() for chunk, _ in each.chunks]
            named += [each.key for each in buffers.values()]
            ids = object_ids_of([*named, *cleanup], self._prefix)
            unique = tuple(dict.fromkeys(cleanup))
            whole = Manifest(keys.object_id, spec, buffers, tuple(ids), unique)
        manifest = whole.encode()
        encoded = encoded_json(manifest)
        all_objects = [*chunks, *objects]
        writes.check_config()
        try:
            writes.put(all_objects)
            writes.put([ObjectPut(keys.manifest, bytes_payload(encoded, "manifest"))])
        except BaseException:
            # The failure of the put is what the caller must see.
            self.objects.discard([keys.manifest, *(each.key for each in all_objects)])
            raise
        return RemoteBundleRef(keys.manifest, manifest)

    def _stored(self, key: str) -> dict[str, Any]:
        """Return the manifest under a key, unchecked."""
        data = self.objects.store.get(key)
        if not data:
            raise _MissingManifestError(f"there is no bundle manifest under the key {key!r}", "", 0)
        if len(data) > _MANIFEST_BYTES_MAX:
            raise ValueError(f"invalid bundle manifest: it has {len(data)} bytes")
        return decoded_json(data, "bundle manifest")

    def _found(self, refs: Iterable[Any], *, may_be_old: bool) -> list[Manifest]:
        """Return the manifests of those bundles that exist."""
        found: list[Manifest] = []
        for ref in refs:
            is_embedded = embedded_manifest(ref) is not None
            is_keyed = isinstance(ref, RemoteBundleRef) or not is_embedded or "manifest_key" in ref
            key = manifest_key_of(ref) if is_keyed else None
            if not is_embedded and key is not None and not self.objects.exists(key):
                continue
            try:
                manifest = self.manifest(ref, may_be_old=may_be_old)
            except _MissingManifestError:
                # It may have been removed since, or the store has no call that tells.
                can_tell = self.objects.call("is_exist") is not None
                if key is None or (can_tell and self.objects.exists(key)):
                    raise
                continue
            if key is not None and manifest.key(self._prefix) != key:
                raise ValueError(
                    f"the bundle manifest_key {key!r} does not match the object_id of its "
                    f"manifest: {manifest.object_id!r}"
                )
            found.append(manifest)
        return found

    def _with_ids(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return a merged manifest of the first version with what later versions write.

        Each bundle that it was merged from must still have a manifest which names the same
        payloads, so that no manifest can claim payloads that were not merged.
        """
        buffers: Mapping[str, Any] = raw["buffers"]
        own = f"{self._prefix}/{raw['object_id']}/"
        ids = object_ids_of([spec["key"] for spec in buffers.values()], self._prefix)
        cleanup: list[str] = []
        for each in ids:
            base = f"{self._prefix}/{each}/"
            if base == own:
                continue
            content = self._stored(f"{base}manifest")
            parts: Any = content.get("buffers")
            merged = {name: spec for name, spec in buffers.items() if spec["key"].startswith(base)}
            is_merged = isinstance(parts, dict) and parts.keys() <= buffers.keys()
            if not is_merged or any(parts.get(name) != merged[name] for name in merged):
                raise ValueError(
                    f"invalid bundle manifest: {raw['object_id']!r} is outside the bundle "
                    f"namespace of {each!r}, whose payloads it names"
                )
            plain = {**content, "buffers": {}}
            cleanup += Manifest.decode(plain, self._prefix).own_keys(self._prefix)
        return {**raw, "buffer_object_ids": ids, "cleanup_keys": cleanup}


def payload_reads(
    spec: PayloadSpec,
    offset: int,
    size: int,
    address: int,
    *,
    is_registered: bool = False,
    is_array: bool = False,
) -> list[ObjectRead]:
    """Return the reads of a range of a payload into memory.

    Args:
        spec: The payload.
        offset: First byte of the range.
        size: Length of the range.
        address: Address of the destination.
        is_registered: True if the destination is registered memory.
        is_array: True if the payload is an array.

    Raises:
        ValueError: The range is not inside of the payload.
    """
    if offset < 0 or size < 0 or offset + size > spec.nbytes:
        raise ValueError(
            f"the range is outside of the payload key={spec.key} offset={offset} size={size} "
            f"bytes={spec.nbytes}"
        )
    if len(spec.chunks) == 1 and size:
        key, length = spec.chunks[0]
        return [ObjectRead(key, length, offset, size, address, is_registered, is_array)]
    reads: list[ObjectRead] = []
    begin = 0
    for key, length in spec.chunks:
        first, last = max(offset, begin), min(offset + size, begin + length)
        if first < last:
            to = address + first - offset
            reads.append(
                ObjectRead(key, length, first - begin, last - first, to, is_registered, is_array)
            )
        begin += length
    return reads


def _check_copies(payloads: Mapping[str, BundlePayload], options: WriteOptions) -> None:
    """Check that a policy without copies is given nothing that would be copied.

    Raises:
        RuntimeError: The first payload that would be copied is an array or bytes.
        ValueError: The first payload that would be copied is a tensor.
    """
    if options.policy.copy_mode != "zero_copy":
        return
    for part in payloads.values():
        if part.form == "tensor":
            raise ValueError(
                "zero-copy structured tensor fields require a BufferPool tensor-object buffer; put "
                "tensor_object_buffer(...), or use copy_mode='auto'"
            )
        # A payload without bytes is no object, so that nothing is copied.
        if part.form == "data" and part.payload.nbytes:
            raise RuntimeError(
                "zero-copy put requires tensor-object buffers; put tensor_object_buffer(...), or "
                "use copy_mode='auto'"
            )


def _cut(
    key: str, part: BundlePayload, chunk_bytes: int, *, is_typed: bool
) -> tuple[PayloadSpec, list[ObjectPut]]:
    """Return the entry of a payload in the manifest, and its objects.

    Args:
        key: Key of the payload.
        part: The payload.
        chunk_bytes: Length of the objects that a long payload is cut into.
        is_typed: True if a tensor will be one in the store, too.
    """
    payload, extra = part.payload, part.extra
    if part.form == "tensor" and is_typed:
        extra = {**part.typed, **extra}
    elif part.pickled is not None:
        payload, extra = part.pickled
    total, form = payload.nbytes, part.form
    # Memory of the caller is one object of any length.
    if not total and form != "memory":
        return PayloadSpec(key, 0, (), extra), []
    if total <= chunk_bytes or form in ("tensor", "memory"):
        only = ObjectPut(key, payload, form, part.tensor)
        return PayloadSpec(key, total, ((key, total),), extra), [only]
    objects = [
        ObjectPut(f"{key}/chunk/{at}", chunk, form, part.tensor)
        for at, chunk in enumerate(payload.chunks(chunk_bytes))
    ]
    sizes = tuple([(each.key, each.payload.nbytes) for each in objects])
    return PayloadSpec(key, total, sizes, extra), objects
