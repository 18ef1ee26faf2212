"""Upstream's tool that unregisters NVMe-oF targets: its options and names; it refuses to run."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ._nof_tools import add_ssh_options, run_tool, unsupported

__all__ = ["MooncakeNoFUnregister", "main", "parse_arguments"]


class MooncakeNoFUnregister:
    """Would take the SSDs of SPDK targets from a master; refuses when it is started."""

    def __init__(
        self, cli_config: dict[str, Any] | None = None, spdk_targets: list[str] | None = None
    ) -> None:
        self.cli_config = dict(cli_config or {})
        self.spdk_targets = list(spdk_targets or [])

    def start_ssd_unregister_service(self) -> NoReturn:
        """Refuse to unregister the targets.

        Raises:
            NofUnsupportedError: Always.
        """
        unsupported("unregister NVMe-oF targets")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Takes the SSDs of SPDK targets from a master.")
    parser.add_argument(
        "--master_server_address", default="192.168.65.81:50051", help="host:port of the master"
    )
    parser.add_argument(
        "--spdk_target_info",
        action="append",
        default=[],
        help="a target, like 'ip:192.0.2.1 path:/opt/spdk'; may be repeated",
    )
    add_ssh_options(parser)
    parser.add_argument(
        "-D", "--define", action="append", default=[], help="a setting, like -Dtrsvcid=4420"
    )
    return parser.parse_args()


def main() -> NoReturn:
    """Run the tool."""
    arguments = parse_arguments()
    settings = {"master_server_address": arguments.master_server_address}
    run_tool(
        MooncakeNoFUnregister(settings, arguments.spdk_target_info).start_ssd_unregister_service
    )


if __name__ == "__main__":
    main()
