"""A master that serves only clients with its token: stores, dummy clients, commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import MasterProcess, start_master
from test_dummy_client import start_daemon

import mooncake
from mooncake.store import MooncakeDistributedStore

SECRET = "open sesame"
VARIABLE = "MOONCAKE_MASTER_TOKEN"
INVALID_PARAMS = -600
ILLEGAL_CLIENT = -601
PAGE = Path(__file__).parents[2] / "docs/how-to/tokens.md"


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MasterProcess]:
    """A master with a token, in an environment without one."""
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    master = start_master(f"--rpc_token_file={path}")
    yield master
    master.stop()


def test_store_with_the_token_of_its_settings(guarded):
    config = mooncake.StoreConfig(segment_bytes="16MB", token=SECRET)
    assert SECRET not in repr(config)
    with mooncake.Store(guarded.address, config) as store:
        assert store.put("key", b"value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("token", [None, "open sesamE"])
def test_store_without_the_token_is_refused(guarded, token):
    with pytest.raises(mooncake.MooncakeError, match=VARIABLE) as caught:
        mooncake.Store(guarded.address, mooncake.StoreConfig(token=token))
    assert caught.value.code == ILLEGAL_CLIENT
    assert SECRET not in str(caught.value)


def test_setup_takes_the_token_from_the_environment(guarded, monkeypatch, caplog):
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", guarded.address)
    store = MooncakeDistributedStore()
    assert store.setup(*arguments) == INVALID_PARAMS
    assert VARIABLE in caplog.text
    monkeypatch.setenv(VARIABLE, SECRET)
    store = MooncakeDistributedStore()
    assert store.setup(*arguments) == 0
    assert store.put("key", b"value") == 0
    store.close()


def test_commands_use_the_environment(guarded):
    def stat(token: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mooncake", "stat", "--master", guarded.address],
            capture_output=True,
            text=True,
            timeout=50,
            env=os.environ | {VARIABLE: token},
        )

    assert stat(SECRET).returncode == 0
    refused = stat("")
    assert refused.returncode == 1
    assert VARIABLE in refused.stderr


def test_daemon_proves_the_token_for_its_dummy_clients(guarded, monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)
    daemon = start_daemon(guarded.address)
    try:
        for token in (SECRET, ""):
            monkeypatch.setenv(VARIABLE, token)
            store = MooncakeDistributedStore()
            assert store.setup_dummy(16 << 20, 1 << 20, daemon.address) == 0
            assert store.put(f"key {token}", b"value") == 0
            assert store.close() == 0
    finally:
        daemon.stop()


def test_embedded_pool_admits_only_others_with_its_token(monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes="16MB")) as own:
        assert own.put("key", b"value")
        with mooncake.Store(own.master_address) as other:
            assert other.get("key") == b"value"
        monkeypatch.delenv(VARIABLE)
        with pytest.raises(mooncake.MooncakeError, match=VARIABLE):
            mooncake.Store(own.master_address)


def test_client_with_a_token_refuses_a_master_without(master, monkeypatch):
    monkeypatch.setenv(VARIABLE, SECRET)
    with pytest.raises(mooncake.MooncakeError, match=VARIABLE) as caught:
        mooncake.Store(master.address)
    assert caught.value.code == ILLEGAL_CLIENT


def test_health_is_open_to_strangers(guarded):
    with urllib.request.urlopen(f"http://{guarded.address}/health", timeout=10) as answer:
        assert answer.status == 200


def test_lines_of_the_page_guard_a_pool(tmp_path: Path) -> None:
    block = PAGE.read_text().partition("```bash\n")[2].partition("```")[0]
    make, start, export = block.splitlines()
    flags = "--rpc_address=127.0.0.1 --rpc_port=0 --metrics_host=127.0.0.1 --metrics_port=0"
    start = start.replace("mooncake_master", f"exec '{sys.executable}' -m mooncake.cli {flags}")
    shell = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE}
    with subprocess.Popen(["bash", "-c", f"{make}\n{start}"], **shell) as master:
        try:
            ready = re.search(r"rpc=(\S+) admin=(\S+)", master.stdout.readline())
            command = f"'{sys.executable}' -m mooncake stat --master {ready[1]}"
            for lines, code in ((command, 1), (f"{export}\n{command}", 0)):
                run = subprocess.run(["bash", "-c", lines], cwd=tmp_path, timeout=60, check=False)
                assert run.returncode == code
            secrets = [
                (tmp_path / f"{name}.token").read_text().strip() for name in ("master", "admin")
            ]
            # Keys need one of the two tokens, and health needs none, as the page says.
            keys = f"http://{ready[2]}/get_all_keys"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(keys, timeout=20)
            refused.value.close()
            assert refused.value.code == 403
            for secret in secrets:
                shown = {"Authorization": f"Bearer {secret}"}
                with urllib.request.urlopen(
                    urllib.request.Request(keys, headers=shown), timeout=20
                ) as answer:
                    assert answer.status == 200
            with urllib.request.urlopen(f"http://{ready[2]}/health", timeout=20) as answer:
                assert answer.status == 200
            arguments = Path(f"/proc/{master.pid}/cmdline").read_text()
            assert [secret for secret in secrets if secret in arguments] == []
        finally:
            master.terminate()
