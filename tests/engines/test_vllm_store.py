"""vLLM's MooncakeStoreConnector on a pool of this package: servers share what one has computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_servers import (
    ANSWER_S,
    BLOCK_TOKENS,
    STORE_CONNECTOR,
    VllmServer,
    running_master,
    until,
    vllm_server,
    write_settings,
)

pytestmark = pytest.mark.timeout(1500)
BLOCKS = 20
# Whole blocks, and a part of one, which is never stored.
PROMPT = [7 + 13 * number % 499 for number in range(BLOCKS * BLOCK_TOKENS + 3)]


def await_stored(server: VllmServer) -> None:
    """Waits until all whole blocks of the prompt are in the pool: the server loads them."""
    done = 0

    def all_loaded() -> bool:
        nonlocal done
        before = server.hits()
        server.reset_prefix_cache()
        server.answer(PROMPT, 1)
        done = server.hits() - before
        return done == BLOCKS * BLOCK_TOKENS

    until(
        all_loaded, ANSWER_S, lambda: f"{BLOCKS} blocks come from the pool, at last {done} tokens"
    )


def test_second_server_loads_what_the_first_computed(model: Path, tmp_path: Path) -> None:
    with running_master() as master:
        settings = write_settings(tmp_path, master)
        with vllm_server(model, tmp_path, STORE_CONNECTOR, settings) as first:
            with vllm_server(model, tmp_path, None) as alone:
                alone.await_ready()
                expected = alone.answer(PROMPT)
            first.await_ready()
            assert first.answer(PROMPT) == expected
            assert first.hits() == 0
            await_stored(first)
            first.reset_prefix_cache()
            assert first.answer(PROMPT) == expected
            with vllm_server(model, tmp_path, STORE_CONNECTOR, settings) as second:
                second.await_ready()
                assert second.answer(PROMPT) == expected
                assert second.hits() == BLOCKS * BLOCK_TOKENS
