"""A tensor that is overwritten in any layout is read in one version, and nothing is left of it."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace

import pytest

import mooncake
from mooncake import Store, StoreConfig
from mooncake.store import MooncakeDistributedStore, ReadTarget
from mooncake.tensor import Axis, Layout, Shard, calls
from mooncake.tensor.format import GENERATION_TAG

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

SHAPE = (8, 6)
LAYOUTS = {
    "whole": None,
    "1": Layout(1),
    "2": Layout(2),
    "3 uneven": Layout(3, split="tensor_split"),
    "4": Layout(4),
    "8": Layout(8),
    "2 along 1": Layout(2, 1),
    "4 uneven along 1": Layout(4, 1),
    "2 of a replica": Layout(2, axes=(Axis.dp(0, 1),)),
    "4 of a replica": Layout(4, axes=(Axis.dp(0, 1),)),
}
TARGETS = [None, Shard.tp(1, 2), Shard.tp(3, 4), Shard.tp(2, 3, 1), Shard.tp(7, 8)]
PAIRS = [*itertools.product(LAYOUTS, LAYOUTS)]

ONE_ATTEMPT_S = 1
"""Time that is enough for one attempt to read, also on a busy machine."""


@pytest.fixture(scope="module")
def store():
    with Store(config=StoreConfig(segment_bytes="256MB")) as store:
        yield store


@pytest.fixture(scope="module")
def upstream(store):
    compatible = MooncakeDistributedStore()
    assert (
        compatible.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", store.master_address)
        == 0
    )
    yield compatible
    compatible.close()


@pytest.fixture
def key(request):
    return request.node.name


def version(number):
    return torch.full(SHAPE, float(number))


def ranks(layout):
    """Return the shards that ranks write one by one; a whole tensor is written by one."""
    return [None] if layout is None else list(layout.shards())


def part(tensor, shard):
    if shard is None:
        return tensor
    box = shard.box(tensor.shape)
    return tensor[tuple(slice(*ends) for ends in zip(box.start, box.stop, strict=True))]


def put_by_ranks(store, key, tensor, layout):
    for shard in ranks(layout):
        store.put_tensor(key, part(tensor, shard), layout=shard, shape=tensor.shape, overwrite=True)


def axes_of(shard):
    """Return the axes of a shard as upstream's calls take them."""
    axes = []
    for axis in shard.axes:
        made = SimpleNamespace(kind=axis.kind, rank=axis.rank, size=axis.size)
        made.split_dim, made.expert_id, made.stage_id = axis.dim, axis.id, None
        assert axis.kind != "pp"
        axes.append(made)
    return SimpleNamespace(axes=axes)


class Readers:
    """Threads that read all targets of a tensor until they are stopped."""

    def __init__(self, store, key, *, count=2):
        self.store, self.key = store, key
        self.wrong, self.failed, self.reads = [], [], 0
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._read) for _ in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception):
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _read(self):
        for target in itertools.cycle(TARGETS):
            if self._is_over.is_set():
                return
            try:
                got = self.store.get_tensor(self.key, target=target, timeout_s=20)
            except mooncake.MooncakeError as error:
                self.failed.append(error)
                continue
            self.reads += 1
            if len(set(got.flatten().tolist())) != 1:
                self.wrong.append((target, got))


def check_all(store, key, number):
    for target in TARGETS:
        expected = part(version(number), target)
        assert torch.equal(store.get_tensor(key, target=target, timeout_s=5), expected), target


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_overwrite_of_any_layout_by_any_other_is_read_in_one_version(store, key, first, second):
    forms = [LAYOUTS[first], LAYOUTS[second]]
    store.put_tensor(key, version(0), layout=forms[0])
    with Readers(store, key) as readers:
        for number in range(1, 7):
            store.put_tensor(key, version(number), layout=forms[number % 2], overwrite=True)
    assert not readers.wrong
    assert not readers.failed
    check_all(store, key, 6)
    store.delete_tensor(key, force=True)
    assert list(store.keys(key, internal=True)) == []


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_overwrite_by_ranks_leaves_the_new_version(store, key, first, second):
    """Ranks do not wait for each other, but a read between them is never of two layouts."""
    forms = [LAYOUTS[first], LAYOUTS[second]]
    put_by_ranks(store, key, version(0), forms[0])
    for shard in ranks(forms[1]):
        store.put_tensor(key, part(version(1), shard), layout=shard, shape=SHAPE, overwrite=True)
        if forms[0] == forms[1]:
            continue
        for target in TARGETS:
            try:
                got = store.get_tensor(key, target=target, timeout_s=0.02)
            except mooncake.MooncakeError:
                continue
            assert len(set(got.flatten().tolist())) == 1, (shard, target, got)
    check_all(store, key, 1)
    # Stale shards do not count; a stale tensor would.
    assert (key in list(store.keys(key, internal=True))) == (second == "whole")
    store.delete_tensor(key, force=True)
    assert list(store.keys(key, internal=True)) == []


@pytest.mark.parametrize("sizes", [*itertools.permutations([1, 2, 4, 8], 2)])
@pytest.mark.parametrize("is_whole_first", [False, True])
def test_upserts_with_upstreams_names_are_not_mixed(store, upstream, key, sizes, is_whole_first):
    before, after = (Layout(size) for size in sizes)
    if is_whole_first:
        store.put_tensor(key, version(0), layout=before)
    else:
        for shard in before.shards():
            tensor = part(version(0), shard)
            assert upstream.upsert_tensor_with_parallelism(key, tensor, axes_of(shard)) == 0
    target = ReadTarget()
    for shard in after.shards():
        tensor = part(version(1), shard)
        assert upstream.upsert_tensor_with_parallelism(key, tensor, axes_of(shard)) == 0
    for wanted in TARGETS[1:]:
        target.mode, target.parallelism = "shard", axes_of(wanted)
        got = upstream.get_tensor_with_parallelism(key, target)
        assert torch.equal(got, part(version(1), wanted)), wanted
    check_all(store, key, 1)
    store.delete_tensor(key, force=True)
    assert list(store.keys(key, internal=True)) == []


UPSERTS = {"tp": (), "replica": (Axis.dp(0, 1),), "expert": (Axis.ep(1, 2, 5),), "writers": None}


def upsert(upstream, key, number, shard, *, is_writer):
    """Upsert a shard as a rank does, with the arguments that upstream takes for its axes."""
    axis, whole = shard.axis("tp"), version(number)
    if is_writer:
        own = SimpleNamespace(rank=axis.rank, size=axis.size, split_dim=axis.dim)
        code = upstream.upsert_tensor_with_parallelism(key, whole, None, None, own)
    else:
        tensor = part(whole, shard) if len(shard.axes) == 1 else whole
        code = upstream.upsert_tensor_with_parallelism(key, tensor, axes_of(shard))
    assert code == 0


@pytest.mark.parametrize(("kind", "again"), [("tp", 1), ("writers", 1), ("expert", 2)])
def test_repeated_upsert_puts_the_known_manifest_beside_the_shard(
    monkeypatch, store, upstream, key, kind, again
):
    """The shards of an expert have another tag than their manifest, so that it is put alone."""
    put, make = [], calls.Put.make
    monkeypatch.setattr(calls.Put, "make", lambda *given: [put.append(given), make(*given)][1])
    layout = Layout(2, axes=UPSERTS[kind] or ())
    counts = []
    for number in range(3):
        for shard in layout.shards():
            put.clear()
            upsert(upstream, key, number, shard, is_writer=kind == "writers")
            counts.append(len(put))
    assert counts == [2, again, again, again, again, again]
    if kind != "expert":
        assert torch.equal(store.get_tensor(key), version(2))
    # Of another dtype, so that the manifest says something else.
    shard, whole = layout.shard(0), version(3).to(torch.float64)
    given = (part(whole, shard) if kind == "tp" else whole, axes_of(shard))
    if kind == "writers":
        given = (whole, None, None, SimpleNamespace(rank=0, size=2, split_dim=0))
    put.clear()
    assert upstream.upsert_tensor_with_parallelism(key, *given) == 0
    assert len(put) == 2
    store.delete_tensor(key, force=True)
    assert list(store.keys(key, internal=True)) == []


@pytest.mark.parametrize("kind", UPSERTS)
@pytest.mark.parametrize("sizes", [(8, 2, 8), (2, 8, 2), (4, 1, 4)])
@pytest.mark.parametrize("step", [1, -1])
def test_upserts_that_come_back_to_a_layout_meet_no_old_shard(
    store, upstream, key, kind, sizes, step
):
    axes = UPSERTS[kind]
    for number, size in enumerate(sizes):
        layout = Layout(size, axes=axes or ())
        for shard in [*layout.shards()][::step]:
            upsert(upstream, key, number, shard, is_writer=axes is None)
            for target in TARGETS if number > 0 else ():
                try:
                    got = store.get_tensor(key, target=with_axes(target, axes), timeout_s=0.02)
                except mooncake.MooncakeError:
                    continue
                assert len(set(got.flatten().tolist())) == 1, (number, shard, target, got)
        for target in TARGETS:
            got = store.get_tensor(key, target=with_axes(target, axes), timeout_s=5)
            assert torch.equal(got, part(version(number), target)), target
        # The shards of this layout and a manifest.
        assert len(list(store.keys(key, internal=True))) == size + 1
    store.delete_tensor(key, force=True)
    assert list(store.keys(key, internal=True)) == []


def with_axes(target, axes):
    """Return the same part of the replica or expert."""
    own = target.axes if target is not None else ()
    return Shard((*(axes or ()), *own)) if axes or own else None


def test_ranks_of_an_expert_leave_the_other_experts(store, upstream, key):
    experts = [(Axis.ep(rank, 2, rank),) for rank in range(2)]
    for number, size in enumerate((8, 2, 8)):
        for axes in experts:
            is_there = number > 0 or axes is not experts[0]
            for shard in Layout(size, axes=axes).shards():
                upsert(upstream, key, number, shard, is_writer=False)
                for each in experts if is_there else ():
                    is_put = each is axes
                    try:
                        got = store.get_tensor(
                            key, target=Shard(each), timeout_s=0.02 if is_put else 20
                        )
                    except mooncake.MooncakeError:
                        assert is_put
                        continue
                    assert len(set(got.flatten().tolist())) == 1, (number, shard, each, got)
        assert len(list(store.keys(key, internal=True))) == 2 * size + 1


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_put_over_another_layout_names_both(store, key, first, second):
    store.put_tensor(key, version(0), layout=LAYOUTS[first])
    names = list(store.keys(key, internal=True))
    if first == second:
        assert not store.put_tensor(key, version(1), layout=LAYOUTS[second])
    else:
        with pytest.raises(mooncake.AlreadyExistsError, match="stored in another layout") as raised:
            store.put_tensor(key, version(1), layout=LAYOUTS[second])
        assert {"stored", "given"} <= set(raised.value.context)
    assert list(store.keys(key, internal=True)) == names
    check_all(store, key, 0)


def test_refused_put_says_which_layouts(store, key):
    store.put_tensor(key, version(0), layout=Layout(2))
    with pytest.raises(mooncake.AlreadyExistsError) as raised:
        store.put_tensor(key, version(1), layout=Layout(4, 1))
    assert raised.value.context["stored"] == "2 shards along dimension 0"
    assert raised.value.context["given"] == "4 shards along dimension 1"
    with pytest.raises(mooncake.AlreadyExistsError, match="given=whole"):
        store.put_tensor(key, version(1))
    with pytest.raises(mooncake.AlreadyExistsError, match="given=4 shards along dimension 0"):
        store.put_tensor(key, version(1)[:2], layout=Shard.tp(3, 4))


def test_shrinking_five_times_leaves_nothing(store, key):
    for _ in range(5):
        store.put_tensor(key, torch.zeros(16, 2), layout=Layout(16))
        store.put_tensor(key, torch.ones(16, 2), layout=Layout(1), overwrite=True)
        assert store.get_tensor(key, target=Shard.tp(15, 16)).tolist() == [[1, 1]]
        store.delete_tensor(key, force=True)
        assert list(store.keys(key, internal=True)) == []


def test_delete_keeps_keys_that_only_share_the_prefix(store, key):
    others = [f"{key}{suffix}" for suffix in ("_tp_01", "_tp_x", "_tp_1_tp_2", "_tp_", "__tp", "2")]
    for name in others:
        store.put(name, b"of somebody else")
    store.put_tensor(key, version(0), layout=Layout(4))
    store.put(f"{key}_tp_9", store.get(f"{key}_tp_3"))
    store.delete_tensor(key, force=True)
    assert sorted(store.keys(key, internal=True)) == sorted(others)


def half_overwritten(store, key, layout):
    """Put a tensor, and of the next version what a writer had stored that died."""
    store.put_tensor(key, version(0), layout=layout)
    store.put_tensor(f"{key}.next", version(1), layout=layout)
    tags = store.info(f"{key}_tp_0").tags
    assert tags == {}, "the tag is not the caller's"
    value = store.get(f"{key}.next_tp_0")
    store.put(f"{key}_tp_0", value, overwrite=True, tags={GENERATION_TAG: "next"})


def test_versions_that_a_dead_writer_has_mixed_are_told(store, key):
    half_overwritten(store, key, Layout(2))
    for _ in range(3):
        with pytest.raises(mooncake.NotReadyError, match="different versions"):
            store.get_tensor(key, timeout_s=ONE_ATTEMPT_S)
    assert torch.equal(store.get_tensor(key, target=Shard.tp(1, 2)), version(0)[4:])
    with pytest.raises(mooncake.NotReadyError, match="different versions"):
        store.put_tensor(key, version(1), layout=Layout(2))
    store.put_tensor(key, version(2), layout=Layout(2), overwrite=True)
    check_all(store, key, 2)


def test_read_waits_for_the_writer(store, key):
    half_overwritten(store, key, Layout(2))
    got = []
    reader = threading.Thread(target=lambda: got.append(store.get_tensor(key, timeout_s=20)))
    reader.start()
    store.put_tensor(key, version(2), layout=Layout(2), overwrite=True)
    reader.join()
    assert torch.equal(got[0], version(2))


def test_remembered_place_does_not_hide_a_mixture(store, key):
    store.put_tensor(key, version(0), layout=Layout(2))
    for _ in range(4):
        assert torch.equal(store.get_tensor(key), version(0))
    value = store.get(f"{key}_tp_0")
    store.put(f"{key}_tp_0", value, overwrite=True, tags={GENERATION_TAG: "next"})
    with pytest.raises(mooncake.NotReadyError, match="different versions"):
        store.get_tensor(key, timeout_s=ONE_ATTEMPT_S)


def test_shard_that_a_rank_writes_alone_counts(store, key):
    store.put_tensor(key, version(0), layout=Layout(4))
    store.put_tensor(key, version(1)[2:4], layout=Shard.tp(1, 4), overwrite=True)
    expected = torch.cat([version(0)[:2], version(1)[2:4], version(0)[4:]])
    assert torch.equal(store.get_tensor(key), expected)
    # Also one that was lost and is put again.
    store.delete(f"{key}_tp_2", force=True)
    store.put_tensor(key, version(2)[4:6], layout=Shard.tp(2, 4))
    expected[4:6] = 2
    assert torch.equal(store.get_tensor(key), expected)


def test_ranks_that_name_a_generation_are_told_apart(store, key):
    layout = Layout(2)
    for number in range(3):
        for at, shard in enumerate(layout.shards()):
            if number > 0 and at > 0:
                with pytest.raises(mooncake.NotReadyError, match="different versions"):
                    store.get_tensor(key, timeout_s=ONE_ATTEMPT_S)
            store.put_tensor(
                key,
                part(version(number), shard),
                layout=shard,
                overwrite=True,
                generation=f"step {number}",
            )
        check_all(store, key, number)


def test_ranks_that_come_back_to_a_layout_meet_no_old_shard(store, key):
    for number, size in enumerate((4, 2, 4)):
        for shard in Layout(size).shards():
            value = part(version(number), shard)
            store.put_tensor(key, value, layout=shard, overwrite=True)
            for target in TARGETS if number > 0 else ():
                try:
                    got = store.get_tensor(key, target=target, timeout_s=0.1)
                except mooncake.MooncakeError:
                    continue
                assert len(set(got.flatten().tolist())) == 1, (number, shard, target, got)
        check_all(store, key, number)
        assert len(list(store.keys(key, internal=True))) == size + 1


def test_reader_waits_for_the_last_rank_of_a_generation(store, key):
    def put(rank, number):
        shard = Shard.tp(rank, 2)
        value = part(version(number), shard)
        store.put_tensor(key, value, layout=shard, overwrite=True, generation=f"step {number}")

    for number in range(2):
        put(0, number)
        if number == 0:
            put(1, number)
    got = []
    reader = threading.Thread(target=lambda: got.append(store.get_tensor(key, timeout_s=20)))
    reader.start()
    put(1, 1)
    reader.join()
    assert torch.equal(got[0], version(1))


def test_put_of_another_generation_completes_nothing(store, key):
    store.put_tensor(key, version(0), layout=Layout(4), generation="one")
    store.delete(f"{key}_tp_2", force=True)
    with pytest.raises(mooncake.NotReadyError, match="different versions") as raised:
        store.put_tensor(key, version(0), layout=Layout(4), generation="two")
    assert raised.value.context["versions"] == "one, two"
    assert store.put_tensor(key, version(0), layout=Layout(4), generation="one")
    check_all(store, key, 0)
    with pytest.raises(mooncake.InvalidArgumentError, match="a generation has a name"):
        store.put_tensor(key, version(0), layout=Layout(4), generation="", overwrite=True)


def test_put_joins_a_shard_that_has_no_manifest(store, key):
    """A writer that died between its shards and the manifest leaves such shards."""
    store.put_tensor(key, version(0), layout=Layout(4))
    for name in set(store.keys(key, internal=True)) - {f"{key}_tp_2"}:
        store.delete(name, force=True)
    assert store.put_tensor(key, version(0), layout=Layout(4))
    check_all(store, key, 0)
    # One of another layout is in the way.
    for name in set(store.keys(key, internal=True)) - {f"{key}_tp_1"}:
        store.delete(name, force=True)
    with pytest.raises(mooncake.AlreadyExistsError, match="stored=4 shards along dimension 0"):
        store.put_tensor(key, version(1), layout=Layout(2))
    assert list(store.keys(key, internal=True)) == [f"{key}_tp_1"]


def test_batch_of_new_and_stored_tensors_is_put_as_each_alone(store, key):
    store.put_tensor(f"{key}.stored", version(0))
    items = {f"{key}.new": version(1), f"{key}.stored": version(1)}
    assert store.put_tensors(items) == [True, False]
    store.put_tensor(f"{key}.split", version(0), layout=Layout(2))
    items = {f"{key}.other": version(1), f"{key}.split": version(1)}
    with pytest.raises(mooncake.AlreadyExistsError, match="stored in another layout"):
        store.put_tensors(items)
    check_all(store, f"{key}.other", 1)
    check_all(store, f"{key}.split", 0)


def test_missing_shards_are_completed_by_another_put(store, key):
    store.put_tensor(key, version(0), layout=Layout(4))
    store.delete(f"{key}_tp_2", force=True)
    store.delete(f"{key}_tp_0", force=True)
    assert store.put_tensor(key, version(0), layout=Layout(4))
    check_all(store, key, 0)


def test_two_writers_never_make_a_mixture(store, key):
    store.put_tensor(key, version(0), layout=Layout(4))

    def write(first):
        for number in range(first, first + 20, 2):
            store.put_tensor(key, version(number), layout=Layout(4), overwrite=True)

    writers = [threading.Thread(target=write, args=(first,)) for first in (1, 2)]
    with Readers(store, key) as readers:
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        store.put_tensor(key, version(50), layout=Layout(4), overwrite=True)
    assert not readers.wrong
    check_all(store, key, 50)


def test_overwrite_of_an_expert_keeps_the_others(store, key):
    layouts = [Layout(2, axes=(Axis.ep(0, 2, expert=expert),)) for expert in range(2)]
    for expert, layout in enumerate(layouts):
        store.put_tensor(key, version(expert), layout=layout)
    smaller = Layout(1, axes=(Axis.ep(0, 2, expert=0),))
    store.put_tensor(key, version(7), layout=smaller, overwrite=True)
    for expert, number in ((0, 7), (1, 1)):
        got = store.get_tensor(key, target=Shard((Axis.ep(0, 1, expert=expert),)))
        assert torch.equal(got, version(number))
    assert f"{key}__tp_1of2_sd0__ep_0of2_eid0" not in list(store.keys(key, internal=True))


def test_partial_set_of_another_layout_is_replaced(store, key):
    for rank in (1, 3):
        store.put_tensor(key, version(0)[:2], layout=Shard.tp(rank, 4))
    with pytest.raises(mooncake.AlreadyExistsError, match="stored=4 shards along dimension 0"):
        store.put_tensor(key, version(1), layout=Layout(2))
    store.put_tensor(key, version(1), layout=Layout(2), overwrite=True)
    check_all(store, key, 1)
    assert f"{key}_tp_3" not in list(store.keys(key, internal=True))


@pytest.mark.parametrize(
    ("layout", "overwrite", "expected"),
    [
        (None, False, ["Put"]),
        (Layout(2), False, ["Put", "Put"]),
        (None, True, ["Put"]),
        (Layout(2), True, ["ReadGrids", "Put", "Put", "List"]),
    ],
)
def test_put_makes_few_calls(store, key, monkeypatch, layout, overwrite, expected):
    if overwrite:
        store.put_tensor(key, version(0), layout=layout)
    made = []
    for kind in (calls.ReadGrids, calls.Put, calls.Remove, calls.List):
        make = kind.make
        monkeypatch.setattr(
            kind, "make", lambda self, store, make=make: made.append(self) or make(self, store)
        )
    store.put_tensor(key, version(1), layout=layout, overwrite=overwrite)
    assert [type(each).__name__ for each in made] == expected
