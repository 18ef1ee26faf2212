"""Upstream's tool that unregisters NVMe-oF targets: its options and names; it refuses to run."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ._nof_tools import SsdTool, parse_ssd_options, run_tool
from ._refusals import refused

__all__ = ["MooncakeNoFUnregister", "main", "parse_arguments"]


class MooncakeNoFUnregister(SsdTool):
    """Would take the SSDs of SPDK targets from a master; refuses when it is started."""

    start_ssd_unregister_service = refused("MooncakeNoFUnregister", "start_ssd_unregister_service")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    return parse_ssd_options(
        "Takes the SSDs of SPDK targets from a master.",
        {"default": "192.168.65.81:50051"},
        {"default": []},
    )


def main() -> NoReturn:
    """Run the tool."""
    arguments = parse_arguments()
    settings = {"master_server_address": arguments.master_server_address}
    run_tool(
        MooncakeNoFUnregister(settings, arguments.spdk_target_info).start_ssd_unregister_service
    )


if __name__ == "__main__":
    main()
