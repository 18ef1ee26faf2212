"""`mooncake demo`, and the probe of `doctor`: two processes that exchange objects."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable

from mooncake._api.store import Store, StoreConfig
from mooncake._command.output import print_json
from mooncake._units import format_bytes, format_speed

__all__ = ["probe", "run"]

_CHILD_S = 60
_DEMO_BYTES = 64 << 20
_PROBE_BYTES = 4 << 20

# Runs in the second process of `demo` and `doctor`: gets one object, reports how, puts another.
_CHILD = """
import sys, time, zlib
from mooncake import Store
with Store(sys.argv[1]) as store:
    buffer = bytearray(store.size("from-parent"))
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        store.get_into("from-parent", buffer)
        best = min(best, time.perf_counter() - begin)
    store.put("from-child", zlib.crc32(buffer).to_bytes(4, "big"))
    served = [name for name, count in store.stats()["store"]["by_transport"].items()
              if count["bytes"]]
    print(len(buffer), best, *served)
"""


def run(options: argparse.Namespace) -> int:
    """Start a pool, put and get from a second process, and tell what happened.

    Args:
        options: ``is_json``.

    Returns:
        0.
    """
    tell: Callable[[str], None] = (lambda _: None) if options.is_json else print
    value = os.urandom(1 << 20) * (_DEMO_BYTES >> 20)
    lent = 4 * _DEMO_BYTES
    with Store(config=StoreConfig(segment_bytes=lent)) as store:
        tell(f"this process {os.getpid()} is master, node and client")
        tell(f"  master at {store.master_address}, lends {format_bytes(lent)}")
        begin = time.perf_counter()
        store.put("from-parent", value)
        taken = time.perf_counter() - begin
        speed = format_speed(len(value) / taken)
        tell(f"  put {format_bytes(len(value))} in {taken * 1e3:.1f} ms ({speed})")
        length, seconds, served = _run_child(store, {})
        tell("a second process joined at that address")
        speed = format_speed(length / seconds)
        tell(f"  get {format_bytes(length)} in {seconds * 1e3:.1f} ms ({speed})")
        tell(f"  the bytes went over: {', '.join(served)}")
        _check_child_bytes(store, value)
        tell("  it read the bytes that were put, and this process read its answer")
        keys = [str(found.key) for found in store.objects()]
        tell(f"objects in the pool: {', '.join(keys)}")
        report = {
            "master": store.master_address,
            "lent_bytes": lent,
            "put": {"bytes": len(value), "seconds": taken},
            "get": {"bytes": length, "seconds": seconds, "transports": served},
            "keys": keys,
        }
    tell("closed; no process is left running")
    if options.is_json:
        print_json(report)
    return 0


def probe(name: str) -> str:
    """Transfer bytes to a second process; raise if another transport served."""
    value = os.urandom(_PROBE_BYTES)
    forced = name == "tcp"
    environment = {"MC_FORCE_TCP": "1" if forced else "0"}
    config = StoreConfig(segment_bytes=4 * _PROBE_BYTES, is_tcp_forced=forced)
    with Store(config=config) as store:
        store.put("from-parent", value)
        length, seconds, served = _run_child(store, environment)
        _check_child_bytes(store, value)
    if name not in served:
        raise RuntimeError(f"{', '.join(served) or 'no transport'} served instead")
    speed = format_speed(length / seconds)
    return f"works: {format_bytes(length)} in {seconds * 1e3:.2f} ms ({speed})"


def _run_child(store: Store, environment: dict[str, str]) -> tuple[int, float, list[str]]:
    """Run a second process that gets an object and puts an answer.

    Returns:
        Bytes, seconds, transports.
    """
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, store.master_address],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the second process failed: {done.stderr.strip()}")
    length, seconds, *served = done.stdout.split()
    return int(length), float(seconds), served


def _check_child_bytes(store: Store, value: bytes) -> None:
    if store.get("from-child") != zlib.crc32(value).to_bytes(4, "big"):
        raise RuntimeError("the second process read other bytes than were put")
