"""vLLM's MooncakeStoreConnector on a pool of this package: servers share what one has computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pools import running_master, write_settings
from prompts import PROMPTS, WHOLE, Answers, await_stored
from vllm_servers import STORE_CONNECTOR, vllm_server

if TYPE_CHECKING:
    from results import Results

pytestmark = pytest.mark.timeout(1500)
PROMPT = PROMPTS[0]


def test_second_server_loads_what_the_first_computed(
    model: Path, tmp_path: Path, expected: Answers, results: Results
) -> None:
    with running_master() as master:
        settings = write_settings(tmp_path, master.address)
        with vllm_server(model, tmp_path, STORE_CONNECTOR, settings) as first:
            first.await_ready()
            assert first.answer(PROMPT) == expected[PROMPT]
            assert first.hits() == 0
            await_stored(first, PROMPT)
            first.reset_prefix_cache()
            assert first.answer(PROMPT) == expected[PROMPT]
            with vllm_server(model, tmp_path, STORE_CONNECTOR, settings) as second:
                second.await_ready()
                assert second.answer(PROMPT) == expected[PROMPT]
                assert second.hits() == WHOLE
    results.add("vllm", "vLLM, `MooncakeStoreConnector`")
