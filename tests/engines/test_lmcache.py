"""LMCache in vLLM with a pool of this package as its remote tier.

LMCache has no connector for the KV cache of a vLLM on a CPU; `cpu_stand_ins.py` has one.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cpu_stand_ins import write_plugin
from pools import OURS, UPSTREAM, running_master, running_upstream_master, until
from prompts import PROMPTS, WHOLE, Answers, Prompt
from vllm_servers import ANSWER_S, VllmServer, vllm_server

if TYPE_CHECKING:
    from results import Results

pytestmark = pytest.mark.timeout(1500)
CONNECTOR = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
# Two blocks of vLLM.
CHUNK_TOKENS = 256
# LMCache ignores the address in `remote_url`. It hands the settings over as a dict, in which
# upstream's package knows the master by the second name only; LMCache removes the prefix.
SETTINGS = """
chunk_size: {chunk}
local_cpu: false
max_local_cpu_size: 0.5
remote_url: "mooncakestore://127.0.0.1:1/"
remote_serde: "naive"
extra_config:
  local_hostname: "127.0.0.1"
  metadata_server: "P2PHANDSHAKE"
  master_server_address: "{master}"
  mooncake_master_server_addr: "{master}"
  protocol: "tcp"
  device_name: ""
  global_segment_size: 134217728
  local_buffer_size: 67108864
  transfer_timeout: 1
"""


def lmcache_variables(folder: Path, master: str) -> dict[str, str]:
    """Write the settings of LMCache, and return the variables that name them."""
    file = folder / "lmcache.yaml"
    file.write_text(SETTINGS.format(chunk=CHUNK_TOKENS, master=master))
    return {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_TRACK_USAGE": "false"}


def ask(server: VllmServer, prompt: Prompt, expected: Answers) -> int:
    """Compare the answer to a prompt, and return how many of its tokens came from LMCache."""
    before = server.hits()
    server.reset_prefix_cache()
    assert server.answer(prompt) == expected[prompt]
    return server.hits() - before


@pytest.mark.parametrize("package", [OURS, UPSTREAM], ids=["ours", "upstream"])
def test_second_server_loads_chunks_of_the_first(
    model: Path, tmp_path: Path, expected: Answers, results: Results, package: Path
) -> None:
    plugins = tmp_path / "plugins"
    write_plugin(plugins, "lmcache_connector")
    prompt = PROMPTS[0]
    with ExitStack() as processes:
        if package == OURS:
            master = processes.enter_context(running_master()).address
        else:
            master = processes.enter_context(running_upstream_master(tmp_path))
        variables = lmcache_variables(tmp_path, master)
        first, second = (
            processes.enter_context(
                vllm_server(
                    model,
                    tmp_path,
                    CONNECTOR,
                    package=package,
                    plugins=plugins,
                    variables=variables,
                )
            )
            for _ in range(2)
        )
        first.await_ready()
        second.await_ready()
        assert ask(first, prompt, expected) == 0
        until(
            lambda: ask(first, prompt, expected) == WHOLE,
            ANSWER_S,
            lambda: f"LMCache loads all chunks\n{first.tail()}",
        )
        assert ask(second, prompt, expected) == WHOLE
    if package == OURS:
        results.add("lmcache", "LMCache, `mooncakestore://` in vLLM")
