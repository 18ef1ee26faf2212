"""The command lines of upstream's NVMe-oF tools, which this package accepts and then refuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from ._refusals import NofUnsupportedError

__all__ = ["SsdTool", "add_ssh_options", "parse_ssd_options", "run_tool"]


class SsdTool:
    """A tool for the SSDs of SPDK targets: its settings, and the targets."""

    def __init__(
        self, cli_config: dict[str, Any] | None = None, spdk_targets: list[str] | None = None
    ) -> None:
        self.cli_config = dict(cli_config or {})
        self.spdk_targets = list(spdk_targets or [])


def parse_ssd_options(
    description: str, master: dict[str, Any], targets: dict[str, Any]
) -> argparse.Namespace:
    """Return the options of an `SsdTool`; `master` and `targets` say what may be absent."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--master_server_address", help="host:port of the master", **master)
    text = "a target, like 'ip:192.0.2.1 path:/opt/spdk'; may be repeated"
    parser.add_argument("--spdk_target_info", action="append", help=text, **targets)
    add_ssh_options(parser)
    text = "a setting, like -Dtrsvcid=4420"
    parser.add_argument("-D", "--define", action="append", default=[], help=text)
    return parser.parse_args()


def add_ssh_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the tools that reach their targets over SSH."""
    parser.add_argument("--username", default="root", help="user on the targets")
    parser.add_argument("--port", type=int, default=22, help="SSH port of the targets")
    parser.add_argument("--password", help="password on the targets")
    parser.add_argument("--key-file", help="file with a private SSH key")


def run_tool(action: Callable[[], object]) -> NoReturn:
    """Run a tool and end the process: 0 if it succeeded, 1 with a line on stderr if not."""
    try:
        action()
    except NofUnsupportedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
