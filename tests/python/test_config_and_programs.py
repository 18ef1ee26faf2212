"""`MooncakeConfig`, `MooncakeDistributedStoreAsync`, and the commands and programs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import MIB, PROMPT_S, MasterProcess, set_up

import mooncake
from mooncake._units import parse_size
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.mooncake_config import MooncakeConfig

REQUIRED = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "localhost:50051",
}


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1024", 1024), ("16 mb", 16 * MIB), ("1.5gb", 3 << 29), ("2KiB", 2048), ("7b", 7)],
)
def test_parses_sizes_with_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "mb", "-1", "1 pb", "1.2.3", "ten", -1, float("nan"), float("inf")]
)
def test_rejects_invalid_sizes(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)
    with pytest.raises(TypeError, match="not bool"):
        parse_size(True)


def test_config_file_has_upstreams_defaults(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**REQUIRED, "global_segment_size": "1gb", "tenant_id": None}))
    config = MooncakeConfig.from_file(str(path))
    assert (config.global_segment_size, config.local_buffer_size) == (1 << 30, 1073741824)
    assert (config.protocol, config.device_name, config.tenant_id) == ("tcp", "", "default")


@pytest.mark.parametrize("field", REQUIRED)
def test_config_file_needs_required_fields(tmp_path, field):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in REQUIRED.items() if k != field}))
    with pytest.raises(ValueError, match=f"Missing required config field: {field}"):
        MooncakeConfig.from_file(str(path))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"local_hostname": " "}, "Config field 'local_hostname' must be a non-empty string"),
        ({"protocol": ""}, "protocol"),
        ({"global_segment_size": -1}, "Invalid global_segment_size: -1. Size must be non-negative"),
        ({"global_segment_size": ""}, "global_segment_size"),
        (
            {"enable_ssd_offload": "maybe"},
            "Invalid enable_ssd_offload: Invalid boolean value: maybe",
        ),
        ({"global_segment_size": None}, "Invalid global_segment_size: "),
        ({"global_segment_size": [1]}, "Invalid global_segment_size: "),
        ({"global_segment_size": True}, "Invalid global_segment_size: True is no number"),
        ({"global_segment_size": float("inf")}, "Invalid global_segment_size: "),
        ({"local_buffer_size": "9" * 400 + ".5"}, "Invalid local_buffer_size: .* too large"),
        ({"client_http_port": None}, "Invalid client_http_port: "),
        ({"client_http_port": -1}, "Invalid client_http_port: -1 is not a port"),
        ({"client_http_port": "65536"}, "Invalid client_http_port: 65536 is not a port"),
        ({"ssd_get_wait_ms": "soon"}, "Invalid ssd_get_wait_ms: "),
    ],
)
def test_rejects_config_file_with_invalid_value(tmp_path, change, text):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**REQUIRED, **change}))
    with pytest.raises(ValueError, match=text):
        MooncakeConfig.from_file(str(path))


def test_config_is_read_from_the_environment(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="Neither the environment variable"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:1")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", " TCP ")
    config = MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.local_hostname) == ("m:1", "localhost")
    assert (config.global_segment_size, config.protocol) == (4 << 30, "tcp")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(REQUIRED))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    assert MooncakeConfig.load_from_env().master_server_address == "localhost:50051"


def test_every_call_has_a_coroutine():
    async def talk() -> tuple[int, bytes, list[int]]:
        store = MooncakeDistributedStoreAsync()
        assert (
            await store.async_setup(
                "localhost", "P2PHANDSHAKE", 64 * MIB, 0, "tcp", "", master_server_addr="embedded"
            )
            == 0
        )
        stored = await store.async_put("k", b"v")
        got, exist = await asyncio.gather(
            store.async_get("k"), store.async_batch_is_exist(["k", "nope"])
        )
        await store.async_close()
        return stored, got, exist

    assert asyncio.run(talk()) == (0, b"v", [1, 0])


def test_unknown_coroutine_raises_attribute_error():
    store = MooncakeDistributedStoreAsync()
    for name in ("async_nonsense", "nonsense", "async__put", "async_"):
        with pytest.raises(AttributeError, match=name):
            getattr(store, name)
    assert set_up(store, "embedded") == 0
    store.label = "an attribute of an instance"
    store.close()


def command(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "mooncake", *arguments],
        input=data,
        capture_output=True,
        timeout=50,
        check=False,
    )


def test_demo_shows_two_processes():
    done = command("demo")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"a second process joined" in done.stdout
    assert b"from-child, from-parent" in done.stdout


def test_doctor_tests_the_transports():
    done = command("doctor")
    for transport in (b"memory", b"shm", b"tcp"):
        works = re.search(rb"\n  " + transport + rb" +works", done.stdout)
        assert works, done.stdout + done.stderr
    assert b"\n  rdma  " in done.stdout, "the line lists the devices, or why they are unknown"
    for subject in (b"choice", b"networks", b"huge pages", b"to lend", b"open files", b"python"):
        assert subject in done.stdout
    assert done.returncode == 0


def test_shell_commands_manage_objects(master: MasterProcess, tmp_path):
    path = tmp_path / "value"
    path.write_bytes(b"from a file")
    to = f"--master={master.address}"
    config = mooncake.StoreConfig(segment_bytes="32mb")
    with mooncake.Store(master.address, config):
        assert command("put", to, "a/1", str(path)).returncode == 0
        assert command("put", to, "a/2", data=b"from a pipe").returncode == 0
        kept = command("put", to, "a/1", data=b"other")
        assert (kept.returncode, b"kept" in kept.stderr) == (1, True)
        assert command("put", to, "--overwrite", "a/1", data=b"other").returncode == 0
        assert command("get", to, "a/1").stdout == b"other"
        assert command("get", to, "a/2", str(path)).returncode == 0
        assert path.read_bytes() == b"from a pipe"
        listed = command("ls", to, "a/").stdout.decode().split()
        assert listed == ["5", "B", "x1", "a/1", "11", "B", "x1", "a/2"]
        assert b"objects   2" in command("stat", to).stdout
        assert command("rm", to, "--force", "a/1", "a/2").returncode == 0
        gone = command("rm", to, "a/1")
        assert (gone.returncode, b"a/1" in gone.stderr) == (1, True)
        assert command("get", to, "a/1").returncode == 1


def test_command_without_master_names_the_remedy():
    done = command("ls", "--master=127.0.0.1:1")
    assert done.returncode == 1
    assert b"127.0.0.1:1" in done.stderr
    assert b"start `mooncake_master`" in done.stderr
    assert command("nonsense").returncode == 2


def test_master_rejects_an_unknown_flag():
    done = subprocess.run(
        [sys.executable, "-m", "mooncake.cli", "--rpc_prt=1"], capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"rpc_port" in done.stderr


@pytest.mark.parametrize("module", ["cli", "cli_client"])
def test_closed_standard_streams_go_to_dev_null(module, master: MasterProcess, tmp_path):
    ports = tmp_path / "ports.json"
    flags = {
        "cli": ["--rpc_port=0", "--metrics_port=0"],
        "cli_client": [
            "--port=0",
            "--global_segment_size=1MB",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={master.address}",
        ],
    }
    command = [sys.executable, "-m", f"mooncake.{module}", f"--ports_file={ports}"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    with subprocess.Popen([*closed, *command, *flags[module]]) as process:
        try:
            deadline = time.monotonic() + PROMPT_S
            while not ports.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            opened = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
            assert opened == ["/dev/null"] * 3
        finally:
            process.terminate()
    assert process.returncode == 0


def program(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"mooncake.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_topology_dump_prints_json(tmp_path):
    done = program("transfer_engine_topology_dump", "--device-name", "")
    assert done.returncode == 0, done.stderr
    where, _, text = done.stdout.partition(": ")
    assert where == "Local topology [te/discover]"
    assert "cpu:0" in json.loads(text)
    path = tmp_path / "t.json"
    path.write_text('{"cpu:0": [[], []]}')
    done = program(
        "transfer_engine_topology_dump", "--use-custom-topo", f"--custom-topo-json={path}"
    )
    assert done.stdout.startswith("Local topology [te/custom]: {")
    done = program("transfer_engine_topology_dump", "--device_name=no-such-device")
    assert (done.returncode, done.stdout) == (1, "")
    assert "device_name=no-such-device" in done.stderr
    done = program("transfer_engine_topology_dump", "--custom-topo-json=/nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "/nowhere" in done.stderr


def test_benchmark_transfers_between_two_processes():
    size = "--buffer_size=1048576"
    own = (
        "--metadata_server=P2PHANDSHAKE",
        "--local_server_name=127.0.0.1",
        "--protocol=tcp",
        size,
    )
    command = [sys.executable, "-m", "mooncake.cli_bench", "--mode=target", *own]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as target:
        try:
            assert target.stderr is not None
            line = target.stderr.readline()
            segment = line.rpartition("listening on ")[2].strip()
            done = program(
                "cli_bench",
                *own,
                f"--segment_id={segment}",
                "--duration=1",
                "--block_size=4096",
                "--batch_size=8",
                "--threads=2",
                "--json",
            )
        finally:
            target.terminate()
        assert target.wait(10) == 0
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith("Test completed: duration 1.")
    assert json.loads(done.stdout)["batch_count"] > 0
