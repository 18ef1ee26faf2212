"""Structured objects and batches are exchanged with upstream's package in both directions."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import set_up
from upstream_package import upstream_python

from mooncake.store import MooncakeDistributedStore

pytest.importorskip("torch")
pytest.importorskip("msgpack")
exchange = pytest.importorskip("structured_exchange")
observations = pytest.importorskip("structured_observations")

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:columns that upstream's package cannot read"),
]

SCRIPT = Path(__file__).with_name("structured_exchange.py")
PACKAGES = Path(np.__file__).parents[1]

# Columns that upstream does not store.
REFUSED = {"unsigned", "array and list", "bfloat16", "anything", "lists of arrays", "nothing"}
# Columns whose numbers upstream stores as floats.
AS_FLOATS = {"numbers", "empty list", "mixed lists"}
# Columns that upstream does not read as they were put, by us or by itself.
MISREAD = {"array and list", "array without dimensions", "bfloat16"}


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def expected(name: str) -> list[Any]:
    return as_json([exchange.described(row) for row in exchange.columns()[name][1]])


def run_upstream(*command: str, given: Any = None) -> Any:
    """Run a script with the upstream package, and with numpy and torch of this interpreter."""
    done = subprocess.run(
        [upstream_python(), *command],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PACKAGES)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def of_upstream() -> Any:
    """What we read of what upstream wrote."""
    written = run_upstream(str(SCRIPT), "write")
    refused = {name for name, handle in written["handles"].items() if "error" in handle}
    assert refused == REFUSED
    return as_json(exchange.read(written))


@pytest.fixture(scope="module")
def by_upstream() -> Any:
    """What upstream reads of what we wrote, also into a store of ours."""
    written = exchange.write()
    store = MooncakeDistributedStore()
    assert set_up(store, "embedded") == 0
    stored = exchange.write_batches(store)
    store.close()
    for part, added in stored.items():
        written[part] |= added
    return run_upstream(str(SCRIPT), "read", given=written)


@pytest.mark.parametrize("name", sorted(exchange.columns().keys() - REFUSED))
def test_column_of_upstream_is_read(of_upstream: Any, name: str):
    rows = of_upstream["columns"][name]
    if name in AS_FLOATS:
        assert "int" not in json.dumps(rows)
    else:
        assert rows["all"] == expected(name)
    assert rows["rest"] == rows["all"][1:]
    assert rows["all numbers"] == list(range(len(rows["all"])))


@pytest.mark.parametrize("name", sorted(exchange.columns().keys() - MISREAD))
def test_upstream_reads_our_column(by_upstream: Any, name: str):
    rows = by_upstream["columns"][name]
    assert rows["all"] == expected(name)
    assert rows["rest"] == expected(name)[1:]


@pytest.mark.parametrize("name", list(exchange.MEMBERS))
@pytest.mark.parametrize("direction", ["of_upstream", "by_upstream"])
def test_members_are_exchanged(request: pytest.FixtureRequest, direction: str, name: str):
    found = request.getfixturevalue(direction)
    assert found["members"][name] == as_json(exchange.described(exchange.MEMBERS[name]))
    assert found["step"] == 7


@pytest.fixture(scope="module")
def observed() -> Any:
    """What each package does in the same cases: upstream's and our outcomes."""
    return run_upstream(observations.__file__), observations.observe()


# Words of upstream's messages that callers match, for the cases whose names begin so.
WORDS = {
    "append ['a', 'b']": ["exactly one"],
    "append 'h' to group 'g'": ["conflicts"],
    "read of changed meta": ["namespace"],
    "read of changed payload": ["namespace"],
    "read of changed chunk": ["namespace"],
    "removal of changed ids": ["namespace"],
    "removal of changed cleanup": ["cleanup_keys"],
    "removal that fails": ["failed to remove 3 Mooncake keys"],
    "utf8_ragged": ["failed to encode", "'f'", "'utf8_ragged'"],
    "auto False": ["not nullable"],
    "auto True {'section': 'batch'}": ["declares section"],
    "handle with {'version': 999}": ["unsupported", "version"],
    "get with {'type': 'dict'}": ["Duplicate keys", "['x']"],
    "get with {'rows': [0.5]}": ["row indices"],
    "get with {'rows': [3]}": ["out of range"],
    "get with {'data_cls': 3}": ["cannot be constructed"],
    "metadata that is no mapping": ["mapping"],
    "metadata without JSON": ["JSON-serializable"],
    "zero copy of bytes": ["zero-copy put"],
    "zero copy of a tensor": ["BufferPool tensor-object buffer"],
    "prefix": ["key_prefix"],
    "fields before options: x, y; partition": ["inconsistent batch sizes: [2, 3]"],
    "fields before options: x, y; policy": ["inconsistent batch sizes: [2, 3]"],
    "fields before options: x, y; field_schemas": ["declares section"],
    "fields before options: batch; partition": ["invalid bundle partition"],
    "fields before options: batch; policy": ["max_inflight_put must be positive"],
    "fields before options: batch; field_schemas": ["declares section"],
    "append of {'x': array([0, 1])}": ["append batch size 2 does not match ref batch size 3"],
    "append of {'x': array([0, 1, 2])} False": ["fields already exist: ['x']"],
    "append of {'x': array([0, 1, 2])} True": ["must include existing fields: ['z']"],
    "append of {'y': array([0, 1, 2])} True": ["must include existing fields: ['x', 'z']"],
    "append of {'y': array([0, 1, 2])} False": ["max_inflight_put must be positive"],
    "tensor in a handle": ["JSON-safe values, got Tensor"],
    "set in a handle": ["JSON-safe values, got set"],
    "append to a stage ({'non_tensor_batch'": ["structured members already exist"],
    "unknown encoding": ["unsupported structured field encoding"],
    "ndarray into read-only array": ["writeable"],
    "rows [3] of texts": ["out of range"],
    "read by another prefix": ["namespace"],
    "configuration 4": ["config must be copyable or default-constructible"],
    "checks of ['meta', 'partition']": ["invalid bundle partition"],
    "checks of ['chunk_bytes', 'value']": ["chunk_bytes must be positive"],
    "checks of ['max_inflight_put', 'value']": ["max_inflight_put must be positive"],
    "checks of ['name', 'value']": ["invalid bundle buffer name"],
}


@pytest.mark.parametrize("name", list(observations.cases()))
def test_both_packages_do_the_same(observed: Any, name: str):
    theirs, ours = (each[name] for each in observed)
    assert theirs.get("value") == ours.get("value")
    if "classes" in theirs:
        assert theirs["classes"][0] in ours["classes"]
        words = [each for case, each in WORDS.items() if name.startswith(case)]
        assert all(
            word in side["text"] for each in words for word in each for side in (theirs, ours)
        )


def fields_after(steps: list[Any]) -> Any:
    fields = {"a": np.arange(3), "t": exchange.torch.tensor([[1.0], [2], [3]])}
    for _, given, _ in steps:
        fields |= given
    return as_json(exchange.described(fields))


@pytest.mark.parametrize("name", list(exchange.STEPS))
@pytest.mark.parametrize(
    ("direction", "where"), [("of_upstream", ""), ("by_upstream", ""), ("by_upstream", "store/")]
)
def test_batches_are_continued(
    request: pytest.FixtureRequest, direction: str, where: str, name: str
):
    steps = exchange.STEPS[name]
    for done in range(len(steps) + 1):
        found = request.getfixturevalue(direction)["batches"][f"{where}{name} {done}"]
        assert found["first"] == fields_after(steps[:done])
        assert found["last"] == fields_after(steps)
        assert found["has one group"]


@pytest.mark.parametrize("direction", ["of_upstream", "by_upstream"])
def test_removal_leaves_nothing_of_the_other_package(
    request: pytest.FixtureRequest, direction: str
):
    assert request.getfixturevalue(direction)["left"] == []
