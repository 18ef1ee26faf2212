"""vLLM servers on CPU, each a process of its own that is stopped by its id."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pools import OURS, stop, until

# For a server to load: a limit for a machine that does other work, too.
READY_S = 600
ANSWER_S = 300
NONE: Mapping[str, str] = {}
STORE_CONNECTOR = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM would bind its threads to cores, the same ones for each server.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The keys of blocks are made of hashes, which must be the same in all servers.
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Serves POST /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}


@dataclass
class VllmServer:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def answer(self, prompt: Sequence[int], tokens: int = 8) -> list[str]:
        """Return the tokens that follow a prompt of token numbers."""
        try:
            return post_completion(self.port, prompt, tokens)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from error

    def reset_prefix_cache(self) -> None:
        """Forget the blocks in the memory of the server itself."""
        self._call("/reset_prefix_cache", b"")

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        text = self._call("/metrics", None)
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def hits(self) -> int:
        """Return the number of tokens that came from the pool so far."""
        return int(self.metric("vllm:external_prefix_cache_hits_total"))

    def _call(self, path: str, body: bytes | None) -> str:
        try:
            return call(self.port, path, body)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from error

    def tail(self) -> str:
        """Return the end of the log."""
        return self.log.read_text(errors="replace")[-4000:]

    def await_ready(self) -> None:
        """Wait until the server answers."""
        until(self.is_ready, READY_S, lambda: f"vLLM answers\n{self.tail()}")

    def is_ready(self) -> bool:
        """Return whether the server answers; fail if it ended."""
        assert self.process.poll() is None, f"vLLM ended:\n{self.tail()}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def post_completion(port: int, prompt: Sequence[int], tokens: int = 8) -> list[str]:
    """Return the tokens that follow a prompt of token numbers."""
    body = {
        "model": "tiny",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    reply = json.loads(call(port, "/v1/completions", json.dumps(body).encode()))
    return list(reply["choices"][0]["logprobs"]["tokens"])


def call(port: int, path: str, body: bytes | None) -> str:
    """Return what a server answers to a GET, or to a POST with a body."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
            return str(reply.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error.read().decode()}") from error


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port that nobody else gets; a server that sets SO_REUSEADDR, as vLLM, can take it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@contextmanager
def vllm_server(
    model: Path,
    folder: Path,
    connector: dict[str, Any] | None,
    settings: Path | None = None,
    package: Path = OURS,
    variables: Mapping[str, str] = NONE,
    plugins: Path | None = None,
) -> Iterator[VllmServer]:
    """Start a server, which is not ready yet.

    Args:
        model: The folder of its model.
        folder: Where its log is written.
        connector: What `--kv-transfer-config` says.
        settings: The file of the store.
        package: The folder from which it imports `mooncake`.
        variables: More of its environment.
        plugins: The folder with the metadata of its plugins, which are in this folder.
    """
    paths = [package, *([] if plugins is None else [plugins, Path(__file__).parent])]
    # Paths of sockets must be short.
    with (
        held_port() as port,
        tempfile.TemporaryDirectory(prefix="v") as sockets,
        (folder / f"vllm-{port}.log").open("wb") as output,
    ):
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--enforce-eager", "--dtype", "bfloat16"]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        environment = {**os.environ, **_ENVIRONMENT, **variables}
        environment |= {"PYTHONPATH": ":".join(map(str, paths)), "VLLM_RPC_BASE_PATH": sockets}
        if settings is not None:
            environment["MOONCAKE_CONFIG_PATH"] = str(settings)
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            yield VllmServer(process, port, Path(output.name))
        finally:
            stop(process)
