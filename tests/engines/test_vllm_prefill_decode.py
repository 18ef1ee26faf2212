"""vLLM's MooncakeConnector over the transfer engine of this package, with its proxy in front."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cpu_stand_ins import write_plugin
from pools import OURS, UPSTREAM, stop
from prompts import PROMPTS, WHOLE, Answers
from vllm_servers import VllmServer, held_port, post_completion, vllm_server

if TYPE_CHECKING:
    from results import Results

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True)
class Case:
    """A connector, and the package with the engine under it."""

    package: Path
    settings: dict[str, object]
    title: str = ""
    has_bootstrap_server: bool = True


def of_vllm(package: Path, protocol: str, title: str = "") -> Case:
    """Return the connector of vLLM itself."""
    return Case(package, {"kv_connector_extra_config": {"mooncake_protocol": protocol}}, title)


OF_THIS_PACKAGE = {"kv_connector_module_path": "mooncake.mooncake_connector_v1"}
CASES = {
    "rdma": of_vllm(OURS, "rdma"),
    "tcp": of_vllm(OURS, "tcp", "vLLM, `MooncakeConnector` of vLLM and the proxy"),
    "upstream": of_vllm(UPSTREAM, "tcp"),
    "module": Case(
        OURS,
        OF_THIS_PACKAGE,
        "vLLM, `mooncake.mooncake_connector_v1` and the proxy",
        has_bootstrap_server=False,
    ),
}


@contextmanager
def running_proxy(prefill: VllmServer, decode: VllmServer, *more: str) -> Iterator[int]:
    """Run the proxy in front of the servers, and give its port."""
    command = [sys.executable, "-m", "mooncake.vllm_v1_proxy_server", "--port", "0", *more]
    command += ["--prefiller-hosts", "127.0.0.1", "--prefiller-ports", str(prefill.port)]
    command += ["--decoder-hosts", "127.0.0.1", "--decoder-ports", str(decode.port)]
    environment = {**os.environ, "PYTHONPATH": str(OURS)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = re.search(r"ready http=\S+:(\d+)", line)
        assert ready is not None, f"the proxy did not start: {line}"
        yield int(ready[1])
    finally:
        stop(process)


@pytest.mark.parametrize("name", CASES)
def test_decode_server_takes_the_blocks_of_the_prefill_server(
    model: Path, tmp_path: Path, expected: Answers, results: Results, name: str
) -> None:
    case = CASES[name]
    plugins = tmp_path / "plugins"
    write_plugin(plugins, "accelerator_index")
    with ExitStack() as processes:
        ports = [str(processes.enter_context(held_port())) for _ in range(2)]
        variables = {
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": ports[0],
            "VLLM_MOONCAKE_SIDE_CHANNEL_PORT": ports[1],
            "VLLM_HOST_IP": "127.0.0.1",
        }
        prefill, decode = (
            processes.enter_context(
                vllm_server(
                    model,
                    tmp_path,
                    {"kv_connector": "MooncakeConnector", "kv_role": role, **case.settings},
                    package=case.package,
                    plugins=plugins,
                    variables=variables,
                )
            )
            for role in ("kv_producer", "kv_consumer")
        )
        prefill.await_ready()
        decode.await_ready()
        more = ("--prefiller-bootstrap-ports", ports[0]) if case.has_bootstrap_server else ()
        port = processes.enter_context(running_proxy(prefill, decode, *more))
        for number, prompt in enumerate(PROMPTS[:3], 1):
            assert post_completion(port, prompt) == expected[prompt], decode.tail()
            # The last token is always computed.
            assert decode.hits() >= number * WHOLE, decode.tail()
    if case.title:
        results.add("vllm", case.title)
