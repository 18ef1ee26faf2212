"""`mooncake.shared_segment`: blocks of tensors in memory that all ranks of a group share."""

from __future__ import annotations

import ctypes
import inspect
import json
import socket
import subprocess
import sys
import threading

import pytest

from mooncake import shared_segment
from mooncake.shared_segment import (
    SharedSegmentError,
    create_shared_segment,
    shared_segment_supported,
)

BLOCKS = {
    "values": {"count": 3, "shape": (2, 5), "dtype": "float32"},
    "keys": {"count": 2, "shape": [4097], "dtype": "torch.uint8"},
}
STRIDE = 8192 + 4096


class Threads:
    """A process group whose ranks are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=30)
        self.sent: list[object] = [None] * world_size

    def rank(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)


class ThreadRank:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank = group, rank

    def all_gather_object(self, value: object) -> list[object]:
        self.group.sent[self.rank] = value
        self.group.barrier.wait()
        received = list(self.group.sent)
        self.group.barrier.wait()
        return received


def in_all_ranks(world_size, make):
    """Run `make` in every rank, and return each result or exception."""
    group = Threads(world_size)
    ends: list[object] = [None] * world_size

    def run(rank: int) -> None:
        try:
            ends[rank] = make(rank, group.rank(rank))
        except Exception as error:  # noqa: BLE001
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    return ends


def test_signatures_match_upstream():
    assert str(inspect.signature(create_shared_segment)).replace("'", "") == (
        "(name: str, blocks: Mapping[str, Mapping[str, Any]], world_size: int, rank_id: int, "
        "owner_rank: int = 0, device_id: int | None = None, comm_group: object = None, "
        "mmap: bool = True, host_register: bool = False, *, tp_group: object = None)"
        " -> SharedSegment"
    )
    assert issubclass(SharedSegmentError, RuntimeError)
    assert shared_segment_supported()
    assert not shared_segment_supported(mmap=False)
    assert not shared_segment_supported(True, True)


def test_blocks_are_laid_out_by_name_and_stride():
    segment = create_shared_segment("alone", BLOCKS, 1, 0)
    base = segment.base_addr()
    assert base % 4096 == 0
    assert segment.total_size() == 3 * STRIDE
    assert segment.addresses("keys") == [base, base + STRIDE]
    assert segment.addresses("values") == [base + 8192 + i * STRIDE for i in range(3)]
    assert ctypes.string_at(base, segment.total_size()) == bytes(segment.total_size())
    with pytest.raises(SharedSegmentError, match="keys, values"):
        segment.addresses("other")


def test_all_ranks_share_memory():
    def make(rank, group):
        names = {"comm_group": group} if rank else {"tp_group": group}
        return create_shared_segment("all", BLOCKS, 3, rank, owner_rank=1, **names)

    segments = in_all_ranks(3, make)
    first, second, third = [segment.addresses("values")[2] for segment in segments]
    assert len({first, second, third}) == 3
    ctypes.memmove(third, b"everybody", 9)
    assert [ctypes.string_at(address, 9) for address in (first, second)] == [b"everybody"] * 2
    del segments


OTHER = """
import ctypes, json, sys
from mooncake.shared_segment import create_shared_segment

class Pipe:
    def all_gather_object(self, value):
        print(json.dumps(value), flush=True)
        return json.loads(sys.stdin.readline())

blocks = {"b": {"count": 2, "shape": 10, "dtype": "int64"}}
segment = create_shared_segment("two", blocks, 2, 1, comm_group=Pipe())
ctypes.memmove(segment.addresses("b")[1], b"from there", 10)
print("done", flush=True)
sys.stdin.readline()
assert ctypes.string_at(segment.addresses("b")[0], 9) == b"from here"
"""


def test_ranks_in_processes_outlive_the_owner():
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        class Pipe:
            def all_gather_object(self, value):
                both = [value, json.loads(other.stdout.readline())]
                other.stdin.write(json.dumps(both) + "\n")
                other.stdin.flush()
                return both

        blocks = {"b": {"count": 2, "shape": 10, "dtype": "int64"}}
        segment = create_shared_segment("two", blocks, 2, 0, comm_group=Pipe())
        assert other.stdout.readline() == "done\n"
        assert ctypes.string_at(segment.addresses("b")[1], 10) == b"from there"
        ctypes.memmove(segment.addresses("b")[0], b"from here", 9)
        del segment
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(30) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"count": 4},
        {"shape": (5, 2)},
        {"dtype": "int32"},
    ],
)
def test_layout_mismatch_fails_all_ranks(change):
    def make(rank, group):
        values = {**BLOCKS["values"], **(change if rank else {})}
        return create_shared_segment("n", {**BLOCKS, "values": values}, 2, rank, comm_group=group)

    ends = in_all_ranks(2, make)
    assert [type(end) for end in ends] == [SharedSegmentError] * 2
    assert "its name is" in str(ends[0])


def test_failing_rank_fails_all_ranks():
    def make(rank, group):
        blocks = {"b": {"count": 1, "shape": 1, "dtype": "no type" if rank == 1 else "int8"}}
        return create_shared_segment("n", blocks, 3, rank, comm_group=group)

    ends = in_all_ranks(3, make)
    assert [str(end) for end in ends] == [str(ends[0])] * 3
    assert str(ends[0]).startswith("rank 1: block 'b'")


@pytest.mark.parametrize(
    "block",
    [
        {"count": 1, "shape": 1},
        {"count": 1, "shape": 1, "dtype": "int8", "more": 1},
        {"count": -1, "shape": 1, "dtype": "int8"},
        {"count": True, "shape": 1, "dtype": "int8"},
        {"count": 1, "shape": (1, -1), "dtype": "int8"},
        {"count": 1, "shape": "ab", "dtype": "int8"},
        {"count": 1, "shape": 1, "dtype": "float31"},
        {"count": 1, "shape": 1, "dtype": None},
        {"count": 0, "shape": 1, "dtype": "int8"},
        {"count": 1, "shape": 0, "dtype": "int8"},
        {"count": 1 << 30, "shape": 1 << 30, "dtype": "int8"},
    ],
)
def test_rejects_invalid_blocks(block):
    with pytest.raises(SharedSegmentError):
        create_shared_segment("n", {"b": block}, 1, 0)


def test_rejects_invalid_calls():
    with pytest.raises(SharedSegmentError, match="no bytes"):
        create_shared_segment("n", {}, 1, 0)
    with pytest.raises(SharedSegmentError, match="comm_group"):
        create_shared_segment("n", BLOCKS, 2, 0)
    with pytest.raises(SharedSegmentError, match="mapped"):
        create_shared_segment("n", BLOCKS, 1, 0, mmap=False)
    with pytest.raises(SharedSegmentError, match="below"):
        create_shared_segment("n", BLOCKS, 1, 1)
    group = Threads(1).rank(0)
    with pytest.raises(TypeError, match="tp_group"):
        create_shared_segment("n", BLOCKS, 1, 0, comm_group=group, tp_group=group)
    with pytest.raises(TypeError, match="create_shared_segment"):
        shared_segment.SharedSegment()


def test_numpy_dtypes_are_accepted():
    numpy = pytest.importorskip("numpy", reason="needs numpy: pip install numpy")
    for dtype in (numpy.float32, numpy.dtype("float32"), "float", "torch.float32"):
        segment = create_shared_segment(
            "n", {"b": {"count": 1, "shape": 1025, "dtype": dtype}}, 1, 0
        )
        assert segment.total_size() == 8192


def test_tensors_view_and_keep_the_segment():
    torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
    blocks = {
        "a": {"count": 2, "shape": (2, 3), "dtype": torch.bfloat16},
        "b": {"count": 1, "shape": (0, 3), "dtype": torch.float64},
        "c": {"count": 1, "shape": (), "dtype": torch.bool},
        "d": {"count": 1, "shape": 5, "dtype": torch.float8_e4m3fn},
    }
    segment = create_shared_segment("tensors", blocks, 1, 0)
    first, second = segment.tensors("a")
    assert (first.shape, first.dtype) == ((2, 3), torch.bfloat16)
    assert [first.data_ptr(), second.data_ptr()] == segment.addresses("a")
    second.copy_(torch.arange(6).reshape(2, 3))
    again = segment.tensors("a")[1]
    assert torch.equal(again, second)
    assert segment.tensors("b")[0].shape == (0, 3)
    assert segment.tensors("c")[0].shape == ()
    assert segment.tensors("d")[0].dtype == torch.float8_e4m3fn
    del segment, first, again
    assert second.float().sum() == 15
    second.add_(1)
    assert second.float().sum() == 21


RANK = """
import sys, torch, torch.distributed as dist
from mooncake.shared_segment import create_shared_segment

rank, port = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
blocks = {"b": {"count": 2, "shape": (4,), "dtype": torch.int32}}
segment = create_shared_segment("torch", blocks, 2, rank, comm_group=dist.group.WORLD)
segment.tensors("b")[rank].fill_(rank + 1)
dist.barrier()
print([one.tolist() for one in segment.tensors("b")])
dist.barrier()
dist.destroy_process_group()
"""


def test_torch_distributed_ranks_share_a_segment():
    pytest.importorskip("torch", reason="needs torch: pip install torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=100)
            assert (rank.returncode, output) == (0, "[[1, 1, 1, 1], [2, 2, 2, 2]]\n")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait(10)


def test_missing_torch_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    segment = create_shared_segment("n", BLOCKS, 1, 0)
    with pytest.raises(ImportError, match=r"\[tensor\]"):
        segment.tensors("keys")
