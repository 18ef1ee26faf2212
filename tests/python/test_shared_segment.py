"""`SharedSegment`: memory of one process that other processes map."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from mooncake.engine import SharedSegment


def write(segment: SharedSegment, text: bytes, offset: int = 0) -> None:
    ctypes.memmove(segment.base_addr() + offset, text, len(text))


def read(segment: SharedSegment, length: int, offset: int = 0) -> bytes:
    return ctypes.string_at(segment.base_addr() + offset, length)


def test_single_rank_gets_its_own_segment():
    segment, blob = SharedSegment.create("alone", 8193, 1, 0)
    assert (segment.ready(), segment.size(), segment.device_addr()) == (False, 8193, 0)
    segment.complete([blob])
    segment.complete([blob])
    assert segment.ready()
    assert segment.base_addr() % 4096 == 0
    write(segment, b"end", 8190)
    assert read(segment, 3, 8190) == b"end"


OTHER = """
import ctypes, json, sys
from mooncake.engine import SharedSegment
segment, blob = SharedSegment.create("group", 10_000, 2, 1)
assert segment.base_addr() == 0
print(json.dumps(blob.decode()), flush=True)
segment.complete([json.loads(sys.stdin.readline()), blob])
assert ctypes.string_at(segment.base_addr(), 5) == b"owner"
ctypes.memmove(segment.base_addr() + 5000, b"other", 5)
print("done", flush=True)
sys.stdin.readline()
assert ctypes.string_at(segment.base_addr(), 5) == b"owner"
"""


def test_mapping_outlives_the_owner():
    segment, blob = SharedSegment.create("group", 10_000, 2, 0, owner_rank=0, device_id=3)
    write(segment, b"owner")
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other_blob = json.loads(other.stdout.readline())
        other.stdin.write(json.dumps(blob.decode()) + "\n")
        other.stdin.flush()
        segment.complete([blob, other_blob])
        assert other.stdout.readline() == "done\n"
        assert read(segment, 5, 5000) == b"other"
        del segment
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(20) == 0


def test_rejects_invalid_arguments():
    for arguments in (
        ("n", 0, 1, 0),
        ("n", -1, 1, 0),
        ("n", 1 << 47, 1, 0),
        ("n", 100, 0, 0),
        ("n", 100, 2, 2),
        ("n", 100, 2, -1),
        ("n", 100, 2, 0, 5),
    ):
        with pytest.raises(RuntimeError):
            SharedSegment.create(*arguments)
    for kind in ({"mmap": False}, {"host_register": True}):
        assert not SharedSegment.supported(**kind)
        with pytest.raises(RuntimeError, match="mapped"):
            SharedSegment.create("n", 100, 1, 0, **kind)
    assert SharedSegment.supported(True, False)
    with pytest.raises(TypeError, match=r"SharedSegment\.create"):
        SharedSegment()


def test_rejects_blobs_of_another_group():
    one, blob_one = SharedSegment.create("n", 100, 2, 0)
    two, blob_two = SharedSegment.create("n", 100, 2, 1)
    _, stranger = SharedSegment.create("m", 100, 2, 1)
    _, longer = SharedSegment.create("n", 200, 2, 1)
    for blobs in (
        [],
        [blob_one],
        [blob_two, blob_one],
        [blob_one, stranger],
        [blob_one, longer],
        [blob_one, b"x"],
        [blob_one, "MKS1[]"],
        [blob_one, b"MKS1" + b"[" * 100_000],
    ):
        with pytest.raises(RuntimeError):
            two.complete(blobs)
        assert not two.ready()
    del one
    # The memory is freed with its owner, unless another rank mapped it before.
    with pytest.raises(RuntimeError, match="gone"):
        two.complete([blob_one, blob_two])
