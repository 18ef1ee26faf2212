"""Objects of tensors that upstream stored are read here, and ours there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import set_up
from upstream_package import last_line, run, upstream_python

from mooncake.store import MooncakeDistributedStore
from mooncake.tensor.dtypes import ALL, EXTENSION_CODE_MIN, DType
from mooncake.tensor.format import AxisRecord, Manifest, TensorMetadata, manifest_key

torch = pytest.importorskip("torch", reason="needs torch: pip install torch")
pytestmark = pytest.mark.timeout(300)

SCRIPT = Path(__file__).parent / "upstream_tensors.py"
SHAPES = [(), (0,), (2, 0, 3), (5,), (2, 3), (1, 2, 1, 2, 1, 2, 1, 2)]
UPSTREAM_DTYPES = [dtype for dtype in ALL if dtype.code < EXTENSION_CODE_MIN]
CASES = [(dtype, shape) for dtype in UPSTREAM_DTYPES for shape in SHAPES]
IDS = [f"{dtype.name}-{shape}" for dtype, shape in CASES]
FLOAT32 = DType.of_name("float32")


@pytest.fixture(scope="module")
def store() -> Iterator[MooncakeDistributedStore]:
    made = MooncakeDistributedStore()
    assert set_up(made, "embedded") == 0
    yield made
    made.close()


def sample(dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor with different bytes."""
    length = dtype.itemsize * torch.Size(shape).numel()
    data = bytearray(index % (2 if dtype.name == "bool" else 251) for index in range(length))
    flat = torch.frombuffer(data, dtype=dtype.torch()) if data else torch.empty(0)
    return flat.to(dtype.torch()).reshape(shape)


def whole() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(4, 6)


def hex_of(tensor: torch.Tensor) -> str:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).hex()


def put_all(store: MooncakeDistributedStore) -> dict[str, Any]:
    """Put tensors into our store; return what upstream shall do with the objects."""
    tensors = []
    for (dtype, shape), name in zip(CASES, IDS, strict=True):
        tensor = sample(dtype, shape)
        assert store.put_tensor(name, tensor) == 0
        data, stored = hex_of(tensor), store.get(name).hex()
        tensors.append(
            {"name": name, "dtype": dtype.name, "shape": shape, "data": data, "object": stored}
        )
    extensions = {
        "complex": torch.ones(2, dtype=torch.complex64),
        "float8_e8m0fnu": torch.ones(2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    }
    for name, tensor in extensions.items():
        assert store.put_tensor(name, tensor) == 0
    assert store.put_tensor_with_tp("ours", whole(), 0, 2, 1) == 0
    objects = {key: store.get(key).hex() for key in (*extensions, "ours_tp_0", "ours_tp_1")}
    manifest = Manifest(FLOAT32, (4, 6), 1, 2).encode()
    return {
        "tensors": tensors,
        "objects": {**objects, manifest_key("ours"): manifest.hex()},
        "tensor_reads": [*extensions, "ours_tp_0"],
        "full_reads": ["ours", "axis"],
    }


@pytest.fixture(scope="module")
def reply(store: MooncakeDistributedStore) -> dict[str, Any]:
    """The reply of a process with upstream's package."""
    folder = str(Path(torch.__file__).parents[1])
    done = run(upstream_python(), str(SCRIPT), folder, stdin=json.dumps(put_all(store)))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(last_line(done.stdout))


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=IDS)
def test_plain_tensors_are_exchanged(store, reply, dtype, shape):
    name, tensor = f"{dtype.name}-{shape}", sample(dtype, shape)
    stored = bytes.fromhex(reply["tensors"][name]["object"])
    assert stored == store.get(name), "both store the same bytes"
    assert store.put(f"upstream {name}", stored) == 0
    found = store.get_tensor(f"upstream {name}")
    assert (found.dtype, found.shape, hex_of(found)) == (tensor.dtype, shape, hex_of(tensor))
    # Upstream gives a tensor without dimensions one.
    expected = {"dtype": str(tensor.dtype), "shape": list(shape) or [1], "data": hex_of(tensor)}
    assert reply["tensors"][name]["read"] == expected


@pytest.mark.parametrize("name", ["complex", "float8_e8m0fnu", "jagged"])
def test_upstream_refuses_the_second_version(reply, name):
    assert reply["tensor_reads"][name] is None


def test_shards_are_exchanged(store, reply):
    for rank in (0, 1):
        assert store.put_tensor_with_tp("own", whole(), 0, 2, 1) == 0
        stored = bytes.fromhex(reply["shards"][f"tp_tp_{rank}"])
        assert stored == store.get(f"own_tp_{rank}"), "both store the same bytes"
        assert store.put(f"theirs_tp_{rank}", stored) == 0
        found = store.get_tensor_with_tp("theirs", rank, 2)
        assert torch.equal(found, whole()[:, 3 * rank :][:, :3])
    assert reply["tensor_reads"]["ours_tp_0"]["data"] == hex_of(whole()[:, :3])


def test_upstream_reads_a_tensor_from_our_shards(reply):
    for key in ("ours", "axis"):
        read = reply["full_reads"][key]
        assert (read["shape"], read["data"]) == ([4, 6], hex_of(whole()))


@pytest.mark.parametrize(
    ("key", "local_shape", "axes"),
    [
        ("axis_tp_1", (4, 3), [AxisRecord("tp", 1, 2, 1, extent=3)]),
        (
            "grid__dp_0of3__tp_1of2_sd0",
            (2, 6),
            [AxisRecord("dp", 0, 3), AxisRecord("tp", 1, 2, 0, extent=2)],
        ),
        ("writer__writer_1of2_sd1", (4, 3), [AxisRecord("tp", 1, 2, 1, extent=3)]),
        ("expert__ep_1of2_eid17", (4, 6), [AxisRecord("ep", 1, 2, id=17)]),
        ("stage__pp_2of3_sid2", (4, 6), [AxisRecord("pp", 2, 3, id=2)]),
    ],
)
def test_metadata_of_upstreams_shards_is_read(reply, key, local_shape, axes):
    stored = bytes.fromhex(reply["shards"][key])
    metadata = TensorMetadata.decode(stored, total=len(stored))
    assert metadata == TensorMetadata(FLOAT32, (4, 6), local_shape, tuple(axes))
    assert metadata.encode() == stored[:304]


@pytest.mark.parametrize(
    ("key", "split_dim"),
    [
        ("axis__parallelism_manifest", 1),
        ("grid__parallelism_manifest", 0),
        ("writer__writer_manifest", 1),
    ],
)
def test_upstreams_manifests_are_read(reply, key, split_dim):
    stored = bytes.fromhex(reply["shards"][key])
    assert Manifest.decode(stored) == Manifest(FLOAT32, (4, 6), split_dim, 2)
    assert Manifest.decode(stored).encode() == stored


def parallelism(*axes: AxisRecord) -> Any:
    """Return axes in upstream's words, as any object with the right attributes."""
    own = [
        SimpleNamespace(
            kind=axis.kind,
            rank=axis.rank,
            size=axis.size,
            split_dim=axis.split_dim,
            expert_id=axis.id if axis.kind == "ep" else None,
            stage_id=axis.id if axis.kind == "pp" else None,
        )
        for axis in axes
    ]
    return SimpleNamespace(axes=own)


def put_parallel_shards(store: MooncakeDistributedStore) -> None:
    """Put what `upstream_tensors.put_shards` puts."""
    put = store.put_tensor_with_parallelism
    for rank in (0, 1):
        axis = AxisRecord("tp", rank, 2, 1)
        assert put("axis", whole()[:, 3 * rank :][:, :3], parallelism(axis)) == 0
        grid = (AxisRecord("dp", 0, 3), AxisRecord("tp", rank, 2, 0))
        assert put("grid", whole(), parallelism(*grid)) == 0
        assert put("writer", whole(), writer_partition=axis) == 0
    assert put("expert", whole(), parallelism(AxisRecord("ep", 1, 2, id=17))) == 0
    assert put("stage", whole(), parallelism(AxisRecord("pp", 2, 3, id=2))) == 0


def test_shards_of_any_axes_are_stored_as_upstream_does(store, reply):
    put_parallel_shards(store)
    for key, stored in reply["shards"].items():
        if not key.startswith("tp_"):
            assert store.get(key).hex() == stored, key


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("axis", []),
        ("writer", []),
        ("grid", [AxisRecord("dp", 0, 3)]),
        ("expert", [AxisRecord("ep", 0, 1, id=17)]),
        ("stage", [AxisRecord("pp", 0, 1, id=2)]),
    ],
)
def test_shards_of_upstream_are_read_as_any_other(store, reply, key, others):
    for name, stored in reply["shards"].items():
        if name.startswith(key):
            assert store.put(f"from upstream {name}", bytes.fromhex(stored)) == 0
    for rank in range(3):
        axes = parallelism(*others, AxisRecord("tp", rank, 3, 1))
        target = SimpleNamespace(mode="shard", parallelism=axes)
        found = store.get_tensor_with_parallelism(f"from upstream {key}", target)
        assert torch.equal(found, whole()[:, 2 * rank :][:, :2])
