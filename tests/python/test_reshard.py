"""Geometry, placements, bindings and stored weights of `mooncake.reshard`, and their limits."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest
from reshard_model import ROWS, fragment, placement, split, stored, tensor, topology

from mooncake import reshard
from mooncake.reshard import ResourceKind, geometry, weight
from mooncake.reshard.contracts import validate_resource_binding_identity
from mooncake.reshard.weight import (
    OwnershipAxis,
    ParallelRank,
    ParallelTopology,
    PlacementFragment,
    PlanningLimits,
    ReplicatedAxis,
    RuntimeBindingFragment,
    SplitAxis,
    TopologyParticipant,
    WeightManifest,
    WeightPlacementManifest,
    WeightRuntimeBindingManifest,
    validate_runtime_binding,
    validate_runtime_bindings,
    weight_placement_from_json,
    weight_placement_to_json,
)

# Geometry


def cells(box) -> set[tuple[int, ...]]:
    offset, shape = box
    spans = (range(start, start + extent) for start, extent in zip(offset, shape, strict=True))
    return set(itertools.product(*spans))


def test_box_functions_agree_with_counting_cells():
    rng = random.Random(7)
    for _ in range(2000):
        dims = rng.randint(1, 3)
        boxes = [
            (
                tuple(rng.randint(0, 2) for _ in range(dims)),
                tuple(rng.randint(0, 3) for _ in range(dims)),
            )
            for _ in range(rng.randint(1, 4))
        ]
        counted = [cells(box) for box in boxes]
        overlap = any(left & right for left, right in itertools.combinations(counted, 2))
        assert geometry.boxes_overlap(boxes) == overlap
        whole = ((0,) * dims, (2,) * dims)
        inside = [box for box in boxes if geometry.box_contains(*whole, *box)]
        assert all(cells(box) <= cells(whole) for box in inside)
        union = set().union(*counted)
        covers = len(inside) == len(boxes) and not overlap and union == cells(whole)
        assert geometry.boxes_exactly_cover(*whole, boxes) == covers


def test_boxes_of_different_dimensions_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        geometry.boxes_overlap([((0,), (2,)), ((0, 0), (2, 2))])
    with pytest.raises(ValueError, match="different lengths"):
        geometry.box_contains((0,), (4,), (0, 0), (1, 1))


def cut_rows(rows: int, dims: int = 2):
    """Rows of a matrix, each cut in two at another column."""
    rest, one = (0,) * (dims - 2), (1,) * (dims - 2)
    for row in range(rows):
        yield (row, 0, *rest), (1, row + 1, *one)
        yield (row, row + 1, *rest), (1, rows - row, *one)


def turned(boxes):
    return [(offset[::-1], shape[::-1]) for offset, shape in boxes]


@pytest.mark.timeout(30)
def test_thousands_of_rectangles_are_compared_by_sweeping():
    boxes = list(cut_rows(4096))
    random.Random(3).shuffle(boxes)
    assert geometry.boxes_exactly_cover((0, 0), (4096, 4097), boxes)
    assert geometry.boxes_exactly_cover((0, 0), (4097, 4096), turned(boxes))
    for extra in (((2000, 2000), (1, 1)), ((0, 4096), (4096, 1)), ((4095, 0), (1, 4097))):
        assert geometry.boxes_overlap([*boxes, extra])
        assert geometry.boxes_overlap([extra, *boxes])
    assert not geometry.boxes_overlap([*boxes, ((0, 4097), (4096, 1))])


def test_comparisons_of_solids_are_limited(monkeypatch):
    boxes = list(cut_rows(40, dims=3))
    assert geometry.boxes_exactly_cover((0, 0, 0), (40, 41, 1), boxes)
    monkeypatch.setattr(geometry, "COMPARISONS_MAX", 500)
    with pytest.raises(ValueError, match="high-dimensional overlap budget"):
        geometry.boxes_exactly_cover((0, 0, 0), (40, 41, 1), boxes)
    assert geometry.boxes_exactly_cover((0, 0), (40, 41), list(cut_rows(40)))


def test_boxes_without_elements_overlap_nothing():
    for shape in ((0, 2), (-1, 2), (-1, -2)):
        assert not geometry.boxes_overlap([((0, 0), (2, 2)), ((0, 0), shape)])


@pytest.mark.timeout(30)
def test_solids_beyond_the_budget_are_refused_in_seconds():
    def overlapping_everywhere(dims: int):
        # Each box is long in the dimension that is swept, so that all are open at once.
        for number in range(1600):
            at = (number, *[number] * (dims - 1))
            yield at, (1600, *[1] * (dims - 1))

    with pytest.raises(ValueError, match="high-dimensional overlap budget"):
        geometry.boxes_overlap(list(overlapping_everywhere(3)))
    assert not geometry.boxes_overlap(list(overlapping_everywhere(2)))


def test_no_boxes_cover_nothing():
    assert not geometry.boxes_exactly_cover((0,), (0,), [])
    assert geometry.boxes_exactly_cover((), (), [((), ())])


# Records


def test_ids_are_those_of_upstream():
    # Measured with upstream's package.
    part = PlacementFragment("t", (0, 0), (2, 4), 16, ParallelRank())
    assert part.fragment_id == (
        "sha256:5de49433978309151a4702bc7201d2a7eab6530f792590d3721cc839dd0787c5"
    )
    assert topology(2).topology_id == (
        "sha256:b18ab6869e82189ea38b27de41ee5a312208e9bb309572d63d18b98e529826a9"
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: ParallelRank(tp=-1), "at least 0"),
        (lambda: ParallelRank(tp=True), "integer"),
        (lambda: tensor(axes=(3,)), "explicit axis"),
        (lambda: dataclasses.replace(tensor(), shard_dims=(0, 0)), "duplicates"),
        (lambda: dataclasses.replace(tensor(), shard_dims=(1, 0)), "sorted"),
        (lambda: dataclasses.replace(tensor(), global_shape=4), "must contain integers"),
        (
            lambda: dataclasses.replace(
                tensor(axes=(SplitAxis("tp", 0),)),
                parallel_axes=(
                    SplitAxis("tp", 0),
                    SplitAxis("ep", 0),
                ),
            ),
            "share a dimension",
        ),
        (lambda: SplitAxis("dp", 0), "split semantics"),
        (lambda: SplitAxis("xx", 0), "there are dp, pp, ep, tp"),
        (lambda: OwnershipAxis(""), "non-empty"),
        (lambda: tensor(""), "tensor_id"),
        (lambda: tensor(shape=()), "at least one dimension"),
        (lambda: tensor(shape=(0, 4)), "at least 1"),
        (lambda: tensor(axes=(SplitAxis("tp", 2),)), "out-of-range"),
        (lambda: tensor(axes=(SplitAxis("ep", 1),)), "EP must split the leading"),
        (lambda: tensor(axes=(SplitAxis("ep", 0),), expert_id=1), "OwnershipAxis"),
        (lambda: tensor(axes=(SplitAxis("tp", 0), SplitAxis("ep", 0))), "duplicate"),
        (lambda: tensor(axes=(SplitAxis("tp", 0), ReplicatedAxis("tp"))), "duplicate"),
        (lambda: dataclasses.replace(tensor(), shard_dims=()), "split dimensions conflict"),
        (lambda: fragment("t", (0,), (0,), ParallelRank()), "at least 1"),
        (lambda: PlacementFragment("t", (0,), (1,), 2**64, ParallelRank()), "nbytes"),
        (lambda: fragment("t", (0,), (1,), None), "ParallelRank"),
        (lambda: fragment("t", (0,), (1,), ParallelRank(), aliases=("t",)), "at least one other"),
        (lambda: fragment("t", (0,), (1,), ParallelRank(), aliases=("u", "v")), "itself"),
        (lambda: fragment("t", (0,), (1,), ParallelRank(), aliases="tu"), "sequence"),
        (lambda: dataclasses.replace(topology(), topology_id="x"), "does not match canonical"),
        (lambda: PlanningLimits(max_transfer_regions=0), "at least 1"),
    ],
)
def test_records_refuse_bad_fields(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ((), "at least one participant"),
        ((("a", 0), ("a", 1)), "participant_id"),
        ((("a", 0), ("b", 0)), "rank"),
        ((("a", 0), ("b", 2)), "tp rank"),
    ],
)
def test_topology_refuses_bad_participants(members, reason):
    participants = tuple(TopologyParticipant(name, ParallelRank(tp=tp)) for name, tp in members)
    with pytest.raises(ValueError, match=reason):
        ParallelTopology(tp_size=2, pp_size=1, ep_size=1, dp_size=1, participants=participants)


# Placements


def rows(*spans, axes=ROWS, tp=None):
    """A placement in which each rank of tp holds a span of rows."""
    parts = [
        fragment("t", (start, 0), (end - start, 4), ParallelRank(tp=rank))
        for rank, (start, end) in enumerate(spans)
    ]
    return placement(topology(tp or len(spans)), [tensor(axes=axes)], parts)


def test_a_tensor_may_be_split_unevenly():
    assert len(rows((0, 1), (1, 4)).fragments) == 2


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: rows((0, 2), (2, 3)), "not fully covered"),
        (lambda: rows((0, 3), (2, 4)), "not fully covered"),
        (lambda: rows((0, 4), tp=2), "split-axis participant"),
        (lambda: rows((0, 4), axes=(ReplicatedAxis("tp"),), tp=2), "replicated-axis participant"),
        (lambda: rows((0, 4), axes=(), tp=2), "active undeclared tp axis"),
        (lambda: rows((0, 4), (0, 4), axes=()), "varies across undeclared tp axis, independently"),
        (lambda: placement(topology(), [], []), "must contain tensors"),
        (lambda: placement(topology(), [tensor()], []), "unreferenced tensor"),
        (
            lambda: placement(topology(), [tensor()], [fragment("u", (0,), (4,), ParallelRank())]),
            "unknown tensor",
        ),
        (
            lambda: placement(
                topology(), [tensor()], [fragment("t", (0, 0), (4, 4), ParallelRank(tp=1))]
            ),
            "no participant",
        ),
        (lambda: split(2, weight_generation=2**64), "weight_generation"),
        (lambda: split(2, placement_id="x"), "canonical logical content"),
        (
            lambda: placement(
                topology(2),
                [tensor()],
                [
                    fragment("t", (0, 0), (4, 2), ParallelRank()),
                    fragment("t", (0, 2), (4, 2), ParallelRank(tp=1)),
                ],
            ),
            "split-axis rank geometry",
        ),
    ],
)
def test_incomplete_placements_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


def test_placement_is_ordered_and_named_by_content():
    forward, other = split(4), split(4)
    parts = tuple(reversed(other.parts))
    backward = WeightPlacementManifest(
        resource_id="model",
        revision="main",
        weight_generation=1,
        placement_set_id="set",
        topology=topology(4),
        parts=parts,
    )
    assert backward == forward
    assert backward.placement_id == forward.placement_id
    assert backward.digest == forward.digest
    assert backward.digest != split(4, revision="next").digest


def test_placement_needs_one_part_of_each_participant():
    given = split(2)
    fields = {
        name: getattr(given, name)
        for name in ("resource_id", "revision", "weight_generation", "placement_set_id")
    }
    for parts, reason in (
        (given.parts[:1], "missing topology participant"),
        ((*given.parts, given.parts[0]), "duplicate"),
        (
            (given.parts[0], dataclasses.replace(given.parts[1], revision="x")),
            "revision differs from manifest",
        ),
    ):
        with pytest.raises(ValueError, match=reason):
            WeightPlacementManifest(topology=given.topology, parts=parts, **fields)


def test_aliases_are_declared_by_all_their_tensors():
    def build(*aliases):
        parts = [
            fragment(name, (0, 0), (4, 4), ParallelRank(), aliases=names)
            for name, names in zip("tu", aliases, strict=True)
        ]
        return placement(topology(), [tensor("t"), tensor("u")], parts)

    assert build(("t", "u"), ("u", "t")).fragments[0].aliases == ("t", "u")
    with pytest.raises(ValueError, match="alias group is not declared consistently"):
        build(("t", "u"), ())
    with pytest.raises(ValueError, match="unknown tensor"):
        build(("t", "v"), ())


def test_json_reads_back_in_any_order():
    given = split(4)
    record = json.loads(weight_placement_to_json(given))
    record["parts"].reverse()
    assert weight_placement_from_json(json.dumps(record)) == given
    assert weight_placement_from_json(weight_placement_to_json(given)) == given


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record.update(extra=1), "unknown=.'extra'"),
        (lambda record: record.pop("topology"), "missing=.'topology'"),
        (lambda record: record.update(resource_kind="kv_cache"), "resource_kind"),
        (lambda record: record.update(weight_generation=2), "placement_id"),
        (lambda record: record.update(weight_generation=1.0), "integer"),
        (lambda record: record.update(tensors=record["tensors"] * 2), "duplicate"),
        (lambda record: record["topology"].update(topology_id="x"), "topology_id"),
        (lambda record: record["topology"].update(topology_id=None), "topology_id"),
        (lambda record: record.update(placement_id=None), "placement_id"),
        (
            lambda record: record["parts"][0]["fragments"][0].update(placement_fragment_id=None),
            "placement_fragment_id",
        ),
        (lambda record: record["parts"][0]["rank"].update(tp=1), "rank"),
        (lambda record: record["parts"][0]["fragments"][0].pop("aliases"), "aliases"),
        (lambda record: record["tensors"][0]["parallel_axes"][0].pop("dim"), "dim"),
        (lambda record: record["tensors"][0]["parallel_axes"][0].update(semantics="x"), "split"),
        (lambda record: record["tensors"][0]["parallel_axes"].append(3), "JSON object"),
    ],
)
def test_json_with_other_content_is_refused(change, reason):
    record = json.loads(weight_placement_to_json(split(2)))
    change(record)
    with pytest.raises(ValueError, match=reason):
        weight_placement_from_json(json.dumps(record))


@pytest.mark.parametrize("text", ["", "{", "[]", "NaN", '{"a": 1, "a": 2}', "[" * 100_000, 3, None])
def test_text_that_is_no_record_is_refused(text):
    with pytest.raises(ValueError, match=r"JSON|finite|schema fields"):
        weight_placement_from_json(text)
    with pytest.raises(ValueError, match=r"JSON|finite|schema fields"):
        WeightManifest.from_json(text)


# Runtime bindings


def memory(part, address, **fields) -> RuntimeBindingFragment:
    given = {
        "placement_fragment_id": part.placement_fragment_id,
        "fragment_id": f"memory of {part.tensor_id}",
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


def binding(placed, index=0, address=4096, fragments=None, **fields):
    part = placed.parts[index]
    if fragments is None:
        fragments = tuple(memory(piece, address) for piece in part.fragments)
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


def test_bindings_of_all_participants_are_accepted():
    placed = split(2)
    both = [binding(placed), binding(placed, 1, address=8192)]
    validate_runtime_bindings(placed, both)
    for one in both:
        validate_runtime_binding(placed, one)
        validate_resource_binding_identity(placed, one)
        assert one.resource_kind is ResourceKind.MODEL_WEIGHT


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resource_id": "x"}, "another resource_id"),
        ({"placement_id": "x"}, "another placement_id"),
        ({"placement_digest": "0" * 64}, "another placement digest"),
        ({"revision": "x"}, "another revision"),
        ({"participant_id": "x"}, "unknown runtime binding participant"),
        ({"participant_id": "p1"}, "unknown placement fragment"),
        ({"fragments": ()}, "missing placement fragment"),
    ],
)
def test_bindings_of_another_placement_are_refused(fields, reason):
    placed = split(2)
    with pytest.raises(ValueError, match=reason):
        validate_runtime_binding(placed, binding(placed, **fields))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"local_shape": (8, 1), "strides_bytes": (2, 2)}, "local_shape of the bound"),
        ({"strides_bytes": (2, 4)}, "strides_bytes of the bound"),
        ({"nbytes": 15}, "byte size of the bound"),
        ({"itemsize": 1, "strides_bytes": (4, 1)}, "itemsize of the bound"),
    ],
)
def test_memory_of_another_shape_is_refused(fields, reason):
    placed = split(2)
    pieces = (memory(placed.parts[0].fragments[0], 4096, **fields),)
    with pytest.raises(ValueError, match=reason):
        validate_runtime_binding(placed, binding(placed, fragments=pieces))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"storage_address": 0}, "storage_address"),
        ({"storage_offset_bytes": 8}, "storage_address"),
        ({"storage_nbytes": 8}, "inside its storage allocation"),
        ({"strides_bytes": (8,)}, "runtime stride rank differs"),
        ({"strides_bytes": (0, 2)}, "must be positive"),
        ({"storage_nbytes": 2**64 - 4096}, "64-bit"),
        ({"device": ""}, "device"),
    ],
)
def test_impossible_memory_is_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        memory(split(2).fragments[0], 4096, **fields)


def test_strides_of_single_steps_are_normalised():
    part = fragment("t", (0, 0), (1, 4), ParallelRank())
    assert memory(part, 4096, strides_bytes=(999, 2)) == memory(part, 4096)


def test_owner_of_memory_is_not_compared():
    part = split(2).fragments[0]
    assert memory(part, 4096, owner=object()) == memory(part, 4096)


def test_memory_is_shared_by_declared_aliases_only():
    def validate(aliases, address, **fields):
        parts = [
            fragment(name, (0, 0), (4, 4), ParallelRank(), aliases=aliases) for name in ("t", "u")
        ]
        placed = placement(topology(), [tensor("t"), tensor("u", **fields)], parts)
        first, second = placed.parts[0].fragments
        pieces = (memory(first, 4096), memory(second, address))
        validate_runtime_binding(placed, binding(placed, fragments=pieces))

    validate(("t", "u"), 4096)
    validate((), 4096 + 32)
    for aliases, address, fields in (
        ((), 4096, {}),
        (("t", "u"), 4096 + 16, {}),
        (("t", "u"), 4096, {"layer_id": 1}),
    ):
        with pytest.raises(ValueError, match="address ranges overlap"):
            validate(aliases, address, **fields)


def test_each_participant_is_bound_once():
    placed = split(2)
    one, other = binding(placed), binding(placed, 1, address=8192)
    for bindings, reason in (
        ([one], "missing runtime binding participant"),
        ([one, one], "duplicate runtime binding participant"),
        ([one, binding(placed, 1, address=4096)], "address ranges overlap"),
        (one, "sequence"),
        ([3], "WeightRuntimeBindingManifest only"),
    ):
        with pytest.raises(ValueError, match=reason):
            validate_runtime_bindings(placed, bindings)
    validate_runtime_bindings(placed, [other, one])


def test_storages_are_the_same_or_disjoint():
    placed = placement(
        topology(),
        [tensor("t"), tensor("u")],
        [fragment(name, (0, 0), (4, 4), ParallelRank()) for name in "tu"],
    )

    def validate(*storages, first=4096, second=4160, device="cpu"):
        pieces = [
            memory(
                part,
                address,
                storage_address=start,
                storage_nbytes=size,
                storage_offset_bytes=address - start,
            )
            for part, address, (start, size) in zip(
                placed.fragments, (first, second), storages, strict=True
            )
        ]
        pieces[1] = dataclasses.replace(pieces[1], device=device)
        validate_runtime_binding(placed, binding(placed, fragments=tuple(pieces)))

    validate((4096, 128), (4096, 128))
    validate((4096, 64), (4160, 64))
    for storages in (
        ((4096, 80), (4160, 64)),  # the end of one is in the other
        ((4096, 128), (4128, 96)),  # nested
        ((4096, 32), (4096, 128)),  # the same start, another length
    ):
        with pytest.raises(ValueError, match="storage allocation ranges overlap"):
            validate(*storages)
        validate(*storages, device="another")
    with pytest.raises(ValueError, match=r"^address ranges overlap"):
        validate((4096, 128), (4096, 64), second=4112)


def test_placements_and_bindings_are_instances():
    class Look:
        def __init__(self, value):
            self.value = value

        def __getattr__(self, name):
            return getattr(self.value, name)

    placed = split(2)
    one, other = binding(placed), binding(placed, 1, address=8192)
    for call, reason in (
        (lambda: validate_runtime_binding(Look(placed), one), "WeightPlacementManifest"),
        (lambda: validate_runtime_binding(placed, Look(one)), "WeightRuntimeBindingManifest"),
        (lambda: validate_runtime_bindings(Look(placed), [one, other]), "WeightPlacementManifest"),
        (lambda: validate_runtime_bindings(placed, [one, Look(other)]), "RuntimeBindingManifest"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()


def test_participants_without_fragments_are_not_bound():
    parts = [fragment("t", (0, 0), (4, 4), ParallelRank())]
    placed = placement(topology(2), [tensor(axes=(OwnershipAxis("tp"),))], parts)
    validate_runtime_bindings(placed, [binding(placed)])
    validate_runtime_binding(placed, binding(placed, 1))
    with pytest.raises(ValueError, match="unknown runtime binding participant"):
        validate_runtime_bindings(placed, [binding(placed), binding(placed, 1)])


# Stored weights


def test_manifest_reads_back_from_json():
    given = stored()
    assert WeightManifest.from_json(given.to_json()) == given
    assert WeightManifest.from_json(given.to_json().encode()) == given
    assert WeightManifest.from_dict(json.loads(given.to_json())) == given
    assert given.manifest_identity.content_sha256 == given.manifest_digest
    assert stored(created_at="later").manifest_digest != given.manifest_digest


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: stored(manifest_key="g/other"), "g/manifest"),
        (lambda: stored(group_id="h", manifest_key="h/manifest"), "h/payload/"),
        (lambda: stored(fragments=stored().fragments[:1]), "not fully covered"),
        (lambda: stored(fragments=stored().fragments * 2), "duplicate"),
        (lambda: stored(tensors=()), "unknown tensor"),
        (lambda: stored(tensors=(tensor(), tensor())), "duplicate"),
        (lambda: stored(created_at=""), "created_at"),
        (
            lambda: stored(
                fragments=tuple(
                    dataclasses.replace(piece, object_offset=0) for piece in stored().fragments
                )
            ),
            "object ranges overlap",
        ),
        (
            lambda: stored(fragments=(dataclasses.replace(stored(1).fragments[0], nbytes=31),)),
            "byte size mismatch",
        ),
        (
            lambda: stored(
                1, fragments=(dataclasses.replace(stored(1).fragments[0], aliases=("t", "u")),)
            ),
            "unknown tensor",
        ),
    ],
)
def test_contradictory_manifests_are_refused(build, reason):
    with pytest.raises(ValueError, match=reason):
        build()


def test_public_names_are_in_the_order_of_the_contract():
    assert len(weight.__all__) == 27
    assert weight.__all__[:3] == ["ParallelRank", "ParallelTopology", "PlacementFragment"]
    assert weight.__all__[-2:] == [
        "plan_placement_transfer_to_local_target",
        "plan_stored_transfer_to_target_placement",
    ]
    assert reshard.__all__ == [
        "ResourceKind", "ResourceManifest", "PlacementManifest", "RuntimeBindingManifest",
    ]  # fmt: skip
