"""Upstream's modules, names, members and parameters are here, by lists and by its package."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from enum import EnumMeta
from typing import Any

import pytest
import vllm_interface
from conftest import assert_quiet, run_script
from upstream_names import MEMBERS, MODULES, PARAMETERS
from upstream_package import run, upstream_python

# Prints the public names that each module of the package defines, without importing one.
LIST_NAMES = """
import ast, importlib.util, json
from pathlib import Path
root = Path(importlib.util.find_spec("mooncake").submodule_search_locations[0])
found = {}
for path in sorted(root.rglob("*.py")):
    parts = ("mooncake", *path.relative_to(root).with_suffix("").parts)
    if any(part.startswith("_") and part != "__init__" for part in parts):
        continue
    names, exported = [], []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [each.id for each in node.targets if isinstance(each, ast.Name)]
            if names[-1:] == ["__all__"] and isinstance(node.value, ast.List):
                exported = [each.value for each in node.value.elts]
        elif isinstance(node, ast.AnnAssign):
            names.append(node.target.id)
        elif isinstance(node, ast.ImportFrom) and path.name == "__init__.py":
            names += [each.asname or each.name for each in node.names]
    module = ".".join(parts).removesuffix(".__init__")
    public = {name for name in names if not name.startswith("_") and name != "*"}
    found[module] = sorted(exported or public)
print(json.dumps(found))
"""

# Prints the members of each public name of the compiled modules.
LIST_MEMBERS = """
import importlib, json
found = {}
for module in ("mooncake.engine", "mooncake.store"):
    for name, value in vars(importlib.import_module(module)).items():
        if not name.startswith("_"):
            members = dir(value) if isinstance(value, type) else []
            found[f"{module}:{name}"] = [each for each in members if not each.startswith("_")]
print("names:" + json.dumps(found))
"""


def resolve(path: str) -> Any:
    """Return a module, or what it has at `module:name`."""
    vllm_interface.install()
    module, _, name = path.partition(":")
    value = importlib.import_module(module)
    return getattr(value, name) if name else value


@pytest.mark.parametrize("module", MODULES)
def test_module_has_upstreams_names(module):
    missing = [name for name in MODULES[module].split() if not hasattr(resolve(module), name)]
    assert missing == []


@pytest.mark.parametrize("path", MEMBERS)
def test_class_has_upstreams_members(path):
    missing = [name for name in MEMBERS[path].split() if not hasattr(resolve(path), name)]
    assert missing == []


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_begin_with_upstreams(path):
    expected = PARAMETERS[path].split()
    assert list(inspect.signature(resolve(path)).parameters)[: len(expected)] == expected


def test_lists_have_every_name_of_upstreams_package():
    done = run(upstream_python(), "-I", "-c", LIST_NAMES)
    assert done.returncode == 0, done.stderr
    missing = {}
    for module, names in json.loads(done.stdout).items():
        known = MODULES.get(module, "").split()
        if unknown := [name for name in names if name not in known]:
            missing[module] = [name for name in unknown if not hasattr(resolve(module), name)]
    assert {module: names for module, names in missing.items() if names} == {}
    assert set(json.loads(done.stdout)) - {"mooncake"} <= MODULES.keys()


def test_compiled_modules_have_the_members_of_upstreams_package():
    done = run(upstream_python(), "-I", "-c", LIST_MEMBERS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("names:")[2])
    missing = {}
    for path, members in found.items():
        value = resolve(path)
        # Names and values belong to the members of an enumeration.
        sample = next(iter(value)) if isinstance(value, EnumMeta) else value
        if absent := [each for each in members if not hasattr(sample, each)]:
            missing[path] = absent
    assert len(found) > 50
    assert missing == {}


def test_links_between_gpus_are_refused_with_a_sentence():
    from mooncake.ep import Buffer, calculate_elastic_buffer_size, get_ep_buffer_size_hint
    from mooncake.errors import NotSupportedError
    from mooncake.mooncake_elastic_buffer import ElasticBuffer

    buffer = Buffer.__new__(Buffer)
    assert buffer.ibgda_disabled() is True
    assert not buffer.p2p_enabled()
    assert not buffer.use_fast_path()
    for call in (buffer.sync_ib, buffer.get_gid, buffer.get_ipc_handle):
        with pytest.raises(NotSupportedError, match=f"{call.__name__} .*dispatch"):
            call()
    for call in (ElasticBuffer.get_buffer_size_hint, calculate_elastic_buffer_size):
        with pytest.raises(NotSupportedError, match=r"mooncake_ep_buffer\.Buffer"):
            call(None, 1, 1)
    assert get_ep_buffer_size_hint(128, 7168, 8, 288) == 2_118_652_416


def test_event_without_a_gpu_waits_for_nothing():
    from mooncake.ep import EventHandle, EventOverlap

    event = EventHandle()
    event.current_stream_wait(0)
    event.synchronize()
    waited = []

    class Recorded(EventHandle):
        def current_stream_wait(self, stream_ptr: int = 0) -> None:
            waited.append(stream_ptr)

    with EventOverlap(Recorded()):
        assert waited == []
    assert len(waited) == 1
    EventOverlap().current_stream_wait()


def test_modules_without_torch_import_or_name_the_extra():
    # The private parts of the connector need vLLM, which they name.
    source = """
import sys, pkgutil, importlib
sys.modules["torch"] = None
import mooncake
for found in pkgutil.walk_packages(mooncake.__path__, "mooncake.", onerror=lambda name: None):
    if found.name.startswith(("mooncake._connector.", "mooncake._native")):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        print(f"{found.name}: {error}", file=sys.stderr)
    except ImportError as error:
        print(found.name, "mooncake-transfer-engine[tensor]" in str(error))
"""
    done = run_script(source)
    assert_quiet(done)
    refused = dict(line.split() for line in done.stdout.splitlines())
    assert refused.keys() >= {"mooncake.ep", "mooncake.pg", "mooncake.mooncake_ep_buffer"}
    assert set(refused.values()) == {"True"}


def test_modules_of_other_distributions_are_found(tmp_path):
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError\n")
    (package / "added_by_another_package.py").write_text("NAME = 'added'\n")
    source = "from mooncake import added_by_another_package as added, Store; print(added.NAME)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {source}"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "added\n", "")
