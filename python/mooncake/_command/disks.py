"""`mooncake disk`: list, check and empty directories of records that no process uses."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable

from mooncake._command.output import (
    CommandError,
    UsageError,
    has_terminal,
    is_confirmed,
    print_table,
    quoted,
)
from mooncake._command.parser import Parser, add_json
from mooncake._runtime import _native
from mooncake._units import format_bytes

__all__ = ["add_options"]

_FAILED = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the commands of `mooncake disk`."""
    commands = parser.add_subparsers(
        required=True, metavar="ACTION", parser_class=Parser, help="what to do with a directory"
    )

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run, exit_code_of_failure=_FAILED)
        command.add_argument("directory", help="directory of records that no process uses")
        add_json(command)
        return command

    add("ls", _ls, "list the records in a directory")
    add("verify", _verify, "read all records in a directory and compare their checksums")
    wipe = add("wipe", _wipe, "remove all records in a directory")
    wipe.add_argument("-y", "--yes", action="store_true", help="do not ask on a terminal")


def _ls(options: argparse.Namespace) -> int:
    found, unreadable = _native.disk_records(options.directory)
    if options.is_json:
        names = ("tenant", "key", "version", "bytes", "extent", "offset", "is_sealed")
        rows = [
            dict(zip(names, (tenant, os.fsdecode(key), *rest), strict=True))
            for tenant, key, *rest in found
        ]
        print(json.dumps(rows, indent=2))
    elif found:
        table = [
            [quoted(tenant), quoted(key), str(version), format_bytes(length)]
            for tenant, key, version, length, *_ in found
        ]
        print_table(["TENANT", "KEY", "VERSION", "SIZE"], table, right=(2, 3))
    for path, why in unreadable:
        print(f"cannot read {quoted(os.fspath(path))}: {why}", file=sys.stderr)
    return _FAILED if unreadable else 0


def _verify(options: argparse.Namespace) -> int:
    extents, records, size, bad, unreadable = _native.disk_verify(options.directory)
    if options.is_json:
        damaged = [
            {"tenant": tenant, "key": os.fsdecode(key), "version": version}
            for tenant, key, version in bad
        ]
        found = {
            "extents": extents,
            "records": records,
            "bytes": size,
            "damaged": damaged,
            "unreadable": [{"path": os.fspath(path), "cause": why} for path, why in unreadable],
        }
        print(json.dumps(found, indent=2))
    else:
        for tenant, key, version in bad:
            print(f"damaged: {quoted(key)} of tenant {quoted(tenant)}, version {version}")
        sizes = f"{format_bytes(size)} in {extents} extents"
        print(f"{records} records are whole ({sizes}), {len(bad)} are damaged")
        for path, why in unreadable:
            print(f"cannot read {quoted(os.fspath(path))}: {why}")
    return _FAILED if bad or unreadable else 0


def _wipe(options: argparse.Namespace) -> int:
    if not options.yes:
        if not has_terminal():
            raise UsageError("wipe removes all records: say --yes where nobody can be asked")
        if not is_confirmed(f"remove all records in {quoted(options.directory)}?"):
            raise CommandError("nothing was removed")
    extents = _native.disk_wipe(options.directory)
    if options.is_json:
        print(json.dumps({"directory": options.directory, "extents": extents}, indent=2))
    else:
        print(f"removed {extents} extents from {quoted(options.directory)}")
    return 0
