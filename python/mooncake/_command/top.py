"""`mooncake top`: a live view of a pool in the terminal, or a single report."""

from __future__ import annotations

import argparse
import contextlib
import json
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mooncake._api.store import SegmentInfo, Store, StoreConfig
from mooncake._command.admin import address_of_pool, fetch, reachable
from mooncake._command.masters import ask, can_take_over, leader_text, standby_text
from mooncake._command.output import CommandError, reason, table
from mooncake._command.parser import seconds
from mooncake._units import format_bytes, format_count, format_duration
from mooncake.errors import MooncakeError

__all__ = ["Sample", "add_options", "render", "run"]

_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
# While no master answers, the view must still be quit.
_CALL_S = 5.0
_SEGMENT_BAR, _NAME_MIN = 10, 15
_HOME, _CLEAR_LINE, _CLEAR_REST = "\033[H", "\033[K", "\033[J"


@dataclass(frozen=True, slots=True)
class Sample:
    """The overview of a master at a point in time.

    Attributes:
        at: Time in seconds of the monotonic clock.
        overview: Decoded JSON of the admin port.
    """

    at: float
    overview: dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument(
        "--admin",
        default="",
        help="host:port of the admin port; by default the address that the master reports",
    )
    parser.add_argument(
        "--interval", type=seconds, default=1.0, metavar="S", help="seconds between two samples"
    )
    parser.add_argument("--once", action="store_true", help="print one view and exit")
    parser.add_argument(
        "--json", action="store_true", dest="is_json", help="print one sample as JSON and exit"
    )


def run(options: argparse.Namespace) -> int:
    """Show the pool until ``q`` is pressed, or print it once.

    It is printed once if standard output is no terminal or an option asks for it.

    Args:
        options: Options that `add_options` declares, and ``master``.

    Returns:
        0.
    """
    with contextlib.ExitStack() as stack:
        # Of the admin port alone it is not known which segments have lost their connection.
        config = StoreConfig(rpc_timeout_s=_CALL_S)
        store = None if options.admin else stack.enter_context(Store(options.master, config))
        admin = options.admin if store is None else address_of_pool(store)
        if options.once or options.is_json or not sys.stdout.isatty():
            before = _sample(admin, store)
            time.sleep(options.interval)
            now = _sample(admin, store)
            if options.is_json:
                print(json.dumps({**now.overview, "per_second": _rates(now, before)}, indent=2))
            else:
                print("\n".join(render(now, before, admin, shutil.get_terminal_size().columns)))
        else:
            _watch(admin, store, options.interval)
    return 0


def render(now: Sample, before: Sample | None, admin: str, width: int) -> list[str]:
    """Return the lines of the view, which fit 80 columns unless names are long.

    Args:
        now: Current sample.
        before: Previous sample, for rates per second; None for no rates.
        admin: Address of the master's admin port.
        width: Columns of the terminal; longer lines are broken between values, or cut.
    """
    seen, rates = now.overview, _rates(now, before)
    lines = _summary(seen, rates, admin, width)
    lines += ["", *_calls(seen, rates), "", *_segments(seen, width)]
    if seen.get("disks"):
        lines += ["", *_disks(seen)]
    lost = {segment["client"] for segment in _lost(seen)}
    clients = [
        (
            client["name"],
            f"{format_duration(client['heard_ms_ago'] / 1000)} ago",
            "connection lost" if client.get("id") in lost else "",
        )
        for client in seen["clients"]
    ]
    lines += ["", *table(("CLIENT", "HEARD", ""), clients, right=(1,))]
    return [line[:width] for line in lines]


def _lost(seen: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in seen["segments"] if not each.get("is_connected", True)]


def _summary(seen: dict[str, Any], rates: dict[str, Any], admin: str, width: int) -> list[str]:
    pool, reads, evicted = seen["pool"], seen["reads"], seen["evictions"]
    # Memory that cannot be reached now takes no objects.
    lost, lost_used = (sum(each[name] for each in _lost(seen)) for name in ("size", "used"))
    used_bytes, capacity = max(pool["used"] - lost_used, 0), max(pool["capacity"] - lost, 0)
    share = used_bytes / capacity if capacity else 0.0
    window = f"{rates['hits'] / rates['gets']:.1%}" if rates["gets"] else "-"
    ever = f"{reads['hits'] / reads['gets']:.1%}" if reads["gets"] else "-"
    master = reachable(seen["addresses"].get("rpc") or "?", admin)
    up = format_duration(seen["uptime_ms"] / 1000)
    used = f"{format_bytes(used_bytes)} of {format_bytes(capacity)}"
    fenced = format_bytes(pool["fenced"])
    parts = [
        ("mooncake ", [f"{seen['version']}  master {master}", f"  admin {admin}", f"  up {up}"]),
        (
            "memory   ",
            [
                f"{_bar(share, 24)} {share:6.1%}  {used}",
                f", {format_bytes(pool['writing'])} being written, {fenced} fenced",
                *([f", {format_bytes(lost)} lost"] if lost else []),
            ],
        ),
        (
            "objects  ",
            [
                f"{pool['keys']:<12} soft pinned {pool['soft_pinned_keys']:<10}",
                f" clients {pool['clients']:<7}",
                f" segments {pool['segments']}",
            ],
        ),
        (
            "reads    ",
            [
                f"{format_count(rates['gets'])}/s",
                f", hit rate {window} now and {ever} ever",
                f", {format_bytes(rates['hit_bytes'])}/s found",
            ],
        ),
        (
            "evicted  ",
            [
                f"{evicted['keys']} objects, {format_bytes(evicted['bytes'])}",
                f"; puts without room {seen['puts']['without_room']}",
                f"; slow calls {seen['slow']['total']}",
            ],
        ),
    ]
    if seen.get("disks"):
        parts += _tiers(seen, rates)
    if seen.get("ha", {}).get("enabled"):
        parts.insert(1, ("masters  ", _masters(seen["ha"])))
    return [line for title, texts in parts for line in _broken(title, texts, width)]


def _masters(elected: dict[str, Any]) -> list[str]:
    """Return the parts of the line about leader and standbys."""
    standbys = [f"; {row['address']} {standby_text(row)}" for row in elected["standbys"]]
    if not any(map(can_take_over, elected["standbys"])):
        standbys.append("; NO STANDBY IN SYNC")
    failure = elected.get("service_error")
    failed = [f"; the lease service cannot be used: {failure}"] if failure else []
    return [f"leader {leader_text(elected)}", *standbys, *failed]


def _tiers(seen: dict[str, Any], rates: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the lines about disks."""
    disks, done, reads = seen["disks"], seen["offloads"], seen["reads"]
    used, size = (sum(disk[name] for disk in disks) for name in ("used_bytes", "capacity_bytes"))
    share = used / size if size else 0.0
    waiting = sum(disk["waiting_objects"] for disk in disks)
    objects = sum(disk["objects"] for disk in disks)
    ever = f"{reads['disk_hits'] / reads['gets']:.1%}" if reads["gets"] else "-"
    return [
        (
            "disks    ",
            [
                f"{_bar(share, 24)} {share:6.1%}  {format_bytes(used)} of {format_bytes(size)}",
                f", {objects} object{'' if objects == 1 else 's'}, {waiting} waiting",
            ],
        ),
        (
            "         ",
            [
                f"{format_bytes(rates['offloaded_bytes'])}/s written",
                f", {format_count(rates['disk_hits'])}/s read from disks ({ever} of all reads)",
                f"; refused {done['refused']}, failed {done['failed']}",
                f", evicted before {done['missed']}",
            ],
        ),
    ]


def _disks(seen: dict[str, Any]) -> list[str]:
    rows = [
        (
            disk["name"],
            format_bytes(disk["used_bytes"]),
            format_bytes(disk["capacity_bytes"]),
            f"{disk['objects']}",
            f"{disk['waiting_objects']}",
            "readable" if disk["is_readable"] else "NOT OPEN",
            disk["address"],
        )
        for disk in seen["disks"]
    ]
    head = ("DISK OF", "USED", "OF", "OBJECTS", "WAITING", "STATE", "AT")
    return table(head, rows, right=(1, 2, 3, 4))


def _broken(title: str, texts: list[str], width: int) -> list[str]:
    """Return a line, or several if it is longer than the width; it is broken between the texts."""
    lines = [title]
    for text in texts:
        if len(lines[-1]) > len(title) and len(lines[-1] + text) > width:
            lines.append(" " * len(title))
            text = text.lstrip(",; ")
        lines[-1] += text
    return lines


def _calls(seen: dict[str, Any], rates: dict[str, Any]) -> list[str]:
    rates_head = f"{'CALL':<20}{'CALLS/S':>9}{'ITEMS/S':>9}{'MISSED/S':>9}{'FAILED/S':>9}"
    lines = [f"{rates_head}{'CALLS':>12}{'FAILED':>10}"]
    for call in sorted(seen["calls"], key=lambda call: -call["calls"]):
        per_second = rates["calls"].get(call["name"], {})
        lines.append(
            f"{call['name'][:19]:<20}{format_count(per_second.get('calls', 0)):>9}"
            f"{format_count(per_second.get('items', 0)):>9}"
            f"{format_count(per_second.get('missed', 0)):>9}"
            f"{format_count(per_second.get('failed', 0)):>9}"
            f"{call['calls']:>12}{call['failed']:>10}"
        )
    return lines


def _segments(seen: dict[str, Any], width: int) -> list[str]:
    """Return the table of segments: with bars, or narrow without them and with shorter names."""
    segments = sorted(seen["segments"], key=lambda segment: -segment["used"])
    shares = [each["used"] / each["size"] if each["size"] else 0.0 for each in segments]

    def lines(bar_width: int, name_width: int) -> list[str]:
        rows = [
            (
                each["name"][:name_width],
                f"{_bar(share, bar_width)} {share:4.0%}" if bar_width else f"{share:.0%}",
                format_bytes(each["used"]),
                format_bytes(each["size"]),
                each["status"] if each.get("is_connected", True) else "LOST",
                each["endpoint"],
            )
            for each, share in zip(segments, shares, strict=True)
        ]
        return table(("SEGMENT", "", "USED", "OF", "STATE", "AT"), rows, right=(1, 2, 3))

    longest = max((len(each["name"]) for each in segments), default=0)
    wide = lines(_SEGMENT_BAR, longest)
    if max(map(len, wide)) <= width:
        return wide
    narrow = lines(0, longest)
    excess = max(map(len, narrow)) - width
    return lines(0, max(longest - excess, _NAME_MIN)) if excess > 0 else narrow


def _watch(admin: str, store: Store | None, interval_s: float) -> None:
    before: Sample | None = None
    with _screen():
        while True:
            note = ""
            try:
                now = _sample(admin, store)
            except CommandError as error:
                if before is None:
                    raise
                # The master may come back, so the last sample stays in view.
                now, note = before, f"the master does not answer: {reason(error)}"
                admin = _admin_of_leader(store) or admin
            size = shutil.get_terminal_size()
            lines = render(now, before, admin, size.columns)
            last = note or f"every {interval_s:g} s; q ends"
            shown = lines[: max(size.lines - 2, 1)]
            text = "".join(f"{line}{_CLEAR_LINE}\r\n" for line in shown)
            sys.stdout.write(f"{_HOME}{text}{_CLEAR_REST}{last[: size.columns]}")
            sys.stdout.flush()
            before = now
            if _is_quit_within(interval_s):
                return


def _admin_of_leader(store: Store | None) -> str:
    """Return the admin port of the master that leads now; empty if none can be asked at once."""
    if store is None:
        return ""
    try:
        return address_of_pool(store)
    except (CommandError, MooncakeError):
        return ""


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Switch the terminal to the alternate screen, and restore it on every exit."""
    file = sys.stdin.fileno() if sys.stdin.isatty() else None
    saved = termios.tcgetattr(file) if file is not None else None
    if file is not None:
        tty.setcbreak(file)
    sys.stdout.write(_ENTER)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if file is not None and saved is not None:
            termios.tcsetattr(file, termios.TCSADRAIN, saved)


def _is_quit_within(seconds: float) -> bool:
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and sys.stdin.read(1) in ("q", "Q", "\x04", "")


def _sample(admin: str, store: Store | None) -> Sample:
    overview = fetch(admin, f"/api/v1/overview?since={1 << 62}")
    if overview is None:
        raise CommandError(f"{admin} has no overview: it is not the admin port of a master")
    overview["ha"] = ask(admin)
    if store is not None:
        _mark_lost(overview, store)
    return Sample(time.monotonic(), overview)


def _mark_lost(overview: dict[str, Any], store: Store) -> None:
    """Say of each segment whether it is connected, and leave out the client of this command."""
    segments = list[SegmentInfo]()
    with contextlib.suppress(MooncakeError):
        segments = store.segments()
    lost = {(each.name, each.endpoint) for each in segments if not each.is_connected}
    for segment in overview["segments"]:
        segment["is_connected"] = (segment["name"], segment["endpoint"]) not in lost
    others = [client for client in overview["clients"] if client["name"] != store.name]
    overview["pool"]["clients"] -= len(overview["clients"]) - len(others)
    overview["clients"] = others


def _rates(now: Sample, before: Sample | None) -> dict[str, Any]:
    """Return rates per second between two samples."""
    if before is None or now.at <= before.at:
        names = (*now.overview["reads"], "offloaded_bytes")
        return {**dict.fromkeys(names, 0.0), "calls": {}}
    seconds = now.at - before.at

    def per_second(new: dict[str, int], old: dict[str, int], name: str) -> float:
        # A restarted master counts from 0 again.
        return max(new.get(name, 0) - old.get(name, 0), 0) / seconds

    reads = now.overview["reads"], before.overview["reads"]
    old = {call["name"]: call for call in before.overview["calls"]}
    calls = {
        call["name"]: {
            name: per_second(call, old.get(call["name"], {}), name)
            for name in ("calls", "items", "missed", "failed")
        }
        for call in now.overview["calls"]
    }
    rates: dict[str, Any] = {name: per_second(*reads, name) for name in reads[0]}
    offloads = now.overview.get("offloads", {}), before.overview.get("offloads", {})
    rates["offloaded_bytes"] = per_second(*offloads, "bytes")
    return {**rates, "calls": calls}


def _bar(share: float, width: int) -> str:
    full = min(max(round(share * width), 0), width)
    return "[" + "#" * full + "." * (width - full) + "]"
