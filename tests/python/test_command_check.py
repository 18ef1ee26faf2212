"""`mooncake check`: the settings of each engine, in the forms in which its users write them."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fake_masters
import pytest
from fake_masters import Masters
from metadata_servers import running_etcd

from mooncake._command import masters as _masters
from mooncake._command.check.yaml_subset import _Reader
from mooncake._command.main import main

if TYPE_CHECKING:
    from conftest import MasterProcess

STORE = {
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
    "global_segment_size": "4GB",
    "local_buffer_size": "1GB",
    "protocol": "tcp",
    "device_name": "",
}
LMCACHE = """\
chunk_size: 256
local_cpu: false  # nothing else
remote_url: "mooncakestore://127.0.0.1:50051/"
remote_serde: "naive"
extra_config:
  local_hostname: "localhost"
  metadata_server: "P2PHANDSHAKE"
  master_server_address: "127.0.0.1:50051"
  protocol: "tcp"
  global_segment_size: 4294967296
  local_buffer_size: 1073741824
  transfer_timeout: 1
"""
DAEMON_READY = re.compile(r"mooncake_client ready rpc=(\S+)")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("MOONCAKE_", "MC_", "LMCACHE_", "SGLANG_", "VLLM_")):
            monkeypatch.delenv(name)


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return its code, and the level and remedy of each field that is named."""

    def run(*words: str, offline: bool = True) -> tuple[int, dict[str, list[tuple[str, str, str]]]]:
        code = main(["check", *words, "--json", *(["--offline"] if offline else [])])
        found: dict[str, list[tuple[str, str, str]]] = {}
        answer = json.loads(capsys.readouterr().out)
        if "error" in answer:
            return code, {"": [("unreadable", answer["error"], "")]}
        for row in answer["findings"]:
            found.setdefault(row["field"], []).append((row["level"], row["text"], row["remedy"]))
        found["engine"] = [(answer["engine"], "", "")]
        return code, found

    return run


def errors(found: dict[str, list[tuple[str, str, str]]]) -> dict[str, str]:
    """Return text and remedy of each error, by field."""
    return {
        field: f"{text} | {remedy}"
        for field, rows in found.items()
        for level, text, remedy in rows
        if level == "error"
    }


@pytest.mark.parametrize(
    ("engine", "config"),
    [
        ("vllm", json.dumps(STORE)),
        ("vllm", '{"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}'),
        ("sglang", json.dumps(STORE | {"local_hostname": "localhost", "check_server": True})),
        ("sglang", json.dumps(STORE | {"device_name": '{"0": ""}', "prefetch_threshold": 256})),
        ("lmcache", LMCACHE),
        ("lmcache", LMCACHE.replace("50051/", "50051/?device=")),
    ],
)
def test_right_settings_are_right(check: Any, tmp_path: Path, engine: str, config: str):
    file = tmp_path / "config"
    file.write_text(config, encoding="utf-8")
    code, found = check(str(file))
    assert (code, errors(found)) == (0, {})
    assert found["engine"][0][0] == engine
    if config.startswith("{"):
        assert check(config) == (code, found), "the text itself"


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"protocols": "tcp"}, "protocols", "is no setting | Write protocol."),
        ({"protocol": "rmda"}, "protocol", "'rmda' is no protocol | Write rdma."),
        (
            {"protocol": "rdma", "device_name": "mlx5_77"},
            "device_name",
            "this machine has no device mlx5_77; .*uses all active devices",
        ),
        (
            {"master_server_address": "http://10.0.0.1:50051"},
            "master_server_address",
            "begins with http:// | Write 10.0.0.1:50051 without http://; .*",
        ),
        (
            {"master_server_address": "etcd://a:2379/x"},
            "master_server_address",
            "is 'etcd://a:2379/x' | Write \"etcd://a:2379;b:2379\".",
        ),
        (
            {"master_server_address": "redis://user:secret@a:x"},
            "master_server_address",
            'begins with redis:// and is no such address | Write "redis://HOST:6379".',
        ),
        ({"master_server_address": "k8s://"}, "master_server_address", "is 'k8s://' | Write"),
        (
            {"master_server_address": "10.0.0.1"},
            "master_server_address",
            "'10.0.0.1' has no port | Write \"10.0.0.1:50051\".",
        ),
        (
            {"master_server_address": "10.0.0.1:1,10.0.0.2"},
            "master_server_address",
            "'10.0.0.2' has no port | Write \"10.0.0.2:50051\".",
        ),
        (
            {"master_server_address": "fe80::1"},
            "master_server_address",
            r"'fe80::1' has no port | Write \"\[fe80::1\]:50051\".",
        ),
        (
            {"master_server_address": "etcd://" + ";".join("a" * 17)},
            "master_server_address",
            "is 'etcd://a;.*' | Write \"etcd://",
        ),
        (
            {"master_server_address": ",".join(["10.0.0.1:1"] * 17)},
            "master_server_address",
            "at most 16 addresses can be named.* | Name fewer",
        ),
        ({"master_server_address": 50051}, "master_server_address", "is 50051, not the address"),
        (
            {"metadata_server": "p2p_handshake"},
            "metadata_server",
            ".* | Write P2PHANDSHAKE, in cap",
        ),
        ({"metadata_server": None}, "metadata_server", "is None | Write P2PHANDSHAKE"),
        ({"global_segment_size": 4}, "global_segment_size", "is 4 bytes: too small .*4GB"),
        ({"global_segment_size": "lots"}, "global_segment_size", "not a size: 'lots'"),
        ({"global_segment_size": True}, "global_segment_size", "is True, not a size"),
        ({"global_segment_size": "900TB"}, "global_segment_size", "is 900 TiB, and this machine"),
        ({"local_buffer_size": "-1"}, "local_buffer_size", "not a size: '-1'"),
        ({"local_hostname": "nowhere.invalid"}, "local_hostname", "the name nowhere.invalid is"),
        ({"local_hostname": "192.0.2.1"}, "local_hostname", "192.0.2.1 is no address of this h"),
        ({"standalone_storage": "maybe"}, "standalone_storage", "is 'maybe' | Write true or f"),
        ({"standalone_storage": "1"}, "client_server_address", "is missing: .*127.0.0.1:50052"),
        ({"tenant_id": 7}, "tenant_id", "is 7, not text"),
    ],
)
def test_wrong_setting_is_named(check: Any, changes: dict[str, Any], field: str, expected: str):
    code, found = check(json.dumps(STORE | changes))
    assert code == 1
    named = errors(found)
    assert list(named) == [field]
    assert re.match(expected.replace(" | ", r" \| "), named[field]), named


def test_missing_setting_is_named(check: Any):
    code, found = check('{"protocol": "tcp", "global_segment_size": "1GB"}')
    assert code == 1
    assert list(errors(found)) == ["metadata_server", "master_server_address"]


def test_odd_settings_are_warned_of(check: Any):
    changes = {"master_server_address": "10.0.0.1:9003", "local_hostname": "localhost"}
    changes |= {"metadata_server": "http://10.0.0.1:8080"}
    code, found = check(json.dumps(STORE | changes | {"own_thing": 1, "global_segment_size": 0}))
    assert code == 0
    levels = {field: rows[0][0] for field, rows in found.items()}
    assert {field: level for field, level in levels.items() if level == "warning"} == {
        "master_server_address": "warning",
        "metadata_server": "warning",
        "local_hostname": "warning",
    }
    assert (levels["own_thing"], levels["global_segment_size"]) == ("note", "note")
    assert "admin port" in found["master_server_address"][0][1]


@pytest.mark.parametrize(
    ("config", "field", "expected"),
    [
        ({"kv_connector": "MooncakeConnection"}, "kv_connector", ".*Write MooncakeConnector"),
        ({"kv_connector": "NixlConnector"}, "kv_connector", ".*does not use Mooncake"),
        ({"kv_role": "kv_bth"}, "kv_role", "'kv_bth' is no role .*Write kv_both"),
        ({"kv_roles": "kv_both"}, "kv_roles", "is no setting .*Write kv_role"),
        (
            {"kv_connector_extra_config": {"mooncake_protocols": "tcp"}},
            "kv_connector_extra_config.mooncake_protocols",
            "is no setting .*Write mooncake_protocol",
        ),
        (
            {"kv_connector_extra_config": {"mooncake_protocol": "tpc"}},
            "kv_connector_extra_config.mooncake_protocol",
            "'tpc' is no protocol .*Write tcp",
        ),
        (
            {"kv_connector_extra_config": []},
            "kv_connector_extra_config",
            "is \\[\\], not an object",
        ),
        ({"kv_connector": "MooncakeStoreConnector"}, "MOONCAKE_CONFIG_PATH", "is not set"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "connectors": [{"kv_connector": "MooncakeConnector", "kv_role": "both"}]
                },
            },
            "kv_connector_extra_config.connectors[0].kv_role",
            "'both' is no role",
        ),
    ],
)
def test_transfer_config_of_vllm(check: Any, config: dict[str, Any], field: str, expected: str):
    right = {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}
    code, found = check(json.dumps(right | config))
    assert code == 1
    assert list(errors(found)) == [field]
    assert re.match(expected, errors(found)[field]), found


def test_store_connector_reads_its_file(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "mooncake_config.json"
    file.write_text(json.dumps(STORE | {"protocol": "tpc"}), encoding="utf-8")
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    code, found = check('{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}')
    assert (code, list(errors(found))) == (1, ["protocol"])
    assert found["PYTHONHASHSEED"][0][0] == "warning"


def test_file_that_lmcache_reads_instead_is_named(
    check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    given, own = tmp_path / "lm.yaml", tmp_path / "own.json"
    given.write_text(LMCACHE, encoding="utf-8")
    own.write_text(
        json.dumps(STORE | {"local_hostname": "localhost", "protocol": "tpc"}), encoding="utf-8"
    )
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(own))
    code, found = check(str(given))
    assert (code, list(errors(found))) == (1, [f"{own}: protocol"])
    assert not [name for name in found if name.startswith("extra_config")]
    own.unlink()
    code, found = check(str(given))
    assert code == 2
    assert f"{own}, which MOONCAKE_CONFIG_PATH names: No such file" in found[""][0][1]


@pytest.mark.parametrize(
    ("old", "new", "field", "expected"),
    [
        ("mooncakestore://", "mooncake_store://", "remote_url", '.*Write "mooncakestore://HOST'),
        ("mooncakestore://", "redis://", "remote_url", ".*another backend"),
        ("remote_url", "remote_uri", "remote_uri", "is no setting .*Write remote_url"),
        ("extra_config", "extra_conf", "extra_conf", "is no setting .*Write extra_config"),
        ("  protocol", "  protocols", "extra_config.protocols", "is no setting .*Write protocol"),
        (
            '  local_hostname: "localhost"\n',
            "",
            "extra_config.local_hostname",
            "is missing, and LM",
        ),
    ],
)
def test_file_of_lmcache(check: Any, tmp_path: Path, old: str, new: str, field: str, expected: str):
    file = tmp_path / "lmcache.yaml"
    file.write_text(LMCACHE.replace(old, new), encoding="utf-8")
    code, found = check(str(file))
    assert code == 1
    assert re.match(expected, errors(found)[field]), found


def test_lmcache_ignores_the_address_in_its_url(check: Any, tmp_path: Path):
    file = tmp_path / "lmcache.yaml"
    other = LMCACHE.replace('address: "127.0.0.1:50051"', 'address: "127.0.0.1:50061"')
    file.write_text(other, encoding="utf-8")
    code, found = check(str(file))
    level, text = found["remote_url"][0][:2]
    assert (code, level) == (0, "warning")
    assert "127.0.0.1:50051 and 127.0.0.1:50061, which LMCache 0.5.6 joins" in text


def test_variables_are_checked(check: Any, monkeypatch: pytest.MonkeyPatch):
    code, found = check()
    assert code == 2
    assert "MOONCAKE_MASTER is not set" in found[""][0][1]
    monkeypatch.setenv("MOONCAKE_MASTER", "127.0.0.1:50051")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "4gb")
    assert check()[0] == 0
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tpc")
    code, found = check()
    assert (code, list(errors(found))) == (1, ["MOONCAKE_PROTOCOL"])


@pytest.mark.parametrize(
    "address",
    [
        *("etcd://a", "etcd://a:1;[::1]:2;c", "redis://user:secret@a:1/2", "redis://a"),
        *("k8s://lease", "k8s://space/lease", "10.0.0.1:1, 10.0.0.2:2"),
    ],
)
def test_master_may_be_one_of_several(check: Any, address: str):
    own = {"local_hostname": "localhost", "check_server": False}
    code, found = check(json.dumps(STORE | own | {"master_server_address": address}))
    assert (code, errors(found)) == (0, {})


def test_check_server_of_sglang_needs_one_master(check: Any, monkeypatch: pytest.MonkeyPatch):
    settings = STORE | {"check_server": True, "master_server_address": "etcd://a:1;b:1"}
    code, found = check(json.dumps(settings))
    assert (code, found["engine"][0][0]) == (1, "sglang")
    assert (
        "a host named etcd, not that of the leader | Write false." in errors(found)["check_server"]
    )
    code, found = check(json.dumps(settings | {"master_server_address": "10.0.0.1:1,10.0.0.2:1"}))
    assert code == 0
    assert found["check_server"][0][:2] == (
        "warning",
        "is on: SGLang asks 10.0.0.1 alone, and waits while another master leads",
    )
    monkeypatch.setenv("MOONCAKE_MASTER", "k8s://lease")
    monkeypatch.setenv("MOONCAKE_CHECK_SERVER", "1")
    assert "Write false." in errors(check()[1])["MOONCAKE_CHECK_SERVER"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "has no settings"),
        ('{"a": ', "is no JSON"),
        ("a: b\n  c: d", "line 2"),
        ("", "has no settings"),
    ],
)
def test_unreadable_file_gives_code_two(check: Any, tmp_path: Path, text: str, why: str):
    file = tmp_path / "config"
    file.write_text(text, encoding="utf-8")
    code, found = check(str(file))
    assert code == 2
    assert why in found[""][0][1] or "is no YAML" in found[""][0][1]
    assert check(str(tmp_path / "none"))[0] == 2


def test_yaml_without_a_library_reads_what_engines_use():
    assert _Reader(LMCACHE).document()["extra_config"]["global_segment_size"] == 4 << 30
    text = 'a:\n- 1\n- \'x # y\'\nb: {"c": [1]}\nd: "q"  # e\nf:\n  g: null\n  h: 1.5\n'
    expected = {"a": [1, "x # y"], "b": {"c": [1]}, "d": "q", "f": {"g": None, "h": 1.5}}
    assert _Reader(text).document() == expected
    for bad, line in [("a: &x 1", 1), ("a: 1\n b: 2", 2), ("a: 'x", 1), ("x", 1)]:
        with pytest.raises(ValueError, match=f"line {line} "):
            _Reader(bad).document()


def test_servers_are_asked(check: Any, master: MasterProcess):
    right = STORE | {"master_server_address": master.address, "global_segment_size": "64MB"}
    code, found = check(json.dumps(right), offline=False)
    assert code == 0
    assert "answers" in found["master_server_address"][-1][1]
    code, found = check(json.dumps(right | {"local_hostname": "localhost"}), "--try", offline=False)
    assert (code, errors(found)) == (0, {})
    assert any("moved an object" in text for _, text, _ in found[""])
    nobody = right | {"master_server_address": "127.0.0.1:1"}
    code, found = check(json.dumps(nobody), offline=False)
    assert code == 1
    assert "no connection to the master" in errors(found)["master_server_address"]
    wrong = right | {"master_server_address": master.admin.removeprefix("http://")}
    assert check(json.dumps(wrong), offline=False)[0] == 1, "the admin port"
    silent = right | {"metadata_server": "http://127.0.0.1:1/metadata"}
    code, found = check(json.dumps(silent), offline=False)
    assert list(errors(found)) == ["metadata_server"]


@pytest.fixture
def elected(master: MasterProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Masters]:
    """A pool of a real master, whose admin port is that of the first of three masters."""
    with fake_masters.running(3) as masters:
        monkeypatch.setattr(_masters.admin, "address_of_pool", lambda _: masters.admin(0))
        yield masters


def test_each_of_several_masters_is_asked(check: Any, master: MasterProcess, elected: Masters):
    settings = STORE | {"master_server_address": f"{master.address},127.0.0.1:1"}
    code, found = check(json.dumps(settings), offline=False)
    rows = {(level, text) for level, text, _ in found["master_server_address"]}
    assert code == 0
    assert ("ok", "127.0.0.1:50051 leads, view 7") in rows
    assert ("ok", "the standby 127.0.0.3:50051 is in sync") in rows
    elected.in_sync, elected.service_error = {0}, "no route to host"
    rows = {
        (level, text)
        for level, text, _ in check(json.dumps(settings), offline=False)[1]["master_server_address"]
    }
    assert ("warning", "no standby is in sync with 127.0.0.1:50051") in rows
    failure = "127.0.0.1:50051 cannot use the lease service: no route to host"
    assert ("warning", failure) in rows
    elected.state = "recovering"
    code, found = check(json.dumps(settings), offline=False)
    assert code == 1
    assert "does not serve yet: it is recovering" in errors(found)["master_server_address"]


def test_address_of_one_of_several_masters_is_odd(
    check: Any, master: MasterProcess, elected: Masters
):
    elected.rpc_port = master.port
    settings = STORE | {"master_server_address": master.address}
    code, found = check(json.dumps(settings), offline=False)
    assert code == 0
    named = ",".join(elected.address(index) for index in range(3))
    assert (
        "warning",
        "names one of 3 masters: no pool is found when another leads",
        f"Write etcd://10.0.0.1:2379, or {named}.",
    ) in found["master_server_address"]


def test_masters_with_a_pool_each_are_no_list(check: Any, master: MasterProcess, elected: Masters):
    elected.is_enabled = False
    listed = f"{master.address},{elected.address(1)}"
    code, found = check(json.dumps(STORE | {"master_server_address": listed}), offline=False)
    assert code == 1
    expected = f"{master.address} and {elected.address(1)} run without --enable_ha: each has a pool"
    assert expected in errors(found)["master_server_address"]


def test_lease_service_is_asked(check: Any, master: MasterProcess, tmp_path: Path):
    with running_etcd(tmp_path) as address:
        settings = STORE | {"master_server_address": f"etcd://{address}"}
        code, found = check(json.dumps(settings), offline=False)
        assert code == 1
        text, remedy = errors(found)["master_server_address"].split(" | ")
        assert "no master leads" in text
        assert "--cluster_id=mooncake_cluster" in remedy
        key = base64.b64encode(b"mooncake-store/mooncake_cluster/master_view").decode()
        value = base64.b64encode(master.address.encode()).decode()
        url = f"http://{address}/v3/kv/put"
        body = json.dumps({"key": key, "value": value}).encode()
        urllib.request.urlopen(url, body, timeout=20).close()
        code, found = check(json.dumps(settings), offline=False)
    assert (code, errors(found)) == (0, {})
    texts = [text for _, text, _ in found["master_server_address"]]
    assert texts[0] == f"the master at {master.address} answers"
    assert "runs without --enable_ha: none takes over" in texts[1]


def test_daemon_is_asked(check: Any, master: MasterProcess):
    flags = ["--host=127.0.0.1", "--port=0", "--global_segment_size=64MB"]
    flags += [f"--master_server_address={master.address}", "--metadata_server=P2PHANDSHAKE"]
    command = [sys.executable, "-m", "mooncake.cli_client", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = DAEMON_READY.search(process.stdout.readline())
            assert ready is not None
            daemon = {"standalone_storage": True, "client_server_address": ready.group(1)}
            code, found = check(json.dumps(STORE | daemon), offline=False)
            assert (code, errors(found)) == (0, {})
            assert "answers" in found["client_server_address"][0][1]
        finally:
            process.terminate()
    code, found = check(json.dumps(STORE | daemon), offline=False)
    assert list(errors(found)) == ["client_server_address"]


def test_text_names_field_and_remedy(capsys: pytest.CaptureFixture[str]):
    assert main(["check", json.dumps(STORE | {"protocol": "tpc"}), "--offline"]) == 1
    shown = capsys.readouterr().out
    assert "ERROR    protocol: 'tpc' is no protocol\n           Write tcp.\n" in shown
    assert shown.endswith("something is wrong: 1 error, 0 warnings\n")
