"""The metrics of a transfer engine: a log line, a Prometheus page, and a dict."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from engine_peers import Memory, start_engine

from mooncake.engine import TransferNotify, Write

# Writes 4 KiB again and again to another engine of the same process, until a line is sent.
WRITER = """
import ctypes, sys, threading
from mooncake.engine import TransferEngine

here, there = TransferEngine(), TransferEngine()
for engine in (here, there):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = ctypes.create_string_buffer(8192)
address = ctypes.addressof(memory)
assert there.register_memory(address, 4096) == 0
segment = f"127.0.0.1:{there.get_rpc_port()}"
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
print("writing", flush=True)
while not ended.wait(0.001):
    assert here.transfer_sync_write(segment, address + 4096, address, 4096) == 0
"""

# The format of upstream's engine; our additions follow it.
LINE = re.compile(
    r"\[Metrics\] Transfer Engine Stats \(over last (\d+)s\): Throughput: (\d+\.\d\d) MB/s "
    r"\| Latency Distribution \(count=(\d+)\): ((?:>?[\d-]+μs:\d+\.\d%(?:, )?)+)"
)


def start_writer(**environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, **environment},
    )


def end(writer: subprocess.Popen[str]) -> str:
    """End the writer, and return what it logged."""
    _, log = writer.communicate("\n", timeout=30)
    assert writer.returncode == 0, log
    return log


@pytest.mark.parametrize("on", ["1", "true", "yes", "on"])
def test_metrics_are_logged_in_upstreams_format(on):
    writer = start_writer(MC_TE_METRIC=on, MC_TE_METRIC_INTERVAL_SECONDS="1")
    assert writer.stderr is not None
    try:
        found = next(filter(None, map(LINE.search, writer.stderr)))
    finally:
        end(writer)
    seconds, rate, count, classes = found.groups()
    assert int(seconds) >= 1
    assert int(count) > 0
    # The interval is rounded to seconds.
    rate_of_count = int(count) * 4096 / int(seconds) / (1 << 20)
    assert float(rate) <= rate_of_count * 1.6 + 0.01
    percents = [float(part.rpartition(":")[2].rstrip("%")) for part in classes.split(", ") if part]
    assert abs(sum(percents) - 100) < len(percents) * 0.1


def test_metrics_are_not_logged_by_default():
    writer = start_writer(MC_LOG_LEVEL="info", MC_TE_METRIC_INTERVAL_SECONDS="1")
    assert writer.stdout is not None
    assert writer.stdout.readline() == "writing\n"
    with pytest.raises(subprocess.TimeoutExpired):
        writer.wait(2.5)
    assert "[Metrics]" not in end(writer)


def test_rejects_metrics_interval_of_zero():
    writer = start_writer(MC_TE_METRIC="1", MC_TE_METRIC_INTERVAL_SECONDS="0")
    _, log = writer.communicate("\n", timeout=30)
    assert writer.returncode != 0, log


def test_metrics_text_and_dict_agree():
    here, there, memory = start_engine(), start_engine(), Memory.of(bytes(300))
    assert (here.metrics_text(), there.metrics()["refused"]["ranges"]) != ("", None)
    assert there.register_memory(memory.address, 200) == 0
    segment = f"127.0.0.1:{there.get_rpc_port()}"
    local = Memory.of(bytes(100))
    for transport in ("memory", "shm", "tcp"):
        args = (segment, local.address, memory.address, 100, transport)
        assert here.transfer_sync_write(*args) == 0, transport
    assert here.transfer_sync_write(segment, local.address, memory.address + 150, 100, "tcp") == -1
    page, metrics = here.metrics_text(), here.metrics()
    for transport in ("memory", "shm", "tcp"):
        one = metrics["transports"][transport]
        line = f'mooncake_transfer_bytes_total{{transport="{transport}",operation="write"}} '
        assert line + str(one["bytes_written"]) + "\n" in page
        assert one["bytes_written"] == 100
    assert metrics["peers"][segment]["errors"] == 1
    assert here.transfer_sync(segment, 0, 0, 0, Write, TransferNotify("a", "b")) == 0
    for name, waiting in (("batches", 0), ("notifications", 1)):
        queue = there.metrics()[name]
        assert (queue["waiting"], queue["refused"]) == (waiting, 0)
        assert queue["limit"] >= 1024
        line = f"mooncake_transfer_{name}_waiting {waiting}\n"
        assert line in there.metrics_text()
    refused = there.metrics()["refused"]["ranges"]
    assert refused >= 1
    assert f'mooncake_transfer_refused_total{{reason="range"}} {refused}\n' in there.metrics_text()
