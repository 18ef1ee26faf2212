"""The admin page, in a headless browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from conftest import MIB, set_up, start_master

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DEADLINE = 120

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs chromium: install the package chromium"
)


def browse(url: str, profile: Path, *flags: str) -> str:
    """Return the output of the browser after some seconds of virtual time."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=6000",
        *flags,
        url,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(3 * DEADLINE)
def test_page_shows_the_pool_and_escapes_names(tmp_path: Path) -> None:
    master = start_master()
    store = MooncakeDistributedStore()
    try:
        assert set_up(store, master.address) == 0
        assert store.put("model@rank/<img src=x onerror=alert(1)>", b"x" * MIB) == 0
        assert store.put("other/key", b"x") == 0
        assert store.put("model\x1b[31m", b"x") == 0
        assert store.get("other/key") == b"x"
        pinned = ReplicateConfig()
        pinned.with_hard_pin = True
        assert store.put("model/pinned", b"x" * MIB, pinned) == 0
        assert store.put("larger than the pool", b"x" * 65 * MIB) == -200
        url = master.admin
        with urllib.request.urlopen(f"{url}/grafana.json", timeout=DEADLINE) as answer:
            assert json.load(answer)["title"] == "Mooncake pool"
        with urllib.request.urlopen(f"{url}/api/v1/overview", timeout=DEADLINE) as answer:
            segment = json.load(answer)["segments"][0]["name"]

        dom = browse(f"{url}/?prefix=model", tmp_path, "--dump-dom")
        assert re.search(r'id="state"[^>]*>live<', dom), dom
        assert segment.replace(":", ":<wbr>") in dom
        assert "1 client, 1 segment" in dom
        assert "1.00 MiB" in dom
        # Lines may break between the parts of a key.
        assert "model@<wbr>rank/<wbr>&lt;img" in dom
        assert "<img" not in dom
        assert "model\\x1b[31m" in dom
        assert "other/key" not in dom, "the key does not have the prefix"
        assert "all keys" in dom
        # The axes of the plots, and misses and rates beside the totals.
        assert re.search(r'<text x="0" y="[\d.]+">64.0 MiB</text>', dom), "the pool's size"
        assert re.search(r'text-anchor="end">\d\d:\d\d</text>', dom), "the time"
        assert "<dt style=" in dom, "what holds the memory"
        parts = re.findall(r'<dt style="--c: ([^"]+);">([^<]+)</dt>', dom)
        assert len({color for color, _ in parts}) == len(parts) == 7, "one colour each"
        assert "get_replica_list" not in dom, "locate in each table"
        assert ">Hard-pinned</dt><dd>1.00 MiB, 2 %</dd>" in dom
        # What is wrong stands at the top.
        assert '<li class="bad"><b>1 put found no memory in the last 5 minutes</b>' in dom
        assert re.search(r'id="groups">.*>model@</button>.*<td class="n">1</td>', dom)
        assert '<a href="/grafana.json" download="mooncake.json">' in dom
        assert ">Missed</th>" in dom
        assert ">A second</th>" in dom
        assert "0.0.0.0" not in dom
        assert "What the numbers mean" in dom
        idle = start_master()
        try:
            dom = browse(idle.admin, tmp_path, "--dump-dom")
            plot = re.search(r'id="chart-bytes"[^>]*>(.*?)</svg>', dom)
            assert plot is not None
            marks = re.findall(r'<text x="0" y="[\d.]+">([^<]+)</text>', plot[1])
            assert marks == ["0 B/s", "1 B/s", "2 B/s"], "no mark twice"
        finally:
            idle.kill()

        for name, size in [("desk.png", "1280,1500"), ("phone.png", "390,1700")]:
            picture = tmp_path / name
            browse(url, tmp_path, f"--window-size={size}", f"--screenshot={picture}")
            head = picture.read_bytes()[:24]
            assert head[:8] == b"\x89PNG\r\n\x1a\n"
            width = int.from_bytes(head[16:20], "big")
            assert width == int(size.split(",")[0])
    finally:
        store.close()
        master.kill()
