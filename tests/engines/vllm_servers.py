"""vLLM servers on CPU and masters, each a process of its own that is stopped by its id."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# For a server to load: a limit for a machine that does other work, too.
READY_S = 600
ANSWER_S = 300
# vLLM stores whole blocks, of 128 tokens on a CPU.
BLOCK_TOKENS = 128
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
    "PYTHONPATH": str(ROOT / "python"),
}


@dataclass
class VllmServer:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def answer(self, prompt: list[int], tokens: int = 8) -> list[str]:
        """Returns the tokens that follow a prompt of token numbers."""
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        reply = json.loads(self._call("/v1/completions", json.dumps(body).encode()))
        return list(reply["choices"][0]["logprobs"]["tokens"])

    def reset_prefix_cache(self) -> None:
        """Forgets the blocks in the memory of the server itself."""
        self._call("/reset_prefix_cache", b"")

    def metric(self, name: str) -> float:
        """Returns the sum of a metric over its labels."""
        text = self._call("/metrics", None)
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(float(value) for value in values)

    def hits(self) -> int:
        """Returns the number of tokens that came from the pool so far."""
        return int(self.metric("vllm:external_prefix_cache_hits_total"))

    def _call(self, path: str, body: bytes | None) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as reply:
                return str(reply.read().decode())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}\n{self.tail()}") from error

    def tail(self) -> str:
        """Returns the end of the log."""
        return self.log.read_text(errors="replace")[-4000:]

    def await_ready(self) -> None:
        """Waits until the server answers."""
        until(self.is_ready, READY_S, lambda: f"vLLM answers\n{self.tail()}")

    def is_ready(self) -> bool:
        """Returns whether the server answers; fails if it ended."""
        assert self.process.poll() is None, f"vLLM ended:\n{self.tail()}"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


def until(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what()}"
        time.sleep(0.2)


@contextmanager
def vllm_server(
    model: Path, folder: Path, connector: dict[str, Any] | None, settings: Path | None = None
) -> Iterator[VllmServer]:
    """Starts a server, which is not ready yet; `settings` is the file of the store."""
    # Held until the server ends; vLLM sets SO_REUSEADDR, too.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    log = folder / f"vllm-{port}.log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--enforce-eager", "--dtype", "bfloat16"]
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    # Paths of sockets must be short.
    with held, tempfile.TemporaryDirectory(prefix="v") as sockets, log.open("wb") as output:
        environment = {**os.environ, **_ENVIRONMENT, "VLLM_RPC_BASE_PATH": sockets}
        if settings is not None:
            environment["MOONCAKE_CONFIG_PATH"] = str(settings)
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            server = VllmServer(process, port, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running_master(*flags: str) -> Iterator[str]:
    """Runs a master at a free port, and gives its address."""
    command = [sys.executable, "-m", "mooncake.cli", "--rpc_address=127.0.0.1", "--rpc_port=0"]
    command += ["--metrics_port=0", "--state_dir=none", "--default_kv_lease_ttl=30s", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        ready = re.search(r"ready rpc=(\S+)", process.stdout.readline())
        assert ready is not None, "the master did not start"
        yield ready[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def write_settings(folder: Path, master: str, **changes: object) -> Path:
    """Writes the file that MOONCAKE_CONFIG_PATH names."""
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "global_segment_size": "256MB",
        "local_buffer_size": "64MB",
        "protocol": "tcp",
        "device_name": "",
        **changes,
    }
    file = folder / "mooncake_config.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return file
