"""`mooncake ls`, `rm`, `expire` and `exists`: objects by key and by prefix."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake._api.blocking.sharded import explained
from mooncake._api.values import milliseconds
from mooncake._command import admin
from mooncake._command.files import joined
from mooncake._command.output import (
    CommandError,
    UsageError,
    has_terminal,
    is_absent,
    is_confirmed,
    missing,
    print_json,
    print_json_list,
    quoted,
    report,
    write_line,
)
from mooncake._command.parser import EXISTS_CODES, add_json, count, duration
from mooncake._units import format_bytes
from mooncake.errors import MooncakeError, NotFoundError
from mooncake.tensor.sharded import OF_SHARDS

if TYPE_CHECKING:
    from mooncake._api.store import Store

__all__ = [
    "add_exists_options",
    "add_expire_options",
    "add_ls_options",
    "add_rm_options",
    "exists",
    "expire",
    "ls",
    "rm",
]

_BATCH = 1000
# Objects of which `rm --dry-run` asks for the leases, in a request each.
_LEASES_MAX = 1000


@dataclass(slots=True)
class Row:
    """A line of a listing: an object, or the objects of a group.

    Attributes:
        key: Key of the object, or the prefix that a group shares.
        objects: Number of objects; None for a single object.
        size: Bytes of the objects.
        memory: Bytes of their copies in memory.
        disk: Bytes of their copies on disks.
        copies: Number of copies of a single object in memory.
        on_disk: Number of those on disks.
        is_complete: False while the object is being written.
    """

    key: str
    objects: int | None
    size: int
    memory: int
    disk: int
    copies: int
    on_disk: int
    is_complete: bool

    def json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        sizes = {"bytes": self.size, "memory_bytes": self.memory, "disk_bytes": self.disk}
        if self.objects is not None:
            return {"prefix": self.key, "objects": self.objects, **sizes}
        copies = {"copies": self.copies + self.on_disk, "copies_on_disk": self.on_disk}
        state = {**copies, "is_complete": self.is_complete}
        return {"key": self.key, **sizes, **state}


def add_ls_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `ls`."""
    parser.add_argument(
        "prefix",
        nargs="?",
        default=b"",
        type=os.fsencode,
        help="beginning of the keys; all keys without it",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="list at most N rows")
    parser.add_argument(
        "--count", action="store_true", dest="is_counted", help="print number and sizes only"
    )
    parser.add_argument(
        "--delimiter",
        metavar="TEXT",
        help="add up the objects whose keys agree up to the next TEXT after the prefix",
    )
    parser.add_argument(
        "--sort",
        choices=["key", "size", "memory"],
        default="key",
        help="order: by key, or largest first by size, or by size of all copies",
    )
    parser.add_argument("--bytes", action="store_true", dest="is_exact", help="sizes in bytes")
    parser.add_argument(
        "--internal",
        action="store_true",
        dest="is_internal",
        help="list the shards and manifests of tensors instead of the tensors",
    )
    parser.add_argument(
        "--keys", action="store_true", dest="is_bare", help="print the keys only, for scripts"
    )
    add_json(parser)


def ls(options: argparse.Namespace) -> int:
    """List objects.

    Returns:
        0.
    """
    with joined(options) as store:
        rows: Iterator[Row] = _rows(store, options.prefix, internal=options.is_internal)
        if options.is_counted:
            _print_count(options, list(rows))
            return 0
        if options.delimiter:
            rows = iter(_grouped(rows, options.prefix, options.delimiter))
        if options.sort != "key":
            by_size = options.sort == "size"
            rows = iter(sorted(rows, key=lambda row: -(row.size if by_size else row.memory)))
        shown = rows if options.limit is None else itertools.islice(rows, options.limit)
        if options.is_json:
            print_json_list(row.json() for row in shown)
            return 0
        for row in shown:
            _print_row(row, options)
        sys.stdout.flush()
    return 0


def _rows(store: Store, prefix: bytes, *, internal: bool = False) -> Iterator[Row]:
    for found in store.objects(prefix, internal=internal):
        on_disk, copies = found.disk_replicas, found.replicas - found.disk_replicas
        memory, disk = found.size * copies, found.size * on_disk
        yield Row(found.key, None, found.size, memory, disk, copies, on_disk, found.is_complete)


def _grouped(rows: Iterator[Row], prefix: bytes, delimiter: str) -> list[Row]:
    """Add up the rows whose keys agree up to the next delimiter."""
    begin, groups = len(os.fsdecode(prefix)), dict[str, Row]()
    for row in rows:
        end = row.key.find(delimiter, begin)
        if end < 0:
            groups[row.key] = row
            continue
        name = row.key[: end + len(delimiter)]
        group = groups.get(name)
        if group is None or group.objects is None:
            # A key may end with the delimiter; it is then one of the group.
            groups[name] = group = Row(name, 0, 0, 0, 0, 0, 0, True)
        group.objects = (group.objects or 0) + 1
        group.size += row.size
        group.memory += row.memory
        group.disk += row.disk
    return list(groups.values())


def _print_row(row: Row, options: argparse.Namespace) -> None:
    if options.is_bare:
        write_line("", row.key)
        return
    size = str(row.size) if options.is_exact else format_bytes(row.size)
    number = f"x{row.copies + row.on_disk}" if row.objects is None else _objects(row.objects)
    state = "" if row.is_complete else "  (being written)"
    if row.on_disk:
        state = "  (also on disk)" if row.copies else "  (on disk only)"
    write_line(f"{size:>14}  {number:>{12 if options.delimiter else 3}}  ", row.key, state)


def _print_count(options: argparse.Namespace, rows: list[Row]) -> None:
    size, memory = sum(row.size for row in rows), sum(row.memory for row in rows)
    disk = sum(row.disk for row in rows)
    if options.is_json:
        found = {"objects": len(rows), "bytes": size, "memory_bytes": memory, "disk_bytes": disk}
        print_json(found)
        return
    numbers = (size, memory, disk)
    sizes = [str(each) if options.is_exact else format_bytes(each) for each in numbers]
    on_disk = f" in memory, {sizes[2]} on disks" if disk else ""
    print(f"{len(rows)} objects, {sizes[0]}; with all copies {sizes[1]}{on_disk}")


def add_rm_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `rm`."""
    parser.add_argument(
        "keys",
        nargs="*",
        metavar="key",
        type=os.fsencode,
        help="key of an object; with --recursive the beginning of keys",
    )
    # Prints the usage and exits with 2.
    parser.set_defaults(refuse=parser.error)
    parser.add_argument(
        "-r",
        "--recursive",
        action="store_true",
        help="remove all objects whose keys begin with a given text",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        dest="is_all",
        help="remove all objects of the tenant; needs --yes where there is no terminal to ask on",
    )
    parser.add_argument("--force", action="store_true", help="also objects that are leased")
    parser.add_argument("--pinned", action="store_true", help="also objects that are hard-pinned")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print sizes and leases of what would be removed, and remove nothing",
    )
    parser.add_argument(
        "-y",
        "--yes",
        action="store_true",
        help="do not ask on a terminal before --recursive and --all",
    )
    add_json(parser)


def rm(options: argparse.Namespace) -> int:
    """Remove objects.

    Returns:
        0; 1 if one was not removed.
    """
    _check_rm(options)
    prefixes = [b""] if options.is_all else options.keys
    with joined(options) as store:
        if not (options.recursive or options.is_all):
            keys = list(options.keys)
            if options.dry_run:
                rows = {key: row for key in keys for row in _row_of(store, key)}
                absent = [missing(key) for key in keys if key not in rows]
                return _would_remove(store, options, list(rows.values()), absent)
            return _removed(store, options, keys)
        found = {row.key: row for prefix in prefixes for row in _rows(store, prefix)}
        total = format_bytes(sum(row.size for row in found.values()))
        under = "" if options.is_all else f" under {', '.join(map(quoted, prefixes))}"
        text = f"{len(found)} objects ({total}){under} in the pool of {options.master}"
        if options.is_all:
            text = f"all {text}"
        if not options.dry_run and not options.yes and not is_confirmed(f"remove {text}?"):
            print("mooncake: nothing was removed", file=sys.stderr)
            return 1
        if options.dry_run:
            return _would_remove(store, options, list(found.values()))
        keys = [key.encode("utf-8", "surrogateescape") for key in found]
        return _removed(store, options, keys)


def _check_rm(options: argparse.Namespace) -> None:
    """Refuse to remove nothing by name, and everything unasked."""
    if options.is_all and options.keys:
        raise UsageError("--all takes no keys: it removes every object")
    if not options.is_all and not options.keys:
        options.refuse("the following arguments are required: key, or --all for every object")
    if options.recursive and b"" in options.keys:
        raise UsageError("an empty prefix would remove every object; --all does that")
    is_asked = options.yes or options.dry_run or has_terminal()
    if options.is_all and not is_asked:
        raise UsageError("--all removes every object: confirm it with --yes")


def _row_of(store: Store, key: bytes) -> Iterator[Row]:
    """Yield the object or the tensor of a key, unless there is none."""
    named = (row for row in _rows(store, key) if os.fsencode(row.key) == key)
    return itertools.islice(named, 1)


def _would_remove(
    store: Store,
    options: argparse.Namespace,
    rows: list[Row],
    absent: Sequence[MooncakeError] = (),
) -> int:
    """Print which objects would be removed, what protects others, and how much memory that is."""
    protected = _protected(store, options, rows)
    protections = protected or {}
    gone = [row for row in rows if row.key not in protections]
    leased = sorted(key for key, word in protections.items() if word == "leased")
    pinned = sorted(key for key, word in protections.items() if word == "hard-pinned")
    size, memory = sum(row.size for row in gone), sum(row.memory for row in gone)
    if options.is_json:
        known = None if protected is None else leased
        keys = {"would_remove": [row.key for row in gone], "leased": known}
        sizes = {"bytes": size, "memory_bytes": memory}
        # As in the answer to a removal, which fails for them.
        kept = [{"key": key, "code": "OBJECT_HAS_LEASE", "number": -706} for key in pinned]
        print_json({**keys, "kept": [*_for_json(absent), *kept], **sizes})
        report(*absent)
        return 1 if absent else 0
    for row in rows:
        word = protections.get(row.key, "")
        verb = "would keep  " if word else "would remove"
        write_line(f"{verb}  {format_bytes(row.size):>10}  ", row.key, word and f"  {word}")
    sys.stdout.flush()
    report(*absent)
    if absent and not rows:
        return 1
    text = f"would remove {_objects(len(gone))}, {format_bytes(size)}; with all copies "
    text += format_bytes(memory)
    if leased:
        text += f"; {_objects(len(leased))} leased, which --force removes"
    if pinned:
        text += f"; {_objects(len(pinned))} hard-pinned, which --pinned removes"
    if protected is None:
        text += "; hard-pinned ones without --pinned, and those that are leased would stay "
        text += "without --force"
    print(text)
    return 1 if absent else 0


def _objects(number: int) -> str:
    return "1 object" if number == 1 else f"{number} objects"


def _protected(store: Store, options: argparse.Namespace, rows: list[Row]) -> dict[str, str] | None:
    """Return what protects each key that would stay; None if that cannot be told.

    It cannot if there are too many keys, or if the admin port does not answer.
    """
    if options.force and options.pinned:
        return {}
    if len(rows) > _LEASES_MAX:
        return None
    try:
        at, protected = admin.address_of_pool(store), dict[str, str]()
        for row in rows:
            key = row.key.encode("utf-8", "surrogateescape")
            seen = admin.object_of(at, key, options.tenant)
            if seen is None:
                continue
            if seen["is_hard_pinned"] and not options.pinned:
                protected[row.key] = "hard-pinned"
            elif seen["lease_left_ms"] > 0 and not options.force:
                protected[row.key] = "leased"
    except CommandError:
        return None
    return protected


def _removed(store: Store, options: argparse.Namespace, keys: list[bytes]) -> int:
    """Remove objects in batches and print what became of them."""
    removed, failures = 0, list[MooncakeError]()
    try:
        for part in _parts(keys):
            for key, outcome in zip(part, _outcomes(store, part, options), strict=True):
                if isinstance(outcome, MooncakeError):
                    failures.append(outcome)
                elif outcome:
                    removed += 1
                elif options.keys and not options.recursive:
                    failures.append(missing(key))
    except KeyboardInterrupt:
        text = f"interrupted: at least {_objects(removed)} of {len(keys)} removed"
        print(f"mooncake: {text}", file=sys.stderr)
        raise
    if options.is_json:
        print_json({"removed": removed, "kept": _for_json(failures)})
    elif options.recursive or options.is_all:
        print(f"removed {_objects(removed)}")
    report(*failures)
    return 1 if failures else 0


def _outcomes(
    store: Store, keys: list[bytes], options: argparse.Namespace
) -> list[bool | MooncakeError]:
    try:
        deleted = store.delete_many(keys, force=options.force, pinned=options.pinned)
        return [deleted.kept.get(key, is_gone) for key, is_gone in zip(keys, deleted, strict=True)]
    except MooncakeError as error:
        if error.outcomes is None:
            raise
        outcomes: list[bool | MooncakeError] = error.outcomes
        return outcomes


def _for_json(failures: Sequence[MooncakeError]) -> list[dict[str, str | int | None]]:
    return [
        {"key": _text(each.key), "code": each.code_name, "number": each.code} for each in failures
    ]


def _text(key: str | bytes | None) -> str | None:
    return os.fsdecode(key) if isinstance(key, bytes) else key


def _parts(keys: list[bytes]) -> Iterator[list[bytes]]:
    return (keys[at : at + _BATCH] for at in range(0, len(keys), _BATCH))


def add_expire_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `expire`."""
    parser.add_argument("keys", nargs="+", metavar="key", type=os.fsencode, help="key of an object")
    parser.add_argument(
        "time",
        type=_duration_or_never,
        help="time from now, as 30s, 2h or 1d; never keeps the objects",
    )
    add_json(parser)


def _duration_or_never(text: str) -> float | None:
    return None if text == "never" else duration(text)


def expire(options: argparse.Namespace) -> int:
    """Let objects expire, even if they are leased then; or keep objects that would.

    Returns:
        0; 1 if one was not changed.
    """
    after_ms = None if options.time is None else milliseconds(options.time)
    changed, failures = 0, list[MooncakeError]()
    with joined(options) as store:
        for part in _parts(options.keys):
            outcomes = store._native.set_expiry(part, after_ms)
            for outcome in explained(lambda: store._native, part, outcomes, OF_SHARDS):
                if isinstance(outcome, MooncakeError):
                    failures.append(outcome)
                else:
                    changed += 1
    if options.is_json:
        print_json({"changed": changed, "failed": _for_json(failures)})
    report(*failures)
    return 1 if failures else 0


def add_exists_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `exists`."""
    parser.epilog = EXISTS_CODES
    # So that a script can tell a missing object from a master that does not answer.
    parser.set_defaults(exit_code_of_failure=2)
    parser.add_argument("keys", nargs="+", metavar="key", type=os.fsencode, help="key of an object")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="print nothing; the exit code is the answer"
    )
    add_json(parser)


def exists(options: argparse.Namespace) -> int:
    """Print which objects exist.

    Returns:
        0 if all of them exist, otherwise 1; a failure is 2.
    """
    if options.quiet and options.is_json:
        raise UsageError("--quiet and --json exclude each other")
    with joined(options) as store:
        found = store.exists_many(options.keys)
        absent = [key for key, is_there in zip(options.keys, found, strict=True) if not is_there]
        unreadable = [] if options.quiet else _unreadable(store, absent)
    if options.is_json:
        print_json(
            {os.fsdecode(key): is_there for key, is_there in zip(options.keys, found, strict=True)}
        )
    elif not options.quiet:
        for key, is_there in zip(options.keys, found, strict=True):
            write_line("yes  " if is_there else "no   ", os.fsdecode(key))
        sys.stdout.flush()
    report(*unreadable)
    return 0 if all(found) else 1


def _unreadable(store: Store, keys: list[bytes]) -> list[MooncakeError]:
    """Return the failures of objects of which no copy can be read now."""
    found = store._native.replicas(keys, lease=False) if keys else []
    return [each for each in found if isinstance(each, NotFoundError) and not is_absent(each)]
