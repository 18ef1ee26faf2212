"""Prometheus reads a master and a daemon: dashboard queries have data, alert rules evaluate."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mooncake

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DEADLINE_S = 45
PANELS = json.loads((DEPLOY / "grafana/mooncake.json").read_text(encoding="utf-8"))["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]


class Prometheus:
    """The API of a running Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=20) as answer:
            return json.load(answer)["data"]

    def is_ready(self) -> bool:
        """Return whether it answers queries; it listens before it does."""
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=20):
                return True
        except urllib.error.HTTPError as refusal:
            refusal.close()
            return False

    def query(self, expression: str) -> list[Any]:
        result: list[Any] = self.ask("query", query=expression)["result"]
        return result


def wait_for(condition: Callable[[], Any]) -> Any:
    """Return what the condition returns once it is true, or at the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def prometheus(master: Any, tmp_path_factory: Any) -> Iterator[Prometheus]:
    """Prometheus with the configuration of `deploy/`, whose targets are a master and a daemon."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus: install the package prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    flags = ["--metadata_server=P2PHANDSHAKE", "--host=127.0.0.1", "--port=0", "--http_port=0"]
    flags += ["--global_segment_size=64MB", "--enable_http_server=true"]
    daemon = subprocess.Popen(
        [
            *(sys.executable, "-m", "mooncake.cli_client"),
            *(f"--master_server_address={master.address}", *flags),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with daemon:
        assert daemon.stdout is not None
        ready = re.search(r" http=\S+:(\d+)", daemon.stdout.readline())
        assert ready is not None
        config = (DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8")
        for old, new in {
            "master.example:9003": master.admin.removeprefix("http://"),
            "node-1.example:9300": f"127.0.0.1:{ready[1]}",
            "scrape_interval: 15s": "scrape_interval: 1s\n  evaluation_interval: 1s",
        }.items():
            assert old in config
            config = config.replace(old, new)
        (folder / "prometheus.yml").write_text(config, encoding="utf-8")
        shutil.copy(DEPLOY / "prometheus/alerts.yml", folder)
        server = subprocess.Popen(
            [
                *(program, "--web.listen-address=127.0.0.1:0", "--config.file=prometheus.yml"),
                f"--storage.tsdb.path={folder / 'data'}",
            ],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        with server:
            assert server.stderr is not None
            listening = re.compile(r'"?Listening on"?.* address=(\S+)')
            found = next(filter(None, map(listening.search, server.stderr)))
            with mooncake.Store(master.address) as store:
                store.put("k", b"v")
                assert store.get("k") == b"v"
                with pytest.raises(mooncake.NotFoundError):
                    store.get("missing")
            prometheus = Prometheus(found[1])
            assert wait_for(prometheus.is_ready)
            yield prometheus
            server.terminate()
            server.stderr.read()
        daemon.terminate()


@pytest.mark.parametrize("job", ["mooncake-master", "mooncake-client"])
def test_targets_of_each_job_are_scraped(prometheus: Prometheus, job: str) -> None:
    values = wait_for(lambda: prometheus.query(f'up{{job="{job}"}} == 1'))
    assert len(values) == 1


@pytest.mark.parametrize(
    ("panel", "target"), TARGETS, ids=[f"{panel}-{target['refId']}" for panel, target in TARGETS]
)
def test_query_of_a_panel_has_data(
    prometheus: Prometheus, panel: str, target: dict[str, str]
) -> None:
    series = wait_for(lambda: prometheus.query(target["expr"]))
    assert series != []
    for label in re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")):
        assert all(each["metric"].get(label) for each in series), label


def test_alert_rules_evaluate(prometheus: Prometheus) -> None:
    def rules() -> list[Any]:
        groups = prometheus.ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def are_evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in rules())

    assert wait_for(are_evaluated)
    assert len(rules()) == 13
    assert {rule["health"] for rule in rules()} == {"ok"}
    alerts = {rule["name"]: rule["state"] for rule in rules()}
    assert alerts["MooncakeMasterDown"] == alerts["MooncakeDaemonDown"] == "inactive"
    assert alerts["MooncakeNoLeader"] == alerts["MooncakeNoStandbyInSync"] == "inactive"


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_parts_of_the_memory_have_colors_that_differ(theme: int) -> None:
    page = (DEPLOY.parent / "crates/master/src/admin/page/index.html").read_text(encoding="utf-8")
    names = re.findall(r'"var\(--(\w+)\)"\]', page)
    assert len(names) == 7
    style = page.split("@media (prefers-color-scheme: dark)")[theme]
    colors = {name: re.search(rf"--{name}: #(\w{{6}});", style) for name in names}
    values = {name: bytes.fromhex(found[1]) for name, found in colors.items() if found}
    assert values.keys() == set(names)
    for one, other in itertools.combinations(names, 2):
        assert math.dist(values[one], values[other]) > 50, f"{one} and {other} look alike"
