"""The guide for operators names only existing flags, metrics, admin paths and codes."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from conftest import MasterProcess, start_master

import mooncake
from mooncake.errors import explain

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guide/operating.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs/reference/options-master.md").read_text(encoding="utf-8")
OPTIONS_OF_DAEMON = (ROOT / "docs/reference/options-client.md").read_text(encoding="utf-8")


def named(pattern: str) -> set[str]:
    """Return all names of this form in the guide."""
    found = set(re.findall(pattern, GUIDE))
    assert found, pattern
    return found


def test_guide_names_only_existing_flags():
    for flag in named(r"--([a-z]+_[a-z_]+)"):
        assert f"`{flag}`" in OPTIONS + OPTIONS_OF_DAEMON, flag


def test_guide_names_only_existing_metrics(tmp_path: Path):
    master = start_master(f"--state_dir={tmp_path}")
    try:
        with urllib.request.urlopen(f"{master.admin}/metrics", timeout=20) as reply:
            served = set(re.findall(r"^# TYPE (\S+)", reply.read().decode(), re.MULTILINE))
    finally:
        master.stop()
    table = GUIDE.split("## Watch")[1].split("##")[0]
    named_metrics = set(re.findall(r"`((?:mooncake_)?master_[a-z_]+|[a-z_]+_nums_)`", table))
    assert len(named_metrics) > 10
    assert named_metrics <= served


def test_guide_names_only_existing_admin_paths(master: MasterProcess):
    for path in named(r"(?:localhost:9003|`)(/[a-z_/0-9]+(?:\.json|\.yml)?)"):
        body = b"" if f"-X POST http://localhost:9003{path}" in GUIDE else None
        # 400 and 409 ask for a body, a parameter or an option; an unknown path answers 404.
        assert status(master.admin + path, body) in (200, 400, 409), path


def status(url: str, body: bytes | None) -> int:
    try:
        with urllib.request.urlopen(url, body, timeout=20) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def test_guide_names_only_known_error_codes():
    for number in named(r"(-\d{3,4})\b"):
        assert "unknown" not in explain(int(number)).lower()


def test_quota_file_of_the_guide_admits_its_tenants(tmp_path: Path):
    file = tmp_path / "quotas.yaml"
    file.write_text(GUIDE.partition("```yaml\n")[2].partition("```")[0])
    flags = re.findall(r"^mooncake_master .*quotas.yaml$", GUIDE, re.MULTILINE)[0].split()[1:]
    flags = [flag.replace(file.name, str(file)) for flag in flags]
    master = start_master("--state_dir=none", *flags)
    try:
        for tenant in ("default", "chat", "other"):
            config = mooncake.StoreConfig(segment_bytes="16MB", tenant=tenant)
            with mooncake.Store(master.address, config) as store:
                if tenant == "other":
                    with pytest.raises(mooncake.DeniedError, match="no quota"):
                        store.put("key", b"value")
                else:
                    assert store.put("key", b"value")
    finally:
        master.stop()
