"""The command: reads a configuration, checks it, asks its servers, and prints the results."""

from __future__ import annotations

import argparse
import functools
import os
import secrets
import sys
import urllib.error
import urllib.request
from pathlib import Path

import mooncake
from mooncake._command.check.engines import (
    ENGINES,
    UnreadableError,
    check_environment,
    check_mapping,
    engine_of,
    parsed,
)
from mooncake._command.check.findings import Findings, Level
from mooncake._command.check.store_settings import Target
from mooncake._command.masters import can_take_over, find, is_locator, remedy_of
from mooncake._command.output import described, print_json
from mooncake._command.parser import add_json
from mooncake._units import format_bytes
from mooncake.errors import MooncakeError
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore

__all__ = ["add_options", "run"]

_WRONG, _UNREADABLE = 1, 2
_TIMEOUT_S = 5.0
_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "warning", "error": "ERROR  "}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = (
        "Exit codes: 0 nothing is wrong (there may be warnings), 1 something is, 2 the "
        "configuration cannot be read."
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a file of vLLM (mooncake.json), SGLang, LMCache or TransferQueue, the JSON of "
        "--kv-transfer-config, or - for standard input; the variables of this shell without it",
    )
    parser.add_argument(
        "--engine", choices=ENGINES, help="program that reads it; guessed from the settings without"
    )
    parser.add_argument("--offline", action="store_true", help="ask no server")
    parser.add_argument(
        "--try",
        action="store_true",
        dest="is_tried",
        help="also open a store as the program does, with the memory that it lends, and put, get "
        "and remove an object",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Check a configuration.

    Returns:
        0; 1 if something is wrong; 2 if the configuration cannot be read.
    """
    findings = Findings()
    try:
        engine, target = _checked(options, findings)
    except UnreadableError as error:
        if options.is_json:
            print_json({"error": str(error)})
        else:
            print(f"mooncake: {error}", file=sys.stderr)
        return _UNREADABLE
    if not options.offline:
        _ask(findings, target)
        if options.is_tried and target.daemon is None and findings.worst != "error":
            _try(findings, target)
    is_wrong = findings.worst == "error"
    if options.is_json:
        rows = [row.json() for row in findings.rows]
        print_json({"engine": engine, "is_right": not is_wrong, "findings": rows})
    else:
        _print(engine, findings)
    return _WRONG if is_wrong else 0


def _checked(options: argparse.Namespace, findings: Findings) -> tuple[str, Target]:
    if options.config is None:
        return "environment", check_environment(findings)
    settings = parsed(*_text_and_name(options.config))
    engine: str = options.engine or engine_of(settings)
    return engine, check_mapping(findings, settings, engine)


def _text_and_name(config: str) -> tuple[str, str]:
    if config == "-":
        return sys.stdin.read(), "standard input"
    if config.lstrip().startswith("{"):
        return config, "the argument"
    try:
        return Path(config).read_text(encoding="utf-8"), config
    except OSError as error:
        raise UnreadableError(f"{config}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableError(f"{config}: it is no text") from error


def _ask(findings: Findings, target: Target) -> None:
    """Ask the servers that the settings name."""
    if target.metadata.startswith(("http://", "https://")):
        _ask_metadata(findings, target.metadata)
    if target.daemon is not None:
        _ask_daemon(findings, target.daemon)
    elif target.master is not None:
        _ask_master(findings, target)


def _ask_metadata(findings: Findings, url: str) -> None:
    name = "metadata_server"
    try:
        with urllib.request.urlopen(f"{url}?key=mooncake/check", timeout=_TIMEOUT_S):
            pass
    except urllib.error.HTTPError as error:
        # A key that is absent.
        if error.code != 404 or not url.rstrip("/").endswith("/metadata"):
            findings.add("error", name, f"{url} answers {error.code} {error.reason}")
            return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        remedy = "Start mooncake_master --enable_http_metadata_server=true, or write P2PHANDSHAKE."
        findings.add("error", name, f"{url} does not answer: {reason}", remedy)
        return
    findings.add("ok", name, f"{url} answers")


def _ask_daemon(findings: Findings, address: str) -> None:
    store = MooncakeDistributedStore()
    code = store.setup_dummy(1 << 20, 1 << 20, address)
    error = mooncake.last_error()
    store.close()
    if code == 0:
        findings.add("ok", "client_server_address", f"the daemon at {address} answers")
        return
    text = f"no daemon answers at {address}: {error or code}"
    remedy = f"Start mooncake_client --port={address.rpartition(':')[2]}."
    findings.add("error", "client_server_address", text, remedy)


def _ask_master(findings: Findings, target: Target) -> None:
    name, master = "master_server_address", target.master or ""
    config = mooncake.StoreConfig(tenant=target.tenant, rpc_timeout_s=_TIMEOUT_S)
    try:
        with mooncake.Store(master, config) as store:
            segments, address = store.segments(), store.master_address
    except (MooncakeError, OSError, ValueError) as error:
        findings.add("error", name, described(error), remedy_of(error, master))
        return
    size = sum(segment.capacity_bytes for segment in segments)
    used = sum(segment.used_bytes for segment in segments)
    findings.add("ok", name, f"the master at {address} answers")
    _ask_masters(findings, name, master)
    if segments:
        text = f"the pool has {format_bytes(size)}, of which {format_bytes(used)} are in use"
        findings.add("ok", "", text)
    elif target.settings is None or not target.settings.get("global_segment_size", 1):
        findings.add("warning", "", "no process lends memory to the pool: puts fail")


def _ask_masters(findings: Findings, name: str, place: str) -> None:
    """Ask each of several masters: who leads, and whether another could take over."""
    cluster = find([place])
    if not cluster.is_elected:
        alone = [each.address for each in cluster.masters if each.seen is not None]
        if len(alone) > 1:
            text = f"{' and '.join(alone)} run without --enable_ha: each has a pool of its own"
            remedy = "Name one of them, or start them with --enable_ha."
            findings.add("error", name, text, remedy)
        elif is_locator(place) or "," in place:
            text = f"the master at {', '.join(alone)} runs without --enable_ha: none takes over"
            findings.add("note", name, text)
        return
    leader = cluster.leader
    if leader is not None:
        findings.add("ok", name, f"{leader.address} leads, view {leader.get('view_version')}")
    for address, row in cluster.followers.items():
        if can_take_over(row):
            findings.add("ok", name, f"the standby {address} is in sync")
    if not is_locator(place) and "," not in place and len(cluster.masters) > 1:
        named = ",".join(sorted(each.address for each in cluster.masters))
        text = f"names one of {len(cluster.masters)} masters: no pool is found when another leads"
        backend = next(each.get("backend") for each in cluster.masters if each.is_elected)
        findings.add("warning", name, text, f"Write {backend}, or {named}.")
    for problem in cluster.problems():
        level: Level = "error" if problem.is_outage else "warning"
        findings.add(level, name, problem.text, problem.remedy)


def _try(findings: Findings, target: Target) -> None:
    """Open a store with the settings, and put, get and remove an object."""
    if target.settings is None or target.master is None:
        return
    given = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE", **target.settings}
    if not given["local_hostname"]:
        given["local_hostname"] = "localhost"
    config = MooncakeConfig.from_settings(given)
    if (config.device_name or "").startswith("{"):
        # SGLang's map from rank to devices.
        config.device_name = None
    store = MooncakeDistributedStore()
    key, value = f"mooncake-check/{os.getpid()}/{secrets.token_hex(4)}", b"value"
    try:
        steps = (
            ("open", functools.partial(store.setup, vars(config))),
            ("put", functools.partial(store.put, key, value)),
            ("get", functools.partial(_compared, store, key, value)),
            ("remove", functools.partial(store.remove, key, force=True)),
        )
        for step, call in steps:
            code = call()
            if code != 0:
                error = mooncake.last_error()
                text = f"{step} failed with {code}: {error or 'the value is another one'}"
                findings.add("error", "", text, error.remedy if error else "")
                return
    finally:
        store.close()
    findings.add("ok", "", "a store was opened with these settings, and moved an object")


def _compared(store: MooncakeDistributedStore, key: str, value: bytes) -> int:
    return 0 if store.get(key) == value else 1


def _print(engine: str, findings: Findings) -> None:
    print(f"settings of {engine}:" if engine != "environment" else "variables of this shell:")
    for row in findings.rows:
        name = f"{row.field}: " if row.field else ""
        print(f"  {_MARKS[row.level]}  {name}{row.text}")
        if row.remedy:
            print(f"           {row.remedy}")
    counts = [sum(row.level == level for row in findings.rows) for level in ("error", "warning")]
    words = [
        f"{n} {w}{'s' if n != 1 else ''}" for n, w in zip(counts, ("error", "warning"), strict=True)
    ]
    print(
        "something is wrong: " + ", ".join(words)
        if counts[0]
        else "nothing is wrong" + (f"; {words[1]}" if counts[1] else "")
    )
