"""The files of `deploy/`: their flags exist, and so do the metrics that they ask for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from conftest import start_master

import mooncake
from mooncake._command.ha import handover
from mooncake._command.main import _parser

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROGRAMS = {"mooncake_master": "mooncake.cli", "mooncake_client": "mooncake.cli_client"}
# Functions, keywords and labels of PromQL in our queries, and a series of Prometheus itself.
PROMQL = {"rate", "increase", "sum", "by", "histogram_quantile", "up"}
PROMQL |= {"max", "and", "changes"}
PROMQL |= {"job", "call", "le", "direction", "reason", "or", "vector"}


def queries() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/mooncake.json").read_text(encoding="utf-8"))
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8")
    blocks = re.findall(r"expr: (\|\n(?: {12}.*\n)+| *\S.*\n)", alerts)
    assert len(blocks) == alerts.count("- alert:")
    return [
        *(target["expr"] for panel in dashboard["panels"] for target in panel["targets"]),
        *blocks,
    ]


def metrics_of(query: str) -> set[str]:
    plain = re.sub(r'"[^"]*"|\[[^]]*\]', "", query)
    return set(re.findall(r"[a-z][a-z_]+", plain)) - PROMQL


def test_queries_ask_for_metrics_of_a_master(tmp_path):
    master = start_master("--enable_offload=true")
    config = mooncake.StoreConfig(segment_bytes="64MB", disk=tmp_path, disk_bytes="256MB")
    with mooncake.Store(master.address, config) as store:
        store.put("k", b"v")
        assert store.get("k") == b"v"
        with urllib.request.urlopen(f"{master.admin}/metrics", timeout=20) as answer:
            text = answer.read().decode() + store.metrics_text()
    master.stop()
    exported = set(re.findall(r"^([a-z_]+)(?:\{| )", text, re.MULTILINE))
    # Masters with --enable_ha have these: test_several_masters.py.
    wanted = {
        name for query in queries() for name in metrics_of(query) if not name.startswith("ha_")
    }
    assert len(wanted) > 10
    assert wanted <= exported, wanted - exported


@pytest.mark.parametrize("program", PROGRAMS)
def test_flags_exist(program):
    done = subprocess.run(
        [sys.executable, "-m", PROGRAMS[program], "--help"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    known = set(re.findall(r"--([a-z_]+)", done.stdout + done.stderr))
    used: set[str] = set()
    for path in DEPLOY.rglob("*"):
        if not path.is_file() or path.suffix == ".json":
            continue
        text = path.read_text(encoding="utf-8")
        commands = re.findall(
            rf"{program}\b(?![.-])(.*?)(?=mooncake_|\n\n|env|\Z)", text, re.DOTALL
        )
        used |= {flag for each in commands for flag in re.findall(r"--([a-z_]+)=", each)}
    assert len(used) >= 3
    assert used <= known, used - known


def test_stopped_masters_hand_over():
    several = DEPLOY / "kubernetes/overlays/several-masters/masters.yaml"
    stopped = re.findall(
        r"preStop:\s+exec:\s+command: \[mooncake, (.*)\]", several.read_text(encoding="utf-8")
    )
    unit = (DEPLOY / "systemd/several-masters.conf").read_text(encoding="utf-8")
    # Without a standby the unit is stopped all the same.
    stopped += re.findall(r"^ExecStop=-/opt/mooncake/bin/mooncake (.*)$", unit, re.MULTILINE)
    assert len(stopped) == 2
    for words in stopped:
        options = _parser().parse_args(re.findall(r"[^\s,\"]+", words))
        assert (options.run, options.if_leader) == (handover, True)
        assert options.admins == ["127.0.0.1:9003"], "the port of unit and base"


def test_clients_of_several_masters_name_each():
    folder = DEPLOY / "kubernetes/overlays/several-masters"
    replicas = re.search(r"replicas: (\d+)", (folder / "masters.yaml").read_text(encoding="utf-8"))
    text = (folder / "kustomization.yaml").read_text(encoding="utf-8")
    listed = re.search(r"--master_server_address=(\S+)", text)
    assert replicas is not None
    assert listed is not None
    names = [address.partition(".")[0] for address in listed[1].split(",")]
    assert names == [f"mooncake-master-{index}" for index in range(int(replicas[1]))]
    # They may label their own pods.
    election = (folder / "election.yaml").read_text(encoding="utf-8")
    pods = re.search(r"resources: \[pods\]\s+resourceNames: \[(.*)\]\s+verbs: \[patch\]", election)
    assert pods is not None
    assert pods[1].split(", ") == names
    suffixes = {address.partition(".")[2] for address in listed[1].split(",")}
    assert f"--advertise_address=$(POD_NAME).{suffixes.pop()}" in text
    assert suffixes == set()


def test_each_container_has_probes_of_its_own_ports():
    for path in (DEPLOY / "kubernetes/base").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        for probe in ("startupProbe:", "readinessProbe:", "livenessProbe:"):
            assert text.count(probe) == text.count("containers:"), f"{probe} {path.name}"
        ports = dict(re.findall(r"\{name: (\w+), containerPort: (\d+)\}", text))
        probed = set(re.findall(r"(?:httpGet|grpc): \{.*?port: (\w+)\}", text))
        assert probed <= ports.keys() | set(ports.values()), path.name
        arguments = set(re.findall(r"^ +- --\w*port=(\d+)$", text, re.MULTILINE))
        assert set(ports.values()) == arguments, path.name


def test_scraped_ports_are_served():
    scrape = (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
    ports = set(re.findall(r"targets: \[\S+?:(\d+)\]", scrape))
    assert len(ports) == 2
    units = "".join(unit.read_text(encoding="utf-8") for unit in DEPLOY.glob("systemd/*.service"))
    assert ports <= set(re.findall(r"--(?:metrics|http)_port=(\d+)", units))
    base = "".join(
        path.read_text(encoding="utf-8") for path in DEPLOY.glob("kubernetes/base/*.yaml")
    )
    assert set(re.findall(r'prometheus\.io/port: "(\d+)"', base)) == ports


def test_units_are_started_until_the_master_runs():
    for unit in DEPLOY.glob("systemd/*.service"):
        sections = re.split(r"^\[(\w+)\]$", unit.read_text(encoding="utf-8"), flags=re.MULTILINE)
        lines = dict(zip(sections[1::2], map(str.splitlines, sections[2::2]), strict=True))
        assert "Restart=on-failure" in lines["Service"], unit.name
        # By default systemd gives up after 5 starts within 10 s.
        assert "StartLimitIntervalSec=0" in lines["Unit"], unit.name


def test_each_scraped_job_has_an_alert_and_each_sign_of_held_memory():
    scrape = (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
    alerts = (DEPLOY / "prometheus/alerts.yml").read_text(encoding="utf-8")
    for job in re.findall(r"job_name: (\S+)", scrape):
        assert f'up{{job="{job}"}} == 0' in alerts
    tested = (DEPLOY / "prometheus/alerts-test.yml").read_text(encoding="utf-8")
    several = ("NoLeader", "NoStandbyInSync", "StandbyLags", "LeaseServiceFails")
    for alert in ("DaemonDown", "FreedMemoryAwaitsSync", "FreedMemoryIsFenced", *several):
        assert f"alert: Mooncake{alert}\n" in alerts
        assert f"alertname: Mooncake{alert}\n" in tested


@pytest.mark.parametrize("is_ci", [False, True])
def test_check_fails_in_ci_without_its_tools(is_ci, tmp_path):
    # A copy, beside which there is no environment with tools.
    copy = tmp_path / "scripts/check-deploy.sh"
    copy.parent.mkdir()
    copy.write_bytes((DEPLOY.parent / "scripts/check-deploy.sh").read_bytes())
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "dirname", "mktemp", "rm"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    done = subprocess.run(
        ["bash", str(copy)],
        env={"PATH": str(tools)} | ({"CI": "true"} if is_ci else {}),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == int(is_ci), done.stderr
    for name in ("promtool", "systemd-analyze", "kubernetes-validate"):
        assert f"not installed: {name} " in done.stderr


def test_steps_make_what_units_and_manifests_need():
    pages = {
        name: (DEPLOY.parent / f"docs/how-to/{name}.md").read_text(encoding="utf-8")
        for name in ("systemd", "containers")
    }
    for unit in (DEPLOY / "systemd").glob("*.service"):
        text = unit.read_text(encoding="utf-8")
        needed = re.findall(r"^EnvironmentFile=-?(\S+)|^ExecStart=(\S+)/", text, re.MULTILINE)
        needed += [(user, "") for user in re.findall(r"^User=(\S+)", text, re.MULTILINE)]
        needed += [(f"{name}=", "") for name in re.findall(r"\$\{(\w+)\}", text)]
        assert len(needed) >= 2, unit.name
        for words in needed:
            assert "".join(words) in pages["systemd"], unit.name
        assert f"deploy/systemd/{unit.name}" in pages["systemd"]
    base = "".join(
        path.read_text(encoding="utf-8") for path in DEPLOY.glob("kubernetes/base/*.yaml")
    )
    secrets = set(re.findall(r"secretRef: \{name: (\S+),", base))
    labels = set(re.findall(r'nodeSelector: \{(\S+): "(\w+)"\}', base))
    assert len(secrets) == len(labels) == 1
    for secret in secrets:
        assert f"create secret generic {secret}" in pages["containers"]
    for label, value in labels:
        assert f"kubectl label node NODE {label}={value}" in pages["containers"]


def test_containers_do_not_run_as_root():
    image = (DEPLOY / "docker/Dockerfile").read_text(encoding="utf-8")
    user = re.findall(r"^USER (\d+):", image, re.MULTILINE)
    assert user == ["10001"]
    for path in (DEPLOY / "kubernetes/base").glob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        assert text.count("runAsNonRoot: true") == text.count("containers:"), path
        assert text.count("allowPrivilegeEscalation: false") == text.count("containers:"), path
        assert set(re.findall(r"runAsUser: (\d+)", text)) <= set(user), path
