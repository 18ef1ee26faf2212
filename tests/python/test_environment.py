"""`mooncake.env`: values of settings, their sources, and variables without effect."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mooncake import env
from mooncake._command import doctor as _doctor
from mooncake.mooncake_config import MooncakeConfig


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith(("MC_", "MOONCAKE_"))]:
        monkeypatch.delenv(name)


def setting(name: str) -> env.Setting:
    return next(each for each in env.settings() if each.name == name)


def test_default_applies_until_a_variable_is_set(monkeypatch):
    assert (setting("MC_TRANSFER_TIMEOUT").value, setting("MC_TRANSFER_TIMEOUT").source) == (
        "30",
        "",
    )
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "7")
    assert setting("MC_TRANSFER_TIMEOUT").value == "7"
    assert setting("MC_TRANSFER_TIMEOUT").source == "MC_TRANSFER_TIMEOUT"


def test_alias_is_reported_as_the_source(monkeypatch):
    monkeypatch.setenv("MC_MIN_PRC_PORT", "16000")
    found = setting("MC_MIN_RPC_PORT")
    assert (found.value, found.source) == ("16000", "MC_MIN_PRC_PORT")
    assert found.is_alias_used


def test_alias_output_names_the_preferred_variable(monkeypatch):
    monkeypatch.setenv("MC_STAY_AWAKE", "off")
    line = "MC_BUSY_POLL = off  [from MC_STAY_AWAKE; prefer the name MC_BUSY_POLL]"
    assert line in run("mooncake.env", "--set").stdout.splitlines()
    doctor = json.loads(run("mooncake", "doctor", "--json").stdout)
    shown = "off (from MC_STAY_AWAKE; prefer the name MC_BUSY_POLL)"
    assert doctor["environment"]["MC_BUSY_POLL"] == shown
    monkeypatch.setenv("MC_BUSY_POLL", "on")
    assert setting("MC_BUSY_POLL").origin == "from MC_BUSY_POLL"


@pytest.mark.parametrize(
    "name",
    ["MC_TRANSFER_TOKEN", "MC_REDIS_PASSWORD", "MOONCAKE_ADMIN_TOKEN", "MOONCAKE_MASTER_TOKEN"],
)
def test_secrets_are_not_shown(monkeypatch, name):
    monkeypatch.setenv(name, "open sesame")
    for command in (["mooncake.env"], ["mooncake.env", "--json"], ["mooncake", "doctor"]):
        done = run(*command)
        assert name in done.stdout
        assert "sesame" not in done.stdout + done.stderr


def test_ineffective_variables_are_listed_with_a_reason(monkeypatch):
    assert env.ignored() == []
    monkeypatch.setenv("MC_TCP_SLICE_SIZE", "65536")
    monkeypatch.setenv("MC_TRANSFER_TIMEOUTS", "7")
    monkeypatch.setenv("MOONCAKE_NO_SUCH_VARIABLE", "1")
    reasons = {each.name: each.reason for each in env.ignored()}
    assert "slices" in reasons["MC_TCP_SLICE_SIZE"]
    assert "MC_TRANSFER_TIMEOUT " in reasons["MC_TRANSFER_TIMEOUTS"].replace("?", " ")
    assert reasons["MOONCAKE_NO_SUCH_VARIABLE"] == "Unknown variable."


@pytest.mark.parametrize("module", ["mooncake.cli", "mooncake.cli_client"])
def test_servers_warn_of_misspelled_variables(module):
    variables = {
        "MC_TRANSFER_TOKN": "a-secret-of-16-b",
        # Kubernetes sets this one for a service.
        "MOONCAKE_MASTER_PORT": "tcp://10.0.0.1:50051",
        "MC_OF_ANOTHER_PROGRAM": "1",
        "MOONCAKE_MASTER": "localhost:50051",
    }
    ended = subprocess.run(
        [sys.executable, "-m", module, "--nonsense"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **variables},
    )
    warnings = [line for line in ended.stderr.splitlines() if line.startswith("WARN: ")]
    assert warnings == ["WARN: MC_TRANSFER_TOKN is not read; did you mean MC_TRANSFER_TOKEN?"]


def test_invalid_values_are_shown_and_fail_the_command(monkeypatch):
    values = {
        "MC_FORCE_TCP": "maybe",
        "MC_LOG_LEVEL": "loud",
        "MC_MTU": "1500",
        "MC_TRANSFER_TIMEOUT": "abc",
        "MC_TRANSFER_TOKEN": "sesame",
        "MOONCAKE_LOG": "a=b=c",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    invalid = {each.name: each.invalid for each in env.settings() if each.invalid}
    assert invalid.keys() == values.keys()
    assert invalid["MC_FORCE_TCP"].endswith("the value counts as on")
    assert invalid["MC_LOG_LEVEL"].endswith("the value counts as warn")
    assert invalid["MOONCAKE_LOG"].endswith("is ignored, and MC_LOG_LEVEL applies")
    assert "duration" in invalid["MC_TRANSFER_TIMEOUT"]
    for options in ([], ["--set"], ["--json"]):
        done = run("mooncake.env", *options, code=1)
        assert "not a duration" in done.stdout
        assert "sesame" not in done.stdout
    monkeypatch.undo()
    assert run("mooncake", "env").returncode == 0


def test_invalid_values_that_are_used_are_logged(monkeypatch):
    monkeypatch.setenv("MC_FORCE_TCP", "maybe")
    monkeypatch.setenv("MC_LOG_LEVEL", "loud")
    code = "import mooncake\nwith mooncake.Store('embedded'): pass"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    for name, effect in (("MC_FORCE_TCP", "counts as on"), ("MC_LOG_LEVEL", "counts as warn")):
        lines = [line for line in done.stderr.splitlines() if name in line]
        assert len(lines) == 1
        assert lines[0].lstrip().startswith("WARN")
        assert effect in lines[0]


def test_settings_are_printed_all_or_only_set(monkeypatch):
    assert run("mooncake.env", "--set").stdout == "no Mooncake variable is set\n"
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    monkeypatch.setenv("MC_LOG_DIR", "/tmp")
    brief = run("mooncake.env", "--set").stdout
    assert brief.startswith("MC_FORCE_TCP = 1  [from MC_FORCE_TCP]\n")
    assert "MC_LOG_DIR" in brief
    whole = run("mooncake", "env", "--json").stdout
    shown_json = json.loads(whole)
    assert {row["name"] for row in shown_json["settings"]} == {each.name for each in env.settings()}
    assert [row["name"] for row in shown_json["without_effect"]] == ["MC_LOG_DIR"]


def test_config_variables_are_in_the_table(monkeypatch):
    asked = set()

    def getenv(name: str, default: str | None = None) -> str | None:
        asked.add(name)
        return "localhost:1" if name == "MOONCAKE_MASTER" else default

    monkeypatch.setattr(os, "getenv", getenv)
    MooncakeConfig.load_from_env()
    assert len(asked) > 10
    assert asked <= {each.name for each in env.settings()}


def run(module: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in _HOMES}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        env=environment,
    )
    assert done.returncode == code, done.stderr
    return done


_HOMES = ("HOME", "XDG_STATE_HOME")


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ((2 << 20, 1 << 20), "2 MiB, of which 1 MiB are available"),
        ((1 << 62, 1 << 61), None),
        (None, None),
    ],
)
def test_doctor_shows_a_memory_limit_below_the_memory(
    monkeypatch: pytest.MonkeyPatch, group: tuple[int, int] | None, expected: str | None
):
    monkeypatch.setattr(_doctor._native, "cgroup_memory", lambda: group)
    shown = _doctor._memory().get("memory limit of the cgroup")
    assert (shown and shown.partition(";")[0]) == expected


def rdma_device(name: str, *, chosen: int | None, reason: str | None) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        state="active" if chosen is not None else None,
        link_layer="Ethernet",
        megabits_per_second=100_000,
        mtu=4096,
        addresses=[(0, "fe80::1", "RoCE v1", "eth0"), (3, "::ffff:10.0.0.1", "RoCE v2", None)],
        limits={"queue pairs": 64, "bytes per registration": (1 << 64) - 1},
        chosen=chosen,
        reason=reason,
    )


def test_doctor_says_which_rdma_devices_are_chosen_and_why(monkeypatch: pytest.MonkeyPatch):
    devices = [
        rdma_device("mlx5_0", chosen=3, reason=None),
        rdma_device("mlx5_1", chosen=None, reason="the port of an RDMA device is down"),
    ]
    monkeypatch.setattr(_doctor._native, "rdma_devices", lambda: (devices, None))
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    found = _doctor.diagnose(lambda _: "works")
    assert found["transports"]["rdma"] == "used for the protocol rdma: mlx5_0"
    assert found["choice"]["other hosts"].startswith("rdma")
    rows = found["rdma devices"]
    assert rows["mlx5_0"] == "used with address 3: ::ffff:10.0.0.1 (RoCE v2)"
    assert rows["mlx5_0 port"] == "active, Ethernet, 100 Gbit/s, MTU 4096"
    assert "0: fe80::1 (RoCE v1, eth0)" in rows["mlx5_0 addresses"]
    assert rows["mlx5_0 limits"] == "queue pairs: 64, bytes per registration: unlimited"
    assert rows["mlx5_1"] == "not used: the port of an RDMA device is down"
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert _doctor.diagnose(lambda _: "works")["choice"]["other hosts"].startswith("tcp")


def test_doctor_says_why_rdma_is_not_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_doctor._native, "rdma_devices", lambda: ([], "libibverbs is missing"))
    found = _doctor.diagnose(lambda _: "works")
    assert found["transports"]["rdma"] == "libibverbs is missing"
    assert found["rdma devices"] == {"none": "libibverbs is missing"}
    assert found["choice"]["other hosts"] == "tcp, since no RDMA device can be used"
