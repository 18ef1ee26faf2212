"""The command lines of upstream's NVMe-oF tools, which this package accepts and then refuses."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["NofUnsupportedError", "add_ssh_options", "run_tool", "unsupported"]


class NofUnsupportedError(NotImplementedError):
    """NVMe-oF targets were asked for, and this package has none."""


def unsupported(action: str) -> NoReturn:
    """Refuse an action on NVMe-oF targets.

    Raises:
        NofUnsupportedError: Always.
    """
    raise NofUnsupportedError(
        f"cannot {action}: this version of mooncake has no NVMe-oF tier, and its master keeps no "
        "NVMe-oF segments; lend memory with `mooncake_client` instead"
    )


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
