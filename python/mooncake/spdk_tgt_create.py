"""Upstream's tool that starts SPDK targets over SSH: its options and names; it refuses to run."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ._nof_tools import add_ssh_options, run_tool
from ._refusals import refused

__all__ = ["SPDKTgtCreator", "main", "parse_arguments"]

_TRANSPORT_OPTIONS = {
    "transport_type": "RDMA",
    "max_queue_depth": 128,
    "max_io_qpairs_per_ctrlr": 127,
    "max_io_size": 4096,
    "in_capsule_data_size": 131072,
    "io_unit_size": 131072,
    "max_aq_depth": 128,
    "num_shared_buffers": 4096,
    "buf_cache_size": 32,
}


class SPDKTgtCreator:
    """Would start SPDK targets on other hosts; refuses when it is asked to."""

    def __init__(
        self,
        spdk_targets: list[str],
        transport_options: dict[str, Any] | None = None,
        core_mask: str = "0xff",
        port: int = 22,
    ) -> None:
        self.spdk_targets = list(spdk_targets)
        self.transport_options = {**_TRANSPORT_OPTIONS, **(transport_options or {})}
        self.core_mask = core_mask
        self.port = port

    deploy_target = refused("SPDKTgtCreator", "deploy_target")
    deploy_all_targets = refused("SPDKTgtCreator", "deploy_all_targets")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Starts SPDK targets on other hosts over SSH.")
    parser.add_argument(
        "--spdk_target_info",
        action="append",
        required=True,
        help="a target, like 'ip:192.0.2.1 path:/opt/spdk pci:0000:01:00.0'; may be repeated",
    )
    parser.add_argument("--core-mask", default="0xff", help="processors of the target")
    for name, default in _TRANSPORT_OPTIONS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(default), default=default, help=f"{name} of the NVMe-oF transport"
        )
    add_ssh_options(parser)
    return parser.parse_args()


def main() -> NoReturn:
    """Run the tool."""
    arguments = parse_arguments()
    options = {name: getattr(arguments, name) for name in _TRANSPORT_OPTIONS}
    creator = SPDKTgtCreator(
        arguments.spdk_target_info, options, arguments.core_mask, arguments.port
    )
    run_tool(creator.deploy_all_targets)


if __name__ == "__main__":
    main()
