"""Reads the metrics of a master, and computes its hit rate and how full its pool is.

The address of the admin port is the argument; without one, a master is started.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import mooncake

SAMPLE = re.compile(r"^(\w+)(?:\{[^}]*\})? (\S+)$")


def scrape(admin: str) -> dict[str, float]:
    """Return the sum of each metric over its labels."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            totals[found[1]] = totals.get(found[1], 0) + float(found[2])
    return totals


def report(admin: str) -> str:
    """Return a line about the master."""
    metrics = scrape(admin)
    gets, hits = (
        metrics["mooncake_master_lookups_total"],
        metrics["mooncake_master_lookup_hits_total"],
    )
    capacity = metrics["master_total_capacity_bytes"]
    used = metrics["mooncake_master_used_bytes"]
    return (
        f"{int(metrics['mooncake_master_objects'])} objects, "
        f"{used / capacity if capacity else 0:.1%} of {int(capacity) >> 20} MiB, "
        f"hit rate {hits / gets if gets else 0:.0%}"
    )


def await_ports(process: subprocess.Popen[bytes], path: Path) -> dict[str, str]:
    """Wait until a master wrote its addresses to a file, and return those on this host."""
    limit = time.monotonic() + 30
    while not path.exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("the master does not start")
        time.sleep(0.05)
    found = json.loads(path.read_text())
    return {name: f"127.0.0.1:{found[name].rpartition(':')[2]}" for name in ("rpc", "admin")}


def main() -> None:
    """Report on a master; put and get something first if no address of one is given."""
    if len(sys.argv) > 1:
        print(report(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ports.json"
        master = [sys.executable, "-m", "mooncake.cli", "--rpc_port=0", "--metrics_port=0"]
        process = subprocess.Popen(
            [*master, "--state_dir=none", f"--ports_file={file}"], stdout=subprocess.DEVNULL
        )
        try:
            ports = await_ports(process, file)
            config = mooncake.StoreConfig(segment_bytes="64MB")
            with mooncake.Store(ports["rpc"], config) as store:
                store.put_many({f"k{number}": b"v" * (1 << 20) for number in range(8)})
                store.get_many([f"k{number}" for number in range(8)])
                print(report(ports["admin"]))
        finally:
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    main()
