"""Addresses in settings: of the master, of a metadata server, of this host."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Any

from mooncake._command.check.findings import Findings
from mooncake._runtime import _native
from mooncake.errors import InvalidArgumentError

__all__ = [
    "check_address",
    "check_local_hostname",
    "check_master",
    "check_metadata",
    "host_of",
    "is_loopback",
]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE)
# Services that know the leader of several masters, with an example of their address.
_LEASE_SERVICES = {
    "etcd": '"etcd://a:2379;b:2379"',
    "redis": '"redis://HOST:6379"',
    "k8s": '"k8s://NAMESPACE/LEASE"',
}
# Ports that other servers of a pool have by default.
_OTHER_PORTS = {
    9003: "the admin port, with the web page and the metrics",
    8080: "the metadata server",
    50052: "a daemon (mooncake_client)",
    9300: "the metrics of a daemon",
}
_EXAMPLE = 'Write HOST:PORT, as "10.0.0.1:50051".'


def check_master(findings: Findings, name: str, value: object) -> str | None:
    """Check the address of a master, or of what names several; return it if it may be right."""
    if not isinstance(value, str) or not value.strip():
        findings.add("error", name, f"is {value!r}, not the address of a master", _EXAMPLE)
        return None
    value = value.strip()
    scheme = _SCHEME.fullmatch(value)
    if scheme:
        kind, rest = scheme[1].lower(), scheme[2].rstrip("/")
        if kind == "mooncake":
            return check_master(findings, name, rest)
        if kind in _LEASE_SERVICES:
            return _check_lease_service(findings, name, kind, value)
        remedy = f"Write {rest} without {kind}://; the port is 50051 unless --rpc_port says so."
        findings.add("error", name, f"begins with {kind}://", remedy)
        return None
    if value == "embedded":
        findings.add("ok", name, "the program starts a master of its own")
        return None
    if None in [check_address(findings, name, each.strip()) for each in value.split(",")]:
        return None
    try:
        _native.master_address(value)
    except InvalidArgumentError as error:
        findings.add("error", name, str(error), "Name fewer masters.")
        return None
    return value


def check_address(findings: Findings, name: str, value: Any) -> str | None:
    """Check the address of one server of calls; return it if it may be right."""
    if not isinstance(value, str):
        findings.add("error", name, f"is {value!r}, not an address", _EXAMPLE)
        return None
    place = _place(value)
    if place is not None and place[1] is None:
        host = f"[{place[0]}]" if ":" in place[0] else place[0]
        findings.add("error", name, f"{value!r} has no port", f'Write "{host}:50051".')
        return None
    if place is None or place[1] == 0:
        findings.add("error", name, f"is {value!r}", _EXAMPLE)
        return None
    port = place[1]
    if port in _OTHER_PORTS:
        text = f"port {port} is by default that of {_OTHER_PORTS[port]}"
        findings.add(
            "warning", name, text, "The master listens on 50051 unless --rpc_port says so."
        )
    return value


def _check_lease_service(findings: Findings, name: str, kind: str, value: str) -> str | None:
    """Check the address of a service that names the leader of several masters."""
    try:
        _native.master_address(value)
    except InvalidArgumentError:
        # A password may stand in the address of Redis.
        shown = f"begins with {kind}:// and is no such address" if "@" in value else f"is {value!r}"
        findings.add("error", name, shown, f"Write {_LEASE_SERVICES[kind]}.")
        return None
    return value


def check_metadata(findings: Findings, name: str, value: Any) -> str | None:
    """Check a metadata server; return it if it may be right."""
    if not isinstance(value, str) or not value.strip():
        findings.add("error", name, f"is {value!r}", "Write P2PHANDSHAKE, which needs no server.")
        return None
    if value == "P2PHANDSHAKE":
        return value
    if value.upper().replace("_", "").replace("-", "") == "P2PHANDSHAKE":
        findings.add("error", name, f"is {value!r}", "Write P2PHANDSHAKE, in capitals.")
        return None
    scheme = _SCHEME.fullmatch(value)
    if not scheme:
        remedy = f"Write http://{value}/metadata, or P2PHANDSHAKE if there is no metadata server."
        findings.add("warning", name, f"{value!r} has no scheme", remedy)
        return value
    if scheme[1].lower() in ("http", "https") and not scheme[2].rstrip("/").endswith("/metadata"):
        remedy = f"Write {value.rstrip('/')}/metadata if it is the server in a mooncake_master."
        findings.add("warning", name, f"{value} does not end with /metadata", remedy)
    if scheme[1].lower() not in ("http", "https", "etcd", "redis"):
        remedy = "Write P2PHANDSHAKE, http://HOST:8080/metadata, etcd://… or redis://…"
        findings.add("error", name, f"{scheme[1]}:// is no kind of metadata server", remedy)
        return None
    return value


def check_local_hostname(findings: Findings, name: str, value: Any, master: str | None) -> None:
    """Check the address that this process tells others."""
    if not isinstance(value, str):
        findings.add("error", name, f"is {value!r}, not text", "Write the address of this host.")
        return
    host = host_of(value)
    if _SCHEME.match(value):
        findings.add("error", name, f"is {value!r}", "Write the host alone, without a scheme.")
        return
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except OSError as error:
        remedy = "Write an address of this host."
        findings.add("error", name, f"the name {host} is not known here: {error.strerror}", remedy)
        return
    if all(ipaddress.ip_address(each).is_loopback for each in found):
        if master is not None and not _is_here(master):
            text = f"is {host}: other hosts cannot read what this process lends"
            findings.add("warning", name, text, "Write the address of this host.")
        return
    if not any(_is_own(each) for each in found):
        text = f"{host} is no address of this host"
        findings.add("error", name, text, "Each host has its own file with its own address.")
        return
    findings.add("ok", name, f"{host} is an address of this host")


def _is_here(master: str) -> bool:
    """Return whether all masters that are named listen on the loopback network."""
    return all(is_loopback(host_of(each.strip())) for each in master.split(","))


def is_loopback(host: str) -> bool:
    """Return whether a host is this one by the loopback network; False if its name is not known."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(each).is_loopback for each in found)


def host_of(address: str) -> str:
    """Return the host of ``host:port``; an IPv6 address without its brackets."""
    place = _place(address)
    return address if place is None else place[0]


def _place(address: str) -> tuple[str, int | None] | None:
    """Return the host and the port of the address of one server; None if it is none."""
    try:
        kind, places, _ = _native.master_address(address)
    except InvalidArgumentError:
        return None
    return places[0] if kind == "master" else None


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
