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

from mooncake._command.admin import address_of, fetch
from mooncake._command.output import CommandError
from mooncake._command.parser import seconds
from mooncake._units import format_bytes, format_count, format_duration

__all__ = ["Sample", "add_options", "render", "run"]

_ENTER, _LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
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
    admin = options.admin or address_of(options.master)
    if options.once or options.is_json or not sys.stdout.isatty():
        before = _sample(admin)
        time.sleep(options.interval)
        now = _sample(admin)
        if options.is_json:
            print(json.dumps({**now.overview, "per_second": _rates(now, before)}, indent=2))
        else:
            print("\n".join(render(now, before, admin, shutil.get_terminal_size().columns)))
        return 0
    _watch(admin, options.interval)
    return 0


def render(now: Sample, before: Sample | None, admin: str, width: int) -> list[str]:
    """Return the lines of the view.

    Args:
        now: Current sample.
        before: Previous sample, for rates per second; None for no rates.
        admin: Address of the master's admin port.
        width: Columns of the terminal.
    """
    seen, rates = now.overview, _rates(now, before)
    pool = seen["pool"]
    share = pool["used"] / pool["capacity"] if pool["capacity"] else 0.0
    reads = rates["gets"]
    window = f"{rates['hits'] / reads:.1%}" if reads else "-"
    ever = f"{seen['reads']['hits'] / seen['reads']['gets']:.1%}" if seen["reads"]["gets"] else "-"
    lines = [
        (
            f"mooncake {seen['version']}  master {seen['addresses'].get('rpc') or '?'}  "
            f"admin {admin}  up {format_duration(seen['uptime_ms'] / 1000)}"
        ),
        (
            f"memory   {_bar(share, 24)} {share:6.1%}  {format_bytes(pool['used'])} of "
            f"{format_bytes(pool['capacity'])}, {format_bytes(pool['writing'])} being written, "
            f"{format_bytes(pool['fenced'])} fenced"
        ),
        (
            f"objects  {pool['keys']:<12} soft pinned {pool['soft_pinned_keys']:<10} "
            f"clients {pool['clients']:<7} segments {pool['segments']}"
        ),
        (
            f"reads    {format_count(reads)}/s, hit rate {window} now and {ever} ever, "
            f"{format_bytes(rates['hit_bytes'])}/s found"
        ),
        (
            f"evicted  {seen['evictions']['keys']} objects, "
            f"{format_bytes(seen['evictions']['bytes'])}; "
            f"puts without room {seen['puts']['without_room']}; slow calls {seen['slow']['total']}"
        ),
        "",
        (
            f"{'CALL':<20}{'CALLS/S':>9}{'ITEMS/S':>9}{'MISSED/S':>9}{'FAILED/S':>9}"
            f"{'CALLS':>12}{'FAILED':>10}"
        ),
    ]
    for call in sorted(seen["calls"], key=lambda call: -call["calls"]):
        per_second = rates["calls"].get(call["name"], {})
        lines.append(
            f"{call['name'][:19]:<20}{format_count(per_second.get('calls', 0)):>9}"
            f"{format_count(per_second.get('items', 0)):>9}"
            f"{format_count(per_second.get('missed', 0)):>9}"
            f"{format_count(per_second.get('failed', 0)):>9}"
            f"{call['calls']:>12}{call['failed']:>10}"
        )
    lines += ["", f"{'SEGMENT':<28}{'USED':>26}  {'OF':>10}  {'STATE':<14}AT"]
    for segment in sorted(seen["segments"], key=lambda segment: -segment["used"]):
        part = segment["used"] / segment["size"] if segment["size"] else 0.0
        lines.append(
            f"{segment['name'][:27]:<28}{_bar(part, 10)} {format_bytes(segment['used']):>11}  "
            f"{format_bytes(segment['size']):>10}  {segment['status'][:13]:<14}"
            f"{segment['endpoint']}"
        )
    lines += ["", f"{'CLIENT':<28}{'HEARD':>12}"]
    for client in seen["clients"]:
        lines.append(
            f"{client['name'][:27]:<28}{format_duration(client['heard_ms_ago'] / 1000):>8} ago"
        )
    return [line[:width] for line in lines]


def _watch(admin: str, interval_s: float) -> None:
    before: Sample | None = None
    with _screen():
        while True:
            note = ""
            try:
                now = _sample(admin)
            except CommandError as error:
                if before is None:
                    raise
                # The master may come back, so the last sample stays in view.
                now, note = before, f"the master does not answer: {error}"
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


def _sample(admin: str) -> Sample:
    overview = fetch(admin, f"/api/v1/overview?since={1 << 62}")
    if overview is None:
        raise CommandError(f"{admin} has no overview: it is not the admin port of a master")
    return Sample(time.monotonic(), overview)


def _rates(now: Sample, before: Sample | None) -> dict[str, Any]:
    """Return rates per second between two samples."""
    if before is None or now.at <= before.at:
        return {"gets": 0.0, "hits": 0.0, "hit_bytes": 0.0, "calls": {}}
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
    return {**rates, "calls": calls}


def _bar(share: float, width: int) -> str:
    full = min(max(round(share * width), 0), width)
    return "[" + "#" * full + "." * (width - full) + "]"
