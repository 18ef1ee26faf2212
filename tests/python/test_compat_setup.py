"""`setup`, `close`, and the results of calls before and after them."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request

import pytest
from conftest import MIB, PROMPT_S, MasterProcess, run_script, set_up, start_master

import mooncake
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.store.setup import SetupArguments

INVALID = -600


@pytest.fixture
def fresh():
    store = MooncakeDistributedStore()
    yield store
    assert store.close() == 0


# The result of every call on a store without `setup`.
UNREADY = [
    (lambda s: s.put("k", b"v"), INVALID),
    (lambda s: s.upsert("k", b"v"), INVALID),
    (lambda s: s.put_batch(["k"], [b"v"]), INVALID),
    (lambda s: s.upsert_batch(["k"], [b"v"]), INVALID),
    (lambda s: s.put_parts("k", b"v"), INVALID),
    (lambda s: s.upsert_parts("k", b"v"), INVALID),
    (lambda s: s.get("k"), b""),
    (lambda s: s.get_batch(["k"]), [b""]),
    (lambda s: s.get_batch([]), [b""]),
    (lambda s: s.get_buffer("k"), None),
    (lambda s: s.batch_get_buffer(["k", "l"]), [None, None]),
    (lambda s: s.is_exist("k"), INVALID),
    (lambda s: s.batch_is_exist(["k", "l"]), [INVALID] * 2),
    (lambda s: s.get_size("k"), INVALID),
    (lambda s: s.remove("k"), INVALID),
    (lambda s: s.batch_remove(["k", "l"]), [INVALID] * 2),
    (lambda s: s.remove_by_regex("k"), INVALID),
    (lambda s: s.remove_all(), INVALID),
    (lambda s: s.register_buffer(4096, 10), INVALID),
    (lambda s: s.unregister_buffer(4096), INVALID),
    (lambda s: s.put_from("k", 4096, 10), INVALID),
    (lambda s: s.upsert_from("k", 4096, 10), INVALID),
    (lambda s: s.get_into("k", 4096, 10), INVALID),
    (lambda s: s.batch_put_from(["k"], [4096], [10]), [INVALID]),
    (lambda s: s.batch_upsert_from(["k"], [4096], [10]), [INVALID]),
    (lambda s: s.batch_get_into(["k"], [4096], [10]), [INVALID]),
    (lambda s: s.batch_put_from_multi_buffers(["k"], [[4096]], [[10]]), []),
    (lambda s: s.batch_get_into_multi_buffers(["k"], [[4096]], [[10]]), [INVALID]),
    (lambda s: s.health_check(), 1),
    (lambda s: s.get_hostname(), ""),
    (lambda s: s.close(), 0),
]


@pytest.mark.parametrize("call", UNREADY, ids=range(len(UNREADY)))
def test_calls_before_setup_return_error_values(call):
    action, answer = call
    assert action(MooncakeDistributedStore()) == answer


def test_calls_after_close_return_error_values(fresh):
    assert set_up(fresh, "embedded") == 0
    assert fresh.close() == 0
    for action, answer in UNREADY:
        assert action(fresh) == answer


def test_call_before_setup_sets_last_error(fresh):
    assert fresh.put("k", b"v") == INVALID
    error = mooncake.last_error()
    assert isinstance(error, mooncake.ClosedError)
    assert "setup()" in str(error)


def test_failed_setup_keeps_only_the_hostname(fresh):
    assert fresh.setup("localhost:7777", "P2PHANDSHAKE", 0, 0, "foo", "", "embedded") == INVALID
    assert (fresh.put("k", b"v"), fresh.get("k"), fresh.health_check()) == (INVALID, b"", 1)
    assert fresh.get_hostname() == "localhost:7777"
    assert fresh.close() == 0


def test_store_shows_its_name_and_master(fresh):
    assert repr(fresh) == "<mooncake.store.MooncakeDistributedStore not set up>"
    assert set_up(fresh, "embedded") == 0
    name = fresh.get_hostname()
    assert repr(fresh).startswith(f"<mooncake.store.MooncakeDistributedStore {name} master=")
    fresh.close()
    assert repr(fresh) == "<mooncake.store.MooncakeDistributedStore not set up>"


def test_second_close_and_second_setup_work(fresh):
    assert set_up(fresh, "embedded") == 0
    assert fresh.put("k", b"v") == 0
    assert set_up(fresh, "embedded") == 0
    assert fresh.get("k") == b"", "a second setup begins a new pool"
    assert fresh.put("k", b"w") == 0
    assert (fresh.close(), fresh.close()) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("", "P2PHANDSHAKE", 0, 0, "tcp", "", "embedded"), INVALID),
        (("localhost", "", 0, 0, "tcp", "", "embedded"), INVALID),
        (("localhost", "P2PHANDSHAKE", 0, 0, "foo", "", "embedded"), INVALID),
        (("localhost", "P2PHANDSHAKE", 1, 0, "tcp", "", "embedded"), INVALID),
        (("localhost", "P2PHANDSHAKE", 16 * MIB - 1, 0, "tcp", "", "embedded"), INVALID),
        (("localhost", "P2PHANDSHAKE", 16 * MIB, 100, "tcp", "", "embedded"), 0),
        (("localhost", "P2PHANDSHAKE", 0, 0, "rdma", "", "embedded"), 0),
        (("localhost:99999", "P2PHANDSHAKE", 0, 0, "tcp", "", "embedded"), 0),
        (("localhost", "http://127.0.0.1:1/metadata", 0, 0, "tcp", "", "embedded"), INVALID),
        (("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "no address"), INVALID),
    ],
)
def test_setup_validates_like_upstream(fresh, arguments, code):
    assert fresh.setup(*arguments) == code


@pytest.mark.parametrize(
    ("variables", "devices", "code"),
    [
        ({"MC_MS_AUTO_DISC": "0"}, "", INVALID),
        ({"MC_MS_AUTO_DISC": "0"}, "auto-discovery", 0),
        ({"MC_MS_AUTO_DISC": "0"}, "none0", 0),
        ({"MC_MS_AUTO_DISC": "1", "MC_MS_FILTERS": "none1"}, "none0", 0),
        ({"MC_TE_FILTERS": "none0", "MC_MS_FILTERS": "none1"}, "", INVALID),
        ({"MC_TE_FILTERS": "none0", "MC_FORCE_HCA": "0"}, "", INVALID),
        ({"MC_TE_FILTERS": "none0", "MC_FORCE_HCA": "0", "MC_FORCE_TCP": "1"}, "", 0),
    ],
)
def test_variables_choose_rdma_devices(fresh, monkeypatch, variables, devices, code):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    arguments = "localhost", "P2PHANDSHAKE", 0, 0, "rdma", devices, "embedded"
    assert fresh.setup(*arguments) == code


def test_documented_defaults_are_accepted(fresh):
    assert fresh.setup("localhost", "P2PHANDSHAKE", master_server_addr="embedded") == 0
    assert fresh.put("k", b"v") == 0


@pytest.mark.parametrize(
    "config",
    [
        {"master_server_addr": "embedded"},
        {"master_server_address": "embedded", "device_name": "", "global_segment_size": "32 mb"},
        {"master_server_addr": "embedded", "global_segment_size": "16777216.0", "tenant_id": ""},
        {"master_server_addr": "embedded", "local_buffer_size": 0, "rdma_devices": None},
    ],
)
def test_setup_accepts_a_dict(fresh, config):
    config = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **config}
    assert fresh.setup(config) == 0
    assert (fresh.put("k", b"v"), fresh.get("k")) == (0, b"v")
    assert fresh.setup(config=config) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"local_hostname": None},
        {"metadata_server": ""},
        {"global_segment_size": "abc"},
        {"global_segment_size": 100},
        {"local_buffer_size": 100},
        {"local_buffer_size": "2tb"},
        {"client_http_port": "x"},
        {"protocol": "foo"},
    ],
)
def test_rejects_dict_with_invalid_value(fresh, change):
    config = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_addr": "embedded",
        **change,
    }
    assert fresh.setup(config) == INVALID


def test_switch_that_cannot_be_read_keeps_its_default(caplog):
    config = {"enable_ssd_prefetch": "maybe", "enable_checksum": "perhaps"}
    read = SetupArguments.from_dict(config)
    assert (read.enable_ssd_prefetch, read.enable_checksum) == (True, False)
    assert "enable_ssd_prefetch='maybe' is neither true nor false and is ignored" in caplog.text
    assert not SetupArguments.from_dict({"enable_ssd_prefetch": "off"}).enable_ssd_prefetch


def test_unknown_setting_logs_the_nearest_name(fresh, caplog):
    config = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_addr": "embedded",
        "globl_segment_size": 5,
    }
    assert fresh.setup(config) == 0
    assert "globl_segment_size" in caplog.text
    assert "'global_segment_size'" in caplog.text


def test_wrong_argument_types_raise(fresh):
    with pytest.raises(TypeError, match="metadata_server"):
        fresh.setup("localhost")
    with pytest.raises(TypeError, match="local_hostname"):
        fresh.setup()
    with pytest.raises(TypeError, match="global_segment_size"):
        fresh.setup("localhost", "P2PHANDSHAKE", "16MB")
    with pytest.raises(RuntimeError, match="Unable to cast"):
        fresh.setup("localhost", "P2PHANDSHAKE", engine=object())
    with pytest.raises(TypeError, match="nonsense"):
        fresh.setup("localhost", "P2PHANDSHAKE", nonsense=1)
    with pytest.raises(TypeError, match="local_hostname"):
        fresh.setup([], "P2PHANDSHAKE")
    for sizes in ((1 << 64, 0), (0, 1 << 64), (-1, 0)):
        with pytest.raises(TypeError, match="sizes"):
            fresh.setup("localhost", "P2PHANDSHAKE", *sizes)


def test_wrong_argument_leaves_the_store_set_up(fresh):
    assert set_up(fresh, "embedded") == 0
    assert fresh.put("k", b"v") == 0
    name = fresh.get_hostname()
    offload = {"enable_ssd_offload": True, "ssd_offload_path": "/nowhere"}
    for wrong in ({"global_segment_size": "16MB"}, {"tenant_id": 5}, {"client_http_port": 1.0}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            fresh.setup("localhost", "P2PHANDSHAKE", **wrong)
    with pytest.raises(ValueError, match="FileStorage"):
        fresh.setup("localhost", "P2PHANDSHAKE", **offload)
    assert (fresh.health_check(), fresh.get("k"), fresh.get_hostname()) == (0, b"v", name)


def test_wrong_value_closes_the_store(fresh, caplog):
    assert set_up(fresh, "embedded") == 0
    assert fresh.setup("localhost:1", "P2PHANDSHAKE", 0, 0, "foo", "", "embedded") == INVALID
    assert (fresh.health_check(), fresh.get_hostname()) == (1, "localhost:1")
    assert "unknown protocol" in caplog.text
    assert "unknown protocol" in str(mooncake.last_error())


def test_sizes_may_be_integers_of_numpy(fresh):
    numpy = pytest.importorskip("numpy")
    sizes = (numpy.int64(16 * MIB), numpy.uint32(MIB))
    assert fresh.setup("localhost", "P2PHANDSHAKE", *sizes, master_server_addr="embedded") == 0
    with pytest.raises(TypeError, match="global_segment_size"):
        fresh.setup("localhost", "P2PHANDSHAKE", numpy.float64(16 * MIB))
    assert fresh.health_check() == 0


def test_dict_excludes_other_arguments(fresh):
    config = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    with pytest.raises(TypeError, match="protocol"):
        fresh.setup(config=config, protocol="rdma")
    with pytest.raises(TypeError, match="metadata_server"):
        fresh.setup(config, "P2PHANDSHAKE")
    with pytest.raises(TypeError, match="config"):
        fresh.setup(config=[("local_hostname", "localhost")])
    assert fresh.health_check() == 1


def test_missing_offload_folder_is_rejected(fresh):
    with pytest.raises(ValueError, match="Invalid FileStorage configuration"):
        fresh.setup(
            "localhost", "P2PHANDSHAKE", enable_ssd_offload=True, ssd_offload_path="/nowhere"
        )
    assert fresh.health_check() == 1


def test_ssd_offload_needs_a_master_with_offload(fresh, tmp_path):
    plain = start_master()
    try:
        asked = {"enable_ssd_offload": True, "ssd_offload_path": str(tmp_path)}
        setup = ("localhost", "P2PHANDSHAKE", 16 * MIB, 16 * MIB, "tcp", "", plain.address)
        assert fresh.setup(*setup, **asked) == -1300
        assert fresh.health_check() == 1
        assert fresh.setup(*setup) == 0, "now without offload"
        assert fresh.put("k", bytes(MIB)) == 0
    finally:
        plain.stop()


JOIN_AS_TENANT = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
tenant, master = sys.argv[1:]
joined = store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", master, tenant_id=tenant)
assert joined == 0, joined
assert store.health_check() == 0
store.close()
"""


@pytest.mark.parametrize(("tenant", "warnings"), [("team-a", 1), ("default", 0), ("", 0)])
def test_setup_warns_of_an_ignored_tenant(master, tenant, warnings):
    done = run_script(JOIN_AS_TENANT, tenant, master.address)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("--enable_multi_tenants") == warnings, done.stderr
    assert done.stderr.count("team-a") == warnings


def test_hostname_without_port_gets_a_port(fresh):
    assert set_up(fresh, "embedded") == 0
    name = re.fullmatch(r"localhost:(\d+)", fresh.get_hostname())
    assert name
    assert 12300 <= int(name[1]) <= 14300


def test_name_ports_come_from_the_environment(fresh, monkeypatch):
    monkeypatch.setenv("MC_STORE_CLIENT_MIN_PORT", "20001")
    monkeypatch.setenv("MC_STORE_CLIENT_MAX_PORT", "20001")
    assert set_up(fresh, "embedded") == 0
    assert fresh.get_hostname() == "localhost:20001"
    fresh.close()
    monkeypatch.setenv("MC_STORE_CLIENT_MAX_PORT", "nonsense")
    assert set_up(fresh, "embedded") == INVALID


def test_stores_of_one_host_have_different_names(fresh, monkeypatch, caplog):
    other, third = MooncakeDistributedStore(), MooncakeDistributedStore()
    monkeypatch.setenv("MC_STORE_CLIENT_MIN_PORT", "20011")
    monkeypatch.setenv("MC_STORE_CLIENT_MAX_PORT", "20012")
    try:
        assert set_up(fresh, "embedded") == 0
        assert set_up(other, "embedded") == 0
        names = {fresh.get_hostname(), other.get_hostname()}
        assert names == {"localhost:20011", "localhost:20012"}
        assert set_up(third, "embedded") == INVALID
        assert "MC_STORE_CLIENT_MAX_PORT=20012 is free" in caplog.text
        other.close()
        assert set_up(third, "embedded") == 0
    finally:
        other.close()
        third.close()


def test_metadata_server_rejects_duplicate_names(fresh, master: MasterProcess):
    metadata = f"http://{master.metadata}/metadata"
    other = MooncakeDistributedStore()
    try:
        assert set_up(fresh, master.address, metadata=metadata, host="localhost:13579") == 0
        assert set_up(other, master.address, metadata=metadata, host="localhost:13579") == INVALID
        assert set_up(other, master.address, metadata=metadata, host="localhost") == 0
    finally:
        other.close()


def test_unknown_protocol_is_named_in_the_error(fresh, caplog):
    assert fresh.setup("localhost", "P2PHANDSHAKE", 0, 0, "tpc", "", "embedded") == -600
    [record] = caplog.records
    assert record.getMessage().startswith(
        "setup failed: unknown protocol 'tpc'; this build has tcp or rdma; "
    )


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda s: set_up(s, "127.0.0.1:1"), INVALID),
        (lambda s: s.setup("localhost", "P2PHANDSHAKE", 0, 0, "foo", "", "embedded"), INVALID),
        (lambda s: s.init_all("foo", ""), INVALID),
        (lambda s: s.setup_dummy(0, 0, "127.0.0.1:1"), -1),
    ],
    ids=["no master", "wrong protocol", "init_all", "setup_dummy"],
)
def test_failed_setup_says_what_later_calls_return(fresh, caplog, call, code):
    # LMCache ignores the number that setup returns, and takes each is_exist other than 0 for a hit.
    assert call(fresh) == code
    [record] = caplog.records
    assert "until a setup succeeds each call fails" in record.getMessage()
    said = re.search(r"is_exist returns (-\d+), which is no hit", record.getMessage())
    assert said is not None, record.getMessage()
    assert fresh.is_exist("key") == int(said[1])
    assert (fresh.get("key"), fresh.put("key", b"v")) == (b"", INVALID)


def test_successful_setup_logs_no_failure(fresh, caplog):
    assert set_up(fresh, "embedded") == 0
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_unreachable_master_is_named_in_the_error(fresh, caplog):
    begin = time.monotonic()
    assert set_up(fresh, "127.0.0.1:1") == INVALID
    assert time.monotonic() - begin < PROMPT_S
    assert "127.0.0.1:1" in caplog.text
    assert "127.0.0.1:1" in str(mooncake.last_error())


def test_only_subclasses_accept_attributes():
    class Sub(MooncakeDistributedStore):
        pass

    sub = Sub()
    sub.note = 1
    with pytest.raises(AttributeError):
        MooncakeDistributedStore().note = 1  # type: ignore[attr-defined]


def test_parameters_are_documented():
    import inspect

    for name, call in inspect.getmembers(MooncakeDistributedStore, inspect.isfunction):
        if name.startswith("_") or name in ("get", "is_exist", "get_size", "get_buffer"):
            continue
        for parameter in inspect.signature(call).parameters:
            if parameter not in ("self", "key", "keys"):
                assert parameter in (call.__doc__ or ""), (name, parameter)
    assert "force" in (MooncakeDistributedStore.batch_remove.__doc__ or "")
    assert isinstance(ReplicateConfig.__doc__, str)


def test_cluster_id_prefixes_metadata_keys(
    fresh, master: MasterProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MC_METADATA_CLUSTER_ID", "blue")
    metadata = f"http://{master.metadata}/metadata"
    assert set_up(fresh, master.address, metadata=metadata, host="localhost:13581") == 0
    name = "localhost%3A13581"
    found = urllib.request.urlopen(f"{metadata}?key=mooncake%2Fblue%2Fram%2F{name}", timeout=10)
    with found:
        assert json.loads(found.read())["protocol"] == "tcp"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{metadata}?key=mooncake%2Fram%2F{name}", timeout=10)
