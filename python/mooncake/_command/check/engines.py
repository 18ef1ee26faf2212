"""The configurations of vLLM, SGLang, LMCache and TransferQueue, as users write them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooncake import env
from mooncake._command.check.addresses import check_master
from mooncake._command.check.findings import Findings, nearest
from mooncake._command.check.store_settings import (
    STORE_FIELDS,
    Target,
    check_protocol,
    check_store,
    truth,
)
from mooncake._command.check.yaml_subset import load_yaml
from mooncake._command.masters import is_locator

__all__ = [
    "ENGINES",
    "UnreadableError",
    "check_environment",
    "check_mapping",
    "engine_of",
    "parsed",
]

ENGINES = ("vllm", "sglang", "lmcache", "transfer-queue")
_STORE_CONNECTOR, _CONNECTOR = "MooncakeStoreConnector", "MooncakeConnector"
_LMCACHE_CONNECTORS = ("LMCacheConnectorV1", "LMCacheMPConnector")
_CONNECTORS = (_STORE_CONNECTOR, _CONNECTOR, "MultiConnector", *_LMCACHE_CONNECTORS)
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_TRANSFER_FIELDS = (
    *("kv_connector", "kv_role", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    *("kv_buffer_device", "kv_buffer_size", "kv_connector_extra_config", "engine_id"),
    *("kv_connector_module_path", "kv_load_failure_policy", "enable_permute_local_kv"),
)
_OWN = {
    "sglang": frozenset(
        {"master_metrics_port", "check_server", "prefetch_threshold", "prefetch_timeout_base"}
        | {"prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys", "interface_v1"}
        | {"extra_backend_tag", "tp_lcm_size"}
    ),
    "lmcache": frozenset({"transfer_timeout", "storage_root_dir", "save_chunk_meta"}),
    "transfer-queue": frozenset({"auto_init", "hard_pin", "offload"}),
    "vllm": frozenset[str](),
}
# LMCache has many more; these are the ones that a pool needs.
_LMCACHE_FIELDS = ("chunk_size", "local_cpu", "remote_url", "remote_serde", "extra_config")
_URL = re.compile(r"([a-z0-9+]+)://([^/?]*)(/[^?]*)?(?:\?(.*))?", re.IGNORECASE)
# The variables of SGLang and of this package, by setting.
_VARIABLES = {
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "local_buffer_size": "MOONCAKE_LOCAL_BUFFER_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_server_address": "MOONCAKE_MASTER",
    "enable_ssd_offload": "MOONCAKE_OFFLOAD_ENABLED",
    "tenant_id": "MOONCAKE_TENANT_ID",
    "standalone_storage": "MOONCAKE_STANDALONE_STORAGE",
    "client_server_address": "MOONCAKE_CLIENT",
}
_FILES = ("SGLANG_HICACHE_MOONCAKE_CONFIG_PATH", "MOONCAKE_CONFIG_PATH", "LMCACHE_CONFIG_FILE")


class UnreadableError(ValueError):
    """A configuration that cannot be read."""


def parsed(text: str, name: str) -> dict[str, Any]:
    """Return the settings of a configuration that is JSON or YAML.

    Raises:
        UnreadableError: It is neither, or no object with settings.
    """
    is_json = text.lstrip().startswith(("{", "["))
    try:
        value = json.loads(text) if is_json else load_yaml(text)
    except RecursionError as error:
        raise UnreadableError(f"{name} has too many values inside one another") from error
    except ValueError as error:
        raise UnreadableError(f"{name} is no {'JSON' if is_json else 'YAML'}: {error}") from error
    if not isinstance(value, dict) or not value:
        raise UnreadableError(f"{name} has no settings")
    return value


def engine_of(settings: Mapping[str, Any]) -> str:
    """Return the engine whose form the settings have."""
    names = {str(name) for name in settings}
    if any(name.startswith("kv_") for name in names):
        return "vllm"
    if names & {"remote_url", "extra_config", "chunk_size", "remote_serde", "local_cpu"}:
        return "lmcache"
    if names & {"transfer_queue", "backend", "MooncakeStore"}:
        return "transfer-queue"
    if names & (_OWN["sglang"] | {"standalone_storage", "client_server_address"}):
        return "sglang"
    # vLLM fills in the host; SGLang and others are given it.
    return "sglang" if "local_hostname" in names else "vllm"


def check_mapping(findings: Findings, settings: dict[str, Any], engine: str) -> Target:
    """Check the settings of an engine; return what they connect to."""
    if engine == "lmcache":
        return _check_lmcache(findings, settings)
    if engine == "transfer-queue":
        return _check_transfer_queue(findings, settings)
    if engine == "vllm" and any(str(name).startswith("kv_") for name in settings):
        return _check_transfer_config(findings, settings)
    required: tuple[str, ...] = ("metadata_server", "master_server_address")
    if engine == "sglang":
        required = ("master_server_address",)
    target = check_store(findings, settings, _NAMES[engine], _OWN[engine], required)
    if engine == "sglang" and truth(findings, settings, "check_server"):
        _check_server_of_sglang(findings, "check_server", target.master)
    return target


def _check_server_of_sglang(findings: Findings, name: str, master: str | None) -> None:
    """Check an option with which SGLang waits for an admin port before it joins."""
    if master is None:
        return
    asked = master.partition(":")[0]
    if is_locator(master):
        text = f"is on: SGLang asks the admin port of a host named {asked}, not that of the leader"
        findings.add("error", name, text, "Write false.")
    elif "," in master:
        text = f"is on: SGLang asks {asked} alone, and waits while another master leads"
        findings.add("warning", name, text, "Write false.")


_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "lmcache": "LMCache",
    "transfer-queue": "TransferQueue",
}


def check_environment(findings: Findings) -> Target:
    """Check the variables of this shell, as SGLang reads them.

    Raises:
        UnreadableError: None of them is set.
    """
    for name in _FILES:
        path = os.environ.get(name)
        if path:
            findings.add("ok", name, f"names {path}")
            text = _text_of(path)
            settings = parsed(text, path)
            return check_mapping(findings, settings, engine_of(settings))
    given = {field: os.environ[name] for field, name in _VARIABLES.items() if name in os.environ}
    if not given.get("master_server_address") and not given.get("client_server_address"):
        text = "no file is given, and MOONCAKE_MASTER is not set"
        raise UnreadableError(f"{text}; `mooncake check FILE` reads a file")
    for variable in env.ignored():
        findings.add("warning", variable.name, variable.reason)
    for each in env.settings():
        if each.invalid:
            findings.add("error", each.source, each.invalid)
    own = Findings()
    target = check_store(own, given, "SGLang", required=("master_server_address",))
    option = "MOONCAKE_CHECK_SERVER"
    if truth(own, {option: os.environ.get(option, False)}, option):
        _check_server_of_sglang(own, option, target.master)
    for row in own.rows:
        findings.add(row.level, _VARIABLES.get(row.field, row.field), row.text, row.remedy)
    return target


def _text_of(path: str, variable: str = "") -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        named = f", which {variable} names" if variable else ""
        raise UnreadableError(f"{path}{named}: {why}") from error


def _check_transfer_config(findings: Findings, settings: dict[str, Any]) -> Target:
    """Check the value of vLLM's ``--kv-transfer-config``."""
    findings.unknown(settings, _TRANSFER_FIELDS, "vLLM")
    connector, role = settings.get("kv_connector"), settings.get("kv_role")
    if role not in _ROLES:
        near = nearest(role, _ROLES) if isinstance(role, str) else ""
        remedy = f"Write {near}." if near else f"Write one of {', '.join(_ROLES)}."
        what = f"{role!r} is no role" if "kv_role" in settings else "is missing"
        findings.add("error", "kv_role", what, remedy)
    extra = settings.get("kv_connector_extra_config") or {}
    if not findings.of_type(settings, "kv_connector_extra_config", dict, "{}"):
        extra = {}
    if connector == "MultiConnector":
        return _check_connectors(findings, extra)
    if connector == _STORE_CONNECTOR:
        return _check_file_of_store_connector(findings)
    if connector in _LMCACHE_CONNECTORS:
        return _check_file_of_lmcache(findings)
    if connector != _CONNECTOR:
        near = nearest(connector, _CONNECTORS) if isinstance(connector, str) else ""
        what = f"{connector!r} does not use Mooncake"
        remedy = f"Write {near}." if near else f"Write {_CONNECTOR} or {_STORE_CONNECTOR}."
        findings.add("error", "kv_connector", what, remedy)
        return Target()
    below = findings.below("kv_connector_extra_config")
    if "mooncake_protocol" in extra:
        check_protocol(below, "mooncake_protocol", extra["mooncake_protocol"], None)
    for name in extra:
        if name != "mooncake_protocol" and (near := nearest(name, ["mooncake_protocol"])):
            below.add("error", name, "is no setting", f"Write {near}.")
    module = settings.get("kv_connector_module_path")
    if module not in (None, "mooncake.mooncake_connector_v1"):
        remedy = "Write mooncake.mooncake_connector_v1 for vLLM 0.10 to 0.12; leave it out later."
        findings.add("error", "kv_connector_module_path", f"is {module!r}", remedy)
    _check_port(findings, "VLLM_MOONCAKE_BOOTSTRAP_PORT")
    _check_port(findings, "VLLM_MOONCAKE_SIDE_CHANNEL_PORT")
    findings.add("ok", "kv_connector", "blocks go from server to server; no master is needed")
    return Target()


def _check_port(findings: Findings, name: str) -> None:
    value = os.environ.get(name)
    if value and not (value.isdecimal() and int(value) < 1 << 16):
        findings.add("error", name, f"is {value!r}", "Write a port.")


def _check_connectors(findings: Findings, extra: dict[str, Any]) -> Target:
    connectors = extra.get("connectors")
    if not isinstance(connectors, list) or not all(isinstance(each, dict) for each in connectors):
        text = "is no list of connectors"
        findings.add("error", "kv_connector_extra_config.connectors", text)
        return Target()
    found = Target()
    for at, each in enumerate(connectors):
        if str(each.get("kv_connector", "")).startswith(("Mooncake", "LMCache")):
            place = findings.below(f"kv_connector_extra_config.connectors[{at}]")
            target = _check_transfer_config(place, each)
            found = target if target.master or target.daemon else found
    return found


def _check_file_of_store_connector(findings: Findings) -> Target:
    findings.add("ok", "kv_connector", "blocks are kept in a pool")
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    if not path:
        text = "is not set: MooncakeStoreConnector reads its settings from the file that it names"
        remedy = "export MOONCAKE_CONFIG_PATH=mooncake_config.json, and check again."
        findings.add("error", "MOONCAKE_CONFIG_PATH", text, remedy)
        return Target()
    if not os.environ.get("PYTHONHASHSEED"):
        text = "is not set: servers make other keys of the same blocks"
        findings.add("warning", "PYTHONHASHSEED", text, "Set it to the same value, as 0, on all.")
    return check_mapping(findings, parsed(_text_of(path, "MOONCAKE_CONFIG_PATH"), path), "vllm")


def _check_file_of_lmcache(findings: Findings) -> Target:
    path = os.environ.get("LMCACHE_CONFIG_FILE")
    if not path:
        text = "is not set: LMCache reads its settings from the file that it names"
        findings.add("error", "LMCACHE_CONFIG_FILE", text, "export it, and check again.")
        return Target()
    return check_mapping(findings, parsed(_text_of(path, "LMCACHE_CONFIG_FILE"), path), "lmcache")


def _check_lmcache(findings: Findings, settings: dict[str, Any]) -> Target:
    for name in settings:
        near = nearest(str(name), _LMCACHE_FIELDS)
        if near and near != name:
            findings.add("error", name, "is no setting", f"Write {near}.")
    master, device = None, ""
    url = settings.get("remote_url")
    example = 'Write "mooncakestore://HOST:50051/".'
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        what = "is missing: LMCache uses no pool" if url is None else f"is {url!r}"
        findings.add("error", "remote_url", what, example)
    elif found[1].lower() != "mooncakestore":
        near = nearest(found[1], ["mooncakestore"])
        what = f"begins with {found[1]}://, which is {'misspelled' if near else 'another backend'}"
        findings.add("error", "remote_url", what, example)
    else:
        quiet = Findings()
        master = check_master(quiet, "remote_url", found[2]) if found[2] else None
        findings.rows += quiet.rows
        device = dict(
            part.split("=", 1) for part in (found[4] or "").split("&") if "=" in part
        ).get("device", "")
    extra = settings.get("extra_config")
    own_file = os.environ.get("MOONCAKE_CONFIG_PATH")
    if own_file:
        text = f"is set: LMCache reads {own_file} before extra_config"
        findings.add("warning", "MOONCAKE_CONFIG_PATH", text, "Unset it, or keep both the same.")
        extra = parsed(_text_of(own_file, "MOONCAKE_CONFIG_PATH"), own_file)
    elif not findings.of_type(settings, "extra_config", dict, "extra_config: with settings below"):
        if extra is None:
            text = "is missing: it has the settings of the store"
            findings.add("error", "extra_config", text, "docs/tutorials/lmcache.md has an example.")
        return Target(master=master)
    assert isinstance(extra, dict)
    below = findings.in_file(own_file) if own_file else findings.below("extra_config")
    required = ("local_hostname", "metadata_server", "master_server_address")
    given = {"device_name": device, **extra} if device else extra
    target = check_store(below, given, "LMCache", _OWN["lmcache"], required)
    if master and target.master and master != target.master:
        of = f"{own_file}: master_server_address" if own_file else "master_server_address"
        text = f"names another master than {of}: {master} and {target.master}"
        text += ", which LMCache 0.5.6 joins"
        findings.add("warning", "remote_url", text, "Write the same address in both.")
    return target


def _check_transfer_queue(findings: Findings, settings: dict[str, Any]) -> Target:
    place = findings
    for name in ("transfer_queue", "backend", "MooncakeStore"):
        if isinstance(settings.get(name), dict):
            settings, place = settings[name], place.below(name)
    if settings.get("storage_backend") not in (None, "MooncakeStore"):
        what = f"is {settings['storage_backend']!r}: no pool is used"
        place.add("error", "storage_backend", what, "Write MooncakeStore.")
    if not set(settings) & STORE_FIELDS:
        place.add("error", "", "there are no settings below MooncakeStore")
        return Target()
    target = check_store(place, settings, "TransferQueue", _OWN["transfer-queue"])
    if settings.get("auto_init", True):
        text = "TransferQueue kills the masters of this host and starts its own"
        place.add("warning", "auto_init", text, "Write false to use a master that runs.")
    return target
