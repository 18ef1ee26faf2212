"""vLLM's MooncakeStoreConnector with tenants, tokens, faults of the pool and a pool that is full.

The servers lend nothing (`standalone-store`): a test lends the memory, and can take it away. They
are started once, and the master keeps its address.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pools import Master, running_lender, running_master, until, write_settings
from prompts import PROMPTS, WHOLE, Answers, Prompt, await_stored
from vllm_servers import ANSWER_S, VllmServer, vllm_server

pytestmark = pytest.mark.timeout(1500)
# By default a request whose blocks are lost between look-up and load fails. A lender that is killed
# leaves the pool at once, so that hardly any request meets that moment.
CONNECTOR = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
TOKENS = {"MOONCAKE_MASTER_TOKEN": "the-master-token", "MC_TRANSFER_TOKEN": "the-transfer-token"}
# Without tenants the master has one namespace of keys. With them only those with a quota may write.
QUOTAS = """
version: 1
tenants:
  - {name: red, quota: 256MB}
  - {name: blue, quota: 256MB}
"""


@dataclass
class Pool:
    """A pool with tokens, and a server in each of two tenants."""

    folder: Path
    master: Master
    processes: ExitStack
    servers: dict[str, VllmServer] = field(default_factory=dict)

    def lender(self, size: str) -> AbstractContextManager[int]:
        """Lend memory while the context is open."""
        return running_lender(self.folder, self.master.address, size, **TOKENS)

    def restart_master(self) -> None:
        """Start a master where the last one was."""
        self.master = self.processes.enter_context(
            token_master(self.folder, address=self.master.address)
        )


def token_master(folder: Path, address: str = "127.0.0.1:0") -> AbstractContextManager[Master]:
    """Run a master that asks for a token, and has short leases, so that blocks can be evicted."""
    secret = folder / "master.token"
    if not secret.exists():
        secret.write_text(TOKENS["MOONCAKE_MASTER_TOKEN"])
        secret.chmod(0o400)
    quotas = folder / "quotas.yaml"
    if not quotas.exists():
        quotas.write_text(QUOTAS)
    flags = [f"--rpc_token_file={secret}", "--default_kv_lease_ttl=2s"]
    flags += ["--enable_multi_tenants=true", f"--tenant_quota_connector_uri={quotas}"]
    return running_master(*flags, address=address, state_dir=folder / "state")


@pytest.fixture(scope="module")
def pool(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with two servers that are ready."""
    folder = tmp_path_factory.mktemp("pool")
    with ExitStack() as processes:
        master = processes.enter_context(token_master(folder))
        pool = Pool(folder, master, processes)
        for tenant in ("red", "blue"):
            home = folder / tenant
            home.mkdir()
            lends_nothing = {"mode": "standalone-store", "global_segment_size": 0}
            settings = write_settings(home, master.address, tenant_id=tenant, **lends_nothing)
            pool.servers[tenant] = processes.enter_context(
                vllm_server(model, home, CONNECTOR, settings, variables=TOKENS)
            )
        for server in pool.servers.values():
            server.await_ready()
        yield pool


class Load:
    """Sends prompts to a server, one after the other, and compares the answers."""

    def __init__(self, server: VllmServer, answers: Answers) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._server = server
        self._answers = answers
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def _send(self) -> None:
        for prompt in itertools.cycle(PROMPTS[:3]):
            if self._is_over.is_set():
                return
            try:
                self._server.reset_prefix_cache()
                tokens = self._server.answer(prompt)
            except (AssertionError, OSError) as error:
                self.failures.append(str(error))
                return
            if tokens != self._answers[prompt]:
                self.failures.append(f"{tokens} instead of {self._answers[prompt]}")
            self.answered += 1

    def await_answers(self, count: int) -> None:
        """Wait for more answers."""
        wanted = self.answered + count
        until(
            lambda: self.failures or self.answered >= wanted,
            ANSWER_S,
            lambda: f"{count} answers, at last {self.answered} of {wanted}",
        )
        assert self.failures == []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def load(server: VllmServer, answers: Answers) -> Iterator[Load]:
    """Send prompts while the context is open; all answers are right."""
    with Load(server, answers) as running:
        yield running
    assert running.failures == []


def ask(server: VllmServer, prompt: Prompt, expected: Answers) -> int:
    """Compare the answer to a prompt, and return how many of its tokens came from the pool."""
    before = server.hits()
    server.reset_prefix_cache()
    assert server.answer(prompt) == expected[prompt]
    return server.hits() - before


def test_tenants_do_not_share_blocks(pool: Pool, expected: Answers) -> None:
    red, blue = pool.servers["red"], pool.servers["blue"]
    prompt = PROMPTS[11]
    with pool.lender("128MB"):
        await_stored(red, prompt)
        assert ask(red, prompt, expected) == WHOLE
        assert ask(blue, prompt, expected) == 0
        await_stored(blue, prompt)
        assert ask(blue, prompt, expected) == WHOLE


def test_server_without_the_token_does_not_start(pool: Pool, model: Path, tmp_path: Path) -> None:
    settings = write_settings(tmp_path, pool.master.address)
    with vllm_server(model, tmp_path, CONNECTOR, settings) as stranger:
        until(lambda: stranger.process.poll() is not None, ANSWER_S, lambda: "vLLM ends")
        log = stranger.log.read_text(errors="replace")
    assert stranger.process.returncode != 0
    assert "MOONCAKE_MASTER_TOKEN" in log
    assert "Initialize MooncakeDistributedStore failed." in log


def test_requests_go_on_while_the_master_is_restarted(pool: Pool, expected: Answers) -> None:
    red = pool.servers["red"]
    with pool.lender("128MB"):
        await_stored(red, PROMPTS[0])
        with load(red, expected) as requests:
            requests.await_answers(3)
            pool.master.kill()
            requests.await_answers(6)
            pool.restart_master()
            requests.await_answers(3)
        await_stored(red, PROMPTS[0])
        assert ask(red, PROMPTS[0], expected) == WHOLE


def test_blocks_of_a_dead_lender_are_computed(pool: Pool, expected: Answers) -> None:
    red = pool.servers["red"]
    with pool.lender("128MB") as lender:
        await_stored(red, PROMPTS[0])
        with load(red, expected) as requests:
            requests.await_answers(3)
            os.kill(lender, signal.SIGKILL)
            requests.await_answers(6)
    with pool.lender("128MB"):
        await_stored(red, PROMPTS[0])
        assert ask(red, PROMPTS[0], expected) == WHOLE


def test_full_pool_evicts_and_fails_no_request(pool: Pool, expected: Answers) -> None:
    red = pool.servers["red"]
    # A prompt has 2.5 MiB of blocks: six fit.
    with pool.lender("16MB"):
        before = pool.master.metric("mooncake_master_evicted_objects_total")

        def has_evicted() -> bool:
            for prompt in PROMPTS:
                ask(red, prompt, expected)
            return pool.master.metric("mooncake_master_evicted_objects_total") > before

        until(has_evicted, ANSWER_S, lambda: f"blocks are evicted\n{red.tail()}")
        await_stored(red, PROMPTS[0])
        assert ask(red, PROMPTS[0], expected) == WHOLE
