"""vLLM on a pool of this package and on one of upstream: hits, tokens, time to first token."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pools import (
    OURS,
    UPSTREAM,
    running_holder,
    running_master,
    running_upstream_master,
    write_settings,
)
from prompts import PROMPTS, WHOLE, Prompt, await_stored
from tiny_model import make_model
from vllm_servers import STORE_CONNECTOR, VllmServer, vllm_server

if TYPE_CHECKING:
    from results import Results

pytestmark = pytest.mark.timeout(1500)
ROUNDS = 5
# 16 KiB of KV cache a token, 40 MiB a prompt.
HEADS, HEAD_SIZE = 16, 128
SEGMENT_BYTES = 512 << 20


def load_s(server: VllmServer, prompt: Prompt) -> float:
    """Return the time to the first token of a prompt whose blocks come from the pool."""
    before = server.hits()
    server.reset_prefix_cache()
    begin = time.monotonic()
    server.answer(prompt, 1)
    seconds = time.monotonic() - begin
    assert server.hits() - before == WHOLE
    return seconds


def test_warm_prompt_is_no_slower_than_with_upstream(tmp_path: Path, results: Results) -> None:
    model = tmp_path / "model"
    make_model(model, HEADS, HEAD_SIZE)
    prompts = PROMPTS[:4]
    # The memory is that of another process.
    shape = {"mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "256MB"}
    with ExitStack() as processes:
        masters = {
            "ours": processes.enter_context(running_master()).address,
            "upstream": processes.enter_context(running_upstream_master(tmp_path)),
        }
        servers = {}
        for name, package in (("ours", OURS), ("upstream", UPSTREAM)):
            home = tmp_path / name
            home.mkdir()
            settings = write_settings(home, masters[name], **shape)
            processes.enter_context(running_holder(package, masters[name], SEGMENT_BYTES))
            servers[name] = processes.enter_context(
                vllm_server(model, home, STORE_CONNECTOR, settings, package)
            )
        for server in servers.values():
            server.await_ready()
        computed: dict[str, list[float]] = {name: [] for name in servers}
        loaded: dict[str, list[float]] = {name: [] for name in servers}
        for prompt in prompts:
            for name, server in servers.items():
                begin = time.monotonic()
                server.answer(prompt, 1)
                computed[name].append(time.monotonic() - begin)
                await_stored(server, prompt)
        for _ in range(ROUNDS):
            for prompt in prompts:
                for name, server in servers.items():
                    loaded[name].append(load_s(server, prompt))
        for prompt in prompts:
            tokens = {}
            for name, server in servers.items():
                server.reset_prefix_cache()
                tokens[name] = server.answer(prompt)
                # Now the blocks are those in the server's own prefix cache.
                assert server.answer(prompt) == tokens[name]
            assert tokens["ours"] == tokens["upstream"]
    ours, upstream = (statistics.median(loaded[name]) for name in ("ours", "upstream"))
    cold = statistics.median(computed["ours"])
    results.add(
        "vllm",
        "vLLM, `MooncakeStoreConnector`, time to first token of a warm prompt",
        {"computed / loaded": cold / ours, "upstream / ours": upstream / ours},
    )
    assert ours <= upstream
