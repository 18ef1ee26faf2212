"""Replays a trace of prompts against vLLM servers without a pool, with one, and with upstream's.

    MOONCAKE_ENGINES_VENV/bin/python benches/programs/serving.py TRACE [--requests 40] [--plot FILE]

The environment is that of `make test-engines`. TRACE has one JSON object a line, whose `hash_ids`
are the blocks of a prompt: equal ids are equal blocks. Each becomes a block of vLLM, 128 tokens on
a CPU. The prompts of some sessions are sent one after the other, in turn to one server or to two.
A server's own prefix cache is emptied before each prompt, as the prompts of other sessions would
do that come between those of one in the trace. Hits come from the pool, then: this measures the
share of the store in the time to the first token, and not a server that has room for more. The
model is tiny, and has 8 KiB of KV cache a token. Only the ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars

# The servers are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/engines"))
pools: Any = importlib.import_module("pools")
vllm_servers: Any = importlib.import_module("vllm_servers")
tiny_model: Any = importlib.import_module("tiny_model")

BLOCK_TOKENS = 128
# With some tokens that are in no whole block, a prompt fits the 8192 tokens of the model.
PROMPT_BLOCKS_MAX = 60
SEGMENT_BYTES = 1 << 30
KINDS = ("no pool", "upstream", "ours")


@dataclass
class Replay:
    """The result of one replay."""

    first_token_s: list[float]
    hit_rate: float


def main() -> None:
    """Replay the trace against one server and two, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--plot", type=Path, help="SVG with the ratios")
    options = parser.parse_args()
    requests = sample_trace(options.trace, options.requests)
    prompts = [prompt_of(blocks) for blocks in requests]
    print(f"{len(prompts)} prompts, {statistics.mean(map(len, prompts)):.0f} tokens on average")
    print(f"hit rate of a cache without limit: {best_hit_rate(requests):.2f}")
    groups = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        tiny_model.make_model(model, heads=8, head_size=128)
        print("| servers | pool | tokens from the pool | mean s to first token | ratio |")
        print("|---|---|---|---|---|")
        for count in (1, 2):
            means = {}
            for kind in KINDS:
                home = Path(folder) / f"{kind} {count}"
                home.mkdir()
                done = replay(model, home, kind, count, prompts)
                means[kind] = statistics.mean(done.first_token_s)
                ratio = means["no pool"] / means[kind]
                row = (count, kind, f"{done.hit_rate:.2f}", f"{means[kind]:.3f}", f"{ratio:.2f}")
                print(f"| {' | '.join(map(str, row))} |", flush=True)
            name = "one server" if count == 1 else "two servers"
            groups[name] = [(kind, means["no pool"] / means[kind]) for kind in KINDS[1:]]
    if options.plot:
        title = "Time to the first token without a pool, relative to that with one"
        options.plot.write_text(bars.draw(title, groups), encoding="utf-8")


def sample_trace(file: Path, count: int) -> list[list[int]]:
    """Return the blocks of the requests of some sessions, in order, if they are not too long.

    Prompts of a session begin with the same two blocks and come far apart in a trace: as many
    requests in a row would share hardly anything.
    """
    sessions: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            blocks = json.loads(line)["hash_ids"]
            sessions.setdefault(tuple(blocks[:2]), []).append((number, blocks))
    names = list(sessions)
    random.Random(0).shuffle(names)
    chosen: list[tuple[int, list[int]]] = []
    for name in names:
        chosen += [each for each in sessions[name] if len(each[1]) <= PROMPT_BLOCKS_MAX]
        if len(chosen) >= count:
            break
    return [blocks for _, blocks in sorted(chosen)][:count]


def prompt_of(blocks: Sequence[int]) -> list[int]:
    """Return tokens, which are the same for equal blocks."""
    tokens = [8, 9, 10]
    for block in reversed(blocks):
        source = random.Random(block)
        tokens = [source.randrange(7, 500) for _ in range(BLOCK_TOKENS)] + tokens
    return tokens


def best_hit_rate(requests: Sequence[Sequence[int]]) -> float:
    """Return the share of blocks that an earlier request with the same beginning had."""
    seen: set[tuple[int, ...]] = set()
    hits = 0
    for blocks in requests:
        beginnings = [tuple(blocks[: end + 1]) for end in range(len(blocks))]
        hits += sum(beginning in seen for beginning in beginnings)
        seen.update(beginnings)
    return hits / sum(map(len, requests))


def replay(model: Path, folder: Path, kind: str, count: int, prompts: list[list[int]]) -> Replay:
    """Start servers, send them all prompts, and stop them."""
    with ExitStack() as processes:
        settings, package = None, pools.OURS
        if kind == "ours":
            master = processes.enter_context(pools.running_master()).address
        elif kind == "upstream":
            master = processes.enter_context(pools.running_upstream_master(folder))
            package = pools.UPSTREAM
        if kind != "no pool":
            processes.enter_context(pools.running_holder(package, master, SEGMENT_BYTES))
            shape = {"mode": "standalone-store", "global_segment_size": 0}
            settings = pools.write_settings(folder, master, local_buffer_size="256MB", **shape)
        servers = [
            processes.enter_context(
                vllm_servers.vllm_server(
                    model,
                    folder,
                    None if settings is None else vllm_servers.STORE_CONNECTOR,
                    settings,
                    package,
                )
            )
            for _ in range(count)
        ]
        for server in servers:
            server.await_ready()
            # The first request of a server takes longer.
            server.answer(prompt_of([-1]), 1)
        before = sum(server.hits() for server in servers) if settings else 0
        times = []
        for number, prompt in enumerate(prompts):
            server = servers[number % count]
            server.reset_prefix_cache()
            begin = time.monotonic()
            server.answer(prompt, 1)
            times.append(time.monotonic() - begin)
        hits = sum(server.hits() for server in servers) - before if settings else 0
        return Replay(times, hits / sum(map(len, prompts)))


if __name__ == "__main__":
    main()
