"""Errors of wrong arguments name the argument and the remedy; nothing wrong passes in silence."""

from __future__ import annotations

import datetime
import inspect
import io
import logging
import pydoc
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from conftest import start_master

import mooncake
from mooncake import checkpoint
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
from mooncake.structured_object_store import MooncakeBundleTransfer
from mooncake.tensor import Layout

MIB = 1 << 20


@pytest.fixture(scope="module")
def store() -> Iterator[mooncake.Store]:
    """A store with a pool of its own."""
    with mooncake.Store(config=mooncake.StoreConfig(segment_bytes=16 * MIB)) as store:
        store.put("short", b"0123456789")
        store.put_array("array", np.arange(12.0).reshape(6, 2))
        yield store


WRONG: dict[str, tuple[Callable[[mooncake.Store], object], type[Exception], str]] = {
    "row": (lambda s: s.get_array("array", rows=5), TypeError, "rows=slice"),  # type: ignore[arg-type]
    "rows": (lambda s: s.get_array("array", rows=(1, 2)), TypeError, "rows=slice"),  # type: ignore[arg-type]
    "ttl text": (lambda s: s.put("k", b"1", ttl_s="2s"), TypeError, "ttl_s is a number"),  # type: ignore[arg-type]
    "ttl": (lambda s: s.put("k", b"1", ttl=2), TypeError, "did you mean 'ttl_s'"),  # type: ignore[call-arg]
    "replica": (lambda s: s.put("k", b"1", replica=2), TypeError, r"PutOptions\(replicas="),  # type: ignore[call-arg]
    "tag": (lambda s: s.put("k", b"1", tags={"a": 1}), TypeError, r"tags\['a'\]"),  # type: ignore[dict-item]
    "pair": (lambda s: s.put_many(["a"]), TypeError, "pair of key and value"),  # type: ignore[list-item]
    "list": (lambda s: s.put_array("k", [1, 2]), TypeError, "numpy.asarray"),  # type: ignore[arg-type]
    "none": (lambda s: s.put("k", None), TypeError, "value of 'k'.*call delete"),  # type: ignore[arg-type]
    "dict": (lambda s: s.put("k", {}), TypeError, "value of 'k'.*json.dumps"),  # type: ignore[arg-type]
    "text": (lambda s: s.put("k", "v"), TypeError, "encode"),  # type: ignore[arg-type]
    "no tensor": (
        lambda s: s.get_tensor("short"),
        mooncake.InvalidArgumentError,
        "shorter than 304 bytes of metadata key",
    ),
    "read-only": (lambda s: s.get_into("short", b"0123456789"), BufferError, "bytearray"),
    "no time": (
        lambda s: s.get("short", timeout_s=0),
        mooncake.InvalidArgumentError,
        "positive number of seconds.*timeout_s=0",
    ),
    "many": (lambda s: s.delete_many(["k"], forc=True), TypeError, "did you mean 'force'"),  # type: ignore[call-arg]
    "of one": (
        lambda s: s.delete_many(["k"], wait=True),  # type: ignore[call-arg]
        TypeError,
        "'wait'; delete takes it, for one key",
    ),
    "save": (
        lambda s: checkpoint.save({}, s, "c", replica=2),  # type: ignore[call-arg]
        TypeError,
        "did you mean 'replicas'",
    ),
    "load": (lambda s: checkpoint.load(s, "c", int=0), TypeError, "did you mean 'into'"),  # type: ignore[call-arg]
    "bundle": (
        lambda s: MooncakeBundleTransfer(s).put({}, name_space="n"),  # type: ignore[call-arg]
        TypeError,
        "did you mean 'namespace'",
    ),
    "time text": (lambda s: s.get("short", timeout_s="1"), TypeError, "timeout_s is a number"),  # type: ignore[call-overload]
    "version": (lambda s: s.put("k", b"1", if_version="1"), TypeError, "if_version is a number"),  # type: ignore[arg-type]
    "option": (lambda _: mooncake.PutOptions(replica=2), TypeError, "did you mean 'replicas'"),  # type: ignore[call-arg]
    "setting": (
        lambda _: mooncake.StoreConfig(segment_size=1),  # type: ignore[call-arg]
        TypeError,
        "did you mean 'segment_bytes'",
    ),
    "argument": (
        lambda _: mooncake.Store(segment_size=1),  # type: ignore[call-arg]
        TypeError,
        r"StoreConfig\(segment_bytes=",
    ),
    "size": (
        lambda _: mooncake.StoreConfig(segment_bytes="lots"),
        mooncake.InvalidArgumentError,
        "segment_bytes=lots",
    ),
}


@pytest.mark.parametrize(("call", "kind", "text"), WRONG.values(), ids=WRONG)
def test_error_names_argument_and_remedy(store, call, kind, text):
    with pytest.raises(kind, match=text):
        call(store)


SETTINGS: list[tuple[dict[str, object], str]] = [
    ({"segment_bytes": [1]}, "segment_bytes is a number of bytes or text"),
    ({"segment_bytes": True}, "segment_bytes is .* not bool"),
    ({"name": 5}, "name is text, not int"),
    ({"metadata": None}, "metadata is text, not NoneType"),
    ({"tenant": b"a"}, "tenant is text, not bytes"),
    ({"listen": 1}, "listen is text, not int"),
    ({"token": 12345678}, "token is text or None, not int"),
    ({"is_tcp_forced": "no"}, "is_tcp_forced is a bool or None, not str"),
    ({"has_checksums": "yes"}, "has_checksums is a bool or None, not str"),
    ({"rpc_timeout_s": "x"}, "rpc_timeout_s is a number of seconds or None, not str"),
    ({"connect_timeout_s": True}, "connect_timeout_s is a number of seconds or None, not bool"),
    ({"transfer_timeout_s": "1"}, "transfer_timeout_s is a number"),
    ({"retry_s": "1"}, "retry_s is a number"),
    ({"http_port": "80"}, "http_port is a number or None, not str"),
    ({"http_port": True}, "http_port is a number or None, not bool"),
]


@pytest.mark.parametrize(("settings", "text"), SETTINGS, ids=lambda each: str(each)[:40])
def test_setting_of_another_type_is_named(settings, text):
    with pytest.raises(TypeError, match=text):
        mooncake.StoreConfig(**settings)


def test_settings_are_numbers_of_any_kind():
    given = mooncake.StoreConfig(
        segment_bytes=np.int64(1 << 20), rpc_timeout_s=1, retry_s=np.float32(0.5), http_port=0
    )
    assert mooncake.StoreConfig(segment_bytes=1e6).segment_bytes == 1_000_000
    with mooncake.Store(config=given) as store:
        assert store.put("k", b"1")
    with pytest.raises(mooncake.InvalidArgumentError, match="not a whole number of bytes"):
        mooncake.StoreConfig(segment_bytes=1e6 + 0.5)


OPTIONS: list[tuple[dict[str, object], str]] = [
    ({"replicas": "2"}, "replicas is an integer, not '2'"),
    ({"replicas": None}, "replicas is an integer, not None"),
    ({"soft_pin": 3}, "soft_pin is text, not 3"),
    ({"soft_pin_ttl_ms": "a"}, "soft_pin_ttl_ms is an integer"),
    ({"is_hard_pinned": "yes"}, "is_hard_pinned is a bool, not 'yes'"),
    ({"preferred_segments": "s"}, "preferred_segments is a list of names, not 's'"),
    ({"prefers_own_segments": None}, "prefers_own_segments is a bool"),
    ({"data_type": 1.5}, "data_type is an integer, not 1.5"),
    ({"groups": "a"}, "groups is a list of names, not 'a'"),
    ({"groups": [1]}, r"groups is a list of names, not \[1\]"),
    ({"ttl_ms": "a"}, "ttl_ms is an integer, not 'a'"),
    ({"tags": 5}, "tags are names and values, not int"),
    ({"if_versions": ["a"]}, r"if_versions is a list of integers, not \['a'\]"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=lambda each: str(each)[:40])
def test_option_of_another_type_is_named(options, text):
    with pytest.raises(TypeError, match=text):
        mooncake.PutOptions(**options)


def test_options_have_a_limit_of_copies():
    assert mooncake.PutOptions(replicas=128).replicas == 128
    with pytest.raises(mooncake.InvalidArgumentError, match="replicas=129 limit=128"):
        mooncake.PutOptions(replicas=129)


PUTS: list[Callable[[mooncake.Store], object]] = [
    lambda s: s.put("k", b"1", options={}),  # type: ignore[arg-type]
    lambda s: s.put_many({"k": b"1"}, options={}),  # type: ignore[arg-type]
    lambda s: s.put_stream("k", [b"1"], options={}),  # type: ignore[arg-type]
    lambda s: s.put_array("k", np.arange(3), options={}),  # type: ignore[arg-type]
    lambda s: s.file("k", "wb", options={}),  # type: ignore[call-overload]
]


@pytest.mark.parametrize("put", PUTS)
def test_options_of_another_type_are_named(store, put):
    with pytest.raises(TypeError, match=r"options is a PutOptions, not dict; use PutOptions\("):
        put(store)


REMEDIES: dict[str, tuple[Callable[[mooncake.Store], object], str]] = {
    "token": (
        lambda s: mooncake.Store(s.master_address, mooncake.StoreConfig(token="12345678")),
        "Start the master with MOONCAKE_MASTER_TOKEN",
    ),
    "new file": (lambda s: s.file("short", "xb"), "mode 'wb'"),
    "expire": (lambda s: s.expire("split", 5), r"keys\(prefix, internal=True\)"),
    "persist": (lambda s: s.persist("split"), r"keys\(prefix, internal=True\)"),
    "copy": (lambda s: s.copy("split", "elsewhere"), r"keys\(prefix, internal=True\)"),
    "move": (lambda s: s.move("split", "here", "there"), r"keys\(prefix, internal=True\)"),
    "version": (lambda s: s.delete("split", if_version=1), "without if_version"),
    "get": (lambda s: s.get("split"), "get_tensor"),
    "leased": (lambda s: leased(s), r"^A client leased the object, by lease\(\)"),
}


def leased(store: mooncake.Store) -> None:
    with store.lease("short"):
        store.delete("short")


@pytest.mark.parametrize(("call", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_remedy_fits_the_call(store, call, remedy):
    store.put_array("split", np.arange(8.0), layout=Layout(2))
    with pytest.raises(mooncake.MooncakeError) as caught:
        call(store)
    assert re.search(remedy, caught.value.remedy)


def test_info_of_a_missing_key_says_what_get_says(store):
    texts = []
    for call in (store.get, store.info):
        with pytest.raises(mooncake.NotFoundError) as caught:
            call("none")
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_other_type_errors_stay_as_they_are(store):
    with pytest.raises(TypeError, match="a key is str or bytes, not int"):
        store.put(7, b"1")


def test_duration_may_be_a_timedelta(store):
    store.put("t", b"1", ttl_s=datetime.timedelta(minutes=1))
    assert 50 < store.info("t").expires_in_s <= 60
    store.expire("t", datetime.timedelta(hours=1))
    assert 3500 < store.info("t").expires_in_s <= 3600
    with pytest.raises(mooncake.InvalidArgumentError, match="positive"):
        store.expire("t", datetime.timedelta())


def test_other_version_has_an_error_of_its_own(store):
    store.put("v", b"1", overwrite=True)
    with pytest.raises(mooncake.VersionDiffersError) as caught:
        store.delete("v", if_version=1)
    assert isinstance(caught.value, mooncake.AlreadyExistsError)
    assert (caught.value.code, caught.value.key) == (-705, "v")
    assert store.delete("v", if_version=store.info("v").version) is None


def test_put_without_a_lender_says_how_memory_is_lent():
    master = start_master()
    try:
        with mooncake.Store(master.address) as store:
            with pytest.raises(mooncake.NoSpaceError, match="no process lends memory") as caught:
                store.put("k", b"1")
            assert "segment_bytes=" in caught.value.remedy
            assert "mooncake_client" in caught.value.remedy
    finally:
        master.stop()


def test_upstream_put_without_a_lender_is_logged_once(caplog):
    master = start_master()
    store = MooncakeDistributedStore()
    try:
        assert store.setup("localhost", "P2PHANDSHAKE", 0, MIB, "tcp", "", master.address) == 0
        with caplog.at_level(logging.WARNING, "mooncake.store"):
            assert [store.put("k", b"1"), store.put("k", b"1")] == [-200, -200]
        assert caplog.text.count("mooncake_client") == 1
    finally:
        store.close()
        master.stop()


def test_put_larger_than_a_segment_has_another_remedy(store):
    with pytest.raises(mooncake.NoSpaceError) as caught:
        store.put("huge", bytes(17 * MIB))
    assert "in parts" in caught.value.remedy


def test_refused_connection_names_the_usual_cause():
    with pytest.raises(mooncake.UnavailableError) as caught:
        mooncake.Store("127.0.0.1:1")
    assert "start `mooncake_master`" in caught.value.remedy


def test_last_error_is_gone_after_a_success():
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", "embedded") == 0
    try:
        assert mooncake.last_error() is None
        assert store.remove("none") == -704
        assert mooncake.last_error() is not None
        assert store.put("k", b"1") == 0
        assert mooncake.last_error() is None
    finally:
        store.close()


def test_unknown_protocol_is_told_and_accepted(caplog):
    engine = TransferEngine()
    with caplog.at_level(logging.WARNING, "mooncake.engine"):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "quic", "") == 0, "as upstream"
    assert "protocol 'quic' is unknown" in str(mooncake.last_error())
    assert "protocol 'quic' is unknown" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mooncake.engine"):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert (caplog.text, mooncake.last_error()) == ("", None)


@pytest.mark.parametrize("name", ["Store", "AsyncStore"])
def test_help_shows_defaults_that_can_be_read(name):
    shown = io.StringIO()
    pydoc.Helper(output=shown)(getattr(mooncake, name))
    assert "<object object" not in shown.getvalue()
    if name == "Store":
        assert "loop" not in inspect.getdoc(mooncake.Store.get)
        assert "(drain.info())" not in shown.getvalue()
    assert "buffer: 'Writable'" in shown.getvalue()
