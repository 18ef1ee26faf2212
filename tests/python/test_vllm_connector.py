"""The connector between two processes, called as vLLM calls it: a prefill and a decode side."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")
torch = pytest.importorskip("torch")

import vllm_interface as vllm  # noqa: E402
from forked_programs import Program  # noqa: E402
from upstream_package import run, upstream_python  # noqa: E402

from mooncake import mooncake_connector_v1 as connector_v1  # noqa: E402

HERE = Path(__file__).parent
PORT = "VLLM_MOONCAKE_SIDE_CHANNEL_PORT"
EXPIRY = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"


def free_ports(count: int) -> int:
    """Return the first of free ports, one after the other.

    An engine listens some time later. Until then a connection of another test may get a port of the
    range from which the kernel takes them. These lie below, if any do.
    """
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    lowest, highest = 10_000, min(int(limits[0]), 65_536) - count
    candidates = range(lowest, highest if lowest + 1_000 < highest else 65_536 - count)
    for first in random.sample(candidates, 100):
        with contextlib.ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError(f"no {count} free ports")


def free_port() -> int:
    return free_ports(1)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


class EngineProcess:
    """An engine in another process, with the role of a producer unless another is given."""

    def __init__(
        self,
        variables: dict[str, str] | None = None,
        program: str = "vllm_interface.py",
        **options: Any,
    ) -> None:
        self.port = free_port()
        environment = {**os.environ, PORT: str(self.port), **(variables or {})}
        options = {"role": "kv_producer", **options}
        self.process = Program(
            [HERE / program, json.dumps(options)], environment, reads_stderr=False
        )
        try:
            self.pid = self.read()
        except BaseException:
            self.kill()
            raise

    def read(self) -> Any:
        line = self.process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def tell(self, *call: Any) -> None:
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()

    def __call__(self, *call: Any) -> Any:
        self.tell(*call)
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def check_free(self) -> None:
        """Check that no block is in use."""
        assert self("until_free")["waiting"] == []

    def end(self) -> None:
        """Check that nothing is left, and end the process."""
        self.check_free()
        assert self("shutdown") == 0
        self.kill()


@pytest.fixture(scope="module")
def shared_prefill() -> Iterator[EngineProcess]:
    started = EngineProcess()
    yield started
    started.end()


@pytest.fixture
def prefill(shared_prefill: EngineProcess) -> Iterator[EngineProcess]:
    yield shared_prefill
    shared_prefill.check_free()


@pytest.fixture
def hasty_prefill() -> Iterator[EngineProcess]:
    """Free blocks that nobody asked for within a second."""
    started = EngineProcess({EXPIRY: "1"})
    yield started
    started.end()


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[vllm.Engine]:
    # A decode side waits for at most the expiry and MC_TRANSFER_TIMEOUT.
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    engine = vllm.Engine("kv_consumer")
    yield engine
    assert engine.shutdown() == 0


def call_raw(port: int, payload: bytes) -> bytes:
    """Send a message to a side channel and return the answer."""
    with connector_v1.zmq_ctx(zmq.REQ, f"tcp://127.0.0.1:{port}") as channel:
        channel.send(payload)
        assert channel.poll(30_000), "no answer"
        return channel.recv()


def finish(decode: vllm.Engine, request_id: str) -> None:
    decode.until(lambda engine: request_id in engine.received)


# Hand-over


@pytest.mark.parametrize("is_split", [True, False], ids=["keys-values-apart", "blocks-first"])
def test_blocks_of_many_layers_arrive(monkeypatch, is_split):
    prefill = EngineProcess(layers=40, is_split=is_split)
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    decode = vllm.Engine("kv_consumer", layers=40, is_split=is_split)
    try:
        # The decode side's blocks are others.
        decode.allocate("other", 5 * vllm.BLOCK_SIZE)
        params = prefill("prefill", "p-1", 30, 7)
        assert decode.start_decode("d-1", 30, params) == (30, True)
        finish(decode, "d-1")
        assert decode.mismatches("d-1", 30, 7) == []
        assert decode.failed == set()
        untouched = set(range(decode.blocks)) - set(decode.owned["d-1"][: vllm.blocks_of(30)])
        assert not any(decode.block(0, block).any() for block in untouched)
        prefill.end()
    finally:
        prefill.kill()
        assert decode.shutdown() == 0


def test_ten_requests_at_once_arrive(prefill, decode):
    asked = {}
    for number in range(10):
        tokens = 5 + 2 * number
        params = prefill("prefill", f"p-{number}", tokens, number)
        asked[f"d-{number}"] = (tokens, number)
        decode.start_decode(f"d-{number}", tokens, params)
        if number % 2:
            decode.step()
    decode.until(lambda engine: engine.received == set(asked))
    for request_id, (tokens, seed) in asked.items():
        assert decode.mismatches(request_id, tokens, seed) == [], request_id
    assert decode.failed == set()


def test_only_missing_blocks_are_sent_where_a_prefix_is_cached(prefill, decode):
    params = prefill("prefill", "p", 18, 3)
    assert decode.start_decode("d", 18, params, cached=3) == (6, True)
    finish(decode, "d")
    assert decode.mismatches("d", 18, 3, cached=3) == []
    assert not any(decode.block(0, block).any() for block in decode.owned["d"][:3])


def test_a_cached_prompt_frees_the_blocks_of_the_prefill(prefill, decode):
    params = prefill("prefill", "p", 16, 3)
    assert decode.start_decode("d", 16, params, cached=4) == (0, False)
    decode.step()
    prefill.check_free()
    assert decode.received == set()


def test_a_call_waits_for_the_end_of_the_prefill(prefill, decode):
    prefill("start_prefill", "p", 12, 4)
    early = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": prefill.port}
    decode.start_decode("p", 12, early)
    decode.step()
    prefill("step")
    assert decode.received == set()
    prefill("finish_prefill", "p")
    finish(decode, "p")
    assert decode.mismatches("p", 12, 4) == []


# Aborted and late requests


def test_an_aborted_prefill_fails_the_waiting_call(prefill, decode):
    prefill("start_prefill", "p", 12, 4)
    early = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": prefill.port}
    decode.start_decode("p", 12, early)
    decode.step()
    assert prefill("finish_prefill", "p", "FINISHED_ABORTED") is None
    finish(decode, "p")
    assert decode.failed == set(decode.owned["p"][: vllm.blocks_of(12)])


def test_an_aborted_decode_frees_the_blocks_of_the_prefill(prefill, decode):
    params = prefill("prefill", "p", 12, 4)
    decode.abort_unscheduled("d", 12, params)
    decode.step()
    prefill.check_free()
    assert decode.received == set()


def test_a_late_call_fails_and_the_blocks_were_freed(hasty_prefill, decode):
    params = hasty_prefill("prefill", "p", 12, 4)
    assert hasty_prefill("until_free")["sent"] == ["p"]
    decode.start_decode("d", 12, params)
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(12)])


def test_one_late_request_does_not_fail_the_others_of_its_call(prefill, decode):
    params = prefill("prefill", "p", 12, 4)
    decode.start_decode("good", 12, params)
    decode.start_decode("late", 8, {**params, "remote_request_id": "unknown"})
    decode.until(lambda engine: engine.received == {"good", "late"})
    assert decode.mismatches("good", 12, 4) == []
    assert decode.failed == set(decode.owned["late"][: vllm.blocks_of(8)])


# Peers that die


def test_a_prefill_that_dies_in_mid_transfer_fails_the_request(decode):
    prefill = EngineProcess()
    params = prefill("prefill", "p", 40, 4)
    prefill("hang_in_write")
    decode.start_decode("d", 40, params)
    decode.step()
    assert prefill.read() == "half written"
    prefill.kill()
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(40)])


def test_a_decode_that_dies_in_mid_transfer_frees_the_blocks(monkeypatch):
    monkeypatch.setenv(PORT, str(free_port()))
    monkeypatch.setenv(EXPIRY, "1")
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    prefill, decode = vllm.Engine("kv_producer"), EngineProcess(role="kv_consumer")
    outcomes = kill_in_mid_transfer(prefill, decode)
    params = prefill.prefill("p", 200, 4)
    assert decode("start_decode", "d", 200, params) == [200, True]
    decode.tell("step")
    prefill.until(lambda engine: len(engine.free) == engine.blocks)
    assert len(outcomes) == 2
    assert outcomes[0] == 0
    assert outcomes[1] != 0, "memory of a process that died was written"
    assert prefill.sent == {"p"}
    assert prefill.shutdown() == 0


def kill_in_mid_transfer(prefill: vllm.Engine, decode: EngineProcess) -> list[int]:
    """Let the next write kill its target after half of its copies; return the results to come."""
    engine = prefill.worker.engine
    outcomes: list[int] = []

    class Half:
        def batch_transfer_sync_write(self, peer, *columns):
            half = len(columns[0]) // 2
            outcomes.append(engine.batch_transfer_sync_write(peer, *(c[:half] for c in columns)))
            decode.kill()
            outcomes.append(engine.batch_transfer_sync_write(peer, *(c[half:] for c in columns)))
            return outcomes[-1]

    prefill.worker._sender._engine = Half()
    return outcomes


def test_a_prefill_that_is_not_there_fails_the_request(decode):
    params = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": free_port(),
    }
    decode.start_decode("d", 40, params)
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(40)])


def test_blocks_for_a_decode_that_died_expire(hasty_prefill):
    hasty_prefill("prefill", "p", 12, 4)
    call = connector_v1.MooncakeAgentMetadata(
        remote_hostname="127.0.0.1",
        remote_port=free_port(),
        request_ids=["p"],
        kv_caches_base_addr=[4096] * 6,
        block_ids=[[0, 1, 2]],
    )
    assert call_raw(hasty_prefill.port, msgspec.msgpack.encode(call)) == connector_v1.TRANS_ERROR
    assert hasty_prefill("until_free")["sent"] == ["p"]


def test_a_worker_that_shuts_down_leaves_no_call_behind(prefill, caplog):
    decode = vllm.Engine("kv_consumer")
    prefill("start_prefill", "p", 12, 4)
    early = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": prefill.port}
    decode.start_decode("p", 12, early)
    decode.step()
    assert decode.shutdown() == 0
    assert "a task of the connector failed" not in caplog.text
    prefill("finish_prefill", "p", "FINISHED_ABORTED")


# What does not fit


def test_a_call_for_more_blocks_than_there_are_fails(hasty_prefill, decode):
    params = hasty_prefill("prefill", "p", 8, 4)
    decode.start_decode("d", 40, params)
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(40)])


@pytest.mark.parametrize("options", [{"layers": 2}, {"heads": 4}], ids=["layers", "heads"])
def test_a_decode_side_with_another_model_is_refused(hasty_prefill, options):
    decode = vllm.Engine("kv_consumer", **options)
    params = hasty_prefill("prefill", "p", 8, 4)
    decode.start_decode("d", 8, params)
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(8)])
    assert decode.shutdown() == 0


def test_wrong_parameters_let_the_decode_side_compute_the_prompt(decode):
    good = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}
    for wrong in (
        {"remote_host": None},
        {"remote_port": "80"},
        {"remote_port": 0},
        {"remote_tp_size": 2},
        {"remote_request_id": 3},
    ):
        assert decode.start_decode(str(wrong), 8, {**good, **wrong}) == (0, False)
    decode.step()
    assert decode.received == set()


def test_a_producer_computes_prompts_itself(monkeypatch):
    monkeypatch.setenv(PORT, str(free_port()))
    engine = vllm.Engine("kv_producer")
    params = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}
    assert engine.start_decode("r", 8, params) == (0, False)
    engine.step()
    assert engine.shutdown() == 0


def test_both_roles_in_one_engine(monkeypatch):
    monkeypatch.setenv(PORT, str(free_port()))
    engine = vllm.Engine("kv_both")
    params = engine.prefill("p", 12, 5)
    engine.start_decode("d", 12, params)
    engine.until(lambda each: each.received == {"d"} and each.sent == {"p"})
    assert engine.mismatches("d", 12, 5) == []
    assert engine.shutdown() == 0


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback device: enable it")
def test_blocks_arrive_over_ipv6(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "::1")
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setenv(PORT, str(free_port()))
    engine = vllm.Engine("kv_both")
    params = engine.prefill("p", 12, 5)
    assert params["remote_host"] == "::1"
    engine.start_decode("d", 12, params)
    engine.until(lambda each: each.received == {"d"})
    assert engine.mismatches("d", 12, 5) == []
    assert engine.shutdown() == 0


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setenv(PORT, str(free_port()))
    first = vllm.Engine("kv_producer")
    with pytest.raises(OSError, match=PORT):
        vllm.Engine("kv_producer")
    assert first.shutdown() == 0


def test_several_groups_of_kv_caches_are_refused():
    vllm.install()
    groups = SimpleNamespace(kv_cache_groups=[1, 2])
    with pytest.raises(ValueError, match="disable-hybrid-kv-cache-manager"):
        connector_v1.MooncakeConnector(
            vllm.config("kv_both", 8), vllm.KVConnectorRole.SCHEDULER, groups
        )


# Wire protocol


def test_a_call_of_upstream_is_served(prefill, decode):
    prefill("prefill", "p", 12, 6)
    ids = decode.allocate("d", 12)
    call = {
        "remote_hostname": "127.0.0.1",
        "remote_port": decode.worker.rpc_port,
        "request_ids": ["p"],
        "kv_caches_base_addr": decode.worker.kv_caches_base_addr,
        "block_ids": [ids],
    }
    assert call_raw(prefill.port, msgspec.msgpack.encode(call)) == b"trans_done"
    assert decode.mismatches("d", 12, 6) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_channels_reach_addresses_of_both_families(host):
    if host == "[::1]" and not has_ipv6():
        pytest.skip("needs IPv6 on the loopback device: enable it")
    with connector_v1.zmq_ctx(zmq.ROUTER, f"tcp://{host}:0") as server:
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        with connector_v1.zmq_ctx(zmq.REQ, address) as client:
            client.send(b"call")
            assert server.poll(30_000)
            assert server.recv_multipart()[-1] == b"call"


def test_our_calls_have_the_fields_of_upstream(decode):
    port = free_port()
    with connector_v1.zmq_ctx(zmq.ROUTER, f"tcp://127.0.0.1:{port}") as channel:
        decode.start_decode(
            "d", 8, {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}
        )
        decode.step()
        assert channel.poll(30_000)
        caller, empty, payload = channel.recv_multipart()
        call = msgspec.msgpack.decode(payload)
        assert empty == b""
        assert call["remote_hostname"] == "127.0.0.1"
        assert call["remote_port"] == decode.worker.rpc_port
        assert call["request_ids"] == ["d"]
        assert call["kv_caches_base_addr"] == decode.worker.kv_caches_base_addr
        assert call["block_ids"] == [decode.owned["d"][:2]]
        channel.send_multipart([caller, b"", b"trans_done"])
        finish(decode, "d")
    assert decode.failed == set()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", msgspec.msgpack.encode({"request_ids": 3}), b"\x81" * 1000],
    ids=["empty", "garbage", "wrong-type", "nested"],
)
def test_malformed_calls_are_answered_with_an_error(prefill, decode, payload):
    assert call_raw(prefill.port, payload) == connector_v1.TRANS_ERROR
    params = prefill("prefill", "p", 8, 6)
    decode.start_decode("d", 8, params)
    finish(decode, "d")
    assert decode.mismatches("d", 8, 6) == []


def test_wrong_calls_are_answered_with_an_error(hasty_prefill):
    hasty_prefill("prefill", "p", 8, 6)
    for ids, blocks in (
        (["p"], []),
        (["p", "p"], [[1], [2]]),
        (["p"], [[-1]]),
        (["unknown"], [[1]]),
        (["p"], [[1, 2, 3]]),
    ):
        call = connector_v1.MooncakeAgentMetadata("127.0.0.1", 1, ids, [4096] * 6, blocks)
        answer = call_raw(hasty_prefill.port, msgspec.msgpack.encode(call))
        assert answer == connector_v1.TRANS_ERROR, (ids, blocks)


# Upstream's connector


@pytest.fixture(scope="module")
def upstream() -> dict[str, str]:
    """The variables with which a process has upstream's package."""
    found = run(upstream_python(), "-c", "import mooncake; print(mooncake.__file__)")
    packages = Path(found.stdout.strip()).parents[1]
    return {"PYTHONPATH": str(packages), "VLLM_MOONCAKE_PROTOCOL": "tcp"}


def test_blocks_of_upstreams_prefill_arrive(upstream, decode):
    prefill = EngineProcess(upstream, "upstream_connector.py")
    try:
        for number, tokens in enumerate((12, 40, 30)):
            params = prefill("prefill", f"p-{number}", tokens, number)
            decode.start_decode(f"d-{number}", tokens, params)
        for number, tokens in enumerate((12, 40, 30)):
            assert decode.receive(f"d-{number}", tokens, number) == []
        assert decode.failed == set()
        prefill.check_free()
    finally:
        prefill.kill()


def test_blocks_arrive_at_upstreams_decode(upstream, prefill):
    decode = EngineProcess(upstream, "upstream_connector.py", role="kv_consumer", spare_tokens=0)
    try:
        params = prefill("prefill", "p", 30, 9)
        decode("start_decode", "d", 30, params)
        assert decode("receive", "d", 30, 9) == []
    finally:
        decode.kill()


# Names


def test_names_without_vllm():
    program = """
import sys
sys.modules["vllm"] = None
from mooncake import mooncake_connector_v1 as module
assert module.TRANS_DONE == b"trans_done" and module.TRANS_ERROR == b"trans_error"
assert module.VLLM_MOONCAKE_SIDE_CHANNEL_PORT == 6557
assert module.VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT == 120
assert module.VLLM_MOONCAKE_SENDER_WORKERS == 10
assert module.VLLM_MOONCAKE_PROTOCOL == "rdma"
assert module.RecvReqMeta([1], "host", 2).remote_request_id is None
assert module.SendBlockMeta([], None).expire_time == float("inf")
assert module.group_concurrent_contiguous([], []) == ([], [])
for name in ("MooncakeConnector", "MooncakeConnectorWorker", "MooncakeConnectorScheduler"):
    try:
        getattr(module, name)
    except ImportError as error:
        assert "mooncake-transfer-engine[vllm]" in str(error), error
    else:
        raise AssertionError(name)
assert not hasattr(module, "no_such_name")
"""
    environment = {name: value for name, value in os.environ.items() if "VLLM" not in name}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=50)


def test_every_public_name_exists_with_vllm():
    vllm.install()
    assert all(getattr(connector_v1, name) is not None for name in connector_v1.__all__)


@pytest.mark.parametrize("name", [PORT, EXPIRY, "VLLM_MOONCAKE_SENDER_WORKERS"])
def test_a_wrong_variable_is_named(monkeypatch, name):
    monkeypatch.setenv(name, "many")
    vllm.install()
    with pytest.raises(ValueError, match=name):
        connector_v1.get_mooncake_side_channel_port(vllm.config("kv_both", 8))


def test_runs_of_blocks():
    runs = connector_v1.group_concurrent_contiguous([1, 2, 3, 7, 8], [4, 5, 9, 10, 11])
    assert runs == ([[1, 2], [3], [7, 8]], [[4, 5], [9], [10, 11]])
    with pytest.raises(ValueError, match="shorter"):
        connector_v1.group_concurrent_contiguous([1, 2], [1])


def test_caches_that_are_not_stored_by_block_are_refused():
    import torch

    from mooncake._connector.blocks import regions_of

    cache = torch.zeros(8, 4, 2, dtype=torch.int32)
    assert [each.block_bytes for each in regions_of({"a": cache, "b": cache}, 8)] == [32]
    assert len(regions_of({"a": cache.transpose(1, 2)}, 8)) == 1
    for wrong in (cache.transpose(0, 1), cache[:, :2], torch.zeros(8), cache[:4]):
        with pytest.raises(ValueError, match="layer a"):
            regions_of({"a": wrong}, 8)
    with pytest.raises(TypeError, match="layer a"):
        regions_of({"a": [cache]}, 8)
    with pytest.raises(ValueError, match="no KV caches"):
        regions_of({}, 8)


def test_a_step_returns_before_its_transfers(decode):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        params = {
            "do_remote_prefill": True,
            "remote_host": "127.0.0.1",
            "remote_port": silent.getsockname()[1],
        }
        decode.start_decode("d", 8, params)
        decode.step()
        assert decode.received == set()
        started = time.monotonic()
        finish(decode, "d")
        assert time.monotonic() - started < 35
    assert decode.failed == set(decode.owned["d"][:2])


# Pipeline stages


@pytest.fixture
def stages() -> Iterator[list[EngineProcess]]:
    """The prefill workers of two stages on one host, which have ports one after the other."""
    port = {PORT: str(free_ports(2)), EXPIRY: "1"}
    with contextlib.ExitStack() as stack:
        started = []
        for stage in range(2):
            started.append(EngineProcess(port, stage=stage, stages=2))
            stack.callback(started[-1].end)
        yield started


@pytest.fixture
def decode_stages(monkeypatch) -> Iterator[list[vllm.Engine]]:
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    made = [vllm.Engine("kv_consumer", stage=stage, stages=2) for stage in range(2)]
    yield made
    for each in made:
        assert each.shutdown() == 0


def test_each_stage_gets_the_layers_of_its_own(stages, decode_stages):
    for number, (prefill, decode) in enumerate(zip(stages, decode_stages, strict=True)):
        params = prefill("prefill", "p", 12, number)
        assert decode.start_decode("d", 12, params) == (12, True)
    for number, decode in enumerate(decode_stages):
        finish(decode, "d")
        assert decode.failed == set()
        assert decode.mismatches("d", 12, number) == []


def test_layers_of_another_stage_are_refused(stages, decode_stages):
    """As where each stage has a host of its own, and all ask the host of the first one."""
    params = stages[0]("prefill", "p", 12, 4)
    decode = decode_stages[1]
    decode.start_decode("d", 12, {**params, "remote_port": params["remote_port"] - 1})
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(12)])
    assert not any(cache.any() for cache in decode.caches.values())


def test_layers_of_other_names_are_refused(hasty_prefill, monkeypatch):
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    decode = vllm.Engine("kv_consumer")
    decode.worker._receiver.use(
        [replace(region, layer=f"draft.{region.layer}") for region in decode.worker._regions]
    )
    params = hasty_prefill("prefill", "p", 8, 4)
    decode.start_decode("d", 8, params)
    finish(decode, "d")
    assert decode.failed == set(decode.owned["d"][: vllm.blocks_of(8)])
    assert decode.shutdown() == 0


def test_stage_refuses_a_call_without_names(stages):
    params = stages[0]("prefill", "p", 12, 4)
    call = connector_v1.MooncakeAgentMetadata(
        remote_hostname="127.0.0.1",
        remote_port=1,
        request_ids=["p"],
        kv_caches_base_addr=[4096] * 6,
        block_ids=[[0, 1, 2]],
    )
    for said in ({}, {"stage": 0, "stages": 2}):
        for name, value in said.items():
            setattr(call, name, value)
        answer = call_raw(params["remote_port"], msgspec.msgpack.encode(call))
        assert answer == connector_v1.TRANS_ERROR


def test_stages_compute_prompts_of_a_prefill_that_names_none(decode_stages):
    params = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}
    assert decode_stages[0].start_decode("d", 8, params) == (0, False)
    params["remote_pp_size"] = 3
    assert decode_stages[0].start_decode("e", 8, params) == (0, False)


# Versions of vLLM


def test_failed_fetch_is_not_done_for_vllm_without_load_errors(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    vllm.install()
    monkeypatch.delattr(vllm.KVConnectorBaseV1, "get_block_ids_with_load_errors")
    decode = vllm.Engine("kv_consumer")
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": free_port()}
    decode.start_decode("d", 8, params)
    decode.until(lambda engine: engine.failed)
    decode.step()
    assert decode.received == set()
    assert "these requests wait until aborted" in caplog.text
    assert decode.shutdown() == 0


def test_hybrid_caches_are_left_to_vllm():
    vllm.install()
    assert not issubclass(connector_v1.MooncakeConnector, vllm.SupportsHMA)


def test_number_of_blocks_is_that_of_the_configuration_of_the_cache(monkeypatch):
    monkeypatch.setenv("VLLM_MOONCAKE_PROTOCOL", "tcp")
    vllm.install()
    settings = vllm.config("kv_consumer", None)
    caches = {"layer": torch.zeros(16, vllm.BLOCK_SIZE // 2, 8)}
    for blocks, is_refused in ((8, True), (16, False), (None, True)):
        cache = None
        if blocks is not None:
            cache = SimpleNamespace(kv_cache_groups=[None], num_blocks=blocks)
        role = vllm.KVConnectorRole.WORKER
        made = connector_v1.MooncakeConnector(settings, role, cache)
        if is_refused:
            with pytest.raises(ValueError, match=r"counts 8 blocks|number is not known"):
                made.register_kv_caches(caches)
        else:
            made.register_kv_caches(caches)
        made.shutdown()


def test_replicas_of_dense_models_have_ports_of_their_own():
    vllm.install()
    port = connector_v1.get_mooncake_side_channel_port
    settings = vllm.config("kv_producer", 8, tp_size=2, stages=3)
    first = port(settings)
    settings.parallel_config.data_parallel_index = 2
    assert port(settings) == first + 2 * 2 * 3
    del settings.parallel_config.data_parallel_index
    settings.parallel_config.data_parallel_rank = 1
    assert port(settings) == first + 2 * 3
