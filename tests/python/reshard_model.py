"""Small placements and stored weights for the tests of `mooncake.reshard`."""

from __future__ import annotations

import dataclasses
import math

from mooncake.reshard.weight import (
    ParallelRank,
    ParallelTopology,
    PlacementFragment,
    ReplicatedAxis,
    SplitAxis,
    StoredFragment,
    TensorDescriptor,
    TopologyParticipant,
    WeightManifest,
    WeightPlacementManifest,
)

ROWS = (SplitAxis("tp", 0),)


def tensor(name="t", shape=(4, 4), axes=ROWS, **fields) -> TensorDescriptor:
    dims = tuple(sorted(axis.dim for axis in axes if isinstance(axis, SplitAxis)))
    return TensorDescriptor(name, shape, "float16", 2, dims, "row-major", axes, **fields)


def fragment(name, offset, shape, rank, **fields) -> PlacementFragment:
    return PlacementFragment(name, offset, shape, 2 * math.prod(shape), rank, **fields)


def topology(tp=1, dp=1) -> ParallelTopology:
    ranks = [ParallelRank(dp=d, tp=t) for d in range(dp) for t in range(tp)]
    members = tuple(TopologyParticipant(f"p{index}", rank) for index, rank in enumerate(ranks))
    return ParallelTopology(tp_size=tp, pp_size=1, ep_size=1, dp_size=dp, participants=members)


def placement(job, tensors, fragments, **fields) -> WeightPlacementManifest:
    identity = {
        "resource_id": "model",
        "revision": "main",
        "weight_generation": 1,
        "placement_set_id": "set",
    }
    return WeightPlacementManifest.from_fragments(
        topology=job, tensors=tensors, fragments=fragments, **{**identity, **fields}
    )


def split(tp, dim=0, **fields) -> WeightPlacementManifest:
    """A tensor of 4 x 4 elements, split evenly along one dimension."""
    extent = 4 // tp
    parts = []
    for rank in range(tp):
        offset, shape = [0, 0], [4, 4]
        offset[dim], shape[dim] = rank * extent, extent
        parts.append(fragment("t", tuple(offset), tuple(shape), ParallelRank(tp=rank)))
    return placement(topology(tp), [tensor(axes=(SplitAxis("tp", dim),))], parts, **fields)


def replicated(tp) -> WeightPlacementManifest:
    parts = [fragment("t", (0, 0), (4, 4), ParallelRank(tp=rank)) for rank in range(tp)]
    return placement(topology(tp), [tensor(axes=(ReplicatedAxis("tp"),))], parts)


def stored(parts=2, **fields) -> WeightManifest:
    rows_each = 4 // parts
    fragments = tuple(
        StoredFragment(
            f"f{index}", "t", (index * rows_each, 0), (rows_each, 4), "g/payload/0", index * 32, 32
        )
        for index in range(parts)
    )
    fragments = tuple(dataclasses.replace(piece, nbytes=rows_each * 8) for piece in fragments)
    given = {
        "namespace": "ns",
        "resource_id": "model",
        "revision": "main",
        "weight_generation": 1,
        "group_id": "g",
        "manifest_key": "g/manifest",
        "tensors": (tensor(),),
        "fragments": fragments,
        "created_at": "2026-01-01",
    }
    return WeightManifest(**{**given, **fields})
