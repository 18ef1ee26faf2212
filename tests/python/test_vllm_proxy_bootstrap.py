"""The proxy in front of servers with vLLM's own connector, which has a bootstrap server."""

from __future__ import annotations

import asyncio
import json

import pytest
from proxy_backends import DEADLINE_S, PARAMETERS, Cluster, cluster

from mooncake import vllm_v1_proxy_server as module

pytestmark = pytest.mark.timeout(150)


def engines(*names: str) -> bytes:
    """Return what the bootstrap server of vLLM answers to `GET /query`."""
    entries = {
        str(rank): {"engine_id": name, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}
        for rank, name in enumerate(names)
    }
    return json.dumps(entries).encode()


def ask_bootstrap_servers(peers: Cluster) -> None:
    """Let the proxy ask each prefill server, at the same port, for its engines."""
    for backend in peers.proxy.prefill.backends:
        backend.bootstrap_port = backend.port


async def run_requests(peers: Cluster, count: int = 1) -> list[int]:
    async with asyncio.timeout(DEADLINE_S):
        return [(await peers.post()).status for _ in range(count)]


def test_decode_is_told_engine_and_bootstrap_server():
    async def run() -> None:
        async with cluster() as peers:
            ask_bootstrap_servers(peers)
            (prefill,), (decode,) = peers.prefill, peers.decode
            prefill.engines = engines("e7")
            assert await run_requests(peers, 2) == [200, 200]
            first, second = (seen["kv_transfer_params"]["transfer_id"] for seen in prefill.seen)
            assert first != second
            assert prefill.seen[0]["kv_transfer_params"]["do_remote_decode"] is True
            assert "x-data-parallel-rank" not in prefill.headers[0]
            assert decode.seen[0]["kv_transfer_params"] == {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": "e7",
                "remote_bootstrap_addr": f"http://127.0.0.1:{prefill.port}",
                "transfer_id": first,
            }
            # A server that was restarted has another engine.
            prefill.engines = engines("e8")
            assert await run_requests(peers) == [200]
            assert decode.seen[2]["kv_transfer_params"]["remote_engine_id"] == "e8"

    asyncio.run(run())


def test_engines_of_a_server_take_turns_by_rank():
    async def run() -> None:
        async with cluster() as peers:
            ask_bootstrap_servers(peers)
            (prefill,), (decode,) = peers.prefill, peers.decode
            prefill.engines = engines("a", "b")
            assert await run_requests(peers, 3) == [200] * 3
            ranks = [headers["x-data-parallel-rank"] for headers in prefill.headers]
            told = [seen["kv_transfer_params"]["remote_engine_id"] for seen in decode.seen]
            assert (ranks, told) == (["0", "1", "0"], ["a", "b", "a"])
            assert all("x-data-parallel-rank" not in headers for headers in decode.headers)

    asyncio.run(run())


def test_repeated_prefill_has_another_transfer():
    async def run() -> None:
        async with cluster(decode=("close", "ok")) as peers:
            ask_bootstrap_servers(peers)
            peers.prefill[0].engines = engines("a")
            assert await run_requests(peers) == [200]
            failed, repeated = (fake.seen[0]["kv_transfer_params"] for fake in peers.decode)
            assert failed["transfer_id"] != repeated["transfer_id"]

    asyncio.run(run())


@pytest.mark.parametrize("answer", [b"{}", b"[1]", b"no JSON", b'{"0": {}}', b'{"x": {"y": 1}}'])
def test_server_without_engines_is_left_for_the_next(answer):
    async def run() -> None:
        async with cluster(("ok", "ok")) as peers:
            ask_bootstrap_servers(peers)
            peers.prefill[0].engines = answer
            peers.prefill[1].engines = engines("b")
            assert await run_requests(peers) == [200]
            assert peers.prefill[0].seen == []
            told = peers.decode[0].seen[0]["kv_transfer_params"]
            assert told["remote_engine_id"] == "b"

    asyncio.run(run())


def test_absent_bootstrap_server_is_named_to_the_client():
    async def run() -> None:
        async with cluster() as peers:
            (backend,) = peers.proxy.prefill.backends
            peers.prefill[0].engines = b"{}"
            ask_bootstrap_servers(peers)
            reply = await peers.post()
            text = reply.body.decode()
            assert reply.status == 503
            assert f"/query names no engine of {backend.name}" in text
            assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" in text
            await peers.prefill[0].stop()
            backend.is_up = True
            reply = await peers.post()
            assert reply.status == 503
            assert f"the bootstrap server of {backend.name} does not answer" in reply.body.decode()

    asyncio.run(run())


def test_options_give_each_prefiller_a_bootstrap_port():
    async def run() -> None:
        hosts = ["--prefiller-hosts", "127.0.0.1", "127.0.0.1", "--prefiller-ports", "1", "2"]
        options = module.parse_args([*hosts, "--prefiller-bootstrap-ports", "3", "4"])
        async with module.lifespan(module.app, options):
            assert module.app.proxy is not None
            backends = module.app.proxy.prefill.backends
            assert [backend.bootstrap_port for backend in backends] == [3, 4]
        async with module.lifespan(module.app, module.parse_args(hosts)):
            backends = module.app.proxy.prefill.backends
            assert [backend.bootstrap_port for backend in backends] == [None, None]
        with pytest.raises(ValueError, match="give --prefiller-bootstrap-ports a port for each"):
            module.parse_args([*hosts, "--prefiller-bootstrap-ports", "3"])

    asyncio.run(run())


def test_without_bootstrap_ports_parameters_are_those_of_the_prefill():
    async def run() -> None:
        async with cluster() as peers:
            peers.prefill[0].engines = engines("a")
            assert await run_requests(peers) == [200]
            assert peers.decode[0].seen[0]["kv_transfer_params"] == PARAMETERS

    asyncio.run(run())
