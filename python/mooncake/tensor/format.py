"""The stored form of tensors: metadata before the payload, manifests of shards, names of keys.

Integers are little-endian. `TensorMetadata` takes 304 bytes and `Manifest` 96; the guide about
tensors lists the offset of each field. Version 1 is upstream's format. Tensors that upstream cannot
represent have version 2, which upstream rejects.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, TypeVar

from mooncake._hints import Readable
from mooncake.tensor.dtypes import EXTENSION_CODE_MIN, DType

__all__ = [
    "AXES_MAX",
    "AXIS_KINDS",
    "DIMS_MAX",
    "GENERATION_TAG",
    "GUIDE_SUFFIXES",
    "MANIFEST_BYTES",
    "METADATA_BYTES",
    "AxisKind",
    "AxisRecord",
    "FormatError",
    "Manifest",
    "TensorMetadata",
    "guides",
    "manifest_key",
    "shard_key",
    "writer_key",
    "writer_manifest_key",
]

METADATA_BYTES: Final = 304
MANIFEST_BYTES: Final = 96
DIMS_MAX: Final = 8
GENERATION_TAG: Final = "mooncake.generation"
"""Tag of the shards that one call has written together; its value differs for each call."""
AXES_MAX: Final = 4

AxisKind: TypeAlias = Literal["dp", "tp", "ep", "pp"]
AXIS_KINDS: Final[tuple[AxisKind, ...]] = ("dp", "tp", "ep", "pp")
"""Kinds of axes in the order of their numbers, which is their order in keys."""

KeyT = TypeVar("KeyT", str, bytes, str | bytes)

_METADATA: Final = struct.Struct("<IHHiiIIQQ8q8qII")
_AXIS: Final = struct.Struct("<iiiiiiq")
_MANIFEST: Final = struct.Struct("<IHHiiiii4x8q")

_METADATA_MAGIC: Final = 0x4D4F4F4E
_MANIFEST_MAGIC: Final = 0x574D414E
_UPSTREAM_VERSION: Final = 1
_EXTENSION_VERSION: Final = 2

_FULL: Final = 0
_SHARD: Final = 1
_JAGGED: Final = 2

_OFFSET_BYTES: Final = 8
# Number of decoded metadata that are remembered.
_CACHED_MAX: Final = 1024
_I32_MAX: Final = (1 << 31) - 1
_I64_MAX: Final = (1 << 63) - 1


class FormatError(ValueError):
    """The bytes are not a tensor or a manifest in a known version of the format."""


@dataclass(frozen=True, slots=True)
class AxisRecord:
    """The position of a shard on one axis of parallelism.

    Attributes:
        kind: Data, tensor, expert or pipeline parallelism.
        rank: Position of the shard on the axis.
        size: Number of positions.
        split_dim: Dimension of the tensor that is split along the axis; None if there is none.
        id: Expert of an ``ep`` axis, stage of a ``pp`` axis, else 0.
        extent: Length of the shard along `split_dim`; 0 without one.
    """

    kind: AxisKind
    rank: int
    size: int
    split_dim: int | None = None
    id: int = 0
    extent: int = 0

    @property
    def key_part(self) -> str:
        """Part of a key that names the position."""
        part = f"{self.kind}_{self.rank}of{self.size}"
        if self.kind == "tp":
            return f"{part}_sd{self.split_dim}"
        if self.kind == "dp":
            return part
        return f"{part}_{'eid' if self.kind == 'ep' else 'sid'}{self.id}"


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """The description of a stored tensor or of one shard of it.

    Attributes:
        dtype: Type of the elements.
        global_shape: Shape of the whole tensor.
        local_shape: Shape of the stored shard; the same as `global_shape` for a whole tensor.
        axes: Position of the shard on each axis; empty for a whole tensor.
        data_offset: Offset of the payload in the object.
        ragged_dim: None for a dense tensor. For a jagged one the dimension along which the
            sequences are concatenated; the shapes are those of the concatenation. The offsets of
            the sequences, as 64-bit integers, lie between the metadata and the payload.
    """

    dtype: DType
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axes: tuple[AxisRecord, ...] = ()
    data_offset: int = METADATA_BYTES
    ragged_dim: int | None = None

    def __post_init__(self) -> None:
        """Refuse what the format cannot hold, or what contradicts itself.

        Raises:
            FormatError: A number is out of range; the message names it.
        """
        _check_shape("local_shape", self.local_shape)
        _check_shape("global_shape", self.global_shape)
        if len(self.local_shape) != len(self.global_shape):
            raise FormatError(
                f"the shapes differ in rank local_shape={self.local_shape} "
                f"global_shape={self.global_shape}"
            )
        if any(own > whole for own, whole in zip(self.local_shape, self.global_shape, strict=True)):
            raise FormatError(
                f"the shard is larger than the tensor local_shape={self.local_shape} "
                f"global_shape={self.global_shape}"
            )
        if not METADATA_BYTES <= self.data_offset <= _I64_MAX - self.nbytes:
            raise FormatError(f"the payload is out of range data_offset={self.data_offset}")
        _check_axes(self.axes, len(self.global_shape))
        if self.ragged_dim is not None:
            self._check_jagged(self.ragged_dim)

    @property
    def nbytes(self) -> int:
        """Length of the payload in bytes."""
        return math.prod(self.local_shape) * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Length of the whole object in bytes."""
        return self.data_offset + self.nbytes

    @property
    def sequences(self) -> int:
        """Number of sequences of a jagged tensor, 0 for a dense one."""
        if self.ragged_dim is None:
            return 0
        return (self.data_offset - METADATA_BYTES) // _OFFSET_BYTES - 1

    def encode(self) -> bytes:
        """Return the 304 bytes that stand at the start of the object."""
        is_jagged = self.ragged_dim is not None
        is_extension = is_jagged or self.dtype.code >= EXTENSION_CODE_MIN
        kind = _JAGGED if is_jagged else _SHARD if self.axes else _FULL
        head = _METADATA.pack(
            _METADATA_MAGIC,
            _EXTENSION_VERSION if is_extension else _UPSTREAM_VERSION,
            METADATA_BYTES,
            self.dtype.code,
            len(self.local_shape),
            kind,
            0,
            self.data_offset,
            self.nbytes,
            *_padded(self.global_shape),
            *_padded(self.local_shape),
            len(self.axes),
            self.ragged_dim or 0,
        )
        axes = (_encode_axis(index, axis) for index, axis in enumerate(self.axes))
        return b"".join((head, *axes)).ljust(METADATA_BYTES, b"\0")

    @classmethod
    def decode(cls, data: Readable, *, total: int | None = None) -> TensorMetadata:
        """Read metadata from the start of an object, and check all of it.

        Args:
            data: The object, or at least its first 304 bytes.
            total: Length of the whole object, with which the metadata must agree; None skips that.

        Raises:
            FormatError: The object is not a tensor, is damaged, or has an unknown version.
        """
        head = bytes(memoryview(data).cast("B")[:METADATA_BYTES])
        if len(head) < METADATA_BYTES:
            raise FormatError(
                f"not a tensor object: it is shorter than {METADATA_BYTES} bytes of metadata "
                f"length={len(head)}"
            )
        return _decoded(head, total)

    def _check_jagged(self, ragged_dim: int) -> None:
        if self.axes:
            raise FormatError("a jagged tensor has no axes: its shards are tensors of their own")
        if not 0 <= ragged_dim < len(self.local_shape):
            raise FormatError(
                f"the dimension of the sequences is out of range ragged_dim={ragged_dim} "
                f"local_shape={self.local_shape}"
            )
        gap = self.data_offset - METADATA_BYTES
        if gap < _OFFSET_BYTES or gap % _OFFSET_BYTES != 0:
            raise FormatError(f"no offsets of sequences fit before data_offset={self.data_offset}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a set of shards, stored beside them.

    Attributes:
        dtype: Type of the elements.
        global_shape: Shape of the whole tensor.
        split_dim: Dimension that is split.
        shard_count: Number of shards.
    """

    dtype: DType
    global_shape: tuple[int, ...]
    split_dim: int
    shard_count: int

    def __post_init__(self) -> None:
        """Refuse what the format cannot hold, or what contradicts itself.

        Raises:
            FormatError: A number is out of range; the message names it.
        """
        _check_shape("global_shape", self.global_shape)
        if not 0 <= self.split_dim < len(self.global_shape):
            raise FormatError(
                f"the split dimension is out of range split_dim={self.split_dim} "
                f"global_shape={self.global_shape}"
            )
        if not 1 <= self.shard_count <= _I32_MAX:
            raise FormatError(
                f"the number of shards is out of range shard_count={self.shard_count}"
            )

    def encode(self) -> bytes:
        """Return the 96 bytes of the manifest."""
        is_extension = self.dtype.code >= EXTENSION_CODE_MIN
        return _MANIFEST.pack(
            _MANIFEST_MAGIC,
            _EXTENSION_VERSION if is_extension else _UPSTREAM_VERSION,
            MANIFEST_BYTES,
            self.dtype.code,
            len(self.global_shape),
            self.split_dim,
            self.shard_count,
            0,
            *_padded(self.global_shape),
        )

    @classmethod
    def decode(cls, data: Readable) -> Manifest:
        """Read a manifest, and check all of it.

        Raises:
            FormatError: The object is not a manifest, is damaged, or has an unknown version.
        """
        view = memoryview(data).cast("B")
        if view.nbytes != MANIFEST_BYTES:
            raise FormatError(
                f"not a manifest of shards: it is not {MANIFEST_BYTES} bytes long "
                f"length={view.nbytes}"
            )
        magic, version, header, code, ndim, split_dim, shards, _, *dims = _MANIFEST.unpack(view)
        if magic != _MANIFEST_MAGIC:
            raise FormatError(f"not a manifest of shards: magic={magic:#010x}")
        dtype = _check_head(version, header, MANIFEST_BYTES, code)
        return cls(dtype, _unpadded("global_shape", dims, ndim), split_dim, shards)


def shard_key(key: KeyT, axes: Sequence[AxisRecord]) -> KeyT:
    """Return the key of a shard: of the whole tensor if there are no axes.

    Args:
        key: Key of the tensor.
        axes: Position of the shard on each axis, in any order.
    """
    if not axes:
        return key
    if [axis.kind for axis in axes] == ["tp"]:
        return _extended(key, f"_tp_{axes[0].rank}")
    ordered = sorted(axes, key=lambda axis: AXIS_KINDS.index(axis.kind))
    return _extended(key, "".join(f"__{axis.key_part}" for axis in ordered))


def manifest_key(key: KeyT) -> KeyT:
    """Return the key of the manifest of a tensor's shards."""
    return _extended(key, "__parallelism_manifest")


def writer_key(key: KeyT, rank: int, size: int, split_dim: int) -> KeyT:
    """Return the key of the shard of one of several writers."""
    return _extended(key, f"__writer_{rank}of{size}_sd{split_dim}")


def writer_manifest_key(key: KeyT) -> KeyT:
    """Return the key of the manifest of the writers' shards."""
    return _extended(key, "__writer_manifest")


def guides(key: KeyT) -> tuple[KeyT, KeyT, KeyT]:
    """Return the keys of the objects that tell whether a tensor is stored in shards."""
    return manifest_key(key), writer_manifest_key(key), _extended(key, "_tp_0")


def _extended(key: KeyT, suffix: str) -> KeyT:
    return key + suffix if isinstance(key, str) else key + suffix.encode()


GUIDE_SUFFIXES: Final = guides(b"")
"""What `guides` have behind the key of the tensor."""


@functools.lru_cache(maxsize=_CACHED_MAX)
def _decoded(head: bytes, total: int | None) -> TensorMetadata:
    """Decode metadata; objects with equal metadata are common, and decoding is not cheap."""
    fields = _METADATA.unpack_from(head)
    magic, version, header, code, ndim, kind, flags, data_offset, data_bytes = fields[:9]
    axis_count, ragged_dim = fields[25:]
    if magic != _METADATA_MAGIC:
        raise FormatError(f"not a tensor object: magic={magic:#010x}")
    dtype = _check_head(version, header, METADATA_BYTES, code)
    if flags != 0 or kind not in (_FULL, _SHARD, _JAGGED):
        raise FormatError(f"unknown layout of a tensor layout_kind={kind} flags={flags:#x}")
    if (kind == _JAGGED) > (version == _EXTENSION_VERSION):
        raise FormatError(f"version {version} has no jagged tensors")
    if axis_count > AXES_MAX:
        raise FormatError(f"a tensor has at most {AXES_MAX} axes axis_count={axis_count}")
    metadata = TensorMetadata(
        dtype,
        _unpadded("global_shape", fields[9:17], ndim),
        _unpadded("local_shape", fields[17:25], ndim),
        tuple(_decode_axis(head, index) for index in range(axis_count)),
        data_offset,
        ragged_dim if kind == _JAGGED else None,
    )
    if data_bytes != metadata.nbytes:
        raise FormatError(
            f"the length of the payload does not match the shape data_bytes={data_bytes} "
            f"dtype={dtype.name} local_shape={metadata.local_shape}"
        )
    if total is not None and total != metadata.total_bytes:
        raise FormatError(
            f"the object is truncated or too long length={total} expected={metadata.total_bytes}"
        )
    return metadata


def _check_head(version: int, header: int, header_expected: int, code: int) -> DType:
    """Return the dtype of a header of a known version and length."""
    if version not in (_UPSTREAM_VERSION, _EXTENSION_VERSION) or header != header_expected:
        raise FormatError(
            f"unknown version of the tensor format version={version} header_bytes={header}: read "
            "the object with a newer release"
        )
    try:
        dtype = DType.of_code(code)
    except ValueError as error:
        raise FormatError(str(error)) from None
    if version == _UPSTREAM_VERSION and code >= EXTENSION_CODE_MIN:
        raise FormatError(f"version {version} has no dtype {dtype.name}")
    return dtype


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > DIMS_MAX:
        raise FormatError(
            f"a stored tensor has at most {DIMS_MAX} dimensions {name}={shape}: reshape it"
        )
    if any(not 0 <= length <= _I64_MAX for length in shape):
        raise FormatError(f"a length is out of range {name}={shape}")


def _check_axes(axes: tuple[AxisRecord, ...], ndim: int) -> None:
    if len(axes) > AXES_MAX or len({axis.kind for axis in axes}) != len(axes):
        raise FormatError(f"a tensor has at most one axis of each kind axes={axes}")
    for axis in axes:
        is_valid = (
            0 <= axis.rank < axis.size <= _I32_MAX
            and (axis.split_dim is None or 0 <= axis.split_dim < ndim)
            and -_I32_MAX <= axis.id <= _I32_MAX
            and 0 <= axis.extent <= _I64_MAX
        )
        if not is_valid:
            raise FormatError(f"a number of an axis is out of range {axis}")


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape + (-1,) * (DIMS_MAX - len(shape))


def _unpadded(name: str, dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    if not 0 <= ndim <= DIMS_MAX or any(length != -1 for length in dims[ndim:]):
        raise FormatError(f"the number of dimensions is wrong ndim={ndim} {name}={(*dims,)}")
    return (*dims[:ndim],)


def _encode_axis(index: int, axis: AxisRecord) -> bytes:
    return _AXIS.pack(
        AXIS_KINDS.index(axis.kind),
        index,
        axis.rank,
        axis.size,
        -1 if axis.split_dim is None else axis.split_dim,
        axis.id,
        axis.extent,
    )


def _decode_axis(head: bytes, index: int) -> AxisRecord:
    kind, _, rank, size, split_dim, id_, extent = _AXIS.unpack_from(
        head, _METADATA.size + index * _AXIS.size
    )
    if not 0 <= kind < len(AXIS_KINDS):
        raise FormatError(f"unknown kind of an axis kind={kind}")
    return AxisRecord(
        AXIS_KINDS[kind], rank, size, None if split_dim == -1 else split_dim, id_, extent
    )
