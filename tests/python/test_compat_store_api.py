"""Checks every call and name of `mooncake.store` against the table of upstream's API."""

from __future__ import annotations

import inspect
import pickle

import pytest
from upstream_store_api import (
    CALLS as OBJECT_CALLS,
    CLASSES,
    ENUMS,
    EXPORTED,
    FIELDS,
    REQUIRED,
)
from upstream_tensor_api import TENSOR_CALLS

from mooncake import store as module
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

CALLS = {**OBJECT_CALLS, **TENSOR_CALLS}
# Calls with few parameters, for which a docstring of one line is enough.
SHORT = {"get", "get_batch", "get_buffer", "batch_get_buffer", "is_exist", "batch_is_exist"}


@pytest.mark.parametrize("name", CALLS)
def test_parameters_match_upstream(name):
    call = CALLS[name]
    found = inspect.signature(getattr(MooncakeDistributedStore, name)).parameters
    named = [p for p in found.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    keywords = {p.name: p for p in found.values() if p.kind is p.KEYWORD_ONLY}
    assert any(p.kind is p.VAR_POSITIONAL for p in found.values()) == call.variadic
    assert not any(p.kind is p.VAR_KEYWORD for p in found.values())
    positional = [p for p in call.parameters if not (call.variadic and p == "config")]
    assert [p.name for p in named[: len(positional)]] == positional
    for parameter in (*named, *(keywords[n] for n in keywords if n in call.parameters)):
        default = call.parameters[parameter.name]
        if name == "setup" and default is REQUIRED:
            continue  # the form with a dict needs neither
        expected = parameter.empty if default is REQUIRED else default
        assert parameter.default == expected, parameter.name
        if parameter.default is not parameter.empty:
            assert type(parameter.default) is type(default)


@pytest.mark.parametrize("name", CALLS)
def test_return_annotation_matches_upstream(name):
    annotation = str(inspect.signature(getattr(MooncakeDistributedStore, name)).return_annotation)
    assert annotation == CALLS[name].returns


@pytest.mark.parametrize("name", CALLS)
def test_calls_without_setup_return_error_values(name):
    store = MooncakeDistributedStore()
    for _ in range(2):
        result = getattr(store, name)(*CALLS[name].arguments)
        assert result == CALLS[name].unready
        assert_plain(result)
        assert store.close() == 0


def assert_plain(value):
    """Assert that the value has built-in types only, because callers compare types."""
    assert type(value) in (int, str, bytes, list, dict, tuple, type(None))
    if isinstance(value, list | tuple):
        for each in value:
            assert_plain(each)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if not call.variadic])
def test_parameters_can_be_keywords(name):
    call = CALLS[name]
    keywords = dict(zip(call.parameters, call.arguments, strict=False))
    assert getattr(MooncakeDistributedStore(), name)(**keywords) == call.unready
    for alias, canonical in call.aliases.items():
        renamed = {alias if n == canonical else n: v for n, v in keywords.items()}
        assert getattr(MooncakeDistributedStore(), name)(**renamed) == call.unready
        with pytest.raises(TypeError, match=f"{alias}|{canonical}"):
            getattr(MooncakeDistributedStore(), name)(**keywords, **{alias: keywords[canonical]})


@pytest.mark.parametrize("name", CALLS)
def test_unknown_keyword_is_named_in_the_error(name):
    with pytest.raises(TypeError, match="no_such_keyword"):
        getattr(MooncakeDistributedStore(), name)(*CALLS[name].arguments, no_such_keyword=1)


@pytest.mark.parametrize("name", CALLS)
def test_docstring_lists_the_parameters(name):
    text = getattr(MooncakeDistributedStore, name).__doc__
    assert text
    if name not in SHORT:
        for parameter in set(CALLS[name].parameters) - {"key", "keys"}:
            assert parameter in text, parameter
    for alias in CALLS[name].aliases:
        assert alias in text


def test_no_call_is_missing_from_the_table():
    public = {name for name in dir(MooncakeDistributedStore) if not name.startswith("_")}
    assert public <= set(CALLS)


@pytest.mark.parametrize("name", FIELDS)
def test_config_field_has_default_and_type(name):
    default, other, wrong = FIELDS[name]
    config = ReplicateConfig()
    assert getattr(config, name) == default
    assert type(getattr(config, name)) is type(default)
    setattr(config, name, other)
    assert getattr(config, name) == other
    with pytest.raises(TypeError):
        setattr(config, name, wrong)
    assert getattr(config, name) == other
    assert name in str(inspect.getdoc(ReplicateConfig))


def test_config_rejects_unknown_fields_and_keywords():
    with pytest.raises(AttributeError):
        ReplicateConfig().replicas = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        ReplicateConfig(replica_num=2)  # type: ignore[call-arg]
    assert ReplicateConfig() != ReplicateConfig()


def test_config_numbers_are_range_checked():
    for name in ("replica_num", "soft_pin_ttl_ms", "nof_replica_num", "dfs_replica_num"):
        for wrong in (-1, 1 << 64, 1.0, True):
            with pytest.raises(TypeError, match=name):
                setattr(ReplicateConfig(), name, wrong)
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", master_server_addr="embedded") == 0
    config = ReplicateConfig()
    config.replica_num = (1 << 64) - 1
    assert store.put("k", b"v", config) == -600, "no pool has that many segments"
    assert store.close() == 0


def test_session_ids_are_kept_and_have_no_effect():
    assert hasattr(ReplicateConfig, "session_ids")
    config = ReplicateConfig()
    before = str(config)
    assert config.session_ids is None
    config.session_ids = ["s", "t"]
    assert config.session_ids == ["s", "t"]
    assert str(config) == before
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", master_server_addr="embedded") == 0
    assert store.put("k", b"v", config) == 0
    assert store.get("k") == b"v"
    assert store.close() == 0


@pytest.mark.parametrize("name", ENUMS)
def test_enum_behaves_like_upstream(name):
    kind = getattr(module, name)
    assert list(kind.__members__) == ENUMS[name]
    for value, (text, member) in enumerate(kind.__members__.items()):
        assert (member.name, member.value, int(member), hash(member)) == (text, value, value, value)
        assert (repr(member), str(member)) == (f"<{name}.{text}: {value}>", f"{name}.{text}")
        assert member != value
        assert range(100)[member] == value
        assert pickle.loads(pickle.dumps(member)) is member
        with pytest.raises(TypeError):
            member < member  # noqa: B015
    assert "???" in str(kind(77))


@pytest.mark.parametrize("name", EXPORTED)
def test_enum_members_are_module_attributes(name):
    assert getattr(module, name) is getattr(getattr(module, EXPORTED[name]), name)


@pytest.mark.parametrize("name", CLASSES)
def test_module_exports_upstream_names(name):
    assert getattr(module, name).__doc__
    assert name in module.__all__


def test_aliases_are_the_same_classes():
    for name in ("Pool", "Lease", "LeaseView"):
        assert getattr(module, f"RegisteredBuffer{name}") is getattr(module, f"Buffer{name}")
