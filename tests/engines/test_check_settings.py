"""`mooncake check` says that the settings with which the other tests start engines are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pools import OURS, running_master, write_settings
from test_lmcache import lmcache_variables
from vllm_servers import STORE_CONNECTOR

PREFILL = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
pytestmark = pytest.mark.timeout(120)


def check(*words: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command, which also opens a store."""
    command = [sys.executable, "-m", "mooncake", "check", *words]
    environment = {**os.environ, **variables, "PYTHONPATH": str(OURS)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("engine", ["vllm", "vllm-connector", "lmcache"])
def test_settings_of_the_tests_are_right(tmp_path: Path, engine: str) -> None:
    with running_master() as master:
        variables: dict[str, str] = {}
        words = ["--try"]
        if engine == "vllm":
            file = write_settings(tmp_path, master.address)
            variables = {"MOONCAKE_CONFIG_PATH": str(file)}
            words.append(json.dumps(STORE_CONNECTOR))
        elif engine == "vllm-connector":
            words = [json.dumps(PREFILL)]
        else:
            lmcache_variables(tmp_path, master.address)
            words.append(str(tmp_path / "lmcache.yaml"))
        done = check(*words, variables=variables)
        assert done.returncode == 0, done.stdout + done.stderr
    # The master is gone now.
    if engine != "vllm-connector":
        done = check(*words, variables=variables)
        assert done.returncode == 1, done.stdout + done.stderr
