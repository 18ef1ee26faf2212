"""Plans of `mooncake.reshard`: executed on arrays, and refused where they contradict."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from reshard_cases import random_manifest, random_placement, random_tensors
from reshard_model import fragment, placement, replicated, split, stored, tensor, topology

from mooncake.reshard.weight import (
    OwnershipAxis,
    ParallelRank,
    PlanningLimits,
    ReplicatedAxis,
    SplitAxis,
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
)


def contents(shape, itemsize, seed) -> np.ndarray:
    """A tensor of random bytes, the bytes of an element last."""
    return np.random.default_rng(seed).integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def buffer_of(values: np.ndarray, part) -> np.ndarray:
    """The dense buffer of a fragment."""
    spans = zip(part.global_offset, part.local_shape, strict=True)
    return values[tuple(slice(start, start + extent) for start, extent in spans)].reshape(-1)


def execute(plan) -> None:
    """Execute a plan in memory, and compare each target fragment with a slice of the tensor."""
    values = {
        item.tensor_id: contents(item.global_shape, item.itemsize, index)
        for index, item in enumerate(plan.source_tensors)
    }
    targets = {}
    for operation in plan.operations:
        source = buffer_of(values[operation.tensor_id], operation.source)
        target = targets.setdefault(
            operation.target.fragment_id,
            (operation.target, np.zeros(operation.target.nbytes, dtype=np.uint8)),
        )[1]
        for from_, to, length in operation.iter_segments(max_segments=100_000):
            target[to : to + length] = source[from_ : from_ + length]
    receivers = {part.participant_id for part in plan.target_executors}
    wanted = [
        piece
        for part in plan.target_placement.parts
        if part.participant_id in receivers
        for piece in part.fragments
    ]
    assert {piece.fragment_id for piece in wanted} == targets.keys()
    for piece, filled in targets.values():
        np.testing.assert_array_equal(filled, buffer_of(values[piece.tensor_id], piece))


def test_executing_a_plan_equals_slicing():
    executed = 0
    for seed in range(1500):
        rng = random.Random(seed)
        tensors = random_tensors(rng)
        try:
            source, target = random_placement(rng, tensors), random_placement(rng, tensors)
            plan = plan_placement_transfer(source, target)
        except ValueError:
            continue
        execute(plan)
        execute(plan_stored_transfer_to_target_placement(random_manifest(rng, source), target))
        for part in target.parts:
            if part.fragments:
                name = part.participant_id
                execute(plan_placement_transfer_to_local_target(source, target, name))
        executed += 1
    assert executed > 100


def test_replicas_may_be_cut_differently():
    job = topology(2, dp=2)
    axes = (SplitAxis("tp", 0), ReplicatedAxis("dp"))
    cuts = {0: [(0, 2), (2, 4)], 1: [(0, 1), (1, 4)]}
    parts = [
        fragment("t", (start, 0), (end - start, 4), ParallelRank(dp=dp, tp=tp))
        for dp, spans in cuts.items()
        for tp, (start, end) in enumerate(spans)
    ]
    placed = placement(job, [tensor(axes=axes)], parts)
    plan = plan_placement_transfer(placed, placed)
    execute(plan)
    assert {(item.source.rank.dp, item.target.rank.dp) for item in plan.operations} == {
        (0, 0),
        (1, 1),
    }


def test_targets_are_spread_over_data_parallel_replicas():
    def placed(dp):
        parts = [fragment("t", (0, 0), (4, 4), ParallelRank(dp=rank)) for rank in range(dp)]
        return placement(topology(dp=dp), [tensor(axes=(ReplicatedAxis("dp"),))], parts)

    plan = plan_placement_transfer(placed(2), placed(4))
    pairs = {(item.target.rank.dp, item.source.rank.dp) for item in plan.operations}
    assert pairs == {(0, 0), (1, 1), (2, 0), (3, 1)}


def test_source_owned_by_many_dp_ranks_is_ambiguous():
    parts = [fragment("t", (0, 0), (4, 4), ParallelRank(dp=rank)) for rank in range(2)]
    source = placement(topology(dp=2), [tensor(axes=(OwnershipAxis("dp"),))], parts)
    with pytest.raises(ValueError, match="ambiguous"):
        plan_placement_transfer(source, replicated(1))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (lambda: split(2, resource_id="x"), "resource_id differ"),
        (lambda: split(2, revision="x"), "revision differ"),
        (lambda: split(2, weight_generation=9), "weight_generation differ"),
        (
            lambda: placement(
                topology(), [tensor("u")], [fragment("u", (0, 0), (4, 4), ParallelRank())]
            ),
            "target manifests are missing tensors",
        ),
        (
            lambda: placement(
                topology(),
                [tensor(layer_id=3)],
                [fragment("t", (0, 0), (4, 4), ParallelRank())],
            ),
            r"tensor descriptor mismatch.*layer_id",
        ),
        (lambda: None, "target placement manifests must be WeightPlacementManifest"),
    ],
)
def test_plans_between_different_weights_are_refused(target, reason):
    with pytest.raises(ValueError, match=reason):
        plan_placement_transfer(split(2), target())


def test_local_plan_fills_one_participant():
    plan = plan_placement_transfer_to_local_target(split(4), split(2), "p1")
    assert {item.target.rank.tp for item in plan.operations} == {1}
    assert plan.total_bytes == 16
    for arguments, reason in (((), "must be given"), (("x",), "unknown target participant")):
        with pytest.raises(ValueError, match=reason):
            plan_placement_transfer_to_local_target(split(4), split(2), *arguments)
    assert plan_placement_transfer_to_local_target(split(4), split(1)).total_bytes == 32


def test_segments_are_nested_strided_copies():
    plan = plan_placement_transfer(split(2), split(2, dim=1))
    region = plan.operations[1]
    assert (region.segment_count, region.nbytes, region.repeat) == (2, 4, 2)
    assert (region.source_stride, region.target_stride) == (8, 4)
    assert list(region.iter_segments(max_segments=2)) == [(0, 8, 4), (8, 12, 4)]
    with pytest.raises(ValueError, match="exceeds max_segments"):
        region.iter_segments(max_segments=1)
    whole = plan_placement_transfer(split(2), split(2)).operations[0]
    assert (whole.segment_count, whole.source_stride) == (1, 0)


def test_regions_with_other_loops_are_refused():
    region = plan_placement_transfer(split(2), split(2)).operations[0]
    for fields, reason in (
        ({"inner_bytes": 8}, "canonical"),
        ({"source_base_offset": 8}, "canonical"),
        ({"overlap_offset": (9, 0)}, "exceeds source logical fragment"),
        ({"tensor_id": "u"}, "another tensor"),
        ({"inner_bytes": 0}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            dataclasses.replace(region, **fields)


@pytest.mark.parametrize(
    "limit", ["max_transfer_regions", "max_segments_per_region", "max_total_lowered_segments"]
)
def test_plans_beyond_their_limits_are_refused(limit):
    reached = {
        "max_transfer_regions": 4,
        "max_segments_per_region": 2,
        "max_total_lowered_segments": 8,
    }[limit]
    source, target = split(2), split(2, dim=1)
    limits = PlanningLimits(**{limit: reached})
    assert plan_placement_transfer(source, target, planning_limits=limits).total_bytes == 32
    limits = PlanningLimits(**{limit: reached - 1})
    with pytest.raises(ValueError, match=limit):
        plan_placement_transfer(source, target, planning_limits=limits)


def test_plans_are_checked_against_their_placements():
    plan = plan_placement_transfer(split(4), split(2))
    from_store = plan_stored_transfer_to_target_placement(stored(), split(2))
    with pytest.raises(ValueError, match="source has no placement"):
        dataclasses.replace(from_store, operations=plan.operations)
    for fields, reason in (
        ({"operations": ()}, "executors"),
        ({"operations": plan.operations[:1]}, "executors"),
        ({"operations": plan.operations * 2}, "exactly once"),
        ({"source_placement": None}, "one source"),
        ({"source_placement": split(2)}, "source placement fragment snapshots differ"),
        ({"target_tensors": ()}, "target tensor catalog differs"),
        ({"source_tensors": ()}, "source tensor catalog differs"),
        ({"source_executors": ()}, "no source executor metadata"),
        ({"revision": "x"}, "source placement identity differs"),
        ({"planning_limits": None}, "planning_limits is invalid"),
        ({"resource_id": ""}, "identifiers must not be empty"),
        ({"target_placement": None}, "target placement is invalid"),
        ({"source_placement": plan}, "source placement is invalid"),
        ({"source_placement": None, "source_manifest": 3}, "source manifest is invalid"),
        ({"operations": (3,)}, "requires a canonical transfer operation"),
        ({"operations": from_store.operations}, "source must be a placement"),
        ({"target_executors": (3,)}, "invalid canonical executor metadata"),
        (
            {"target_executors": plan.source_executors},
            "target executor placement differs from target",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            dataclasses.replace(plan, **fields)


def test_order_of_executors_has_no_meaning():
    plan = plan_placement_transfer(split(4), split(2))
    for name in ("source_executors", "target_executors"):
        given = getattr(plan, name)[::-1]
        assert getattr(dataclasses.replace(plan, **{name: given}), name) == given
        with pytest.raises(ValueError, match="executors differ from planned operations"):
            dataclasses.replace(plan, **{name: given * 2})


def test_executors_know_their_operations():
    plan = plan_placement_transfer(split(4), split(2))
    found = [plan.operation_indices_for_executor(item, "target") for item in plan.target_executors]
    assert sorted(itertools.chain(*found)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="source or target"):
        plan.operation_indices_for_executor(plan.target_executors[0], "both")


def test_plan_keeps_the_identity_of_its_stored_source():
    plan = plan_stored_transfer_to_target_placement(stored(), split(4))
    execute(plan)
    assert plan.source_placement_id is None
    assert plan.source_executors == ()
    assert plan.source_manifest_identity == stored().manifest_identity
    plan.validate_source_manifest_snapshot()
    object.__setattr__(plan.source_manifest, "created_at", "changed")
    with pytest.raises(ValueError, match="has changed"):
        plan.validate_source_manifest_snapshot()


def test_tensors_of_a_stored_source_are_in_order():
    pieces = tuple(
        dataclasses.replace(
            stored(1).fragments[0], tensor_id=name, fragment_id=name, object_offset=offset
        )
        for name, offset in (("u", 0), ("t", 64))
    )
    given = stored(tensors=(tensor("u"), tensor("t")), fragments=pieces)
    parts = [fragment(name, (0, 0), (4, 4), ParallelRank()) for name in "ut"]
    target = placement(topology(), [tensor("u"), tensor("t")], parts)
    plan = plan_stored_transfer_to_target_placement(given, target)
    assert [item.tensor_id for item in plan.source_tensors] == ["t", "u"]
    assert [item.tensor_id for item in plan.source_manifest.tensors] == ["u", "t"]
    assert plan.total_bytes == 64
