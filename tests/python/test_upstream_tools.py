"""Modules of upstream that need hardware: they import, work where they can, and else refuse."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake
from mooncake import (
    allocator,
    fabric_allocator_utils,
    mooncake_config,
    transfer_engine_topology_dump as topology,
)
from mooncake._refusals import NofUnsupportedError
from mooncake.mooncake_ssd_register import MooncakeNoFRegister
from mooncake.mooncake_ssd_unregister import MooncakeNoFUnregister
from mooncake.spdk_tgt_create import SPDKTgtCreator

FOLDER = Path(mooncake.__file__).parent


def test_library_path_is_inside_the_package():
    found = next(FOLDER.glob("_native*.so"))
    assert fabric_allocator_utils.get_mooncake_so_path(found.name, "") == str(found)
    with pytest.raises(ImportError, match="get it elsewhere"):
        fabric_allocator_utils.get_mooncake_so_path("absent.so", "get it elsewhere")
    with pytest.raises(ValueError, match="only a file name"):
        fabric_allocator_utils.get_mooncake_so_path(f"../mooncake/{found.name}", "")


@pytest.mark.parametrize(
    ("library", "symbol", "is_called"),
    [("libc.so.6", "getpid", True), ("libc.so.6", "absent", False), ("/absent.so", "x", False)],
)
def test_probe_calls_the_library_or_reports_the_default(library, symbol, is_called):
    found = fabric_allocator_utils.probe_allocator_backend(library, symbol, ctypes.c_int, -2)
    assert (found > 0) == is_called
    assert is_called or found == -2


def test_allocators_name_the_library_that_they_lack():
    assert allocator.NVLinkAllocator.detect_mem_backend() is allocator.MemoryBackend.UNSUPPORTED
    with pytest.raises(ImportError, match=r"nvlink_allocator\.so"):
        allocator.NVLinkAllocator.get_allocator(0)
    with pytest.raises(ImportError, match=r"libaccl_barex\.so"):
        allocator.BarexAllocator.get_allocator(0)


@pytest.mark.parametrize(("value", "backend"), [(0, "USE_CUDAMALLOC"), (1, "USE_CUMEMCREATE")])
def test_backend_is_what_the_library_reports(monkeypatch, value, backend):
    monkeypatch.setattr(allocator, "get_mooncake_so_path", lambda name, message: name)
    monkeypatch.setattr(allocator, "probe_allocator_backend", lambda *arguments: value)
    assert allocator.NVLinkAllocator.detect_mem_backend().name == backend


@pytest.mark.parametrize(
    "start",
    [
        MooncakeNoFRegister({}, ["ip:192.0.2.1 path:/x"]).start_ssd_service,
        MooncakeNoFUnregister().start_ssd_unregister_service,
        SPDKTgtCreator(["ip:192.0.2.1 path:/x"]).deploy_all_targets,
        lambda: SPDKTgtCreator([]).deploy_target({}),
    ],
)
def test_nof_tools_refuse_when_they_are_started(start):
    with pytest.raises(NofUnsupportedError, match="no NVMe-oF tier"):
        start()


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (
            "mooncake_ssd_register",
            ["--master_server_address=h:1", "--spdk_target_info=ip:192.0.2.1"],
        ),
        ("mooncake_ssd_unregister", ["-Dtrsvcid=4420", "--key-file", "k"]),
        ("spdk_tgt_create", ["--spdk_target_info=ip:192.0.2.1", "--max-io-size", "8192"]),
    ],
)
def test_nof_programs_refuse_in_one_line(module, arguments):
    command = [sys.executable, "-m", f"mooncake.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "no NVMe-oF tier" in done.stderr


def test_segment_sizes_are_parsed_under_upstreams_name():
    assert mooncake_config._parse_segment_size("1.5gb") == 3 << 29
    assert mooncake_config._parse_segment_size(7) == 7
    with pytest.raises(ValueError, match="size"):
        mooncake_config._parse_segment_size("")


def test_helpers_of_the_topology_program_choose_the_engine(monkeypatch, tmp_path):
    for name in ("MC_USE_TENT", "MC_USE_TEV1", "MC_TENT_CONF", "MC_CUSTOM_TOPO_JSON"):
        monkeypatch.delenv(name, raising=False)
    options = topology.parse_args(["--device-name", "mlx5_0", "--use-custom-topo"])
    assert (options.device_name, options.use_custom_topo) == ("mlx5_0", True)
    assert (options.backend, options.custom_topo_json) == ("auto", None)
    assert topology.resolve_backend("auto") == "te"
    topology.apply_backend("tent")
    assert topology.resolve_backend("auto") == "tent"
    assert topology.resolve_backend("te") == "te"
    topology.apply_backend("te")
    assert topology.resolve_backend("auto") == "te"
    assert "cpu:0" in json.loads(topology.dump_te_topology(""))
    with pytest.raises(mooncake.NotSupportedError, match="dump_te_topology"):
        topology.dump_tent_topology("")
    assert topology.sanitize_tent_conf_for_discover() is None
    kept = {"topology": {"other": 1}, "log": 2}
    overriding = {**kept, "topology": {"other": 1, "priority_matrix": {}}}
    conf = tmp_path / "tent.json"
    conf.write_text(json.dumps(overriding))
    for value in (str(conf), json.dumps(overriding)):
        monkeypatch.setenv("MC_TENT_CONF", value)
        path = topology.sanitize_tent_conf_for_discover()
        assert os.environ["MC_TENT_CONF"] == path
        assert json.loads(Path(path).read_text()) == kept
        Path(path).unlink()
