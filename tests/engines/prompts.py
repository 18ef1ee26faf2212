"""Prompts, and what a server without a connector answers to them."""

from __future__ import annotations

from pathlib import Path

from pools import until
from vllm_servers import ANSWER_S, VllmServer, vllm_server

# vLLM stores whole blocks, of 128 tokens on a CPU.
BLOCK_TOKENS = 128
BLOCKS = 20
# The tokens of a prompt that are in whole blocks. A part of a block is never stored.
WHOLE = BLOCKS * BLOCK_TOKENS
# They differ from the first block on.
PROMPTS = [
    tuple(7 + (13 + 2 * which) * number % 499 for number in range(WHOLE + 3)) for which in range(12)
]
Prompt = tuple[int, ...]
Answers = dict[Prompt, list[str]]


def computed_answers(model: Path, folder: Path) -> Answers:
    """Return the answers of a server that computes everything."""
    with vllm_server(model, folder, None) as alone:
        alone.await_ready()
        answers = {prompt: alone.answer(prompt) for prompt in PROMPTS}
    # Otherwise blocks of another prompt would not be noticed.
    assert len(set(map(tuple, answers.values()))) == len(PROMPTS)
    return answers


def await_stored(server: VllmServer, prompt: Prompt) -> None:
    """Wait until all whole blocks of a prompt are in the pool: the server loads them."""
    done = 0

    def all_loaded() -> bool:
        nonlocal done
        before = server.hits()
        server.reset_prefix_cache()
        server.answer(prompt, 1)
        done = server.hits() - before
        return done == WHOLE

    until(
        all_loaded,
        ANSWER_S,
        lambda: f"{WHOLE} tokens come from the pool, at last {done}\n{server.tail()}",
    )
