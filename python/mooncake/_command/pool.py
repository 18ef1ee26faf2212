"""`mooncake stat`, `segments`, `clients` and `drain`: the pool and its memory."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TextIO

from mooncake._command import admin, masters
from mooncake._command.files import hinting, joined, joined_for_bytes, lending_line
from mooncake._command.output import (
    CommandError,
    UsageError,
    described,
    is_absent,
    is_confirmed,
    missing,
    print_json,
    print_table,
    quoted,
    report,
    table,
)
from mooncake._command.parser import add_json, add_metadata
from mooncake._units import format_bytes, format_duration
from mooncake.errors import DeadlineError, NotFoundError, TransferFailedError
from mooncake.tensor.format import GENERATION_TAG

if TYPE_CHECKING:
    from mooncake._api.blocking.jobs import Drain
    from mooncake._api.store import SegmentInfo, Store
    from mooncake._api.tasks import DrainInfo
    from mooncake.tensor.info import Info, TensorInfo

__all__ = [
    "add_clients_options",
    "add_drain_options",
    "add_segments_options",
    "add_stat_options",
    "clients",
    "drain",
    "segments",
    "stat",
]

# The master quarantines freed memory for at most a minute, and then writes that it is free.
_FREEING_S_MAX = 65.0
_FREEING_POLL_S = 0.1
# A drain without progress is reported at this interval.
_REPORT_S = 5.0
# Clients of a restarted master come back within about a heartbeat and a reconnect.
_RETURN_S = 10.0
_ROUNDED = "each copy takes a multiple of 8 bytes, from 4 KiB on of 64"
_ROUNDING_SHOWS_BYTES = 64 << 10
_JOB = re.compile(r"(\d{1,20})-(\d{1,20})")
_HELD = {
    "free_bytes": "free",
    "evictable_bytes": "objects that may be evicted",
    "leased_bytes": "leased: read lately, or kept by a lease",
    "hard_pinned_bytes": "hard-pinned: never evicted",
    "soft_pinned_bytes": "soft-pinned: not evicted by the rules",
    "writing_bytes": "being written",
    "fenced_bytes": "freed, quarantined until reads of it have ended",
    "awaiting_sync_bytes": "freed, waiting for the log on disk",
}


# Sort keys of listings.
_SEGMENT_ORDER: dict[str, Callable[[SegmentInfo], Any]] = {
    "name": lambda segment: segment.name,
    "used": lambda segment: -segment.used_bytes,
    "free": lambda segment: segment.used_bytes - segment.capacity_bytes,
    "size": lambda segment: -segment.capacity_bytes,
}
_CLIENT_ORDER: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda client: client["name"],
    "lends": lambda client: -client["lent_bytes"],
    "heard": lambda client: -client["heard_ms_ago"],
}


def add_stat_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `stat`."""
    parser.add_argument(
        "key", nargs="?", type=os.fsencode, help="an object or a tensor; the pool without it"
    )
    add_metadata(parser)
    add_json(parser)


def stat(options: argparse.Namespace) -> int:
    """Print the status of the pool, or what is stored under a key.

    Returns:
        0.
    """
    if options.key is None:
        with joined(options) as store:
            _stat_pool(store, options)
    else:
        # The bytes of the object tell whether it is a tensor.
        with joined_for_bytes(options) as store:
            _stat_object(store, options)
    return 0


def _stat_pool(store: Store, options: argparse.Namespace) -> None:
    pool = store.stats()["pool"]
    # This command is a client itself.
    others = max(pool["clients"] - 1, 0)
    found, details = store.segments(), _details(store)
    try:
        at: str | None = admin.address_of_pool(store)
        held: dict[str, int] = admin.fetch(at or "", "/api/v1/memory") or {}
        seen: dict[str, Any] = admin.fetch(at or "", f"/api/v1/overview?since={1 << 62}") or {}
        elected = masters.ask(at or "")
        note = ""
    except CommandError as error:
        at, held, seen, elected, note = None, {}, {}, {}, str(error)
    lost = [segment for segment in found if not segment.is_connected]
    lost_bytes = sum(segment.capacity_bytes for segment in lost)
    if options.is_json:
        shown = {name: held[name] for name in _HELD if name in held} | {"lost_bytes": lost_bytes}
        names = {**pool, "clients": others, "page": at and f"http://{at}/", "memory": shown}
        tiers = {name: seen[name] for name in ("disks", "reads", "offloads") if name in seen}
        print_json(
            {**names, **tiers, "ha": elected, "segments": _segments_json(found, _states(details))}
        )
        return
    print(f"master    {store.master_address}, version {pool['version']}")
    print(f"page      http://{at}/" if at else f"page      none: {note}")
    for line in masters.lines_of(elected):
        print(line)
    clients = f"{_count(others, 'client')} beside this command"
    if lost_clients := _lost_clients(found, details):
        clients += f", of which {len(lost_clients)} lost the connection"
    print(f"up        {format_duration(pool['uptime_s'])}, {clients}")
    print(f"objects   {pool['keys']}")
    used = max(pool["used_bytes"] - sum(segment.used_bytes for segment in lost), 0)
    capacity = format_bytes(max(pool["capacity_bytes"] - lost_bytes, 0))
    rounded = f"; {_ROUNDED}" if 0 < used < _ROUNDING_SHOWS_BYTES else ""
    print(f"memory    {format_bytes(used)} of {capacity} used{rounded}")
    if lost:
        owners = ", ".join(segment.name for segment in lost)
        print(f"          {format_bytes(lost_bytes):>10}  lost, not counted above: {owners}")
    for name, text in _HELD.items():
        if held.get(name):
            print(f"          {format_bytes(held[name]):>10}  {text}")
    for line in _why_puts_fail(store, pool, found, held):
        print(f"          {line}")
    if seen.get("disks"):
        _print_tier(seen)
    if found:
        print()
        _print_segments(found, _states(details))
    if seen.get("disks"):
        print()
        _print_disks(seen["disks"])


def _print_tier(seen: dict[str, Any]) -> None:
    """Print what the disks hold and did, since the start of the master."""
    disks, reads, done = seen["disks"], seen["reads"], seen["offloads"]
    total = {
        name: sum(disk[name] for disk in disks)
        for name in ("used_bytes", "capacity_bytes", "objects", "waiting_objects")
    }
    used, capacity = format_bytes(total["used_bytes"]), format_bytes(total["capacity_bytes"])
    print(f"disks     {used} of {capacity} used, {_count(total['objects'], 'object')}")
    put = seen["puts"]["bytes"]
    each = f", {done['bytes'] / put:.2f} a byte put" if put else ""
    rows = [
        (format_bytes(done["bytes"]), f"written for {_count(done['done'], 'object')}{each}"),
        (
            format_bytes(reads["disk_hit_bytes"]),
            f"read: {reads['disk_hits']} of {reads['hits']} hits were on a disk only",
        ),
        (str(total["waiting_objects"]), "objects wait to be written"),
        (str(done["refused"]), "refused, since too many waited (--offloading_queue_limit)"),
        (str(done["failed"]), "failed: the disk was full, or returned errors"),
        (str(done["missed"]), "evicted before a disk had them"),
        (str(done["lost"]), "dropped on a disk for others, or damaged"),
    ]
    for number, text in rows:
        if number not in ("0", "0 B"):
            print(f"          {number:>10}  {text}")


def _why_puts_fail(
    store: Store, pool: dict[str, Any], found: list[SegmentInfo], held: dict[str, int]
) -> list[str]:
    """Return why puts find no memory, and what helps; nothing if they find some."""
    started = f"the master started {format_duration(pool['uptime_s'])} ago"
    if pool["capacity_bytes"] == 0:
        lines = ["no process lends memory; this lends some:", lending_line(store)]
        if pool["keys"]:
            # Only a log of the time before knows objects whose holders it has not seen.
            text = "has not heard from the processes that hold its objects since then"
            lines.insert(0, f"{started}, and {text}")
        return lines
    if not any(segment.takes_objects for segment in found):
        text = "every segment was drained, or has lost its connection"
        help_ = "another process must lend memory, or one of these must be restarted"
        return [f"puts find no memory now: {text}", help_]
    if held and held["free_bytes"] + held["evictable_bytes"] == 0:
        is_drained = not all(segment.takes_objects for segment in found)
        where = " in segments not drained" if is_drained else ""
        text = f"nothing is free{where}, and nothing may be evicted"
        lines = [f"puts find no memory now: {text}"]
        if pool["uptime_s"] < _RETURN_S:
            lines.append(f"{started}; processes that lend memory may still come back")
        return lines
    return []


def _lost_clients(found: list[SegmentInfo], details: list[dict[str, Any]]) -> set[str]:
    """Return the ids of clients that lend memory and have lost their connection."""
    lost = {segment.id for segment in found if not segment.is_connected}
    return {row["client_id"] for row in details if row["segment_id"] in lost}


def _stat_object(store: Store, options: argparse.Namespace) -> None:
    """Print an object with its copies, leases and pins; of a tensor also dtype and layout."""
    key: bytes = options.key
    note, found = "", None
    try:
        found = admin.object_of(admin.address_of_pool(store), key, options.tenant)
    except CommandError as error:
        note = str(error)
    info: Info | None = None
    unread: TransferFailedError | None = None
    try:
        if found is None or found["is_complete"]:
            with hinting(store, options.metadata):
                info = store.info(key)
    except NotFoundError as error:
        if found is None:
            raise (missing(key) if is_absent(error) else error) from None
    except TransferFailedError as error:
        if found is None:
            raise
        unread = error
    parts: dict[str, dict[str, Any]] = {}
    if found is None and not note and info is not None and info.tensor is not None:
        parts = _shards(admin.address_of_pool(store), info.tensor, options.tenant)
    if options.is_json:
        shown = _tensor_json(key, info, parts)
        print_json({**(found or {"bytes": info.size if info else 0}), **shown})
        return
    print(f"key       {quoted(key)}")
    if info is not None or found is not None:
        size = info.size if info is not None else found["bytes"] if found is not None else 0
        print(f"size      {format_bytes(size)}" + _exact(size))
    if found is not None:
        _print_protection(found)
    elif parts:
        _print_protection(_united(parts))
    elif note:
        print(f"copies    unknown, as are leases and pins: {note}")
    _print_tensor(info)
    if unread is not None:
        text = f"the object may be a tensor, but cannot be read: {described(unread)}"
        report(CommandError(text, unread.remedy))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _exact(size: int) -> str:
    return f" ({size} bytes)" if size >= 1024 else ""


def _print_protection(found: dict[str, Any]) -> None:
    if found["is_complete"]:
        print(f"version   {found['version']}")
    if found["checksum"]:
        print(f"checksum  {found['checksum']}")
    if found["unfinished_puts"]:
        print(f"puts      {found['unfinished_puts']} unfinished")
    left_s = found["lease_left_ms"] / 1000
    if left_s > 0:
        print(f"lease     {left_s:.1f} s left; not evicted, and removed with --force only")
    else:
        print("lease     none")
    pins = ["hard, never evicted"] if found["is_hard_pinned"] else []
    if found["soft_pin_ttl_ms"] is not None:
        pins.append(f"soft, for {found['soft_pin_ttl_ms'] / 1000:g} s after each use")
    print(f"pins      {'; '.join(pins) or 'none'}")
    if found["expires_in_ms"] is not None:
        print(f"expires   in {found['expires_in_ms'] / 1000:.1f} s")
    for name, value in found["tags"].items():
        print(f"tag       {name}={value}")
    if found["group"] is not None:
        print(f"group     {quoted(found['group'])}, evicted together")
    if found["is_being_copied"]:
        print("task      a client copies or moves it")
    for copy in found["copies"]:
        state = "" if copy["is_readable"] else "  not readable: its process does not answer"
        place = "on disk, served at" if copy.get("tier") == "disk" else "at"
        print(f"copy      {copy['segment']}  {place} {copy['endpoint']}{state}")


def _shards(at: str, tensor: TensorInfo, tenant: str) -> dict[str, dict[str, Any]]:
    """Return copies, leases and pins of the shards of a tensor by their keys."""
    names = [_bytes(part.key) for part in tensor.parts]
    rows = [(name, admin.object_of(at, name, tenant)) for name in names]
    return {quoted(name): found for name, found in rows if found is not None}


def _united(parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what is true of all shards of a tensor, as for one object, and the copies of each."""
    found = list(parts.values())
    ends = [each["expires_in_ms"] for each in found if each["expires_in_ms"] is not None]
    soft = [each["soft_pin_ttl_ms"] for each in found]
    first = found[0]
    return {
        "is_complete": False,
        "checksum": None,
        "unfinished_puts": sum(each["unfinished_puts"] for each in found),
        "lease_left_ms": max(each["lease_left_ms"] for each in found),
        "is_hard_pinned": all(each["is_hard_pinned"] for each in found),
        "soft_pin_ttl_ms": None if None in soft else min(soft),
        "expires_in_ms": min(ends, default=None),
        "tags": {
            name: value
            for name, value in first["tags"].items()
            if name != GENERATION_TAG and all(each["tags"].get(name) == value for each in found)
        },
        "group": first["group"] if len({each["group"] for each in found}) == 1 else None,
        "is_being_copied": any(each["is_being_copied"] for each in found),
        "copies": [
            {**copy, "segment": f"{name}  {copy['segment']}"}
            for name, each in parts.items()
            for copy in each["copies"]
        ],
    }


def _bytes(key: str | bytes) -> bytes:
    return os.fsencode(key) if isinstance(key, str) else key


def _tensor_json(
    key: bytes, info: Info | None, found: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    text = {"key": os.fsdecode(key)}
    if info is None or info.tensor is None:
        return text
    tensor = info.tensor
    parts = [
        {**found.get(quoted(part.key), {}), "key": _text(part.key), "shape": part.shape}
        for part in tensor.parts
    ]
    names = {"dtype": tensor.dtype, "shape": tensor.shape, "layout": tensor.layout}
    return {**text, "bytes": info.size, "tensor": {**names, "parts": parts}}


def _print_tensor(info: Info | None) -> None:
    if info is None or (tensor := info.tensor) is None:
        return
    print(f"dtype     {tensor.dtype}")
    print(f"shape     {tensor.shape}")
    print(f"layout    {tensor.layout}")
    for part in tensor.parts:
        axes = "".join(f" {axis}" for axis in part.axes)
        print(f"object    {quoted(part.key)} {part.shape}{axes}")


def _text(key: str | bytes) -> str:
    return os.fsdecode(key) if isinstance(key, bytes) else key


def add_segments_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `segments`."""
    parser.add_argument(
        "--sort",
        choices=list(_SEGMENT_ORDER),
        default="name",
        help="order: by name, or largest first by used memory, free memory or size",
    )
    add_json(parser)


def segments(options: argparse.Namespace) -> int:
    """List the memory that processes lend, and their disks.

    Returns:
        0.
    """
    with joined(options) as store:
        found, states, lending = store.segments(), _states(_details(store)), lending_line(store)
        disks = _disks(store)
    found.sort(key=_SEGMENT_ORDER[options.sort])
    if options.is_json:
        print_json(_segments_json(found, states))
    elif found:
        _print_segments(found, states)
    else:
        text = f"no process lends memory to the pool\n  hint: Start `{lending}`."
        print(f"mooncake: {text}", file=sys.stderr)
    if disks and not options.is_json:
        print()
        _print_disks(disks)
    return 0


def _disks(store: Store) -> list[dict[str, Any]]:
    """Return what the admin port says about disks; nothing without one."""
    try:
        seen = admin.fetch(admin.address_of_pool(store), "/api/v1/disks")
    except CommandError:
        return []
    found: list[dict[str, Any]] = seen["disks"] if seen else []
    return found


def _print_disks(found: list[dict[str, Any]]) -> None:
    rows = [
        (
            disk["name"],
            format_bytes(disk["used_bytes"]),
            format_bytes(disk["capacity_bytes"]),
            f"{disk['used_bytes'] / max(disk['capacity_bytes'], 1):.0%}",
            f"{disk['objects']}",
            f"{disk['waiting_objects']}",
            "yes" if disk["is_readable"] else "no, nobody has it open",
        )
        for disk in found
    ]
    head = ("DISK OF", "USED", "OF", "", "OBJECTS", "WAITING", "READABLE")
    print("\n".join(table(head, rows, right=(1, 2, 3, 4, 5))))


def _states(details: list[dict[str, Any]]) -> dict[str, str]:
    """Return the states of segments by id, in lower case."""
    return {row["segment_id"]: row["status"].lower().replace("_", " ") for row in details}


def _details(store: Store) -> list[dict[str, Any]]:
    """Return what the admin port says about segments; nothing without one."""
    try:
        seen = admin.fetch(admin.address_of_pool(store), "/get_segments_detail")
    except CommandError:
        return []
    found: list[dict[str, Any]] = seen["segments"] if seen else []
    return found


def _segments_json(found: list[SegmentInfo], states: dict[str, str]) -> list[dict[str, Any]]:
    return [{**asdict(segment), "state": states.get(segment.id)} for segment in found]


def _takes(segment: SegmentInfo, state: str) -> str:
    """Return whether a segment takes puts, and the state that keeps it from it."""
    if not segment.is_connected:
        return "no, connection lost"
    is_usual = state in ("", "ok")
    if segment.takes_objects and is_usual:
        return "yes"
    return "no" if is_usual else f"no, {state}"


def _print_segments(
    found: list[SegmentInfo], states: dict[str, str], file: TextIO | None = None
) -> None:
    rows = [
        (
            segment.name,
            format_bytes(segment.used_bytes),
            format_bytes(segment.capacity_bytes),
            f"{segment.used_bytes / max(segment.capacity_bytes, 1):.0%}",
            _takes(segment, states.get(segment.id, "")),
            segment.endpoint,
        )
        for segment in found
    ]
    head = ("SEGMENT", "USED", "OF", "", "TAKES PUTS", "AT")
    print("\n".join(table(head, rows, right=(1, 2, 3))), file=file)


def add_clients_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `clients`."""
    parser.add_argument(
        "--sort",
        choices=list(_CLIENT_ORDER),
        default="name",
        help="order: by name, or largest first by lent memory, or by the time since it was heard",
    )
    add_json(parser)


def clients(options: argparse.Namespace) -> int:
    """List the processes that have joined the pool.

    Returns:
        0.
    """
    with joined(options) as store:
        at, own = admin.address_of_pool(store), store.name
        seen = admin.fetch(at, f"/api/v1/overview?since={1 << 62}")
        lost = _lost_clients(store.segments(), _details(store))
    lent: dict[str, int] = {}
    for segment in seen["segments"]:
        lent[segment["client"]] = lent.get(segment["client"], 0) + segment["size"]
    rows = [
        {
            **client,
            "lent_bytes": lent.get(client["id"], 0),
            "is_connection_lost": client["id"] in lost,
        }
        for client in seen["clients"]
        if client["name"] != own
    ]
    rows.sort(key=_CLIENT_ORDER[options.sort])
    if options.is_json:
        print_json(rows)
        return 0
    if not rows:
        print("mooncake: no other process has joined the pool", file=sys.stderr)
        return 0
    lines = [
        (
            row["name"],
            format_bytes(row["lent_bytes"]) if row["lent_bytes"] else "-",
            f"{format_duration(row['heard_ms_ago'] / 1000)} ago",
            "connection lost" if row["is_connection_lost"] else "",
            row["id"],
        )
        for row in rows
    ]
    print_table(("CLIENT", "LENDS", "HEARD", "", "ID"), lines, right=(1, 2))
    return 0


def add_drain_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `drain`."""
    parser.add_argument(
        "segments",
        nargs="*",
        metavar="segment",
        help="name of a segment as `mooncake segments` lists it, or a host: all of its segments",
    )
    parser.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="SEGMENT",
        help="segment that receives the copies; by default any with free memory",
    )
    parser.add_argument(
        "-y",
        "--yes",
        action="store_true",
        help="do not ask on a terminal before a host is drained that lends all memory of the pool",
    )
    parser.add_argument(
        "--evict",
        action="store_true",
        help="evict other objects where a copy does not fit into free memory",
    )
    parser.add_argument(
        "--no-wait", action="store_true", help="print the id of the job and do not wait for its end"
    )
    parser.add_argument("--status", metavar="ID", type=_job, help="print the state of a job")
    parser.add_argument(
        "--cancel", metavar="ID", type=_job, help="cancel a job: its segments take objects again"
    )
    add_json(parser)


def _job(text: str) -> tuple[int, int]:
    found = _JOB.fullmatch(text)
    halves = tuple(map(int, found.groups())) if found else ()
    if not halves or max(halves) >= 1 << 64:
        raise argparse.ArgumentTypeError(f"not the id of a job: {text!r}")
    return halves[0], halves[1]


def drain(options: argparse.Namespace) -> int:
    """Move the objects of segments elsewhere, so that their process can be stopped.

    Returns:
        0; 1 if the segments are not empty at the end.
    """
    asked = [bool(options.segments), options.status is not None, options.cancel is not None]
    if asked.count(True) != 1:
        text = "name segments, or give --status ID or --cancel ID"
        raise UsageError(text, "`mooncake segments` lists the names.")
    with joined(options) as store:
        if options.status is not None:
            return _print_job(options, store.drain_of(options.status).info())
        if options.cancel is not None:
            return _print_job(options, store.drain_of(options.cancel).cancel())
        names = _named(store, options.segments)
        if not options.yes and not _is_drain_meant(store, options, names):
            print("mooncake: nothing was drained", file=sys.stderr)
            return 1
        job = store.drain(names, to=options.to, may_evict=options.evict)
        text = f"{job.id[0]}-{job.id[1]}"
        if options.no_wait:
            return _print_job(options, job.info())
        cancel = f"mooncake drain --master {options.master} --cancel {text}"
        note = f"it continues if this command ends; `{cancel}` ends it"
        print(f"mooncake: job {text} empties {', '.join(names)}; {note}", file=sys.stderr)
        try:
            _wait(job)
        except KeyboardInterrupt:
            hint = f"`{cancel}` ends it."
            print(f"mooncake: job {text} continues\n  hint: {hint}", file=sys.stderr)
            raise
        info = job.info()
        code = _print_job(options, info)
        wait_s = _FREEING_S_MAX if info.state == "succeeded" else 0.0
        return _prove_empty(store, options, names, wait_s) or code


def _named(store: Store, wanted: list[str]) -> list[str]:
    """Return the names of segments: those that are named, and those of hosts that are."""
    known = list(dict.fromkeys(segment.name for segment in store.segments()))
    names = []
    for word in wanted:
        found = [name for name in known if name == word or name.rpartition(":")[0] == word]
        if not found:
            near = get_close_matches(word, known, 1)
            hint = f"Did you mean {near[0]}?" if near else "`mooncake segments` lists the names."
            raise CommandError(f"no segment or host has the name {quoted(word)}", hint)
        names += found
    return list(dict.fromkeys(names))


def _is_drain_meant(store: Store, options: argparse.Namespace, names: list[str]) -> bool:
    """Ask on a terminal whether to drain a host, if no other segment could take its objects."""
    found = store.segments()
    if len(names) <= len(options.segments):
        return True
    if any(segment.takes_objects for segment in found if segment.name not in names):
        return True
    print("no other segment takes objects than these:", file=sys.stderr)
    _print_segments(
        [each for each in found if each.name in names], _states(_details(store)), sys.stderr
    )
    return is_confirmed(f"drain all {len(names)} segments of the pool of {options.master}?")


def _wait(job: Drain) -> None:
    """Wait until a job is over; show each change on a terminal, elsewhere the state at times."""
    progress = _show if sys.stderr.isatty() else None
    while True:
        try:
            job.wait(timeout_s=_REPORT_S, progress=progress)
            return
        except TransferFailedError:
            # The caller prints the state, which says why.
            return
        except DeadlineError:
            # Fails if it is the master that does not answer.
            info = job.info()
            if progress is None:
                _show(info)


def _show(info: DrainInfo) -> None:
    moved = f"{info.succeeded} copies moved ({format_bytes(info.moved_bytes)})"
    rest = f"{info.active} in progress, {info.blocked} blocked"
    print(f"mooncake: {info.state}: {moved}, {rest}", file=sys.stderr)


def _print_job(options: argparse.Namespace, info: DrainInfo) -> int:
    text = f"{info.id[0]}-{info.id[1]}"
    if options.is_json:
        moments = {"created": info.created.isoformat(), "updated": info.updated.isoformat()}
        print_json({**asdict(info), **moments, "id": text})
    else:
        print(f"job       {text}")
        print(f"state     {info.state}")
        print(f"segments  {', '.join(info.segments)}")
        print(f"moved     {info.succeeded} copies, {format_bytes(info.moved_bytes)}")
        rest = [f"{info.active} in progress", f"{info.blocked} blocked", f"{info.failed} failed"]
        print(f"left      {', '.join(rest)}")
        if info.evicted:
            print(f"evicted   {info.evicted} other objects, {format_bytes(info.evicted_bytes)}")
        if info.message:
            print(f"message   {info.message}")
    return 1 if info.state == "failed" else 0


def _prove_empty(store: Store, options: argparse.Namespace, names: list[str], wait_s: float) -> int:
    """Print what the drained segments hold at the end.

    Memory of moved objects is in use until the removal is on disk and no read of it can be in
    flight: `wait_s` is the time that this may take.
    """
    deadline = monotonic() + wait_s
    left = _used_bytes(store, names)
    while any(left.values()) and monotonic() < deadline:
        sleep(_FREEING_POLL_S)
        left = _used_bytes(store, names)
    opened = {segment.name for segment in store.segments() if segment.takes_objects}
    for name, used in left.items():
        text = "holds no object; its process may be stopped"
        if used:
            text = f"holds {format_bytes(used)}"
        elif name in opened:
            text = (
                "holds no object, but takes new ones: drain it again before its process is stopped"
            )
        print(f"{name} {text}", file=sys.stderr if options.is_json else sys.stdout)
    return 1 if any(left.values()) else 0


def _used_bytes(store: Store, names: list[str]) -> dict[str, int]:
    """Return the bytes that are in use in each named segment."""
    used = dict.fromkeys(names, 0)
    for segment in store.segments():
        if segment.name in used:
            used[segment.name] += segment.used_bytes
    return used
