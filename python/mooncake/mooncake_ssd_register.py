"""Upstream's tool that registers NVMe-oF targets: its options and names; it refuses to run."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ._nof_tools import SsdTool, parse_ssd_options, run_tool
from ._refusals import refused

__all__ = ["MooncakeNoFRegister", "main", "parse_arguments"]


class MooncakeNoFRegister(SsdTool):
    """Would register the SSDs of SPDK targets at a master; refuses when it is started."""

    start_ssd_service = refused("MooncakeNoFRegister", "start_ssd_service")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    return parse_ssd_options(
        "Registers the SSDs of SPDK targets at a master.", {"required": True}, {"required": True}
    )


def main() -> NoReturn:
    """Run the tool."""
    arguments = parse_arguments()
    settings = {"master_server_address": arguments.master_server_address}
    run_tool(MooncakeNoFRegister(settings, arguments.spdk_target_info).start_ssd_service)


if __name__ == "__main__":
    main()
