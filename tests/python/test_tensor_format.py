"""The stored form of tensors: metadata, manifests and keys, also from arbitrary bytes."""

from __future__ import annotations

import random
import struct
from dataclasses import replace

import pytest

from mooncake.tensor import dtypes, format as tensor_format
from mooncake.tensor.dtypes import DType
from mooncake.tensor.format import AxisRecord, FormatError, Manifest, TensorMetadata

FLOAT32 = DType.of_name("float32")
COMPLEX64 = DType.of_name("complex64")
TP = AxisRecord("tp", 1, 4, split_dim=1, extent=2)
EP = AxisRecord("ep", 0, 2, id=17)
PP = AxisRecord("pp", 2, 3, id=2)
DP = AxisRecord("dp", 5, 8)
SHARD = TensorMetadata(FLOAT32, (3, 8), (3, 2), (DP, TP, EP, PP))
JAGGED = TensorMetadata(FLOAT32, (6, 3), (6, 3), data_offset=304 + 8 * 5, ragged_dim=0)
FULL = TensorMetadata(FLOAT32, (2, 3), (2, 3))
SHAPES = [(), (0,), (7,), (2, 3), (0, 3), (1, 2, 3, 4, 1, 2, 1, 3)]

# Offsets of the fields of the metadata: format character, offset.
FIELDS = {
    "magic": ("I", 0),
    "version": ("H", 4),
    "header_size": ("H", 6),
    "dtype": ("i", 8),
    "ndim": ("i", 12),
    "layout_kind": ("I", 16),
    "flags": ("I", 20),
    "data_offset": ("Q", 24),
    "data_bytes": ("Q", 32),
    "global_shape_0": ("q", 40),
    "global_shape_7": ("q", 96),
    "local_shape_0": ("q", 104),
    "local_shape_1": ("q", 112),
    "axis_count": ("I", 168),
}


def changed(data: bytes, **values: int) -> bytes:
    altered = bytearray(data)
    for name, value in values.items():
        code, offset = FIELDS[name]
        struct.pack_into(f"<{code}", altered, offset, value)
    return bytes(altered)


def test_metadata_has_the_documented_bytes():
    # Written out by hand from the description of the format.
    axis = struct.pack("<iiiiiiq", 1, 0, 1, 4, 1, 0, 2)
    expected = b"".join(
        (
            struct.pack("<IHHii", 0x4D4F4F4E, 1, 304, 0, 2),
            struct.pack("<IIQQ", 1, 0, 304, 24),
            struct.pack("<8q", 3, 8, -1, -1, -1, -1, -1, -1),
            struct.pack("<8q", 3, 2, -1, -1, -1, -1, -1, -1),
            struct.pack("<II", 1, 0),
            axis,
            bytes(96),
        )
    )
    assert TensorMetadata(FLOAT32, (3, 8), (3, 2), (TP,)).encode() == expected


@pytest.mark.parametrize("dtype", dtypes.ALL, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_metadata_round_trips(dtype, shape):
    metadata = TensorMetadata(dtype, shape, shape)
    encoded = metadata.encode()
    assert len(encoded) == 304
    total = 304 + metadata.nbytes
    assert TensorMetadata.decode(encoded + b"payload", total=total) == metadata


@pytest.mark.parametrize("metadata", [SHARD, JAGGED, replace(FULL, data_offset=512)])
def test_shards_jagged_and_gaps_round_trip(metadata):
    assert TensorMetadata.decode(metadata.encode(), total=metadata.total_bytes) == metadata


def test_jagged_metadata_counts_its_sequences():
    assert (JAGGED.sequences, JAGGED.nbytes, JAGGED.total_bytes) == (4, 72, 416)
    assert FULL.sequences == 0


def test_only_extensions_have_the_version_upstream_rejects():
    versions = {
        metadata: struct.unpack_from("<H", metadata.encode(), 4)[0]
        for metadata in (FULL, SHARD, JAGGED, replace(FULL, dtype=COMPLEX64))
    }
    assert list(versions.values()) == [1, 1, 2, 2]


def test_metadata_length_must_match_the_object():
    encoded = FULL.encode()
    assert TensorMetadata.decode(encoded, total=328) == FULL
    for total in (327, 329, 304, 0):
        with pytest.raises(FormatError, match=rf"length={total} expected=328"):
            TensorMetadata.decode(encoded, total=total)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"magic": 0}, "not a tensor object"),
        ({"version": 3}, "unknown version"),
        ({"version": 0}, "unknown version"),
        ({"header_size": 303}, "unknown version"),
        ({"dtype": 15}, "unknown dtype code=15"),
        ({"dtype": -1}, "unknown dtype code=-1"),
        ({"dtype": COMPLEX64.code}, "version 1 has no dtype complex64"),
        ({"ndim": 9}, "number of dimensions"),
        ({"ndim": -1}, "number of dimensions"),
        ({"ndim": 1}, "number of dimensions"),
        ({"layout_kind": 3}, "unknown layout"),
        ({"layout_kind": 2}, "no jagged tensors"),
        ({"flags": 1}, "unknown layout"),
        ({"data_offset": 303}, "out of range"),
        ({"data_offset": 1 << 63}, "out of range"),
        ({"data_bytes": 23}, "does not match the shape"),
        ({"global_shape_0": -1}, "length is out of range"),
        ({"global_shape_0": 1}, "larger than the tensor"),
        ({"global_shape_7": 0}, "number of dimensions"),
        ({"local_shape_0": -1}, "length is out of range"),
        ({"local_shape_0": 1 << 62, "global_shape_0": 1 << 62}, "out of range"),
        ({"axis_count": 5}, "at most 4 axes"),
        ({"axis_count": 1}, "number of an axis"),
    ],
    ids=str,
)
def test_rejects_a_lying_header(values, reason):
    with pytest.raises(FormatError, match=reason):
        TensorMetadata.decode(changed(FULL.encode(), **values), total=328)


def test_rejects_sizes_that_wrap_around():
    # 2^32 * 2^32 elements are 0 in 64 bits.
    wrapping = {"global_shape_0": 1 << 32, "local_shape_0": 1 << 32, "local_shape_1": 1 << 32}
    encoded = bytearray(changed(FULL.encode(), **wrapping, data_bytes=0))
    struct.pack_into("<q", encoded, 48, 1 << 32)
    with pytest.raises(FormatError, match="out of range"):
        TensorMetadata.decode(encoded, total=304)


@pytest.mark.parametrize(
    "axis",
    [
        replace(TP, rank=4),
        replace(TP, rank=-1),
        replace(TP, size=0),
        replace(TP, split_dim=2),
        replace(TP, split_dim=-2),
        replace(TP, extent=-1),
        replace(EP, id=1 << 31),
    ],
    ids=str,
)
def test_rejects_an_axis_out_of_range(axis):
    with pytest.raises(FormatError, match="number of an axis"):
        TensorMetadata(FLOAT32, (3, 8), (3, 2), (axis,))


def test_rejects_metadata_the_format_cannot_hold():
    for bad, reason in (
        (lambda: TensorMetadata(FLOAT32, (1,) * 9, (1,) * 9), "at most 8 dimensions"),
        (lambda: TensorMetadata(FLOAT32, (1, 2), (1,)), "differ in rank"),
        (lambda: replace(SHARD, axes=(TP, TP)), "one axis of each kind"),
        (lambda: replace(JAGGED, ragged_dim=2), "ragged_dim=2"),
        (lambda: replace(JAGGED, data_offset=304), "no offsets"),
        (lambda: replace(JAGGED, data_offset=317), "no offsets"),
        (lambda: replace(JAGGED, axes=(DP,)), "no axes"),
    ):
        with pytest.raises(FormatError, match=reason):
            bad()


@pytest.mark.parametrize("length", [0, 1, 303])
def test_rejects_short_objects(length):
    with pytest.raises(FormatError, match="shorter than 304 bytes"):
        TensorMetadata.decode(FULL.encode()[:length])


def test_arbitrary_bytes_decode_or_raise_a_format_error():
    rng = random.Random(20)
    starts = [FULL.encode(), SHARD.encode(), JAGGED.encode(), bytes(304)]
    outcomes = set()
    for _ in range(20_000):
        data = bytearray(rng.choice(starts))
        for _ in range(rng.randint(1, 6)):
            at = rng.choice((rng.randrange(304), rng.randrange(4, 40), rng.randrange(40, 176)))
            data[at] = rng.choice((0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        total = rng.choice((None, 328, 304, rng.randrange(1000)))
        try:
            metadata = TensorMetadata.decode(data, total=total)
        except FormatError:
            outcomes.add("refused")
            continue
        outcomes.add("decoded")
        # What was accepted is consistent: it fits into the object and survives a round trip.
        assert total is None or metadata.data_offset + metadata.nbytes == total
        assert TensorMetadata.decode(metadata.encode()) == metadata
    assert outcomes == {"refused", "decoded"}


@pytest.mark.parametrize("dtype", [FLOAT32, COMPLEX64])
def test_manifest_round_trips(dtype):
    manifest = Manifest(dtype, (12, 5), 1, 5)
    encoded = manifest.encode()
    assert len(encoded) == 96
    assert Manifest.decode(encoded) == manifest


def test_manifest_has_the_documented_bytes():
    expected = struct.pack("<IHHiiiii4x", 0x574D414E, 1, 96, 0, 2, 1, 5, 0)
    expected += struct.pack("<8q", 12, 5, -1, -1, -1, -1, -1, -1)
    assert Manifest(FLOAT32, (12, 5), 1, 5).encode() == expected


def test_rejects_a_damaged_manifest():
    encoded = bytearray(Manifest(FLOAT32, (12, 5), 1, 5).encode())
    for offset, code, value, reason in (
        (0, "I", 1, "not a manifest"),
        (4, "H", 9, "unknown version"),
        (6, "H", 95, "unknown version"),
        (8, "i", 99, "unknown dtype"),
        (12, "i", 3, "length is out of range"),
        (12, "i", 9, "number of dimensions"),
        (16, "i", 2, "split_dim=2"),
        (16, "i", -1, "split_dim=-1"),
        (20, "i", 0, "shard_count=0"),
    ):
        damaged = bytearray(encoded)
        struct.pack_into(f"<{code}", damaged, offset, value)
        with pytest.raises(FormatError, match=reason):
            Manifest.decode(damaged)
    for length in (0, 95, 97):
        with pytest.raises(FormatError, match=f"length={length}"):
            Manifest.decode(bytes(encoded).ljust(97, b"\0")[:length])


def test_arbitrary_manifests_decode_or_raise_a_format_error():
    rng = random.Random(21)
    start = Manifest(FLOAT32, (12, 5), 1, 5).encode()
    for _ in range(5_000):
        data = bytearray(start)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(96)] = rng.randrange(256)
        try:
            manifest = Manifest.decode(data)
        except FormatError:
            continue
        assert Manifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ([], "d"),
        ([TP], "d_tp_1"),
        ([TP, DP], "d__dp_5of8__tp_1of4_sd1"),
        ([EP], "d__ep_0of2_eid17"),
        ([PP], "d__pp_2of3_sid2"),
        ([PP, EP, TP, DP], "d__dp_5of8__tp_1of4_sd1__ep_0of2_eid17__pp_2of3_sid2"),
    ],
    ids=str,
)
def test_shard_keys_are_upstreams(axes, expected):
    assert tensor_format.shard_key("d", axes) == expected
    assert tensor_format.shard_key(b"d", axes) == expected.encode()


def test_keys_of_manifests_and_writers_are_upstreams():
    assert tensor_format.manifest_key("d") == "d__parallelism_manifest"
    assert tensor_format.writer_key("d", 1, 4, 0) == "d__writer_1of4_sd0"
    assert tensor_format.writer_manifest_key(b"\xff") == b"\xff__writer_manifest"


def test_dtype_codes_are_stable():
    # Objects in pools and snapshots have these codes.
    upstream = """
        float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool float16 bfloat16
        float8_e4m3fn float8_e5m2
    """
    extension = """
        complex64 complex128 complex32 bcomplex32 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
        float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7
        uint1 uint2 uint3 uint4 uint5 uint6 uint7
    """
    assert {dtype.name: dtype.code for dtype in dtypes.ALL} == {
        **{name: code for code, name in enumerate(upstream.split())},
        **{name: code for code, name in enumerate(extension.split(), 256)},
    }


def test_dtypes_are_found_by_code_and_name():
    for dtype in dtypes.ALL:
        assert DType.of_code(dtype.code) is dtype
        assert DType.of_name(dtype.name) is DType.of_name(f"torch.{dtype.name}") is dtype
    with pytest.raises(TypeError, match="float7"):
        DType.of_name("float7")
    with pytest.raises(ValueError, match="code=255"):
        DType.of_code(255)
