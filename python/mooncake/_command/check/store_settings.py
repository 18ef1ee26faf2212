"""The settings of a store, as vLLM, SGLang, LMCache and TransferQueue pass them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields
from typing import Any

from mooncake._command.check.addresses import (
    check_address,
    check_local_hostname,
    check_master,
    check_metadata,
)
from mooncake._command.check.findings import Findings, nearest
from mooncake._protocols import PROTOCOLS
from mooncake._runtime import _native
from mooncake._units import format_bytes, parse_size
from mooncake.mooncake_config import _FALSE, _TRUE, MooncakeConfig

__all__ = ["STORE_FIELDS", "Target", "check_protocol", "check_store", "truth"]

STORE_FIELDS = frozenset(field.name for field in fields(MooncakeConfig))
_DAEMON_FIELDS = frozenset({"standalone_storage", "client_server_address"})
_SMALL_BYTES = 64 << 20
_SIZES = ("global_segment_size", "local_buffer_size")
_BOOLEANS = ("enable_ssd_offload", "enable_client_http_server", "standalone_storage")
_RDMA = frozenset({"rdma", "efa"})


@dataclass(slots=True)
class Target:
    """What a program connects to.

    Attributes:
        master: Address of the master; None if it is not known.
        metadata: Metadata server.
        tenant: Tenant of the keys.
        daemon: Address of a daemon, which is joined instead of the master.
        settings: The settings with which a store is opened; None if it cannot be.
    """

    master: str | None = None
    metadata: str = "P2PHANDSHAKE"
    tenant: str = "default"
    daemon: str | None = None
    settings: dict[str, Any] | None = None


def check_store(
    findings: Findings,
    settings: dict[str, Any],
    program: str,
    own: frozenset[str] = frozenset(),
    required: tuple[str, ...] = ("metadata_server", "master_server_address"),
) -> Target:
    """Check the settings of a store.

    Args:
        findings: Takes the results.
        settings: Values by name.
        program: Program that reads them.
        own: Settings of the program itself.
        required: Settings that the program requires.

    Returns:
        What the program connects to.
    """
    findings.unknown(settings, STORE_FIELDS | _DAEMON_FIELDS | own, program)
    target = Target()
    is_standalone = truth(findings, settings, "standalone_storage")
    for name in required:
        if name not in settings and not (is_standalone and name == "master_server_address"):
            remedy = "P2PHANDSHAKE needs no server." if name == "metadata_server" else ""
            findings.add("error", name, f"is missing, and {program} requires it", remedy)
    if is_standalone:
        target.daemon = _daemon(findings, settings)
    elif "master_server_address" in settings:
        name = "master_server_address"
        target.master = check_master(findings, name, settings[name])
    if "metadata_server" in settings:
        found = check_metadata(findings, "metadata_server", settings["metadata_server"])
        target.metadata = found or target.metadata
    if settings.get("local_hostname"):
        name = "local_hostname"
        check_local_hostname(findings, name, settings[name], target.master)
    for name in _SIZES:
        if settings.get(name) is not None:
            _check_size(findings, name, settings[name], may_be_zero=name != _SIZES[0])
    check_protocol(findings, "protocol", settings.get("protocol"), settings.get("device_name"))
    truth(findings, settings, "enable_ssd_offload")
    truth(findings, settings, "enable_client_http_server")
    if findings.of_type(settings, "tenant_id", str, "a name") and settings["tenant_id"]:
        target.tenant = settings["tenant_id"]
    if not any(row.level == "error" for row in findings.rows):
        target.settings = {name: settings[name] for name in settings if name in STORE_FIELDS}
    return target


def check_protocol(findings: Findings, name: str, value: Any, devices: Any) -> None:
    """Check a protocol and the names of its devices against what this machine has."""
    protocol = "tcp" if value is None else value
    if not isinstance(protocol, str) or protocol.strip().lower() not in PROTOCOLS:
        near = nearest(protocol, PROTOCOLS, 0.6) if isinstance(protocol, str) else ""
        remedy = f"Write {near}." if near else "Write tcp or rdma."
        findings.add("error", name, f"{protocol!r} is no protocol", remedy)
        return
    protocol = protocol.strip().lower()
    names = _device_names(findings, devices)
    if protocol not in _RDMA:
        if names:
            findings.add("note", "device_name", f"has no effect with the protocol {protocol}")
        if protocol != "tcp":
            text = f"{protocol} is not there in this build: TCP and shared memory are used"
            findings.add("warning", name, text)
        return
    found, why_none = _native.rdma_devices()
    usable = [device.name for device in found if device.chosen is not None]
    if why_none or not usable:
        text = f"{protocol}, and this machine has no usable device: TCP is used"
        findings.add("warning", name, text, "`mooncake doctor` says why.")
    missing = sorted(set(names) - {device.name for device in found})
    if missing:
        has = ", ".join(device.name for device in found) or "none"
        text = f"this machine has no device {', '.join(missing)}; it has {has}"
        findings.add("error", "device_name", text, "An empty device_name uses all active devices.")
    elif usable:
        findings.add("ok", name, f"{protocol} with {', '.join(names or usable)}")


def _device_names(findings: Findings, devices: Any) -> list[str]:
    """Return the names of devices: a list with commas, or SGLang's map from rank to devices."""
    if not devices:
        return []
    if isinstance(devices, str) and devices.lstrip().startswith("{"):
        try:
            devices = json.loads(devices)
        except (ValueError, RecursionError) as error:
            text = f"is no map from rank to devices: {error}"
            findings.add("error", "device_name", text, 'Write as {"0": "mlx5_0"}.')
            return []
    lists = devices.values() if isinstance(devices, dict) else [devices]
    if not all(isinstance(each, str) for each in lists):
        text = f"is {devices!r}, not text"
        findings.add("error", "device_name", text, 'Write names with commas, as "mlx5_0,mlx5_1".')
        return []
    return [name.strip() for each in lists for name in each.split(",") if name.strip()]


def _check_size(findings: Findings, name: str, value: Any, *, may_be_zero: bool) -> None:
    remedy = 'Write a number of bytes, or text as "4GB".'
    if isinstance(value, bool) or not isinstance(value, int | str):
        findings.add("error", name, f"is {value!r}, not a size", remedy)
        return
    try:
        size = parse_size(value)
    except (TypeError, ValueError) as error:
        findings.add("error", name, str(error), remedy)
        return
    if size == 0:
        if not may_be_zero:
            text = "is 0: this process lends nothing; puts need another one that does"
            findings.add("note", name, text)
        return
    if size < 1 << 20:
        findings.add("error", name, f"is {size} bytes: too small to be meant", remedy)
        return
    if name == "global_segment_size":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > total:
            text = f"is {format_bytes(size)}, and this machine has {format_bytes(total)}"
            findings.add("error", name, text, "`mooncake doctor` says how much can be lent.")
            return
        if size < _SMALL_BYTES:
            text = f"is {format_bytes(size)}: a larger object finds no memory there"
            findings.add("warning", name, text)
            return
    findings.add("ok", name, format_bytes(size))


def truth(findings: Findings, settings: dict[str, Any], name: str) -> bool:
    """Return a setting that is true or false; adds a result if it is neither."""
    value = settings.get(name, False)
    if isinstance(value, str):
        if value.strip().lower() not in _TRUE + _FALSE:
            findings.add("error", name, f"is {value!r}", "Write true or false.")
        return value.strip().lower() in _TRUE
    if not isinstance(value, bool | int):
        findings.add("error", name, f"is {value!r}", "Write true or false.")
        return False
    return bool(value)


def _daemon(findings: Findings, settings: dict[str, Any]) -> str | None:
    name = "client_server_address"
    if not settings.get(name):
        text = "is missing: with standalone_storage the program joins a daemon"
        findings.add(
            "error", name, text, 'Write the address of mooncake_client, as "127.0.0.1:50052".'
        )
        return None
    quiet = Findings()
    address = check_address(quiet, name, settings[name])
    for row in quiet.rows:
        if row.level == "error":
            findings.add("error", name, row.text, 'Write HOST:PORT, as "127.0.0.1:50052".')
    return address
