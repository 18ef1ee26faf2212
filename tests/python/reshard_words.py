"""Refusals of `mooncake.reshard` whose words callers match: run by the interpreter of a package.

python reshard_words.py    # prints the class and the text of each refusal as JSON
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reshard_model import (
    ROWS,
    fragment,
    placement,
    split,
    stored,
    tensor,
    topology,
)

from mooncake.reshard.weight import (
    OwnershipAxis,
    ParallelRank,
    ParallelTopology,
    ReplicatedAxis,
    RuntimeBindingFragment,
    SplitAxis,
    TopologyParticipant,
    WeightManifest,
    WeightPlacementManifest,
    WeightRuntimeBindingManifest,
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
    validate_runtime_binding,
    validate_runtime_bindings,
    weight_placement_from_json,
    weight_placement_to_json,
)

Case = tuple[str, Callable[[], Any]]
change = dataclasses.replace


def rows(*spans: tuple[int, int], axes: Any = ROWS, tp: int | None = None) -> Any:
    """A placement in which each rank of tp holds a span of rows."""
    parts = [
        fragment("t", (start, 0), (end - start, 4), ParallelRank(tp=rank))
        for rank, (start, end) in enumerate(spans)
    ]
    return placement(topology(tp or len(spans)), [tensor(axes=axes)], parts)


def members(*ranks: tuple[str, int], tp: int = 2) -> ParallelTopology:
    participants = tuple(TopologyParticipant(name, ParallelRank(tp=each)) for name, each in ranks)
    return ParallelTopology(tp_size=tp, pp_size=1, ep_size=1, dp_size=1, participants=participants)


def memory(part: Any, address: int, /, **fields: Any) -> RuntimeBindingFragment:
    given = {
        "placement_fragment_id": part.placement_fragment_id,
        "fragment_id": f"memory of {part.tensor_id} at {address}",
        "address": address,
        "nbytes": part.nbytes,
        "worker_id": "w",
        "endpoint": "host:1",
        "device": "cpu",
        "itemsize": 2,
        "local_shape": part.local_shape,
        "strides_bytes": (2 * part.local_shape[1], 2),
        "storage_address": address,
        "storage_nbytes": part.nbytes,
        "storage_offset_bytes": 0,
    }
    return RuntimeBindingFragment(**{**given, **fields})


def binding(placed: Any, index: int = 0, fragments: Any = None, **fields: Any) -> Any:
    part = placed.parts[index]
    if fragments is None:
        starts = range(4096 * (index + 1), 4096 * (index + 2), 256)
        pairs = zip(part.fragments, starts, strict=False)
        fragments = tuple(memory(piece, address) for piece, address in pairs)
    given = {
        "resource_id": placed.resource_id,
        "placement_id": placed.placement_id,
        "placement_digest": placed.digest,
        "instance_id": "i",
        "generation": 0,
        "lease_id": "l",
        "revision": placed.revision,
        "participant_id": part.participant_id,
        "fragments": fragments,
    }
    return WeightRuntimeBindingManifest(**{**given, **fields})


def two(aliases: tuple[str, ...] = (), of: str = "tu", **fields: Any) -> WeightPlacementManifest:
    """Two whole tensors of one participant, of which some declare aliases."""
    pieces = [
        fragment(name, (0, 0), (4, 4), ParallelRank(), aliases=aliases if name in of else ())
        for name in "tu"
    ]
    return placement(topology(), [tensor("t", axes=()), tensor("u", axes=())], pieces, **fields)


def bound(placed: Any, *changes: dict[str, Any]) -> None:
    """Validate a binding of the first participant, whose fragments are changed."""
    pieces = placed.parts[0].fragments
    given = zip(pieces, (4096, 8192), (*changes, {}, {}), strict=False)
    fragments = tuple(memory(piece, address, **fields) for piece, address, fields in given)
    validate_runtime_binding(placed, binding(placed, fragments=fragments))


def parsed(edit: Callable[[Any], Any], placed: Any = None) -> Any:
    document = json.loads(weight_placement_to_json(placed or split(2)))
    text = edit(document)
    return weight_placement_from_json(text if isinstance(text, str) else json.dumps(document))


def manifest_parsed(edit: Callable[[Any], Any]) -> Any:
    document = json.loads(stored().to_json())
    edit(document)
    return WeightManifest.from_json(json.dumps(document))


def spread(size: str, axes: tuple[Any, ...], held: int, spans: Any = ((0, 4), (0, 4))) -> Any:
    """Rows of a tensor on the first ranks of one axis of two."""
    sizes = {"tp_size": 1, "pp_size": 1, "ep_size": 1, "dp_size": 1, f"{size}_size": 2}
    ranks = [ParallelRank(**{size: each}) for each in range(2)]
    named = tuple(TopologyParticipant(f"p{each}", rank) for each, rank in enumerate(ranks))
    pieces = [
        fragment("t", (first, 0), (count, 4), rank)
        for rank, (first, count) in zip(ranks[:held], spans, strict=False)
    ]
    job = ParallelTopology(**sizes, participants=named)
    return placement(job, [tensor(axes=axes)], pieces)


def of_parts(placed: Any, parts: Any) -> WeightPlacementManifest:
    return WeightPlacementManifest(
        resource_id=placed.resource_id,
        revision=placed.revision,
        weight_generation=placed.weight_generation,
        placement_set_id=placed.placement_set_id,
        topology=placed.topology,
        parts=parts,
    )


def one() -> Any:
    """The first tensor of `two`."""
    pieces = [fragment("t", (0, 0), (4, 4), ParallelRank())]
    return placement(topology(), [tensor("t", axes=())], pieces)


def plan() -> Any:
    return plan_placement_transfer(split(2), split(1))


def stored_plan() -> Any:
    return plan_stored_transfer_to_target_placement(stored(), split(1))


def of_cases() -> dict[str, Case]:
    """Return for each condition the words, and the call that is refused with them."""
    whole = "global placement tensor is not fully covered"
    pieces = stored().fragments
    return {
        "not covered": (f"{whole}: t", lambda: rows((0, 2), (2, 3))),
        "replica missing": (
            "replicated-axis participant",
            lambda: rows((0, 4), axes=(ReplicatedAxis("tp"),), tp=2),
        ),
        "rank missing": ("split-axis participant", lambda: rows((0, 4), tp=2)),
        "undeclared dp": ("active undeclared dp axis", lambda: spread("dp", (), 2)),
        "undeclared pp": ("active undeclared pp axis", lambda: spread("pp", (), 2)),
        "undeclared ep": ("active undeclared ep axis", lambda: spread("ep", (), 1)),
        "undeclared tp": ("active undeclared tp axis", lambda: spread("tp", (), 1)),
        "independent": (
            "varies across undeclared ep axis",
            lambda: spread("ep", (), 2, [(0, 2), (2, 2)]),
        ),
        "ranks share indices": (
            "split-axis rank geometry",
            lambda: placement(
                topology(2),
                [tensor()],
                [
                    fragment("t", (0, 0), (4, 2), ParallelRank()),
                    fragment("t", (0, 2), (4, 2), ParallelRank(tp=1)),
                ],
            ),
        ),
        "no tensors": ("must contain tensors", lambda: placement(topology(), [], [])),
        "no fragment": ("unreferenced tensor", lambda: placement(topology(), [tensor()], [])),
        "participant missing": (
            "missing topology participant",
            lambda: of_parts(split(2), split(2).parts[:1]),
        ),
        "participant twice": (
            "duplicate placement participant",
            lambda: of_parts(split(2), (*split(2).parts, split(2).parts[0])),
        ),
        "alias unknown": ("alias group references unknown tensor", lambda: two(("t", "z"), "t")),
        "alias of one": ("alias group is not declared consistently", lambda: two(("t", "u"), "t")),
        "alias twice": (
            "aliases",
            lambda: fragment("t", (0,), (1,), ParallelRank(), aliases=("t", "u", "u")),
        ),
        "placement_id": ("canonical logical content", lambda: split(2, placement_id="x")),
        "boxes overlap": (
            "logical fragment boxes overlap",
            lambda: placement(
                topology(),
                [tensor(axes=())],
                [
                    fragment("t", (0, 0), (3, 4), ParallelRank()),
                    fragment("t", (2, 0), (2, 4), ParallelRank()),
                ],
            ),
        ),
        "beyond": (
            "out of bounds",
            lambda: placement(
                topology(), [tensor(axes=())], [fragment("t", (1, 0), (4, 4), ParallelRank())]
            ),
        ),
        "size": (
            "byte size mismatch",
            lambda: placement(
                topology(),
                [tensor(axes=())],
                [change(fragment("t", (0, 0), (4, 4), ParallelRank()), nbytes=31)],
            ),
        ),
        "memory missing": (
            "missing placement fragment",
            lambda: validate_runtime_binding(split(2), binding(split(2), fragments=())),
        ),
        "memory unknown": (
            "unknown placement fragment",
            lambda: bound(split(2), {"placement_fragment_id": "x"}),
        ),
        "memory twice": (
            "duplicate placement fragment",
            lambda: binding(
                split(2),
                fragments=[memory(split(2).parts[0].fragments[0], at) for at in (4096, 8192)],
            ),
        ),
        "fragment_id twice": (
            "duplicate runtime fragment_id",
            lambda: bound(two(), {"fragment_id": "x"}, {"fragment_id": "x"}),
        ),
        "memory of another size": ("byte size", lambda: bound(split(2), {"nbytes": 8})),
        "binding missing": (
            "missing runtime binding participant",
            lambda: validate_runtime_bindings(split(2), [binding(split(2))]),
        ),
        "binding twice": (
            "duplicate runtime binding participant",
            lambda: validate_runtime_bindings(split(2), [binding(split(2)), binding(split(2))]),
        ),
        "binding unknown": (
            "unknown runtime binding participant",
            lambda: validate_runtime_bindings(
                split(2),
                [*(binding(split(2), at) for at in (0, 1)), binding(split(2), participant_id="x")],
            ),
        ),
        "addresses overlap": (
            "address ranges overlap",
            lambda: bound(
                two(),
                {"storage_nbytes": 64},
                {
                    "address": 4112,
                    "storage_address": 4096,
                    "storage_nbytes": 64,
                    "storage_offset_bytes": 16,
                },
            ),
        ),
        "address": ("storage_address plus", lambda: bound(split(2), {"storage_offset_bytes": 8})),
        "storage": ("storage allocation", lambda: bound(split(2), {"storage_nbytes": 8})),
        "storages overlap": (
            "storage allocation ranges overlap",
            lambda: bound(
                two(), {"storage_nbytes": 64}, {"address": 4128, "storage_address": 4128}
            ),
        ),
        "rank beyond": ("tp rank", lambda: members(("a", 0), ("b", 2))),
        "integer beyond": ("64-bit", lambda: split(2, weight_generation=2**64)),
        "end beyond": ("64-bit", lambda: memory(split(1).fragments[0], 2**64 - 8)),
        "digest": ("SHA-256", lambda: binding(split(2), placement_digest="x")),
        "kind twice": (
            "duplicate",
            lambda: tensor(axes=(SplitAxis("tp", 0), ReplicatedAxis("tp"))),
        ),
        "dimension twice": (
            "share a dimension",
            lambda: change(tensor(), parallel_axes=(SplitAxis("tp", 0), SplitAxis("ep", 0))),
        ),
        "dp split": ("split semantics", lambda: SplitAxis("dp", 0)),
        "pp split": ("split semantics", lambda: SplitAxis("pp", 0)),
        "ep split": ("leading", lambda: tensor(axes=(SplitAxis("ep", 1),))),
        "foreign axis": ("explicit axis", lambda: tensor(axes=(3,))),
        "expert": (
            "individually allocated expert",
            lambda: tensor(axes=(SplitAxis("ep", 0),), expert_id=1),
        ),
        "dims repeated": ("duplicates", lambda: change(tensor(), shard_dims=(0, 0))),
        "dims unsorted": ("sorted", lambda: change(tensor(), shard_dims=(1, 0))),
        "dim too large": ("out-of-range", lambda: change(tensor(), shard_dims=(5,))),
        "no shape": (
            "global_shape must contain integers",
            lambda: change(tensor(), global_shape=4),
        ),
        "field twice": (
            "duplicate JSON field",
            lambda: parsed(lambda given: '{"schema_version":1,"schema_version":1}'),
        ),
        "fields": ("schema fields", lambda: parsed(lambda given: given.update(extra=1))),
        "fields of a manifest": (
            "schema fields",
            lambda: manifest_parsed(lambda given: given.update(extra=1)),
        ),
        "NaN": (
            "non-finite",
            lambda: parsed(lambda given: json.dumps({**given, "weight_generation": float("nan")})),
        ),
        "infinity": (
            "non-finite",
            lambda: parsed(lambda given: json.dumps({**given, "revision": float("inf")})),
        ),
        "same box": (
            "duplicate fragment geometry",
            lambda: stored(
                fragments=(*pieces, change(pieces[0], fragment_id="x", object_offset=64))
            ),
        ),
        "objects overlap": (
            "object ranges overlap",
            lambda: stored(fragments=(pieces[0], change(pieces[1], object_offset=8))),
        ),
        "foreign element": ("WeightManifest fragments", lambda: stored(fragments=(3,))),
        "key of another group": (
            "group",
            lambda: stored(fragments=(pieces[0], change(pieces[1], object_key="other/x"))),
        ),
        "manifest key of another group": ("group", lambda: stored(manifest_key="other/manifest")),
        "forged source": (
            "source placement fragment snapshots differ",
            lambda: change(
                plan(), source_placement=split(2, 1), source_tensors=split(2, 1).tensors
            ),
        ),
        "forged manifest": (
            "source manifest fragment snapshots differ",
            lambda: change(stored_plan(), source_manifest=stored(4)),
        ),
        "forged source tensors": (
            "source tensor catalog differs",
            lambda: change(plan(), source_tensors=()),
        ),
        "forged target tensors": (
            "target tensor catalog differs",
            lambda: change(plan(), target_tensors=()),
        ),
        "generation": (
            "weight_generation differ",
            lambda: plan_placement_transfer(split(2), split(2, weight_generation=9)),
        ),
        "target lacks a tensor": (
            "target manifests are missing tensors",
            lambda: plan_placement_transfer(two(), one()),
        ),
        "source lacks a tensor": ("unknown tensors", lambda: plan_placement_transfer(one(), two())),
        "layout": (
            "layout mismatch",
            lambda: plan_placement_transfer(
                split(1),
                placement(
                    topology(),
                    [change(tensor(), layout_fingerprint="other")],
                    split(1).fragments,
                ),
            ),
        ),
        "descriptor": (
            "tensor descriptor mismatch",
            lambda: plan_placement_transfer(
                split(1),
                placement(topology(), [change(tensor(), dtype="other")], split(1).fragments),
            ),
        ),
        "owners": (
            "ambiguous declared owners",
            lambda: plan_placement_transfer(
                placement(
                    topology(dp=2),
                    [tensor(axes=(OwnershipAxis("dp"),))],
                    [fragment("t", (0, 0), (4, 4), ParallelRank(dp=each)) for each in range(2)],
                ),
                split(1),
            ),
        ),
        "segments": (
            "exceeds max_segments",
            lambda: list(
                plan_placement_transfer(split(2, 1), split(1))
                .operations[0]
                .iter_segments(max_segments=1)
            ),
        ),
        "loops": (
            "canonical",
            lambda: change(
                plan().operations[0],
                outer_loop_counts=(2,),
                source_strides=(8,),
                target_strides=(8,),
                inner_bytes=8,
            ),
        ),
        "bytes of loops": (
            "loop geometry does not match overlap",
            lambda: change(plan().operations[0], inner_bytes=8),
        ),
        "participant without fragments": (
            "no fragments",
            lambda: plan_placement_transfer_to_local_target(
                split(1),
                placement(topology(2), [tensor(axes=(OwnershipAxis("tp"),))], split(1).fragments),
                "p1",
            ),
        ),
    }


def refusals() -> dict[str, Any]:
    """Return the class and the text of each refusal; None if the call was not refused."""
    found: dict[str, Any] = {}
    for name, (_, call) in of_cases().items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 # the test compares what is raised
            found[name] = [type(error).__name__, str(error)]
        else:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(refusals()))
