"""What users of dicts, URLs, environments and pickle expect of a store."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import warnings

import pytest

import mooncake
from mooncake import AsyncStore, Store, StoreConfig
from mooncake._api.config import address_to_rejoin, with_port


def test_iteration_yields_keys_and_len_says_why_not(store: Store):
    store.put_many({"a": b"1", "b": b"2"})
    assert list(store) == ["a", "b"]
    assert dict.fromkeys(store) == {"a": None, "b": None}
    assert bool(store)
    with pytest.raises(TypeError, match=r"no length.*stats"):
        len(store)


def test_store_is_not_copied(store: Store):
    for make in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be copied"):
            make(store)


def test_embedded_store_says_how_to_share_it(store: Store):
    with pytest.raises(TypeError, match="master_address"):
        pickle.dumps(store)


def read(store: Store) -> tuple[bytes, str]:
    with store:
        return store.get("k"), store.name


def test_joined_store_is_pickled_as_address_and_settings(master):
    config = StoreConfig(segment_bytes="16MB", retry_s=1.0, http_port=0)
    with Store(master.address, config) as store:
        store.put("k", b"value")
        pool = multiprocessing.get_context("spawn").Pool(1)
        with pool:
            value, name = pool.apply(read, (store,))
        assert value == b"value"
        assert name != store.name
        other = pickle.loads(pickle.dumps(store))
        with other:
            assert other.config == StoreConfig(retry_s=1.0)


def test_token_is_never_pickled(master):
    config = StoreConfig(token="a secret of the pool")
    assert b"secret" not in pickle.dumps(config.for_another_process())


@pytest.mark.parametrize(
    "url",
    [
        "localhost:50051",
        "http://localhost:50051",
        "mooncake://",
        "mooncake://a/b",
        "mooncake://a?x=1",
        "mooncake://a?tenant",
        "mooncake://a?tenant=",
        "mooncake://[::1",
    ],
)
def test_url_of_another_form_is_refused(url: str):
    with pytest.raises(mooncake.InvalidArgumentError, match="mooncake://HOST:PORT"):
        Store.from_url(url)


def test_url_is_text():
    with pytest.raises(TypeError, match="not int"):
        Store.from_url(5)  # type: ignore[arg-type]


def test_url_names_the_master(master):
    with Store.from_url(f"mooncake://{master.address}") as store:
        assert store.master_address == master.address
    with pytest.raises(mooncake.NotSupportedError, match="tenant=other"):
        Store.from_url(f"mooncake://{master.address}?tenant=other")


def test_environment_names_master_and_settings(master, monkeypatch):
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(mooncake.InvalidArgumentError, match="MOONCAKE_MASTER is not set"):
        Store.from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", master.address)
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "16mb")
    with Store.from_env() as store:
        assert store.config.segment_bytes == 16 << 20
        assert store.put("k", b"v")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "much")
    with pytest.raises(ValueError, match="MOONCAKE_GLOBAL_SEGMENT_SIZE: not a size"):
        StoreConfig.from_env()


def test_misspelled_variables_are_told(monkeypatch):
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENTS_SIZE", "16mb")
    with pytest.warns(UserWarning, match="did you mean MOONCAKE_GLOBAL_SEGMENT_SIZE"):
        assert StoreConfig.from_env().segment_bytes is None
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    monkeypatch.setenv("MOONCAKE_MASTERS", "localhost:50051")
    with pytest.raises(mooncake.InvalidArgumentError, match=r"MOONCAKE_MASTERS is not read"):
        Store.from_env()


def test_protocol_of_the_environment_is_checked(monkeypatch):
    for known in ("rdma", " TCP ", "ascend", ""):
        monkeypatch.setenv("MOONCAKE_PROTOCOL", known)
        StoreConfig.from_env()
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tpc")
    with pytest.raises(ValueError, match=r"MOONCAKE_PROTOCOL: .*'tpc'; did you mean 'tcp'\?"):
        StoreConfig.from_env()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MOONCAKE_STORE_LIB_DIR", "/opt/lib"),
        ("MOONCAKE_EP_USE_MUSA", "1"),
        ("MOONCAKE_CLIENT", "python"),
        ("MOONCAKE_P2P_POOL_SIZE", "8"),
        ("MOONCAKE_DFS_ENABLED", "1"),
        ("MOONCAKE_MASTER_PORT", "tcp://10.0.0.1:50051"),
        ("MOONCAKE_MASTER_SERVICE_HOST", "10.0.0.1"),
        ("MOONCAKE_MASTER_SERVICE_PORT", "50051"),
        ("MOONCAKE_MASTER_PORT_50051_TCP_ADDR", "10.0.0.1"),
    ],
)
def test_variables_of_others_are_no_mistakes(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StoreConfig.from_env()


@pytest.mark.parametrize("open_store", [Store, lambda *given: AsyncStore(*given)])
def test_wrong_arguments_are_named(open_store):
    with pytest.raises(TypeError, match="not NoneType"):
        open_store(None)
    with pytest.raises(TypeError, match="StoreConfig, not dict"):
        open_store("embedded", {"segment_bytes": 1})
    with pytest.raises(mooncake.InvalidArgumentError, match="empty"):
        open_store("")
    with pytest.raises(mooncake.InvalidArgumentError, match="from_url"):
        open_store("http://localhost:50051")


def test_store_is_pickled_with_all_masters(master):
    place = f"127.0.0.1:1,{master.address}"
    with Store(place) as store:
        assert store.master_address == master.address
        assert store.__reduce__()[1][0] == place
        with pickle.loads(pickle.dumps(store)) as other:
            assert other.master_address == master.address
    for given, told in {
        "etcd://a:1;b:2": "etcd://a:1;b:2",
        "redis://user:secret@a:1/2": "redis://a:1/2",
        "a:1, [::1]:2": "a:1,[::1]:2",
        "[::1]": "10.0.0.1:50051",
        "a": "10.0.0.1:50051",
    }.items():
        assert address_to_rejoin(given, "10.0.0.1:50051") == told


def test_port_of_a_master_is_added_where_it_is_missing():
    for given, full in {
        "a": "a:50051",
        "a:1": "a:1",
        "::1": "[::1]:50051",
        "[::1]": "[::1]:50051",
        "[::1]:7": "[::1]:7",
        "a:1,b": "a:1,b",
        "etcd://a": "etcd://a",
        "a:x": "a:x",
        "": "",
    }.items():
        assert with_port(given) == full


@pytest.mark.parametrize("address", ["etcd://127.0.0.1:1;127.0.0.1:2", "redis://127.0.0.1:1"])
def test_address_may_name_a_lease_service(address):
    with pytest.raises(mooncake.UnavailableError, match="no master leads") as caught:
        Store(address, StoreConfig(rpc_timeout_s=0.2))
    assert caught.value.code == -1010


@pytest.mark.parametrize("port", [-1, 65_536])
def test_port_out_of_range_is_named(port):
    with pytest.raises(mooncake.InvalidArgumentError) as caught:
        StoreConfig(http_port=port)
    assert f"http_port={port}" in str(caught.value)
    with pytest.raises(TypeError, match="http_port"):
        StoreConfig(http_port="80")  # type: ignore[arg-type]


def test_negative_times_are_refused():
    with pytest.raises(mooncake.InvalidArgumentError, match="retry_s=-1"):
        Store(config=StoreConfig(retry_s=-1))
    with pytest.raises(mooncake.InvalidArgumentError, match="transfer_timeout_s=0"):
        Store(config=StoreConfig(transfer_timeout_s=0))


def test_async_store_shows_where_it_is(master):
    store = AsyncStore(master.address)
    assert repr(store) == f"<mooncake.AsyncStore master={master.address} not open yet>"
