"""Random placements and plans, printed as JSON lines by whichever package the interpreter has.

Usage: reshard_cases.py FIRST_SEED COUNT. One line per seed, equal for equal behaviour.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import math
import random
import sys
from typing import Any

from mooncake.reshard import weight

KINDS = ("dp", "pp", "ep", "tp")


def random_topology(rng: random.Random) -> Any:
    sizes = {kind: rng.choice((1, 1, 2, 2, 3)) for kind in KINDS}
    ranks = [
        dict(zip(KINDS, coordinates, strict=True))
        for coordinates in itertools.product(*(range(sizes[kind]) for kind in KINDS))
    ]
    if rng.random() < 0.3:
        # Expert parallelism lies over tensor parallelism, as in many serving engines.
        sizes["ep"] = sizes["tp"]
        ranks = [{**rank, "ep": rank["tp"]} for rank in ranks if rank["ep"] == 0]
    elif rng.random() < 0.15:
        ranks = rng.sample(ranks, rng.randint(1, len(ranks)))
    names = [f"p{index}" for index in range(len(ranks))]
    rng.shuffle(names)
    return weight.ParallelTopology(
        **{f"{kind}_size": size for kind, size in sizes.items()},
        participants=tuple(
            weight.TopologyParticipant(name, weight.ParallelRank(**rank))
            for name, rank in zip(names, ranks, strict=True)
        ),
    )


def random_axes(rng: random.Random, topology: Any, dims: int) -> tuple[Any, ...]:
    axes: list[Any] = []
    free = list(range(dims))
    for kind in KINDS:
        size = getattr(topology, f"{kind}_size")
        choice = rng.random()
        if choice < (0.6 if size == 1 else 0.05):
            continue
        if kind == "ep" and choice > 0.6 and 0 in free:
            axes.append(weight.SplitAxis(kind, 0))
            free.remove(0)
        elif kind == "tp" and choice > 0.4 and free:
            axes.append(weight.SplitAxis(kind, free.pop(rng.randrange(len(free)))))
        elif kind in ("pp", "ep") or choice < 0.2:
            axes.append(weight.OwnershipAxis(kind))
        else:
            axes.append(weight.ReplicatedAxis(kind))
    return tuple(axes)


def cuts(rng: random.Random, extent: int, parts: int) -> list[tuple[int, int]]:
    """Cut an extent into parts of at least one index, evenly or not."""
    parts = min(parts, extent)
    if extent % parts == 0 and rng.random() < 0.6:
        borders = [extent // parts * index for index in range(parts + 1)]
    else:
        borders = [0, *sorted(rng.sample(range(1, extent), parts - 1)), extent]
    return list(itertools.pairwise(borders))


def random_fragments(rng: random.Random, topology: Any, tensor: Any) -> list[Any]:
    axes = {axis.kind: axis for axis in tensor.parallel_axes}
    spans: dict[Any, Any] = {}
    owners: dict[str, set[int]] = {}
    for kind, axis in axes.items():
        size = getattr(topology, f"{kind}_size")
        if isinstance(axis, weight.SplitAxis):
            spans[kind] = cuts(rng, tensor.global_shape[axis.dim], size)
            if rng.random() < 0.1:
                rng.shuffle(spans[kind])
        elif isinstance(axis, weight.OwnershipAxis):
            many = rng.random() < 0.2
            owners[kind] = set(rng.sample(range(size), rng.randint(1, size) if many else 1))
    found = []
    splits_boxes = rng.random() < 0.15
    for member in topology.participants:
        if any(getattr(member.rank, kind) not in ranks for kind, ranks in owners.items()):
            continue
        begins, ends = [0] * len(tensor.global_shape), list(tensor.global_shape)
        for kind, parts in spans.items():
            rank = getattr(member.rank, kind)
            if rank >= len(parts):
                break
            begins[axes[kind].dim], ends[axes[kind].dim] = parts[rank]
        else:
            boxes = [(begins, ends)]
            if splits_boxes and ends[-1] - begins[-1] > 1:
                # All replicas are cut at the same index: upstream refuses others.
                middle = (begins[-1] + ends[-1]) // 2
                boxes = [(begins, [*ends[:-1], middle]), ([*begins[:-1], middle], ends)]
            for low, high in boxes:
                shape = tuple(b - a for a, b in zip(low, high, strict=True))
                size = math.prod(shape) * tensor.itemsize
                stage = member.rank.pp if rng.random() < 0.5 else None
                fragment = weight.PlacementFragment(
                    tensor.tensor_id, tuple(low), shape, size, member.rank, stage
                )
                found.append(fragment)
    return found


def random_tensors(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "tensor_id": f"layer.{index}.ä" if index == 2 else f"layer.{index}",
            "global_shape": tuple(rng.choice((1, 2, 4, 6, 12)) for _ in range(rng.randint(1, 4))),
            "itemsize": rng.choice((1, 2, 4)),
            "layer_id": rng.choice((None, index)),
        }
        for index in range(rng.randint(1, 3))
    ]


def random_placement(rng: random.Random, tensors: list[dict[str, Any]]) -> Any:
    topology = random_topology(rng)
    descriptors, fragments = [], []
    for tensor in tensors:
        axes = random_axes(rng, topology, len(tensor["global_shape"]))
        split = sorted(axis.dim for axis in axes if isinstance(axis, weight.SplitAxis))
        descriptors.append(
            weight.TensorDescriptor(
                **tensor,
                dtype="bits",
                shard_dims=tuple(split),
                layout_fingerprint="row-major",
                parallel_axes=axes,
            )
        )
        fragments += random_fragments(rng, topology, descriptors[-1])
    if rng.random() < 0.1 and fragments:
        fragments.pop(rng.randrange(len(fragments)))
    return weight.WeightPlacementManifest.from_fragments(
        resource_id="model",
        revision="main",
        weight_generation=rng.randrange(2) if rng.random() < 0.1 else 1,
        placement_set_id=f"set{rng.randrange(3)}",
        topology=topology,
        tensors=descriptors,
        fragments=fragments,
    )


def random_manifest(rng: random.Random, placement: Any) -> Any:
    """Store one replica of a placement's tensors, in one or more objects."""
    stored, offset = [], 0
    for tensor in placement.tensors:
        boxes = {(0,) * len(tensor.global_shape): tensor.global_shape}
        if rng.random() < 0.7:
            first = max(range(len(tensor.global_shape)), key=lambda d: tensor.global_shape[d])
            boxes = {}
            for begin, end in cuts(rng, tensor.global_shape[first], rng.randint(1, 4)):
                offsets = [0] * len(tensor.global_shape)
                offsets[first] = begin
                shape = list(tensor.global_shape)
                shape[first] = end - begin
                boxes[tuple(offsets)] = tuple(shape)
        for start, shape in boxes.items():
            size = math.prod(shape) * tensor.itemsize
            key = f"group/payload/{rng.randrange(2)}"
            name = f"f{rng.randrange(10**6)}"
            stored.append(
                weight.StoredFragment(name, tensor.tensor_id, start, shape, key, offset, size)
            )
            offset += size
    return weight.WeightManifest(
        namespace="ns",
        resource_id="model",
        revision="main",
        weight_generation=placement.weight_generation,
        group_id="group",
        manifest_key="group/manifest",
        tensors=placement.tensors,
        fragments=tuple(stored),
        created_at="2026-01-01T00:00:00Z",
    )


def described(plan: Any) -> dict[str, Any]:
    return {
        "operations": [
            [
                operation.tensor_id,
                operation.source.fragment_id,
                operation.target.fragment_id,
                operation.overlap_offset,
                operation.overlap_shape,
                operation.source_base_offset,
                operation.target_base_offset,
                operation.inner_bytes,
                operation.outer_loop_counts,
                operation.source_strides,
                operation.target_strides,
                list(operation.iter_segments(max_segments=10_000)),
            ]
            for operation in plan.operations
        ],
        "bytes": plan.total_bytes,
        "routes": [list(vars(route).values()) for route in plan.pipeline_routes],
        "executors": [
            [executor.participant_id, vars(executor.rank), executor.placement_fragment_ids]
            for executor in (*plan.source_executors, *plan.target_executors)
        ],
        "tensors": [
            [tensor.tensor_id for tensor in tensors]
            for tensors in (plan.source_tensors, plan.target_tensors)
        ],
    }


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of each value in a JSON document."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        items = []
    found = [path] if path else []
    for name, each in items:
        found += places(each, (*path, name))
    return found


def spoil(rng: random.Random, document: Any) -> None:
    """Change one value of a JSON document, add one or remove it."""
    path = rng.choice(places(document))
    parent = document
    for name in path[:-1]:
        parent = parent[name]
    name, value = path[-1], parent[path[-1]]
    way = rng.randrange(7)
    if way == 0:
        parent[name] = rng.choice([None, -1, 2**63, 2**64, "x", "", True, 1.5, [], {}, 0, 1, 7])
    elif way == 1 and isinstance(value, int):
        parent[name] = value + rng.choice([1, -1, 2])
    elif way == 2 and isinstance(value, str):
        parent[name] = value + rng.choice(["x", " "])
    elif way == 3 and isinstance(parent, list):
        parent.append(copy.deepcopy(value))
    elif way == 4:
        del parent[name]
    elif way == 5 and isinstance(parent, dict):
        parent["extra"] = 1
    elif isinstance(parent, list):
        rng.shuffle(parent)


def spoiled(seed: int) -> list[list[str]]:
    """Return what a package makes of JSON in which up to two values are wrong."""
    rng = random.Random(seed)
    placement = None
    while placement is None:
        with contextlib.suppress(ValueError):
            tensors = random_tensors(rng)
            placement = random_placement(random.Random(rng.randrange(2**32)), tensors)
    documents = [(weight.weight_placement_to_json(placement), weight.weight_placement_from_json)]
    with contextlib.suppress(ValueError):
        manifest = random_manifest(rng, placement)
        documents.append((manifest.to_json(), weight.WeightManifest.from_json))
    found = []
    for text, parse in documents:
        document = json.loads(text)
        for _ in range(rng.randint(1, 2)):
            spoil(rng, document)
        try:
            parse(json.dumps(document))
        except Exception as error:  # noqa: BLE001 # the test compares what is raised
            found.append([type(error).__name__, str(error)])
        else:
            found.append(["", ""])
    return found


def outcome(seed: int) -> dict[str, Any]:
    """Return what a package makes of a pair of placements; a refusal is part of the outcome."""
    rng = random.Random(seed)
    tensors = random_tensors(rng)
    seeds = [rng.randrange(2**32) for _ in range(4)]
    found: dict[str, Any] = {"seed": seed, "spoiled": spoiled(seed)}
    placements = []
    for name, part in zip(("source", "target"), seeds, strict=False):
        try:
            placement = random_placement(random.Random(part), tensors)
        except ValueError as error:
            found[name] = None
            found[f"{name} error"] = str(error)
        else:
            placements.append(placement)
            text = weight.weight_placement_to_json(placement)
            found[name] = [placement.placement_id, placement.digest, text]
    if len(placements) < 2:
        return found
    source, target = placements
    member = random.Random(seeds[2]).choice(target.topology.participants).participant_id
    manifest = random_manifest(random.Random(seeds[3]), source)
    found["manifest"] = [manifest.manifest_digest, manifest.to_json()]
    for name, plan, arguments in (
        ("all", weight.plan_placement_transfer, (source, target)),
        ("local", weight.plan_placement_transfer_to_local_target, (source, target, member)),
        ("stored", weight.plan_stored_transfer_to_target_placement, (manifest, target)),
    ):
        try:
            found[name] = described(plan(*arguments))
        except ValueError as error:
            found[name] = None
            found[f"{name} error"] = str(error)
    return found


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        print(json.dumps(outcome(seed)))
